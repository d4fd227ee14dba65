"""Measure time and memory of simulating many ranks and steps, in a new process.

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
class SimulatorBenchConfig:
    ranks: int = 4096
    """Number of simulated ranks."""
    steps: int = 100
    """Number of simulated steps."""
    micro_batches: int = 8
    """Number of micro-batches per simulated batch."""
    replicas: int = 4
    """Number of replica groups of the simulated mesh."""
    schedules: tuple[str, ...] = ("serial", "stale", "dual_buffer", "frozen_window", "nested", "priority", "semi_async")
    """Pipeline schedules, each simulated in its own process."""


def measure_simulator(bench: SimulatorBenchConfig) -> list[dict[str, Any]]:
    """Return one row per schedule; `process_s` covers the process from the first import to its end."""
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
    """Rehearse and replay with costs that vary over ranks and steps, and break down the steps of the slowest rank."""
    start = time.perf_counter()
    options = PipelineConfig(schedule=schedule)
    program = rehearse(options, micro_batches=micro_batches, steps=steps)
    rehearsed = time.perf_counter()
    done = replay(program, _VariedCosts(ranks, micro_batches), Mesh(replicas, ranks // replicas))
    done.parts(done.slowest())
    end = time.perf_counter()
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "rehearsal_s": round(rehearsed - start, 2),
        "replay_s": round(end - rehearsed, 2),
        "peak_gib": round(peak_gib, 3),
        "stages": len(program.stages),
    }


class _VariedCosts:
    """Costs that differ between stages, ranks and steps."""

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
        if operation in ("fetch_rows", "prefetch_rows", "write_back", "deduplicate"):
            return Cost(0.15 * busy)
        return Cost(0.0, 0.002, "all") if operation == "dense_reduce" else Cost(0.001 * busy)


BENCH = Bench(config=SimulatorBenchConfig, measure=measure_simulator)
