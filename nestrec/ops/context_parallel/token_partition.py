"""Partition of sequences over a context-parallel group, and blocks of (query, key) pairs of two parts.

`TokenPartition` assigns the tokens of every sequence to the ranks, with the zigzag order of ring attention:

    a sequence of L tokens is cut into 2 n chunks, chunk c from floor(L c / 2n) to floor(L (c + 1) / 2n)
    part r of n has chunks r and 2n - 1 - r

With causal attention the work per token grows with its position. So each part has an early and a late chunk, and all
pairs of two parts have the same amount of work. If a sequence has fewer tokens than chunks, some parts have none of it.

`blocks_of` divides the pairs of the queries of one part and the keys of another into blocks that are computed at once.
Short sequences are padded and batched. Long sequences are divided into ranges of query rows, with the keys that these
can attend to. So memory is bounded by MAX_PAIRS for sequences of any length. Blocks are a function of the lengths only,
so the order of all sums does not depend on the rank that computes them.

Legend: B sequences, C = 2 n chunks; G sequences of a block, N padded queries, M padded keys.
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
    """Assignment of the tokens of a batch of sequences to `size` parts, one per rank.

    Computed on the host, identically on all ranks.

    Args:
        lengths: (B,) number of tokens of each sequence.
        size: Number of parts.
    """

    def __init__(self, lengths: Ints, size: int) -> None:
        require(size >= 1, "must be at least 1", option="size", value=size)
        self.lengths = np.asarray(lengths, np.int64)
        self.size = size
        self._bounds_BC = self.lengths[:, None] * np.arange(2 * size + 1) // (2 * size)
        self._first_B = np.cumsum(self.lengths) - self.lengths
        self._token_cache: dict[int, tuple[Ints, Ints]] = {}
        self.cache: dict[object, object] = {}
        """Values derived from the partition by other modules, cached because every layer needs them."""

    @property
    def num_total_tokens(self) -> int:
        """Total number of tokens of all parts."""
        return int(self.lengths.sum())

    def chunks_of(self, part: int) -> tuple[int, int]:
        """Return the two chunks of a part, in order."""
        return part, 2 * self.size - 1 - part

    def lengths_of(self, part: int) -> Ints:
        """Return the (B, 2) number of tokens of each sequence in both chunks of a part."""
        early, late = self.chunks_of(part)
        return np.stack([self._bounds_BC[:, c + 1] - self._bounds_BC[:, c] for c in (early, late)], axis=1)

    def offsets(self, part: int) -> Ints:
        """Return the (B + 1,) start of each sequence in the tokens of a part."""
        return np.concatenate([[0], np.cumsum(self.lengths_of(part).sum(axis=1))])

    def positions(self, part: int) -> Ints:
        """Return the position of each token of a part in its sequence; ascending within a sequence."""
        return self._tokens(part)[0]

    def global_indices(self, part: int) -> Ints:
        """Return the index of each token of a part in the concatenated tokens of all sequences."""
        return self._tokens(part)[1]

    def num_tokens(self, part: int) -> int:
        """Return the number of tokens of a part."""
        return len(self.positions(part))

    def _tokens(self, part: int) -> tuple[Ints, Ints]:
        if part not in self._token_cache:
            lengths_B2 = self.lengths_of(part)
            starts_B2 = self._bounds_BC[:, list(self.chunks_of(part))]
            counts = lengths_B2.reshape(-1)
            starts = starts_B2.reshape(-1)
            first = np.repeat(np.cumsum(counts) - counts, counts)
            position = np.arange(counts.sum()) - first + np.repeat(starts, counts)
            self._token_cache[part] = position, position + np.repeat(self._first_B, lengths_B2.sum(axis=1))
        return self._token_cache[part]


def count_causal_pairs(parts: TokenPartition) -> list[int]:
    """Return the number of (query, key) pairs of each part under causal attention."""
    return [int((parts.positions(part) + 1).sum()) for part in range(parts.size)]


def row_blocks(counts: tuple[int, ...], max_rows: int) -> list[tuple[int, int]]:
    """Divide the rows of chunks into ranges of at most `max_rows` within a chunk; counts: number of rows per chunk."""
    bounds = [0, *itertools.accumulate(counts)]
    return [
        (start, min(start + max_rows, end))
        for first, end in itertools.pairwise(bounds)
        for start in range(first, end, max_rows)
    ]


MAX_PAIRS = 1 << 20
"""Maximum number of (query, key) pairs per block."""
SMALL_PAIRS = 1 << 14
"""Blocks of at most this many pairs may have any fraction of padding, because it costs less than another block."""
_MIN_ROWS = 16
_NO_QUERY = -1
_NO_KEY = 1 << 40
"""Positions of padding queries and keys, chosen so that the causal mask excludes them."""


@dataclass(frozen=True, slots=True)
class BlockSide:
    """Queries or keys of a block."""

    tokens: slice | torch.Tensor
    """Indices of the tokens in their part, without padding."""
    padded: torch.Tensor | None
    """(G N,) indices of the tokens with padding, which repeats a token; None for a single sequence without padding."""
    valid: torch.Tensor | None
    """Indices of the entries of `padded` that are not padding."""
    position_GN: torch.Tensor
    """Position of each token in its sequence."""

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the (G, N, ...) values of the block from the (T, ...) values of a part."""
        if self.padded is None:
            taken = x[self.tokens] if isinstance(self.tokens, slice) else x.index_select(0, self.tokens)
            return taken[None]
        return x.index_select(0, self.padded).view(*self.position_GN.shape, *x.shape[1:])

    def add(self, total: torch.Tensor, x_GN: torch.Tensor) -> None:
        """Add (G, N, ...) values to the (T, ...) values of a part in place; each token occurs once in a block."""
        flat = self.flat(x_GN).to(total.dtype)
        if isinstance(self.tokens, slice):
            total[self.tokens] += flat
        else:
            total.index_add_(0, self.tokens, flat)

    def flat(self, x_GN: torch.Tensor) -> torch.Tensor:
        """Flatten (G, N, ...) values to (tokens, ...), without padding."""
        flat = x_GN.flatten(0, 1)
        return flat if self.valid is None else flat.index_select(0, self.valid)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of one part and keys of another that are computed at once."""

    queries: BlockSide
    keys: BlockSide

    def attention_mask(self, rules: AttentionMask) -> torch.Tensor:
        """Return the (G, N, M) bool attention mask: True where a query attends to a key."""
        i = self.queries.position_GN[:, :, None]
        j = self.keys.position_GN[:, None, :]
        is_seen: torch.Tensor = j <= i
        if rules.max_attention_length is not None:
            is_seen = is_seen & ((i - j < rules.max_attention_length) | (j < rules.num_context))
        return is_seen

    def distance(self) -> torch.Tensor:
        """Return the (G, N, M) int64 distance: position of the key minus that of the query, at most 0."""
        return (self.keys.position_GN[:, None, :] - self.queries.position_GN[:, :, None]).clamp(max=0)

    @property
    def num_pairs(self) -> int:
        """Number of computed (query, key) pairs, including masked ones."""
        return self.queries.position_GN.numel() * self.keys.position_GN.shape[1]


def blocks_of(
    parts: TokenPartition, queries: int, keys: int, rules: AttentionMask, device: torch.device | str = "cpu"
) -> list[Block]:
    """Return the blocks of the queries of one part and the keys of another; cached for all layers of a batch."""
    name = (queries, keys, rules.max_attention_length, rules.num_context, str(device))
    if name not in parts.cache:
        parts.cache[name] = list(_blocks(parts, queries, keys, rules, torch.device(device)))
    return cast(list[Block], parts.cache[name])


def _blocks(
    parts: TokenPartition, queries: int, keys: int, rules: AttentionMask, device: torch.device
) -> Iterator[Block]:
    counts = np.stack([parts.lengths_of(part).sum(axis=1) for part in (queries, keys)])
    remaining = np.flatnonzero(counts.min(axis=0) > 0)
    while len(remaining) > 0:
        if counts[:, remaining[0]].prod() > MAX_PAIRS:
            yield from _split_sequence(parts, queries, keys, int(remaining[0]), rules, device)
            remaining = remaining[1:]
            continue
        num_sequences = _num_sequences_per_block(counts[:, remaining])
        sides = [
            _padded_side(parts, part, remaining[:num_sequences], padding_position, device)
            for part, padding_position in ((queries, _NO_QUERY), (keys, _NO_KEY))
        ]
        yield Block(*sides)
        remaining = remaining[num_sequences:]


def _num_sequences_per_block(counts_2B: Ints) -> int:
    """Return how many of the first sequences form a block: at most MAX_PAIRS, and at most half of it padding."""
    num_B = np.arange(1, counts_2B.shape[1] + 1)
    padded_B = num_B * np.maximum.accumulate(counts_2B, axis=1).prod(axis=0)
    fits_B = (padded_B <= MAX_PAIRS) & (padded_B <= np.maximum(2 * np.cumsum(counts_2B.prod(axis=0)), SMALL_PAIRS))
    return len(fits_B) if fits_B.all() else max(1, int(np.argmin(fits_B)))


def _padded_side(
    parts: TokenPartition, part: int, sequences: Ints, padding_position: int, device: torch.device
) -> BlockSide:
    first_G = parts.offsets(part)[sequences]
    length_G = parts.lengths_of(part).sum(axis=1)[sequences]
    column_N = np.arange(length_G.max())
    is_valid_GN = column_N < length_G[:, None]
    index_GN = np.where(is_valid_GN, first_G[:, None] + column_N, first_G[:, None])
    position_GN = np.where(is_valid_GN, parts.positions(part)[index_GN], padding_position)
    return BlockSide(
        tokens=_to_device(index_GN[is_valid_GN], device),
        padded=_to_device(index_GN.reshape(-1), device),
        valid=_to_device(np.flatnonzero(is_valid_GN), device),
        position_GN=_to_device(position_GN, device),
    )


def _split_sequence(  # noqa: PLR0917
    parts: TokenPartition, queries: int, keys: int, sequence: int, rules: AttentionMask, device: torch.device
) -> Iterator[Block]:
    """Yield the blocks of one long sequence."""
    (first_q, end_q), (first_k, end_k) = (parts.offsets(part)[sequence : sequence + 2] for part in (queries, keys))
    position_q, position_k = parts.positions(queries)[first_q:end_q], parts.positions(keys)[first_k:end_k]
    max_rows = max(_MIN_ROWS, MAX_PAIRS // len(position_k))
    early, late = parts.lengths_of(queries)[sequence].tolist()
    for start, end in row_blocks((early, late), max_rows):
        visible = _seen_keys(position_k, int(position_q[start]), int(position_q[end - 1]), rules)
        if len(visible) == 0:
            continue
        is_contiguous = len(visible) == visible[-1] - visible[0] + 1
        tokens = (
            slice(int(first_k + visible[0]), int(first_k + visible[-1] + 1))
            if is_contiguous
            else _to_device(first_k + visible, device)
        )
        rows = slice(int(first_q) + start, int(first_q) + end)
        yield Block(
            BlockSide(rows, None, None, _to_device(position_q[None, start:end], device)),
            BlockSide(tokens, None, None, _to_device(position_k[None, visible], device)),
        )


def _seen_keys(position_k: Ints, first: int, last: int, rules: AttentionMask) -> Ints:
    """Return the indices of the keys that any query at positions [first, last] attends to."""
    end = int(np.searchsorted(position_k, last, side="right"))
    if rules.max_attention_length is None:
        return np.arange(end)
    near = int(np.searchsorted(position_k, first - rules.max_attention_length + 1))
    prefix = min(int(np.searchsorted(position_k, rules.num_context)), near)
    return np.concatenate([np.arange(min(prefix, end)), np.arange(near, end)])


def _to_device(values: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
