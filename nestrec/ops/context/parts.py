"""Sequences divided over the ranks of a context group.

    a sequence of L tokens is cut into 2 n chunks, chunk c from floor(L c / 2n) to floor(L (c + 1) / 2n)
    part r of n holds chunks r and 2n - 1 - r

A token sees all before it, so work grows with its place: a late chunk goes with an early one, and every pair of two
parts has as much to compute as every other. A sequence of fewer tokens than chunks leaves some parts without any.

Legend: B sequences, C = 2 n chunks.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError

Ints = NDArray[np.int64]


class TokenParts:
    """Which tokens of a batch of sequences each of `size` ranks holds; known on the host, the same on all of them."""

    def __init__(self, lengths: Ints, size: int) -> None:
        if size < 1:
            raise UserError("a group has at least one rank", field="size", value=size)
        self.lengths, self.size = np.asarray(lengths, np.int64), size
        self._bounds_BC = self.lengths[:, None] * np.arange(2 * size + 1) // (2 * size)
        self._first_B = np.cumsum(self.lengths) - self.lengths
        self._found: dict[int, tuple[Ints, Ints]] = {}
        self.kept: dict[object, object] = {}
        """what others have made of these parts, and would make again in every layer"""

    @property
    def num_whole_tokens(self) -> int:
        """Of all parts together."""
        return int(self.lengths.sum())

    def chunks_of(self, part: int) -> tuple[int, int]:
        """The two chunks of a part, in order."""
        return part, 2 * self.size - 1 - part

    def lengths_of(self, part: int) -> Ints:
        """(B, 2) tokens of each sequence in both chunks of a part."""
        early, late = self.chunks_of(part)
        return np.stack([self._bounds_BC[:, c + 1] - self._bounds_BC[:, c] for c in (early, late)], axis=1)

    def offsets(self, part: int) -> Ints:
        """(B + 1,) where each sequence begins among the tokens of a part."""
        return np.concatenate([[0], np.cumsum(self.lengths_of(part).sum(axis=1))])

    def positions(self, part: int) -> Ints:
        """Of each token of a part, in its sequence: rising within each."""
        return self._tokens(part)[0]

    def places(self, part: int) -> Ints:
        """Of each token of a part, among the tokens of all sequences one after the other."""
        return self._tokens(part)[1]

    def num_tokens(self, part: int) -> int:
        """That a part holds."""
        return len(self.positions(part))

    def _tokens(self, part: int) -> tuple[Ints, Ints]:
        if part not in self._found:
            lengths_B2, starts_B2 = self.lengths_of(part), self._bounds_BC[:, list(self.chunks_of(part))]
            counts, starts = lengths_B2.reshape(-1), starts_B2.reshape(-1)
            first = np.repeat(np.cumsum(counts) - counts, counts)
            position = np.arange(counts.sum()) - first + np.repeat(starts, counts)
            self._found[part] = position, position + np.repeat(self._first_B, lengths_B2.sum(axis=1))
        return self._found[part]


def causal_pairs_of(parts: TokenParts) -> list[int]:
    """For each part the pairs of one of its tokens and one that it sees, where everything before a token is seen."""
    return [int((parts.positions(part) + 1).sum()) for part in range(parts.size)]


def row_blocks(counts: tuple[int, ...], most: int) -> list[tuple[int, int]]:
    """Runs of at most so many rows that do not reach over the end of a chunk. counts: rows of each chunk."""
    bounds = [0, *itertools.accumulate(counts)]
    return [
        (start, min(start + most, end))
        for first, end in itertools.pairwise(bounds)
        for start in range(first, end, most)
    ]
