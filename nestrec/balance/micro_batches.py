"""Micro-batches of near equal cost inside a rank, for the frozen window.

Rank r computes its j-th micro-batch while the exchanges of all ranks for the next one run, so a window takes the sum
over j of the costliest j-th micro-batch. Where long samples keep micro-batches from being equal, it helps that the
ranks have their costly ones at the same j: they are in falling order of cost.
"""

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.ordering import Groups, loads_of
from nestrec.balance.policies import partition


def micro_partition(cost: NDArray[np.float64], num_micro_batches: int) -> Groups:
    """Indices into a rank's samples for each micro-batch, costliest first, ties by number; some may be empty."""
    groups = partition("refined", cost, num_micro_batches)
    order = np.argsort(-loads_of(cost, groups), kind="stable")
    return [groups[i] for i in order]


def window_imbalance(costs: NDArray[np.float64]) -> float:
    """Part of a frozen window that ranks wait, from (R, N) costs of the micro-batches of each rank."""
    window = float(costs.max(axis=0).sum())
    return 1.0 - float(costs.sum(axis=1).mean()) / window if window > 0 else 0.0
