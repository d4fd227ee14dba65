"""Who computes which samples of a global batch: a hook for balancing, which lives above this folder."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nestrec.data.dataset import Rows
from nestrec.data.order import Position, contiguous_shares


@dataclass(frozen=True, slots=True)
class Share:
    """Some samples of a global batch."""

    places: NDArray[np.int64]
    """their indices in the global batch"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """what is to be recorded of this dealing"""


class Dealer:
    """Near equal counts in the order of the global batch: the baseline that balancing is compared with.

    A rank reads its share, may trade it against samples that other ranks have read, and cuts what it then has into
    micro-batches. Every choice is a function of (position, tokens), the same on every rank.
    """

    trades: bool = False
    """Whether `trade` is collective; it is then called for every batch, in order, by one thread."""

    def __init__(self, rank: int, world: int):
        self._rank, self._world = rank, world

    def share(self, position: Position, tokens: NDArray[np.int64]) -> Share:
        """What this rank reads, from the tokens of the samples of the global batch."""
        return Share(contiguous(len(tokens), self._world)[self._rank])

    def trade(self, position: Position, share: Share, rows: Rows, tokens: NDArray[np.int64]) -> tuple[Share, Rows]:
        """What this rank computes, for what it has read."""
        return share, rows

    def costs(self, position: Position, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the samples cost to compute."""
        return tokens.astype(np.float64)

    def micro_batches(
        self, position: Position, tokens: NDArray[np.int64], num_micro_batches: int
    ) -> list[NDArray[np.int64]]:
        """Parts of what this rank computes, from the tokens of its samples."""
        return contiguous(len(tokens), num_micro_batches)


def contiguous(num_samples: int, num_shares: int) -> list[NDArray[np.int64]]:
    """Near equal counts in order."""
    bounds = contiguous_shares(num_samples, num_shares)
    return [np.arange(a, b) for a, b in itertools.pairwise(bounds)]
