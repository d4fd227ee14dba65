"""Biases of the pairs of a batch whose prefixes lie in pages, as the kernels of paged attention read them.

    bias[i, j] = position[place(j) - place(i) + centre] + time[bucket(query time[i] - time[j])]  or  + b(dt)

A block of queries has a tile for each block of keys that it reads, in the order in which it reads them; heads share
them. Candidates of a sequence stand at one place and ask at one time, so the rows of their tiles are alike, and all of
its blocks have the same ones; behind the last stands the bias of a candidate with itself. Buckets are found once a
batch, for all layers. The times of cached tokens lie beside their pages.

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
"""programs that share the tiles of a block"""
_LARGEST_BYTE = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """When rows and cached tokens happened; float64 seconds."""

    slots: torch.Tensor
    """of cached tokens, by slot of the pool"""
    time_T: torch.Tensor
    query_time_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Which pairs there are."""

    blocks: torch.Tensor
    """(blocks, FIELDS) of `write_blocks`"""
    pages: torch.Tensor
    page_tokens: int
    num_tiles: int
    """most_tiles of the blocks"""
    seen: VisibleRange

    @property
    def keys(self) -> int:
        """Of a tile."""
        return min(BLOCK_KEYS, self.page_tokens)

    def memory(self, dtype: torch.dtype) -> torch.Tensor:
        """(tiles, BLOCK_ROWS * BLOCK_KEYS), which layers use one after the other."""
        return torch.empty(self.num_tiles, BLOCK_ROWS * BLOCK_KEYS, dtype=dtype, device=self.blocks.device)


def find_buckets(plan: PairPlan, times: PairTimes, num_buckets: int) -> torch.Tensor:
    """Time buckets of all pairs, once a batch; of candidates the first row of a tile."""
    found = plan.memory(torch.uint8 if num_buckets <= _LARGEST_BYTE else torch.int32)
    _buckets_kernel[plan.blocks.shape[0], _SPLITS](
        found,
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
        REACH=plan.seen.reach,
        SPLITS=_SPLITS,
    )
    return found


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
    """The sum of what is given. buckets: with a table of times; times: with a function of them."""
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
        REACH=plan.seen.reach,
        SPLITS=_SPLITS,
        FAST=not IS_INTERPRETED,
    )


def store_times(time_T: torch.Tensor, slots_T: torch.Tensor, to: torch.Tensor) -> None:
    """Beside the pages, those of the rows whose slot is not negative."""
    _times_kernel[(triton.cdiv(len(slots_T), 256),)](time_T, slots_T, to, len(slots_T), ROWS=256)


@triton.jit
def _times_kernel(times, slots, to, num_rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    tl.store(to + slot, tl.load(times + row, mask=slot >= 0, other=0.0), mask=slot >= 0)


@triton.jit
def _counts(block, KEYS: tl.constexpr, REACH: tl.constexpr):
    """(tiles of the prefix, first new key that is seen, tiles of new history) of a block"""
    num_seen = tl.load(block + 6)
    begin = num_seen * 0
    if REACH:
        begin = tl.minimum(tl.maximum(tl.load(block + 13) - tl.load(block + 14), 0), num_seen)
    num_old = (tl.load(block + 2) - tl.load(block + 8) + KEYS - 1) // KEYS
    return num_old, begin, (num_seen - begin + KEYS - 1) // KEYS


@triton.jit
def _start_of(block, n, KEYS: tl.constexpr, REACH: tl.constexpr):
    """First token of the n-th tile, which is one of the prefix."""
    number = tl.load(block + 8) + n * KEYS
    if REACH:
        context, low = tl.load(block + 12), tl.load(block + 13)
        return tl.where(number < context, number, number - context + low)
    else:
        return number


@triton.jit
def _tokens_of(block, n, num_old, begin, key, KEYS: tl.constexpr, REACH: tl.constexpr):
    """Places of the keys of the n-th tile in the history."""
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
    """When the keys of the n-th tile happened."""
    is_old, start = n < num_old, _start_of(block, n, KEYS, REACH)
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
            seen_at = _times_of(block, n, num_old, begin, key, pages, slot_times, row_times, PAGE, KEYS, REACH)
            bucket = time_bucket(now - seen_at, edges, num_buckets)
            at = tiles + first_tile * (ROWS * UNIT) + n * (ROWS * KEYS)
            tl.store(at + key, bucket.to(tiles.dtype.element_ty))
        if (tl.program_id(1) == 0) & (tl.load(block + 10) == tl.load(block + 9) - 1):
            own = tl.load(row_times + row0 + tl.arange(0, 1))
            bucket = time_bucket(now - own, edges, num_buckets)
            last = tiles + first_tile * (ROWS * UNIT) + (num_old + num_new) * (ROWS * KEYS) + tl.arange(0, 1)
            tl.store(last, bucket.to(tiles.dtype.element_ty))
    else:
        asked = tl.load(query_times + row0 + row, mask=row < num_rows, other=0.0)
        for n in range(tl.program_id(1), num_old + num_new, SPLITS):
            seen_at = _times_of(block, n, num_old, begin, key, pages, slot_times, row_times, PAGE, KEYS, REACH)
            bucket = time_bucket(asked[:, None] - seen_at[None, :], edges, num_buckets)
            at = tiles + first_tile * (ROWS * UNIT) + n * (ROWS * KEYS)
            tl.store(at + row[:, None] * KEYS + key[None, :], bucket.to(tiles.dtype.element_ty))


@triton.jit
def _bias_kernel(
    tiles,
    blocks,
    pages,
    position_table,
    centre,
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
    place = tl.load(block + 14) + tl.load(block + 5)
    if candidate > 0:
        for n in range(tl.program_id(1), num_old + num_new, SPLITS):
            tile = first_tile * (ROWS * UNIT) + n * (ROWS * KEYS)
            value = tl.zeros((KEYS,), tl.float32)
            if position_table is not None:
                distance = _tokens_of(block, n, num_old, begin, key, KEYS, REACH) - place
                is_inside = (distance >= -centre) & (distance <= centre)
                value += tl.load(position_table + centre + distance, mask=is_inside, other=0.0).to(tl.float32)
            if time_table is not None:
                value += tl.load(time_table + tl.load(buckets + tile + key).to(tl.int32)).to(tl.float32)
            if function is not None:
                seen_at = _times_of(block, n, num_old, begin, key, pages, slot_times, row_times, PAGE, KEYS, REACH)
                shape, _, _ = time_function(function, seen_at, tl.load(query_times + row0 + one), FAST)
                value += tl.load(function).to(tl.float32) * tl.sum(shape, 1)
            alike = tl.zeros((ROWS, KEYS), tl.float32) + value[None, :]
            words = tile_words(alike.to(tiles.dtype.element_ty), ROWS, KEYS)
            tl.store(tiles + tile + tl.arange(0, ROWS * KEYS), words)
        if (tl.program_id(1) == 0) & (tl.load(block + 10) == tl.load(block + 9) - 1):
            last = first_tile * (ROWS * UNIT) + (num_old + num_new) * (ROWS * KEYS) + one
            itself = tl.zeros((1,), tl.float32)
            if position_table is not None:
                itself += tl.load(position_table + centre + one).to(tl.float32)
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
                distance = token[None, :] - (place + row)[:, None]
                is_inside = (distance >= -centre) & (distance <= centre)
                value += tl.load(position_table + centre + distance, mask=is_inside, other=0.0).to(tl.float32)
            if time_table is not None:
                at = tile + row[:, None] * KEYS + key[None, :]
                value += tl.load(time_table + tl.load(buckets + at).to(tl.int32)).to(tl.float32)
            if function is not None:
                seen_at = _times_of(block, n, num_old, begin, key, pages, slot_times, row_times, PAGE, KEYS, REACH)
                asked = tl.load(query_times + row0 + row, mask=row < num_rows, other=0.0)
                shape, _, _ = time_function(function, seen_at, asked, FAST)
                value += tl.load(function).to(tl.float32) * tl.trans(shape)
            words = tile_words(value.to(tiles.dtype.element_ty), ROWS, KEYS)
            tl.store(tiles + tile + tl.arange(0, ROWS * KEYS), words)
