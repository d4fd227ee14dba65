"""`token_threshold`: the global batch, in its own order, cut into runs of near equal tokens (TurboGR, short sequences).

TurboGR's loader fills a rank until a token threshold is reached. Here the threshold is the smallest with which the
ranks hold the whole global batch, so that no sample changes its step.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.cuts import cut_at_threshold, smallest_threshold
from nestrec.balance.ordering import Groups, groups_of


def token_threshold(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts differ. Counts tokens as published, or cost where no lengths are given."""
    weights = cost if lengths is None else lengths.astype(np.float64)
    return groups_of(cut_at_threshold(weights, smallest_threshold(weights, num_ranks)), num_ranks)
