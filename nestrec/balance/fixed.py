"""`fixed`: equal counts, contiguous in the global batch. The baseline that knows nothing of lengths."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.ordering import Groups
from nestrec.data.order import contiguous_shares


def fixed(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts differ by one at the most; the first ranks have the more."""
    bounds = contiguous_shares(cost.size, num_ranks)
    return [np.arange(start, end) for start, end in itertools.pairwise(bounds)]
