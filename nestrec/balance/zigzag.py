"""`zigzag`: sorted by length and dealt in zig-zag (FreeScale, fixed batch size).

With n ranks, rank i takes the places i, 2n-1-i, 2n+i, 4n-1-i, ... of the sorted list.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.ordering import Groups, descending, groups_of


def zigzag(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts differ by one at the most. Sorts by length as published, or by cost where no lengths are given."""
    order = descending(cost if lengths is None else lengths.astype(np.float64))
    place = np.arange(cost.size) % (2 * num_ranks)
    assignment = np.empty(cost.size, dtype=np.int64)
    assignment[order] = np.minimum(place, 2 * num_ranks - 1 - place)
    return groups_of(assignment, num_ranks)
