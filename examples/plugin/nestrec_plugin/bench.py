"""`nestrec bench lion`: rows a second that Lion changes by its formula, beside plain SGD in the same run."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from nestrec import config
from nestrec.base.config_values import Count
from nestrec.embedding.row_optimizer import RowOptimizerConfig, RowStep
from nestrec_bench.bench import Bench


@config
class LionBench:
    """What is measured."""

    rows: Count = 100_000
    """rows of a step"""
    dim: Count = 64
    """of a row"""
    rounds: Count = 5
    """steps of each, by turns; the quickest counts"""


def measure(bench: LionBench) -> Iterator[dict[str, Any]]:
    """A row for each row optimiser."""
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


BENCH = Bench(config=LionBench, measure=measure)
