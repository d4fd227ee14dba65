"""How even a partition is. Predicted from costs here; the same functions serve measured times."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.ordering import Groups, loads_of


@dataclass(frozen=True, slots=True)
class Evenness:
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


def evenness(groups: Groups, lengths: NDArray[Any], cost: NDArray[np.float64], *, step_cost: float = 0.0) -> Evenness:
    """Of a partition. `cost` is the true cost of each sample, `step_cost` that of a step whatever its samples."""
    loads = loads_of(cost, groups)
    return Evenness(
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
