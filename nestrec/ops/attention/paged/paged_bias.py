"""Position and time biases for paged attention, written in the tile order in which the kernels read them.

    bias[i, j] = position_table[position(j) - position(i) + center] + time_table[bucket(query time[i] - time[j])]
                 or, with a time function, + b(query time[i] - time[j])

A block of queries has one tile for each block of keys that it reads, in reading order; tiles are shared by the heads.
Candidates of a sequence share position and query time, so all rows of their tiles are equal and all candidate blocks of
a sequence share the same tiles; the last tile is followed by the bias of a candidate with itself. Time buckets are
computed once per batch, for all layers. The event times of cached tokens are stored in a pool parallel to the KV cache.

Legend: T rows of the batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.mask_and_bias import bucket_edges
from nestrec.ops.attention.paged.paged_kernel import tile_words
from nestrec.ops.attention.paged.query_blocks import BLOCK_KEYS, BLOCK_ROWS, FIELDS, VisibleRange
from nestrec.ops.attention.time_triton import time_bucket, time_function
from nestrec.ops.kernel_op import IS_INTERPRETED

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0912, PLR0915, PLR0917


_SPLITS = 1 if IS_INTERPRETED else 8
"""Number of programs that share the tiles of a block."""
_LARGEST_BYTE = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """Event times of the rows of a batch and of cached tokens, in float64 seconds."""

    slots: torch.Tensor
    """Times of cached tokens, indexed by slot of the pool."""
    time_T: torch.Tensor
    """Times of the rows as keys, (T,)."""
    query_time_T: torch.Tensor
    """Times of the rows as queries, (T,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Query blocks and pages of a batch, which determine the pairs that have a bias."""

    blocks: torch.Tensor
    """Table written by `write_blocks`, (blocks, FIELDS) int32."""
    pages: torch.Tensor
    """Block table: page numbers of all sequences, int32."""
    page_tokens: int
    """Number of tokens per page."""
    num_tiles: int
    """Upper bound on the number of tiles; see `max_tiles`."""
    visible_range: VisibleRange

    @property
    def keys(self) -> int:
        """Number of keys per tile."""
        return min(BLOCK_KEYS, self.page_tokens)

    def allocate_tiles(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory for all tiles, (tiles, BLOCK_ROWS * BLOCK_KEYS), which layers can reuse sequentially."""
        return torch.empty(self.num_tiles, BLOCK_ROWS * BLOCK_KEYS, dtype=dtype, device=self.blocks.device)


def compute_buckets(plan: PairPlan, times: PairTimes, num_buckets: int) -> torch.Tensor:
    """Compute the time buckets of all pairs, once per batch; tiles of candidates have only their first row filled."""
    tiles = plan.allocate_tiles(torch.uint8 if num_buckets <= _LARGEST_BYTE else torch.int32)
    _buckets_kernel[plan.blocks.shape[0], _SPLITS](
        tiles,
        plan.blocks,
        plan.pages,
        times.slots,
        times.time_T,
        times.query_time_T,
        bucket_edges(num_buckets, plan.blocks.device),
        num_buckets,
        PAGE=plan.page_tokens,
        ROWS=BLOCK_ROWS,
        KEYS=plan.keys,
        UNIT=BLOCK_KEYS,
        FIELDS=FIELDS,
        REACH=plan.visible_range.reach,
        SPLITS=_SPLITS,
    )
    return tiles


def write_biases(
    out: torch.Tensor,
    plan: PairPlan,
    *,
    position_table: torch.Tensor | None = None,
    time_table: torch.Tensor | None = None,
    buckets: torch.Tensor | None = None,
    time_function: torch.Tensor | None = None,
    times: PairTimes | None = None,
) -> None:
    """Write the sum of the given biases to `out`.

    Args:
        out: Result of `PairPlan.allocate_tiles`, in the dtype of the queries.
        plan: Query blocks and pages of the batch.
        position_table: Bias per distance, (2 * max_length - 1,).
        time_table: Bias per time bucket; requires `buckets`.
        buckets: Result of `compute_buckets`.
        time_function: Scalars of a time function, (3,); requires `times`.
        times: Event times of the batch.
    """
    _bias_kernel[plan.blocks.shape[0], _SPLITS](
        out,
        plan.blocks,
        plan.pages,
        position_table,
        0 if position_table is None else (position_table.numel() - 1) // 2,
        time_table,
        buckets,
        time_function,
        None if times is None else times.slots,
        None if times is None else times.time_T,
        None if times is None else times.query_time_T,
        PAGE=plan.page_tokens,
        ROWS=BLOCK_ROWS,
        KEYS=plan.keys,
        UNIT=BLOCK_KEYS,
        FIELDS=FIELDS,
        REACH=plan.visible_range.reach,
        SPLITS=_SPLITS,
        FAST=not IS_INTERPRETED,
    )


def store_times(time_T: torch.Tensor, slots_T: torch.Tensor, to: torch.Tensor) -> None:
    """Store the event times of rows in the pool of times; rows with a negative slot are skipped."""
    _times_kernel[(triton.cdiv(len(slots_T), 256),)](time_T, slots_T, to, len(slots_T), ROWS=256)


@triton.jit
def _times_kernel(times, slots, to, num_rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    tl.store(to + slot, tl.load(times + row, mask=slot >= 0, other=0.0), mask=slot >= 0)


@triton.jit
def _counts(block, KEYS: tl.constexpr, REACH: tl.constexpr):
    """Return the number of prefix tiles, the first visible new key, and the number of new-history tiles of a block."""
    num_seen = tl.load(block + 6)
    begin = num_seen * 0
    if REACH:
        begin = tl.minimum(tl.maximum(tl.load(block + 13) - tl.load(block + 14), 0), num_seen)
    num_old = (tl.load(block + 2) - tl.load(block + 8) + KEYS - 1) // KEYS
    return num_old, begin, (num_seen - begin + KEYS - 1) // KEYS


@triton.jit
def _start_of(block, n, KEYS: tl.constexpr, REACH: tl.constexpr):
    """Return the first token of the n-th tile, which must be a prefix tile."""
    number = tl.load(block + 8) + n * KEYS
    if REACH:
        context, low = tl.load(block + 12), tl.load(block + 13)
        return tl.where(number < context, number, number - context + low)
    else:
        return number


@triton.jit
def _tokens_of(block, n, num_old, begin, key, KEYS: tl.constexpr, REACH: tl.constexpr):
    """Return the positions of the keys of the n-th tile in the history."""
    fresh = tl.load(block + 14) + begin + (n - num_old) * KEYS
    return tl.where(n < num_old, _start_of(block, n, KEYS, REACH), fresh) + key


@triton.jit
def _times_of(
    block,
    n,
    num_old,
    begin,
    key,
    pages,
    slot_times,
    row_times,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    REACH: tl.constexpr,
):
    """Return the event times of the keys of the n-th tile."""
    is_old = n < num_old
    start = _start_of(block, n, KEYS, REACH)
    page = tl.load(pages + tl.load(block + 3) + start // PAGE, mask=is_old, other=0).to(tl.int64)
    old = tl.load(
        slot_times + page * PAGE + start % PAGE + key, mask=is_old & (start + key < tl.load(block + 14)), other=0.0
    )
    fresh = begin + (n - num_old) * KEYS + key
    is_new = (n >= num_old) & (fresh < tl.load(block + 6))
    return old + tl.load(row_times + tl.load(block + 4) + fresh, mask=is_new, other=0.0)


@triton.jit
def _buckets_kernel(
    tiles,
    blocks,
    pages,
    slot_times,
    row_times,
    query_times,
    edges,
    num_buckets,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    FIELDS: tl.constexpr,
    REACH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    block = blocks + tl.program_id(0) * FIELDS
    num_rows = tl.load(block + 1)
    if (num_rows == 0) | (tl.load(block + 17) == 0):
        return
    num_old, begin, num_new = _counts(block, KEYS, REACH)
    row0, candidate, first_tile = tl.load(block), tl.load(block + 7), tl.load(block + 16).to(tl.int64)
    row, key = tl.arange(0, ROWS), tl.arange(0, KEYS)
    if candidate > 0:
        now = tl.load(query_times + row0)
        for n in range(tl.program_id(1), num_old + num_new, SPLITS):
            key_seconds = _times_of(block, n, num_old, begin, key, pages, slot_times, row_times, PAGE, KEYS, REACH)
            bucket = time_bucket(now - key_seconds, edges, num_buckets)
            at = tiles + first_tile * (ROWS * UNIT) + n * (ROWS * KEYS)
            tl.store(at + key, bucket.to(tiles.dtype.element_ty))
        if (tl.program_id(1) == 0) & (tl.load(block + 10) == tl.load(block + 9) - 1):
            own = tl.load(row_times + row0 + tl.arange(0, 1))
            bucket = time_bucket(now - own, edges, num_buckets)
            last = tiles + first_tile * (ROWS * UNIT) + (num_old + num_new) * (ROWS * KEYS) + tl.arange(0, 1)
            tl.store(last, bucket.to(tiles.dtype.element_ty))
    else:
        query_seconds = tl.load(query_times + row0 + row, mask=row < num_rows, other=0.0)
        for n in range(tl.program_id(1), num_old + num_new, SPLITS):
            key_seconds = _times_of(block, n, num_old, begin, key, pages, slot_times, row_times, PAGE, KEYS, REACH)
            bucket = time_bucket(query_seconds[:, None] - key_seconds[None, :], edges, num_buckets)
            at = tiles + first_tile * (ROWS * UNIT) + n * (ROWS * KEYS)
            tl.store(at + row[:, None] * KEYS + key[None, :], bucket.to(tiles.dtype.element_ty))


@triton.jit
def _bias_kernel(
    tiles,
    blocks,
    pages,
    position_table,
    center,
    time_table,
    buckets,
    function,
    slot_times,
    row_times,
    query_times,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    FIELDS: tl.constexpr,
    REACH: tl.constexpr,
    SPLITS: tl.constexpr,
    FAST: tl.constexpr,
):
    block = blocks + tl.program_id(0) * FIELDS
    num_rows = tl.load(block + 1)
    if (num_rows == 0) | (tl.load(block + 17) == 0):
        return
    num_old, begin, num_new = _counts(block, KEYS, REACH)
    row0, candidate, first_tile = tl.load(block), tl.load(block + 7), tl.load(block + 16).to(tl.int64)
    row, key, one = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, 1)
    query_position = tl.load(block + 14) + tl.load(block + 5)
    if candidate > 0:
        for n in range(tl.program_id(1), num_old + num_new, SPLITS):
            tile = first_tile * (ROWS * UNIT) + n * (ROWS * KEYS)
            value = tl.zeros((KEYS,), tl.float32)
            if position_table is not None:
                distance = _tokens_of(block, n, num_old, begin, key, KEYS, REACH) - query_position
                is_inside = (distance >= -center) & (distance <= center)
                value += tl.load(position_table + center + distance, mask=is_inside, other=0.0).to(tl.float32)
            if time_table is not None:
                value += tl.load(time_table + tl.load(buckets + tile + key).to(tl.int32)).to(tl.float32)
            if function is not None:
                key_seconds = _times_of(block, n, num_old, begin, key, pages, slot_times, row_times, PAGE, KEYS, REACH)
                shape, _, _ = time_function(function, key_seconds, tl.load(query_times + row0 + one), FAST)
                value += tl.load(function).to(tl.float32) * tl.sum(shape, 1)
            alike = tl.zeros((ROWS, KEYS), tl.float32) + value[None, :]
            words = tile_words(alike.to(tiles.dtype.element_ty), ROWS, KEYS)
            tl.store(tiles + tile + tl.arange(0, ROWS * KEYS), words)
        if (tl.program_id(1) == 0) & (tl.load(block + 10) == tl.load(block + 9) - 1):
            last = first_tile * (ROWS * UNIT) + (num_old + num_new) * (ROWS * KEYS) + one
            itself = tl.zeros((1,), tl.float32)
            if position_table is not None:
                itself += tl.load(position_table + center + one).to(tl.float32)
            if time_table is not None:
                itself += tl.load(time_table + tl.load(buckets + last).to(tl.int32)).to(tl.float32)
            if function is not None:
                own = tl.load(row_times + row0 + one)
                shape, _, _ = time_function(function, own, tl.load(query_times + row0 + one), FAST)
                itself += tl.load(function).to(tl.float32) * tl.sum(shape, 1)
            tl.store(tiles + last, itself.to(tiles.dtype.element_ty))
    else:
        for n in range(tl.program_id(1), num_old + num_new, SPLITS):
            tile = first_tile * (ROWS * UNIT) + n * (ROWS * KEYS)
            value = tl.zeros((ROWS, KEYS), tl.float32)
            if position_table is not None:
                token = _tokens_of(block, n, num_old, begin, key, KEYS, REACH)
                distance = token[None, :] - (query_position + row)[:, None]
                is_inside = (distance >= -center) & (distance <= center)
                value += tl.load(position_table + center + distance, mask=is_inside, other=0.0).to(tl.float32)
            if time_table is not None:
                at = tile + row[:, None] * KEYS + key[None, :]
                value += tl.load(time_table + tl.load(buckets + at).to(tl.int32)).to(tl.float32)
            if function is not None:
                key_seconds = _times_of(block, n, num_old, begin, key, pages, slot_times, row_times, PAGE, KEYS, REACH)
                query_seconds = tl.load(query_times + row0 + row, mask=row < num_rows, other=0.0)
                shape, _, _ = time_function(function, key_seconds, query_seconds, FAST)
                value += tl.load(function).to(tl.float32) * tl.trans(shape)
            words = tile_words(value.to(tiles.dtype.element_ty), ROWS, KEYS)
            tl.store(tiles + tile + tl.arange(0, ROWS * KEYS), words)
