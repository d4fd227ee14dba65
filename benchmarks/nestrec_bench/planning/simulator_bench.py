"""How long simulating many ranks and steps takes, and how much memory, in a fresh process.

nestrec bench simulator --ranks 4096 --steps 100 --schedules nested
"""

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from nestrec.base.config import config
from nestrec.pipeline import PipelineConfig
from nestrec.planning.simulator.program_replay import Cost, Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec_bench.bench import Bench


@config
class SimulatorBench:
    ranks: int = 4096
    """ranks that are simulated"""
    steps: int = 100
    """steps that are simulated"""
    micro_batches: int = 8
    """micro-batches of each simulated batch"""
    replicas: int = 4
    """replica groups of the simulated mesh"""
    schedules: tuple[str, ...] = ("serial", "stale", "dual_buffer", "frozen_window", "nested", "priority", "semi_async")
    """each in a process of its own"""


def measure_simulator(bench: SimulatorBench) -> list[dict[str, Any]]:
    """A row for each schedule; the whole process counts, from the first import to the breakdown of the slowest rank."""
    rows = []
    for schedule in bench.schedules:
        code = (
            "import json; from nestrec_bench.planning.simulator_bench import simulate_once; "
            f"print(json.dumps(simulate_once({schedule!r}, {bench.ranks}, {bench.steps}, {bench.micro_batches}, "
            f"{bench.replicas})))"
        )
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - start
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            {
                "schedule": schedule,
                "ranks": bench.ranks,
                "steps": bench.steps,
                "micro_batches": bench.micro_batches,
                "process_s": round(seconds, 2),
                **found,
            }
        )
    return rows


def simulate_once(schedule: str, ranks: int, steps: int, micro_batches: int, replicas: int) -> dict[str, float]:
    """Rehearse, replay with costs that vary over ranks and steps, and break the slowest rank's steps down."""
    start = time.perf_counter()
    options = PipelineConfig(schedule=schedule)
    program = rehearse(options, micro_batches=micro_batches, steps=steps)
    rehearsed = time.perf_counter()
    done = replay(program, _Varied(ranks, micro_batches), Mesh(replicas, ranks // replicas))
    done.parts(done.slowest())
    end = time.perf_counter()
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "rehearsal_s": round(rehearsed - start, 2),
        "replay_s": round(end - rehearsed, 2),
        "peak_gib": round(peak_gib, 3),
        "stages": len(program.stages),
    }


class _Varied:
    """Every stage takes another time on every rank and in every step."""

    def __init__(self, ranks: int, micro_batches: int) -> None:
        self._ranks = ranks
        self._draw = np.random.default_rng(0)
        self._part = 1.0 / micro_batches

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        busy = self._draw.uniform(0.9, 1.1, self._ranks)
        if operation == "forward_backward":
            return Cost(busy * self._part)
        if operation in ("exchange_vectors", "exchange_gradients"):
            return Cost(0.0, 0.35 * busy * self._part, "shards")
        if operation in ("fetch", "read_ahead", "write_back", "deduplicate"):
            return Cost(0.15 * busy)
        return Cost(0.0, 0.002, "all") if operation == "dense_reduce" else Cost(0.001 * busy)


BENCH = Bench(config=SimulatorBench, measure=measure_simulator)
