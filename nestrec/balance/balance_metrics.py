"""Balance metrics: predicted imbalance of partitions and measured imbalance of training steps.

The functions on partitions predict the imbalance from sample costs; the same functions accept measured times.

Wait times are computed from the durations of collectives. A collective ends on all ranks at about the same time, and
the last rank to enter it does not wait: its duration is the time of the collective itself, and any excess on another
rank is wait time. Because only durations are needed, the clocks of different machines need not be synchronized.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.partition_tools import Groups, loads_of


@dataclass(frozen=True, slots=True)
class BalanceMetrics:
    """Balance of one step."""

    imbalance: float
    """Imbalance of the costs of the ranks: (max - mean) / max."""
    straggler: float
    """Mean idle time of the ranks, as a fraction of the iteration time."""
    max_token_gap: int
    """Difference between the largest and the smallest number of tokens of a rank."""


def imbalance(loads: NDArray[np.float64]) -> float:
    """Return (max - mean) / max over ranks: the fraction of the largest load for which the average rank waits."""
    top = float(loads.max(initial=0.0))
    return (top - float(loads.mean())) / top if top > 0 else 0.0


def straggler(busy_s: NDArray[np.float64], iteration_s: float) -> float:
    """Return the mean idle time of ranks that wait for the slowest, over the iteration time (FreeScale)."""
    return float((busy_s.max(initial=0.0) - busy_s).mean()) / iteration_s if iteration_s > 0 else 0.0


def max_token_gap(lengths: NDArray[Any], groups: Groups) -> int:
    """Return the difference between the largest and the smallest number of tokens of a rank."""
    tokens = [int(lengths[group].sum()) for group in groups]
    return max(tokens) - min(tokens)


def compute_balance_metrics(
    groups: Groups, lengths: NDArray[Any], cost: NDArray[np.float64], *, step_cost: float = 0.0
) -> BalanceMetrics:
    """Return the balance metrics of a partition.

    Args:
        groups: Indices of the samples of each rank.
        lengths: (B,) number of tokens of each sample.
        cost: (B,) true cost of each sample.
        step_cost: Cost of a step that does not depend on its samples.
    """
    loads = loads_of(cost, groups)
    return BalanceMetrics(
        imbalance=imbalance(loads),
        straggler=straggler(loads, float(loads.max()) + step_cost),
        max_token_gap=max_token_gap(lengths, groups),
    )


def moved_bytes(groups: Groups, home_rank: NDArray[np.int64], sample_bytes: NDArray[np.int64]) -> int:
    """Return the total bytes of the samples that are computed by a rank other than the one that read them."""
    return sum(int(sample_bytes[group][home_rank[group] != rank].sum()) for rank, group in enumerate(groups))


def noise_uniform(num_samples: int, amount: float, seed: int) -> NDArray[np.float64]:
    """Return (B,) independent factors, uniform in [1 - amount, 1 + amount], as model error of the true cost."""
    return np.random.default_rng(seed).uniform(1.0 - amount, 1.0 + amount, num_samples)


def noise_gaussian(num_samples: int, amount: float, seed: int) -> NDArray[np.float64]:
    """Return (B,) independent normal factors with mean 1 and standard deviation `amount`, clipped at 0."""
    return np.maximum(0.0, np.random.default_rng(seed).normal(1.0, amount, num_samples))


def noise_floor(cost: NDArray[np.float64], num_ranks: int, deviation: float, seed: int = 0) -> float:
    """Estimate the lowest expected imbalance of any partition if independent noise of this deviation is unpredictable.

    The mean loads are then equal, and so are their variances (unequal variances only raise the expected maximum). With
    many samples per rank the loads are approximately normal.
    """
    std = deviation * np.sqrt(float(cost @ cost) * num_ranks) / float(cost.sum())
    highest = np.random.default_rng(seed).standard_normal((2000, num_ranks)).max(axis=1) * std
    return float((highest / (1.0 + highest)).mean())


Floats = NDArray[np.float64]

_SLOW_FACTOR = 1.5
"""Time per token, relative to the median of the other ranks, above which a rank is slow. Equal devices differ by 10 to
20% because of their samples.
"""
_MIN_SLOW_REPORTS = 3
"""Number of successive reports in which a rank must be slow; other programs can slow down any rank briefly."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Balance metrics of successive steps, (S,) each, the same on every rank."""

    straggler: Floats
    """Mean idle time of the ranks by their own compute times, as a fraction of the iteration time."""
    imbalance: Floats
    """Mean time that the ranks wait in collectives, as a fraction of the step time."""


def summarize_steps(step_s: Floats, compute_s: Floats, waiting_s: Floats) -> MeasuredSteps:
    """Compute balance metrics from measured times.

    Args:
        step_s: (R, S) duration of each step on each rank, in seconds.
        compute_s: (R, S) compute time within each step, in seconds.
        waiting_s: (S,) wait time in collectives, averaged over ranks, in seconds.
    """
    iteration_s = step_s.mean(axis=0)
    stragglers = [straggler(busy, float(step)) for busy, step in zip(compute_s.T, iteration_s, strict=True)]
    return MeasuredSteps(np.array(stragglers), waiting_s / np.maximum(iteration_s, 1e-12))


def find_slow_rank(compute_s: Floats, tokens: Floats) -> tuple[int, float] | None:
    """Return the rank whose time per token is much higher than the median of the other ranks, and their ratio, or None.

    Args:
        compute_s: (R, S) compute time of each rank and step, in seconds.
        tokens: (R, S) number of tokens of each rank and step.
    """
    time_per_token = compute_s.sum(axis=1) / np.maximum(tokens.sum(axis=1), 1.0)
    rank = int(time_per_token.argmax())
    others = float(np.median(np.delete(time_per_token, rank))) if len(time_per_token) > 1 else 0.0
    return (
        (rank, float(time_per_token[rank]) / others)
        if others > 0 and time_per_token[rank] > _SLOW_FACTOR * others
        else None
    )


@dataclass(slots=True)
class SlowRankDetector:
    """Decides when to warn of a slow rank: once per rank, and only if it stays slow."""

    _rank: int | None = None
    _num_reports: int = 0
    _warned_ranks: set[int] = field(default_factory=set)

    def should_warn(self, rank: int | None) -> bool:
        """Return whether to warn of the slow rank of a report; `rank` is None if no rank was slow."""
        self._num_reports = self._num_reports + 1 if rank == self._rank else 1
        self._rank = rank
        if rank is None or rank in self._warned_ranks or self._num_reports < _MIN_SLOW_REPORTS:
            return False
        self._warned_ranks.add(rank)
        return True


def mean_wait_times(durations: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]) -> Floats:
    """Return the (K,) wait times in each collective, averaged over ranks.

    Args:
        durations: (R, K) duration of each collective on each rank, in seconds.
        groups: Ranks of each process group that shares a collective; every rank is in exactly one group.
    """
    table = np.array(durations, dtype=np.float64).reshape(len(durations), -1)
    for ranks in groups:
        table[list(ranks)] -= table[list(ranks)].min(axis=0)
    mean: Floats = table.mean(axis=0)
    return mean


def sum_per_step(values: Floats, counts: Sequence[int]) -> Floats:
    """Return (S,) sums of consecutive values: the first `counts[0]` values belong to the first step, and so on."""
    step_of = np.repeat(np.arange(len(counts)), counts)[: len(values)]
    return np.bincount(step_of, weights=values[: len(step_of)], minlength=len(counts)).astype(np.float64)
