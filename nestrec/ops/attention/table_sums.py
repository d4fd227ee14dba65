"""Gradients of bias tables out of kept gradients of scores: sums over heads, then over pairs of equal distance or time.

    d position[d]   = sum over pairs that are d apart of sum_heads G
    d time[b]       = sum over pairs of bucket b of sum_heads G
    d function[n]   = sum over pairs of sum_heads G times the derivative of the time function

A program, one warp, owns 16 keys of tiles of one distance between their blocks, whose elements lie on the same
diagonals: it adds such tiles, and their diagonals once at its end. What programs find has places of its own and is
added in a fixed order, so all is repeatable to the bit. bias_tables.py does the same where nothing was kept, or where
candidates share a place.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0915, PLR0917

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.inputs import AttentionInputs
from nestrec.ops.attention.pair_tiles import SIDE, TilePlan
from nestrec.ops.attention.time_function import function_gradient
from nestrec.ops.attention.time_function_triton import time_function
from nestrec.ops.attention.work_order import make_schedule
from nestrec.ops.registry import IS_INTERPRETED

SLAB = 16
"""keys of a tile that one program takes"""
SLOTS = 256
"""sums by bucket of a program"""
LANES = 32
"""places of a program's sums for a time function, of which it needs three"""
NEAR = 2
"""distances, from that of the diagonal on, whose tiles have many buckets"""
NEAR_SPLITS, FAR_SPLITS, PROGRAMS = 512, 64, 4096
"""programs that share the tiles of such a distance, and of another at most; programs in all, about"""


class _Division(NamedTuple):
    """How programs are divided among distances in blocks: first those near the diagonal, then the others."""

    near_splits: int
    far_splits: int
    behind: int
    """distances from NEAR on"""
    ahead: int
    """distances at which keys come after queries"""

    @property
    def programs(self) -> int:
        return NEAR * self.near_splits + (self.behind + self.ahead) * self.far_splits


def _divide(inputs: AttentionInputs, num_tokens: int) -> _Division:
    blocks, rows = -(-inputs.max_length // SIDE), max(1, num_tokens // SIDE + inputs.offsets.numel() - 1)
    near = FAR_SPLITS if inputs.bias.time_table is None else NEAR_SPLITS
    return _Division(
        min(near, rows),
        min(rows, max(8, min(FAR_SPLITS, PROGRAMS // blocks))),
        max(0, blocks - NEAR),
        blocks - 1 if inputs.is_square else 0,
    )


class TableSums:
    """Gradients of the tables of a layer, added up over groups of heads."""

    def __init__(self, inputs: AttentionInputs, num_tokens: int, plan: TilePlan, buckets: torch.Tensor | None):
        assert inputs.rules.num_targets_B is None
        self._inputs, self._num_tokens, self._plan, self._buckets = inputs, num_tokens, plan, buckets
        self._by_distance: torch.Tensor | None = None
        self._by_time: torch.Tensor | None = None

    def add(self, kept: torch.Tensor) -> None:
        """kept: (tiles, heads, keys, queries)."""
        inputs, bias, rules = self._inputs, self._inputs.bias, self._inputs.rules
        division = _divide(inputs, self._num_tokens)
        rows = division.programs * (SIDE // SLAB)
        _, scale, _, num_context, window, looking = inputs.scalars(kept[:, :, 0])
        slots = SLOTS if bias.time_function is None else LANES
        diagonals, by_time = (
            torch.empty(rows, width, dtype=torch.float32, device=kept.device) if is_needed else None
            for is_needed, width in ((bias.position_table is not None, 2 * SIDE), (bias.has_time, slots))
        )
        _sums_kernel[division.programs, SIDE // SLAB](
            kept,
            self._buckets,
            *make_schedule(inputs.offsets, self._num_tokens, SIDE),
            self._plan.first_B,
            bias.time_function,
            bias.query_time_T,
            bias.time_T,
            scale,
            num_context,
            window,
            looking,
            diagonals,
            by_time,
            *division,
            HAS_RULES=not rules.is_plain,
            IS_SQUARE=inputs.is_square,
            HEADS=kept.shape[1],
            NEAR=NEAR,
            SLAB=SLAB,
            SLOTS=slots,
            SIDE=SIDE,
            FAST=not IS_INTERPRETED,
            num_warps=1,
        )
        if diagonals is not None and bias.position_table is not None:
            distances = NEAR + division.behind + division.ahead
            whole = torch.empty(distances, SIDE // SLAB, 2 * SIDE, dtype=torch.float32, device=kept.device)
            _splits_kernel[distances, SIDE // SLAB](
                diagonals, whole, *division[:2], NEAR=NEAR, SLAB=SLAB, SIDE=SIDE, num_warps=8
            )
            table = torch.empty(bias.position_table.shape, dtype=torch.float32, device=kept.device)
            below = -(-(table.numel() // 2) // SIDE)
            _diagonals_kernel[(2 * below + 1,)](
                whole, table, table.numel(), below, *division[2:], NEAR=NEAR, SLAB=SLAB, SIDE=SIDE, num_warps=1
            )
            self._by_distance = table if self._by_distance is None else self._by_distance + table
        if by_time is not None:
            found = by_time.sum(0)
            self._by_time = found if self._by_time is None else self._by_time + found

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of the position table, of the time table and of the time function, where they are."""
        bias, time = self._inputs.bias, self._by_time
        position = None
        if self._by_distance is not None and bias.position_table is not None:
            position = self._by_distance.to(bias.position_table.dtype)
        if time is not None and bias.time_table is not None:
            return position, time[: bias.time_table.numel()].to(bias.time_table.dtype), None
        if time is not None and bias.time_function is not None:
            return position, None, function_gradient(bias.time_function, time)
        return position, None, None


@triton.jit
def _is_kept(asks, sees, length, num_context, window, looking, HAS_RULES: tl.constexpr, IS_SQUARE: tl.constexpr):
    """Whether the pass over keys has met this tile, as hopper/product.py says."""
    kept = (sees >= 0) & (asks * 64 < length) & (sees * 64 < length)
    if HAS_RULES:
        x0 = sees // 2 * 128
        x1 = tl.minimum(length, x0 + 128)
        end = x1 - 1 + window
        end = tl.where((end > length) | (x0 < num_context), length, tl.maximum(end, x1))
        prefix = tl.minimum((looking + 63) // 64, x0 // 64)
        kept = kept & (((asks >= x0 // 64) & (asks < (end + 63) // 64)) | (asks < prefix))
    if not IS_SQUARE:
        kept = kept & (sees <= asks)
    return kept


@triton.jit(do_not_specialize=["num_context", "window", "looking", "near_splits", "far_splits", "behind", "ahead"])
def _sums_kernel(
    kept,
    buckets,
    schedule,
    state,
    first_tile,
    function,
    query_time,
    key_time,
    scale,
    num_context,
    window,
    looking,
    diagonals,
    by_time,
    near_splits,
    far_splits,
    behind,
    ahead,
    HAS_RULES: tl.constexpr,
    IS_SQUARE: tl.constexpr,
    HEADS: tl.constexpr,
    NEAR: tl.constexpr,
    SLAB: tl.constexpr,
    SLOTS: tl.constexpr,
    SIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    program, slab = tl.program_id(0), tl.program_id(1)
    far = program - NEAR * near_splits
    if far < 0:
        apart, item, splits = program // near_splits, program % near_splits, near_splits
    else:
        apart, item, splits = far // far_splits, far % far_splits, far_splits
        apart = tl.where(apart < behind, apart + NEAR, apart - behind - ahead)
    total = tl.load(state)
    key, query = slab * SLAB + tl.arange(0, SLAB), tl.arange(0, SIDE)
    inside = key[:, None] * SIDE + query[None, :]
    by_diagonal = tl.zeros([SLAB, SIDE], tl.float32)
    slot = tl.arange(0, SLOTS)
    by_slot = tl.zeros([SLOTS], tl.float32)
    at_once = tl.zeros([SLAB, SIDE], tl.float32)
    while item < total:
        entry = schedule + 4 * item
        length = tl.load(entry + 1)
        asks = item - tl.load(entry + 2)
        sees = asks - apart
        if _is_kept(asks, sees, length, num_context, window, looking, HAS_RULES, IS_SQUARE):
            tile = tl.load(first_tile + tl.load(entry + 3))
            if IS_SQUARE:
                tile += asks * ((length + SIDE - 1) // SIDE) + sees
            else:
                tile += asks * (asks + 1) // 2 + sees
            place = kept + tile.to(tl.int64) * (HEADS * SIDE * SIDE) + inside
            g = tl.zeros([SLAB, SIDE], tl.float32)
            for head in tl.static_range(HEADS):
                g += tl.load(place + head * (SIDE * SIDE)).to(tl.float32)
            by_diagonal += g
            if (by_time is not None) & (function is None):
                bucket = tl.load(buckets + tile.to(tl.int64) * (SIDE * SIDE) + inside).to(tl.int32)
                # The bucket of an event and itself is the first, with nothing between it and the others of a tile.
                at_once += tl.where(bucket == 0, g, 0.0)
                high = tl.max(bucket)
                for b in range(tl.min(tl.where(bucket == 0, SLOTS, bucket)), high + 1):
                    by_slot += tl.where(slot == b, tl.sum(tl.where(bucket == b, g, 0.0)), 0.0)
            if function is not None:
                start = tl.load(entry).to(tl.int64)
                i, j = asks * SIDE + query, sees * SIDE + key
                asked = tl.load(query_time + start + i, mask=i < length, other=0.0)
                seen_at = tl.load(key_time + start + j, mask=j < length, other=0.0)
                value, slope, exponent = time_function(function, seen_at, asked, FAST)
                g0, g1 = g * value, g * slope
                by_slot += tl.where(slot == 0, tl.sum(g0), 0.0) + tl.where(slot == 1, tl.sum(g1), 0.0)
                by_slot += tl.where(slot == 2, tl.sum(g1 * exponent), 0.0)
        # Sequences come by length: the next ones may be too short.
        item = tl.where(length <= apart * SIDE, total, item + splits)
    row = program * (SIDE // SLAB) + slab
    if by_time is not None:
        by_slot += tl.where(slot == 0, tl.sum(at_once), 0.0)
        tl.store(by_time + row * SLOTS + slot, by_slot * scale)
    if diagonals is not None:
        # After rotating row r by r, column c holds r - c = -c (straight) or SIDE - c (wrapped).
        r, c = tl.arange(0, SLAB)[:, None], query[None, :]
        turned = tl.gather(by_diagonal * scale, (r + c) % SIDE, 1)
        place = diagonals + row * (2 * SIDE) + query
        tl.store(place, tl.sum(tl.where(r + c < SIDE, turned, 0.0), 0))
        tl.store(place + SIDE, tl.sum(tl.where(r + c < SIDE, 0.0, turned), 0))


@triton.jit(do_not_specialize=["near_splits", "far_splits"])
def _splits_kernel(
    diagonals, whole, near_splits, far_splits, NEAR: tl.constexpr, SLAB: tl.constexpr, SIDE: tl.constexpr
):
    """Sums of the programs of one distance and slab."""
    number, slab = tl.program_id(0), tl.program_id(1)
    first, splits = number * near_splits, near_splits
    if number >= NEAR:
        first, splits = NEAR * near_splits + (number - NEAR) * far_splits, far_splits
    column = tl.arange(0, 2 * SIDE)
    total = tl.zeros([2 * SIDE], tl.float32)
    for low in range(0, splits, 2 * SIDE):
        split = low + column
        place = diagonals + ((first + split) * (SIDE // SLAB) + slab)[:, None] * (2 * SIDE) + column[None, :]
        total += tl.sum(tl.load(place, mask=(split < splits)[:, None], other=0.0), 0)
    tl.store(whole + (number * (SIDE // SLAB) + slab) * (2 * SIDE) + column, total)


@triton.jit(do_not_specialize=["size", "below", "behind", "ahead"])
def _diagonals_kernel(
    whole, out, size, below, behind, ahead, NEAR: tl.constexpr, SLAB: tl.constexpr, SIDE: tl.constexpr
):
    """A program has 64 neighbouring distances (key less query), which two distances in blocks hold."""
    block = tl.program_id(0) - below
    distance = block * SIDE + tl.arange(0, SIDE)
    total = tl.zeros([SIDE], tl.float32)
    for n in tl.static_range(2):
        apart = -block - n
        number = tl.where(apart >= 0, apart, apart + NEAR + behind + ahead)
        is_there = (apart >= -ahead) & (apart < NEAR + behind)
        for slab in tl.static_range(SIDE // SLAB):
            r = distance + apart * SIDE - slab * SLAB  # key less query within the slab
            column = tl.where(r <= 0, -r, 2 * SIDE - r)
            place = whole + (number * (SIDE // SLAB) + slab) * (2 * SIDE) + column
            total += tl.load(place, mask=is_there & (r > -SIDE) & (r < SLAB), other=0.0)
    place = distance + (size - 1) // 2
    tl.store(out + place, total, mask=(place >= 0) & (place < size))
