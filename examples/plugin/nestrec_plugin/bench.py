"""Benchmark `nestrec bench lion`: rows per second of Lion's formula, compared with plain SGD in the same run."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from nestrec import config
from nestrec.base.config_values import Count
from nestrec.embedding.row_optimizer import RowOptimizerConfig, RowStep
from nestrec_bench.bench import Bench


@config
class LionBenchConfig:
    """Options of the benchmark."""

    rows: Count = 100_000
    """Number of rows per step."""
    dim: Count = 64
    """Embedding dimension."""
    rounds: Count = 5
    """Number of alternating steps per optimizer; the fastest one is reported."""


def measure(bench: LionBenchConfig) -> Iterator[dict[str, Any]]:
    """Measure and yield one result row per row optimizer."""
    grad = torch.randn(bench.rows, bench.dim, generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {"sgd": [], "lion": []}
    for number in range(1, bench.rounds + 1):
        for name, times in seconds.items():
            options = RowOptimizerConfig(kind=name)
            states = [torch.zeros_like(grad) for _ in options.spec.state]
            begin = time.perf_counter()
            options.spec.formula(states, grad, RowStep(number=number, learning_rate=0.1, options=options))
            times.append(time.perf_counter() - begin)
    for name, times in seconds.items():
        slower = min(times) / min(seconds["sgd"])
        yield {"op": name, "rows_per_s": round(bench.rows / min(times)), "times_sgd": round(slower, 2)}


BENCH = Bench(config=LionBenchConfig, measure=measure)
