"""Metrics of balance: how evenly partitions spread the work, and what ranks measured.

How even steps really were, from what every rank measured of them.

A collective ends on all ranks at about the same time, and the last rank to enter it waits for nobody: what it spends
there is the collective itself, and what another rank spends there beyond that, it waited. So durations are enough, and
the clocks of different machines need not agree.

How even a partition is. Predicted from costs here; the same functions serve measured times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.partition_tools import Groups, loads_of


@dataclass(frozen=True, slots=True)
class BalanceMetrics:
    """One step's balance."""

    imbalance: float
    """(max - mean) / max of the cost of the ranks"""
    straggler: float
    """mean idle time of the ranks over the iteration"""
    max_token_gap: int
    """tokens of the fullest rank less those of the emptiest"""


def imbalance(loads: NDArray[np.float64]) -> float:
    """(max - mean) / max over ranks: the part of the longest rank's work for which the average rank waits."""
    top = float(loads.max(initial=0.0))
    return (top - float(loads.mean())) / top if top > 0 else 0.0


def straggler(busy_s: NDArray[np.float64], iteration_s: float) -> float:
    """Mean idle time of ranks waiting for the slowest, over the iteration time (FreeScale's definition)."""
    return float((busy_s.max(initial=0.0) - busy_s).mean()) / iteration_s if iteration_s > 0 else 0.0


def max_token_gap(lengths: NDArray[Any], groups: Groups) -> int:
    tokens = [int(lengths[group].sum()) for group in groups]
    return max(tokens) - min(tokens)


def evenness(
    groups: Groups, lengths: NDArray[Any], cost: NDArray[np.float64], *, step_cost: float = 0.0
) -> BalanceMetrics:
    """Of a partition. `cost` is the true cost of each sample, `step_cost` that of a step whatever its samples."""
    loads = loads_of(cost, groups)
    return BalanceMetrics(
        imbalance=imbalance(loads),
        straggler=straggler(loads, float(loads.max()) + step_cost),
        max_token_gap=max_token_gap(lengths, groups),
    )


def moved_bytes(groups: Groups, home_rank: NDArray[np.int64], sample_bytes: NDArray[np.int64]) -> int:
    """Bytes of the samples that are computed by another rank than the one that read them."""
    return sum(int(sample_bytes[group][home_rank[group] != rank].sum()) for rank, group in enumerate(groups))


def noise_uniform(num_samples: int, amount: float, seed: int) -> NDArray[np.float64]:
    """(B,) independent factors, evenly spread within 1 +- amount: the model misses the true cost by up to it."""
    return np.random.default_rng(seed).uniform(1.0 - amount, 1.0 + amount, num_samples)


def noise_gaussian(num_samples: int, amount: float, seed: int) -> NDArray[np.float64]:
    """(B,) independent factors with mean 1 and standard deviation `amount`, never negative."""
    return np.maximum(0.0, np.random.default_rng(seed).normal(1.0, amount, num_samples))


def noise_floor(cost: NDArray[np.float64], num_ranks: int, deviation: float, seed: int = 0) -> float:
    """About the least expected imbalance of a partition that cannot foresee independent noise of this deviation.

    The mean loads are then equal and so are their variances (unequal variances only raise the expected maximum); many
    samples a rank make the loads normal.
    """
    spread = deviation * np.sqrt(float(cost @ cost) * num_ranks) / float(cost.sum())
    highest = np.random.default_rng(seed).standard_normal((2000, num_ranks)).max(axis=1) * spread
    return float((highest / (1.0 + highest)).mean())


Floats = NDArray[np.float64]

_SLOW = 1.5
"""Ranks of one kind differ by a tenth or two, by what their samples are like."""
_LASTING = 3
"""Successive reports in which a rank must be slow: other programs slow down any rank for a moment."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Figures of some successive steps, (S,) each, the same on every rank."""

    straggler: Floats
    """mean idle time of the ranks, by their own computing times, over the iteration"""
    imbalance: Floats
    """mean time of the ranks waiting at collectives for others, over the step"""


def measured_steps(step_s: Floats, compute_s: Floats, waiting_s: Floats) -> MeasuredSteps:
    """step_s: (R, S) duration of each step; compute_s: (R, S) computing in it; waiting_s: (S,) mean over ranks."""
    iteration_s = step_s.mean(axis=0)
    idle = [straggler(busy, float(whole)) for busy, whole in zip(compute_s.T, iteration_s, strict=True)]
    return MeasuredSteps(np.array(idle), waiting_s / np.maximum(iteration_s, 1e-12))


def slow_rank(compute_s: Floats, tokens: Floats) -> tuple[int, float] | None:
    """The rank that computes much longer for a token than the others' median, and how many times as long; or none.

    Both (R, S), of each rank and step.
    """
    pace = compute_s.sum(axis=1) / np.maximum(tokens.sum(axis=1), 1.0)
    rank = int(pace.argmax())
    others = float(np.median(np.delete(pace, rank))) if len(pace) > 1 else 0.0
    return (rank, float(pace[rank]) / others) if others > 0 and pace[rank] > _SLOW * others else None


@dataclass(slots=True)
class SlowRankWatch:
    """Decides when a slow rank is worth a warning: if it stays slow, and once for each rank."""

    _rank: int | None = None
    _num_reports: int = 0
    _named: set[int] = field(default_factory=set)

    def is_news(self, rank: int | None) -> bool:
        """Return whether to warn of the slow rank of a report; `rank` is None if no rank was slow."""
        self._num_reports = self._num_reports + 1 if rank == self._rank else 1
        self._rank = rank
        if rank is None or rank in self._named or self._num_reports < _LASTING:
            return False
        self._named.add(rank)
        return True


def waiting(durations: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]) -> Floats:
    """(K,) mean over ranks of the time waited in each collective, from its (R, K) durations.

    groups: ranks that share a collective; each rank stands in one of them.
    """
    table = np.array(durations, dtype=np.float64).reshape(len(durations), -1)
    for ranks in groups:
        table[list(ranks)] -= table[list(ranks)].min(axis=0)
    mean: Floats = table.mean(axis=0)
    return mean


def per_step(values: Floats, counts: Sequence[int]) -> Floats:
    """(S,) sums of runs of values: the first `counts[0]` belong to the first step, and so on."""
    step_of = np.repeat(np.arange(len(counts)), counts)[: len(values)]
    return np.bincount(step_of, weights=values[: len(step_of)], minlength=len(counts)).astype(np.float64)
