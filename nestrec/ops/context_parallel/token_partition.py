"""Partition of the tokens of a sequence over a context-parallel group.

What is computed at a time where the queries of one part meet the keys of another.

Short sequences are padded and computed together, long ones a run of query rows at a time against the keys that those
can see: memory is bounded by MOST_PAIRS, however long sequences are. Blocks are a function of the lengths alone, so all
sums have an order that does not depend on who computes them.

Legend: G sequences of a block, N padded queries, M padded keys.

Sequences divided over the ranks of a context group.

    a sequence of L tokens is cut into 2 n chunks, chunk c from floor(L c / 2n) to floor(L (c + 1) / 2n)
    part r of n holds chunks r and 2n - 1 - r

A token sees all before it, so work grows with its place: a late chunk goes with an early one, and every pair of two
parts has as much to compute as every other. A sequence of fewer tokens than chunks leaves some parts without any.

Legend: B sequences, C = 2 n chunks.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import require
from nestrec.ops.attention.mask_and_bias import AttentionMask

Ints = NDArray[np.int64]


class TokenPartition:
    """Which tokens of a batch of sequences each of `size` ranks holds; known on the host, the same on all of them."""

    def __init__(self, lengths: Ints, size: int) -> None:
        require(size >= 1, "a group has at least one rank", option="size", value=size)
        self.lengths = np.asarray(lengths, np.int64)
        self.size = size
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
            lengths_B2 = self.lengths_of(part)
            starts_B2 = self._bounds_BC[:, list(self.chunks_of(part))]
            counts = lengths_B2.reshape(-1)
            starts = starts_B2.reshape(-1)
            first = np.repeat(np.cumsum(counts) - counts, counts)
            position = np.arange(counts.sum()) - first + np.repeat(starts, counts)
            self._found[part] = position, position + np.repeat(self._first_B, lengths_B2.sum(axis=1))
        return self._found[part]


def causal_pairs_of(parts: TokenPartition) -> list[int]:
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


MOST_PAIRS = 1 << 20
"""pairs of a query and a key in a block"""
SMALL_PAIRS = 1 << 14
"""padding of blocks below this costs less than another block"""
_LEAST_ROWS = 16
_NO_QUERY = -1
_NO_KEY = 1 << 40
"""positions of padding: it sees nothing, and nothing sees it"""


@dataclass(frozen=True, slots=True)
class BlockSide:
    """Queries or keys of a block."""

    tokens: slice | torch.Tensor
    """their places in their part"""
    padded: torch.Tensor | None
    """(G N) places with padding, which is some token; none: they are one sequence, without any"""
    real: torch.Tensor | None
    """which of `padded` are no padding"""
    position_GN: torch.Tensor
    """in their sequences"""

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """(G, N, ...) of a part's (T, ...)."""
        if self.padded is None:
            taken = x[self.tokens] if isinstance(self.tokens, slice) else x.index_select(0, self.tokens)
            return taken[None]
        return x.index_select(0, self.padded).view(*self.position_GN.shape, *x.shape[1:])

    def add(self, total: torch.Tensor, x_GN: torch.Tensor) -> None:
        """Add (G, N, ...) to a part's (T, ...), in place; each token stands once in a block."""
        flat = self.flat(x_GN).to(total.dtype)
        if isinstance(self.tokens, slice):
            total[self.tokens] += flat
        else:
            total.index_add_(0, self.tokens, flat)

    def flat(self, x_GN: torch.Tensor) -> torch.Tensor:
        """(tokens, ...) of (G, N, ...)."""
        flat = x_GN.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)


@dataclass(frozen=True, slots=True)
class Block:
    queries: BlockSide
    keys: BlockSide

    def seen(self, rules: AttentionMask) -> torch.Tensor:
        """(G, N, M) bool: which query sees which key."""
        i = self.queries.position_GN[:, :, None]
        j = self.keys.position_GN[:, None, :]
        is_seen: torch.Tensor = j <= i
        if rules.max_attention_length is not None:
            is_seen = is_seen & ((i - j < rules.max_attention_length) | (j < rules.num_context))
        return is_seen

    def distance(self) -> torch.Tensor:
        """(G, N, M) int64: position of the key less that of the query; 0 where that is more."""
        return (self.keys.position_GN[:, None, :] - self.queries.position_GN[:, :, None]).clamp(max=0)

    @property
    def num_pairs(self) -> int:
        """That are computed, seen or not."""
        return self.queries.position_GN.numel() * self.keys.position_GN.shape[1]


def blocks_of(
    parts: TokenPartition, queries: int, keys: int, rules: AttentionMask, device: torch.device | str = "cpu"
) -> list[Block]:
    """Of the queries of one part and the keys of another; found once for all layers of a batch."""
    name = (queries, keys, rules.max_attention_length, rules.num_context, str(device))
    if name not in parts.kept:
        parts.kept[name] = list(_blocks(parts, queries, keys, rules, torch.device(device)))
    return cast(list[Block], parts.kept[name])


def _blocks(
    parts: TokenPartition, queries: int, keys: int, rules: AttentionMask, device: torch.device
) -> Iterator[Block]:
    counts = np.stack([parts.lengths_of(part).sum(axis=1) for part in (queries, keys)])
    left = np.flatnonzero(counts.min(axis=0) > 0)
    while len(left) > 0:
        if counts[:, left[0]].prod() > MOST_PAIRS:
            yield from _of_rows(parts, queries, keys, int(left[0]), rules, device)
            left = left[1:]
            continue
        num = _num_together(counts[:, left])
        sides = [
            _padded(parts, part, left[:num], outside, device)
            for part, outside in ((queries, _NO_QUERY), (keys, _NO_KEY))
        ]
        yield Block(*sides)
        left = left[num:]


def _num_together(counts_2B: Ints) -> int:
    """How many of the first sequences form a block: they fit, and at least half of it is no padding."""
    num_B = np.arange(1, counts_2B.shape[1] + 1)
    padded_B = num_B * np.maximum.accumulate(counts_2B, axis=1).prod(axis=0)
    fits_B = (padded_B <= MOST_PAIRS) & (padded_B <= np.maximum(2 * np.cumsum(counts_2B.prod(axis=0)), SMALL_PAIRS))
    return len(fits_B) if fits_B.all() else max(1, int(np.argmin(fits_B)))


def _padded(parts: TokenPartition, part: int, sequences: Ints, outside: int, device: torch.device) -> BlockSide:
    first_G = parts.offsets(part)[sequences]
    length_G = parts.lengths_of(part).sum(axis=1)[sequences]
    column_N = np.arange(length_G.max())
    is_real_GN = column_N < length_G[:, None]
    place_GN = np.where(is_real_GN, first_G[:, None] + column_N, first_G[:, None])
    position_GN = np.where(is_real_GN, parts.positions(part)[place_GN], outside)
    return BlockSide(
        tokens=_sent(place_GN[is_real_GN], device),
        padded=_sent(place_GN.reshape(-1), device),
        real=_sent(np.flatnonzero(is_real_GN), device),
        position_GN=_sent(position_GN, device),
    )


def _of_rows(  # noqa: PLR0917
    parts: TokenPartition, queries: int, keys: int, sequence: int, rules: AttentionMask, device: torch.device
) -> Iterator[Block]:
    """Of one long sequence."""
    (first_q, end_q), (first_k, end_k) = (parts.offsets(part)[sequence : sequence + 2] for part in (queries, keys))
    position_q, position_k = parts.positions(queries)[first_q:end_q], parts.positions(keys)[first_k:end_k]
    most = max(_LEAST_ROWS, MOST_PAIRS // len(position_k))
    early, late = parts.lengths_of(queries)[sequence].tolist()
    for start, end in row_blocks((early, late), most):
        seen = _seen_keys(position_k, int(position_q[start]), int(position_q[end - 1]), rules)
        if len(seen) == 0:
            continue
        is_run = len(seen) == seen[-1] - seen[0] + 1
        tokens = slice(int(first_k + seen[0]), int(first_k + seen[-1] + 1)) if is_run else _sent(first_k + seen, device)
        rows = slice(int(first_q) + start, int(first_q) + end)
        yield Block(
            BlockSide(rows, None, None, _sent(position_q[None, start:end], device)),
            BlockSide(tokens, None, None, _sent(position_k[None, seen], device)),
        )


def _seen_keys(position_k: Ints, first: int, last: int, rules: AttentionMask) -> Ints:
    """Those that some query from position `first` to `last` sees."""
    end = int(np.searchsorted(position_k, last, side="right"))
    if rules.max_attention_length is None:
        return np.arange(end)
    near = int(np.searchsorted(position_k, first - rules.max_attention_length + 1))
    prefix = min(int(np.searchsorted(position_k, rules.num_context)), near)
    return np.concatenate([np.arange(min(prefix, end)), np.arange(near, end)])


def _sent(values: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
