"""Program of the ranks of `nestrec bench peers`, started by torchrun with one process per rank.

All systems are built in the same processes. They alternate in rounds of a few steps over the same batches, so that
disturbances of the machine affect all of them. Rank 0 writes the measurements as JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json, all_reduce_sum, barrier
from nestrec.distributed.topology import ParallelConfig
from nestrec_bench.external.external_workload import PeersWorkload, WorkloadConfig
from nestrec_bench.external.torchrec_job import TorchRecJob
from nestrec_bench.external.training_job import DENSE_KINDS, OUR_MODES, DenseKind, Job, NestrecJob

NUM_BATCHES = 12
WARMUP_STEPS = 4


@dataclass(slots=True)
class SystemTimes:
    """A training job of one system and the times of its rounds."""

    job: Job
    seconds: list[float] = field(default_factory=list)
    """Wall time of each round, until the last rank finished."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU time of each round in all threads of this rank."""


def build(dense: DenseKind, modes: list[str], torchrec_modes: list[str], topology: Topology) -> list[SystemTimes]:
    """Build the jobs of all systems, each with its own tables. Collective."""
    workload = PeersWorkload(WorkloadConfig())
    batches = [workload.batch(topology.rank, step) for step in range(NUM_BATCHES)]
    jobs: list[Job] = [NestrecJob(workload, batches, dense, _topology_of(topology, mode), mode) for mode in modes]
    jobs += [TorchRecJob(workload, batches, dense, mode) for mode in torchrec_modes]
    return [SystemTimes(job) for job in jobs]


def _topology_of(topology: Topology, mode: str) -> Topology:
    """Return the topology with the transport of a mode of nestrec. Collective."""
    gloo = ParallelConfig(transport="collectives")
    return Topology.of_process_group(topology.device, gloo) if mode == "serial_gloo" else topology


def run_alternately(systems: list[SystemTimes], topology: Topology, *, rounds: int, steps: int) -> None:
    """Run rounds of steps of all systems; the first system of a round rotates. Collective."""
    for system in systems:
        for _ in range(WARMUP_STEPS):
            system.job.step()
    for number in range(rounds):
        first = number % len(systems)
        for system in systems[first:] + systems[:first]:
            barrier(topology.control)
            start_s = time.perf_counter()
            start_cpu_s = time.process_time()
            for _ in range(steps):
                system.job.step()
            system.cpu_seconds.append(time.process_time() - start_cpu_s)
            barrier(topology.control)
            system.seconds.append(time.perf_counter() - start_s)


def global_losses(job: Job, topology: Topology, num_steps: int) -> list[float]:
    """Return the losses of the first steps, averaged over ranks. Collective."""
    total = torch.stack(job.losses[:num_steps])
    all_reduce_sum(topology.dense, total)
    return [round(float(x), 6) for x in total / topology.world]


def describe(system: SystemTimes, topology: Topology, steps: int) -> dict[str, Any]:
    """Return the measurements of one system. Collective."""
    samples = WorkloadConfig().batch * topology.world * steps
    cpu_ms = all_gather_json(topology.control, 1e3 * statistics.median(system.cpu_seconds) / steps)
    return {
        "system": system.job.system,
        "version": system.job.version,
        "mode": system.job.mode,
        "samples_per_s_rounds": [round(samples / s, 1) for s in system.seconds],
        "losses": global_losses(system.job, topology, 8),
        "cpu_ms": round(statistics.mean(cpu_ms), 2),
        "parts_ms": system.job.parts_ms() if isinstance(system.job, NestrecJob) else None,
    }


def main() -> None:
    """Run the benchmark on this rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", choices=DENSE_KINDS, required=True)
    parser.add_argument("--modes", nargs="+", choices=OUR_MODES, required=True, help="modes of nestrec")
    parser.add_argument("--torchrec-modes", nargs="*", default=[], help="modes of TorchRec to compare with")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="number of steps per round")
    parser.add_argument("--output", type=Path, required=True, help="result file, written by rank 0")
    options = parser.parse_args()
    topology = Topology.from_environment("cpu")
    systems = build(options.dense, options.modes, options.torchrec_modes, topology)
    run_alternately(systems, topology, rounds=options.rounds, steps=options.steps)
    rows = [describe(system, topology, options.steps) for system in systems]
    if topology.is_first:
        options.output.write_text(json.dumps(rows))
    barrier(topology.control)
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads that a system has left running sometimes abort a normal exit


if __name__ == "__main__":
    main()
