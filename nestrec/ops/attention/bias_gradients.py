"""Gradients of the learned biases of HSTU attention: sums over heads and pairs of equal distance or equal time bucket.

    g[i, j]         = sum_heads SiLU'(q[i] . k[j] + bias) (d out[i] . v[j]) / normalizer
    d position[d]   = sum of g over pairs whose positions differ by d
    d time[b]       = sum of g over pairs of bucket b
    d function[n]   = sum over pairs of g times the derivative of the time function

There are two implementations, and both are bitwise reproducible:

- `table_gradients` recomputes the scores. The tables are shared by the heads, so a tile of g is summed over the heads
  first. A program owns tiles of one block distance, whose elements are on the same diagonals: it accumulates the tiles
  and reduces the diagonals once at its end. Results of programs are added as integers, whose sum does not depend on
  the order.
- `TableSums` reduces gradients of scores that the backward pass has saved. A program, one warp, owns 16 keys of the
  tiles of one block distance and also reduces the diagonals once at its end. Programs write partial sums to separate
  rows, which are added in a fixed order. It does not support candidates, which share a position.

Legend: T tokens, H heads, D head dimension, B sequences.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.attention_inputs import AttentionInputs
from nestrec.ops.attention.hstu_triton import Blocks, seen_pairs, sigmoid
from nestrec.ops.attention.mask_and_bias import function_gradient
from nestrec.ops.attention.pair_tiles import SIDE, TilePlan
from nestrec.ops.attention.time_triton import time_bucket, time_function
from nestrec.ops.attention.work_schedule import make_schedule
from nestrec.ops.kernel_op import IS_INTERPRETED

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0915, PLR0917


def blocks_for(dim: int, dtype: torch.dtype) -> Blocks:
    """Return the fixed numbers of queries (x) and keys (y) of a tile; no autotuning, for reproducible results."""
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 1)
    if dim <= 64:
        return Blocks(128, 64, 8, 3)
    return Blocks(128, 64, 8, 2) if dim <= 128 else Blocks(64, 64, 8, 1)


def table_gradients(
    grad_THD: torch.Tensor, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of the position table and the time table by recomputing the scores.

    Args:
        grad_THD: Gradient of the attention output, (T, H, D).
        q_THD: Queries, (T, H, D).
        k_THD: Keys, (T, H, D).
        v_THD: Values, (T, H, D).
        inputs: All other inputs of the attention.

    Returns:
        Gradients of the position table and of the time table; None for a table that is absent.
    """
    bias = inputs.bias
    rules = inputs.rules
    tables = (bias.position_table, bias.time_table)
    # The unit of the integer sums is 2^-34 of the largest gradient: far below rounding, and far from overflow.
    quantum = torch.linalg.vector_norm(grad_THD, ord=torch.inf).float() * 2.0**-34
    quantum = torch.where(quantum == 0.0, 1.0, quantum)
    sums = [None if t is None else torch.zeros(t.shape, dtype=torch.int64, device=t.device) for t in tables]
    tokens, _, dim = q_THD.shape
    tile = blocks_for(dim, q_THD.dtype)
    schedule = make_schedule(inputs.offsets, tokens, tile.x)
    tensors = [t if t.stride(2) == 1 else t.contiguous() for t in (q_THD, k_THD, grad_THD, v_THD)]
    blocks = -(-inputs.max_length // tile.y)
    before = blocks - 1 if inputs.is_square else tile.x // tile.y - 1
    distances = blocks + before
    splits = max(8, min(64, 2048 // distances))
    _tables_kernel[distances, splits](
        *tensors,
        *(t.stride(0) for t in tensors),
        *(t.stride(1) for t in tensors),
        *schedule,
        *inputs.scalars(q_THD),
        *inputs.biases,
        *sums,
        quantum,
        before,
        splits,
        HAS_TARGETS=rules.num_targets_B is not None,
        HAS_POSITION=tables[0] is not None,
        HAS_TIME=tables[1] is not None,
        FAST=q_THD.dtype == torch.bfloat16,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        BM=tile.x,
        BN=tile.y,
        D=dim,
        WIDTH=max(16, triton.next_power_of_2(dim)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    gradients = [
        None if total is None or table is None else (total.double() * quantum).to(table.dtype)
        for total, table in zip(sums, tables, strict=True)
    ]
    return gradients[0], gradients[1]


@triton.jit
def _add_integers(pointers, values, quantum, mask):
    units = values / quantum
    # Round half away from zero; a NaN propagates through the quantum.
    rounded = (units + tl.where(units >= 0, 0.5, -0.5)).to(tl.int64)
    tl.atomic_add(pointers, rounded, mask=mask, sem="relaxed")


@triton.jit
def _add_diagonals(g, table, quantum, BM: tl.constexpr, BN: tl.constexpr):
    """Add g[row, column] of equal column - row to the table, where `table` points at the value of distance 0."""
    row = tl.arange(0, BM)[:, None]
    column = tl.arange(0, BN)
    # After rotating row r by r, column c holds distance c (not wrapped) or c - BN (wrapped) plus a constant.
    turned = tl.gather(g, (row + column[None, :]) % BN, 1)
    is_wrapped = (row % BN) + column[None, :] >= BN
    for part in tl.static_range(BM // BN):
        is_part = row // BN == part
        straight = tl.sum(tl.where(is_part & (is_wrapped == 0), turned, 0.0), 0)
        wrapped = tl.sum(tl.where(is_part & is_wrapped, turned, 0.0), 0)
        pointers = table + column - part * BN
        _add_integers(pointers, straight, quantum, straight != 0.0)
        _add_integers(pointers - BN, wrapped, quantum, wrapped != 0.0)


@triton.jit
def _slope(s, FAST: tl.constexpr):
    """Return the derivative of SiLU."""
    if FAST:
        half = s * 0.5
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, True, 1)
        return (0.5 * t + 0.5) * ((half + 1.0) - half * t)
    else:
        sigma = sigmoid(s)
        return sigma * (1.0 + s * (1.0 - sigma))


@triton.jit(
    do_not_specialize=["heads", "num_context", "window", "ahead", "center", "num_buckets", "before", "num_splits"]
)
def _tables_kernel(
    q,
    k,
    grad,
    v,
    q_step,
    k_step,
    grad_step,
    v_step,
    q_head,
    k_head,
    grad_head,
    v_head,
    schedule,
    state,
    heads,
    scale,
    targets,
    num_context,
    window,
    ahead,
    position_table,
    center,
    time_table,
    edges,
    num_buckets,
    query_time,
    key_time,
    position_grad,
    time_grad,
    quantum_ptr,
    before,
    num_splits,
    HAS_TARGETS: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    apart = (tl.program_id(0) - before) * BN  # first query minus first key of every tile
    total = tl.load(state)
    quantum = tl.load(quantum_ptr)
    row, channel = tl.arange(0, BM), tl.arange(0, WIDTH)
    column = tl.arange(0, BN)
    by_distance = tl.zeros([BM, BN], tl.float32)
    item = tl.program_id(1)
    while item < total:
        entry = schedule + 4 * item
        start, length = tl.load(entry).to(tl.int64), tl.load(entry + 1)
        i0 = (item - tl.load(entry + 2)) * BM
        j0 = i0 - apart
        history = length
        if HAS_TARGETS:
            history = tl.maximum(length - tl.load(targets + tl.load(entry + 3)).to(tl.int32), 0)
        is_near = (tl.minimum(i0, history) - j0 - BN < window) | (j0 < num_context) | (i0 < ahead)
        if (j0 >= 0) & (j0 < length) & is_near:
            i = i0 + row
            j = j0 + column
            at_i, at_j = (start + i)[:, None], (start + j)[None, :]
            bias = tl.zeros([BM, BN], tl.float32)
            distance = tl.minimum(j, history)[None, :] - tl.minimum(i, history)[:, None]
            if HAS_POSITION:
                is_inside = (distance >= -center) & (distance <= center)
                bias += tl.load(position_table + (distance + center), mask=is_inside, other=0.0).to(tl.float32)
            bucket = tl.zeros([BM, BN], tl.int32)
            if HAS_TIME:
                query_seconds = tl.load(query_time + start + i, mask=i < length, other=0.0)
                key_seconds = tl.load(key_time + start + j, mask=j < length, other=0.0)
                bucket = time_bucket(query_seconds[:, None] - key_seconds[None, :], edges, num_buckets)
                bias += tl.load(time_table + bucket).to(tl.float32)
            mask_i = (i < length)[:, None] & (channel < D)[None, :]
            mask_j = (j < length)[None, :] & (channel < D)[:, None]
            g = tl.zeros([BM, BN], tl.float32)
            for head in range(heads):
                q_tile = tl.load(q + at_i * q_step + head * q_head + channel[None, :], mask=mask_i, other=0.0)
                k_tile = tl.load(k + at_j * k_step + head * k_head + channel[:, None], mask=mask_j, other=0.0)
                s = tl.dot(q_tile, k_tile, input_precision=PRECISION) + bias
                grad_tile = tl.load(
                    grad + at_i * grad_step + head * grad_head + channel[None, :], mask=mask_i, other=0.0
                )
                v_tile = tl.load(v + at_j * v_step + head * v_head + channel[:, None], mask=mask_j, other=0.0)
                g += _slope(s, FAST) * tl.dot(grad_tile, v_tile, input_precision=PRECISION)
            seen = seen_pairs(i[:, None], j[None, :], history, num_context, window, ahead)
            seen = seen & (i < length)[:, None] & (j < length)[None, :]
            g = tl.where(seen, g * scale, 0.0)
            if HAS_POSITION:
                if (i0 + BM <= history) | (history == length):
                    by_distance += g
                else:
                    _add_integers(position_grad + (distance + center), g, quantum, g != 0.0)
            if HAS_TIME:
                # A tile contains few buckets, because times are either far apart or similar.
                low = tl.min(tl.where(seen, bucket, num_buckets))
                high = tl.max(tl.where(seen, bucket, 0))
                for b in range(low, high + 1):
                    part = tl.sum(tl.where(bucket == b, g, 0.0))
                    _add_integers(time_grad + b, part, quantum, part != 0.0)
        # Sequences are sorted by length: all following ones are too short if this one is.
        item = tl.where(length <= apart, total, item + num_splits)
    if HAS_POSITION:
        _add_diagonals(by_distance, position_grad + center - apart, quantum, BM, BN)


SLAB = 16
"""Number of keys of a tile that one program processes."""
SLOTS = 256
"""Number of bucket sums per program."""
LANES = 32
"""Number of sums per program for a time function, of which three are used."""
NEAR = 2
"""Number of block distances, starting at the diagonal, whose tiles contain many time buckets."""
NEAR_SPLITS, FAR_SPLITS, PROGRAMS = 512, 64, 4096
"""Number of programs per near block distance, maximum number per other distance, and approximate total number."""


class _Division(NamedTuple):
    """Division of the programs among block distances: near distances first, then all others."""

    near_splits: int
    """Number of programs per near distance."""
    far_splits: int
    """Number of programs per other distance."""
    past_distances: int
    """Number of distances from NEAR on, at which keys precede queries."""
    future_distances: int
    """Number of distances at which keys follow queries."""

    @property
    def programs(self) -> int:
        return NEAR * self.near_splits + (self.past_distances + self.future_distances) * self.far_splits


def _divide(inputs: AttentionInputs, num_tokens: int) -> _Division:
    blocks = -(-inputs.max_length // SIDE)
    rows = max(1, num_tokens // SIDE + inputs.offsets.numel() - 1)
    near = FAR_SPLITS if inputs.bias.time_table is None else NEAR_SPLITS
    return _Division(
        min(near, rows),
        min(rows, max(8, min(FAR_SPLITS, PROGRAMS // blocks))),
        max(0, blocks - NEAR),
        blocks - 1 if inputs.is_square else 0,
    )


class TableSums:
    """Accumulates the bias gradients of a layer from saved gradients of scores, over groups of heads."""

    def __init__(self, inputs: AttentionInputs, num_tokens: int, plan: TilePlan, buckets: torch.Tensor | None):
        assert inputs.rules.num_targets_B is None
        self._inputs = inputs
        self._num_tokens = num_tokens
        self._plan = plan
        self._buckets = buckets
        self._by_distance: torch.Tensor | None = None
        self._by_time: torch.Tensor | None = None

    def add(self, score_gradients: torch.Tensor) -> None:
        """Add a group of heads.

        Args:
            score_gradients: Saved gradients of the scores, (tiles, heads, keys, queries).
        """
        inputs = self._inputs
        bias = self._inputs.bias
        rules = self._inputs.rules
        division = _divide(inputs, self._num_tokens)
        rows = division.programs * (SIDE // SLAB)
        _, scale, _, num_context, window, looking = inputs.scalars(score_gradients[:, :, 0])
        slots = SLOTS if bias.time_function is None else LANES
        diagonals, by_time = (
            torch.empty(rows, width, dtype=torch.float32, device=score_gradients.device) if is_needed else None
            for is_needed, width in ((bias.position_table is not None, 2 * SIDE), (bias.has_time, slots))
        )
        _sums_kernel[division.programs, SIDE // SLAB](
            score_gradients,
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
            HEADS=score_gradients.shape[1],
            NEAR=NEAR,
            SLAB=SLAB,
            SLOTS=slots,
            SIDE=SIDE,
            FAST=not IS_INTERPRETED,
            num_warps=1,
        )
        if diagonals is not None and bias.position_table is not None:
            distances = NEAR + division.past_distances + division.future_distances
            totals = torch.empty(distances, SIDE // SLAB, 2 * SIDE, dtype=torch.float32, device=score_gradients.device)
            _splits_kernel[distances, SIDE // SLAB](
                diagonals, totals, *division[:2], NEAR=NEAR, SLAB=SLAB, SIDE=SIDE, num_warps=8
            )
            table = torch.empty(bias.position_table.shape, dtype=torch.float32, device=score_gradients.device)
            below = -(-(table.numel() // 2) // SIDE)
            _diagonals_kernel[(2 * below + 1,)](
                totals, table, table.numel(), below, *division[2:], NEAR=NEAR, SLAB=SLAB, SIDE=SIDE, num_warps=1
            )
            self._by_distance = table if self._by_distance is None else self._by_distance + table
        if by_time is not None:
            total_by_time = by_time.sum(0)
            self._by_time = total_by_time if self._by_time is None else self._by_time + total_by_time

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the position table, the time table and the time function; None if absent."""
        bias = self._inputs.bias
        time = self._by_time
        position = None
        if self._by_distance is not None and bias.position_table is not None:
            position = self._by_distance.to(bias.position_table.dtype)
        if time is not None and bias.time_table is not None:
            return position, time[: bias.time_table.numel()].to(bias.time_table.dtype), None
        if time is not None and bias.time_function is not None:
            return position, None, function_gradient(bias.time_function, time)
        return position, None, None


@triton.jit
def _is_kept(
    query_block, key_block, length, num_context, window, looking, HAS_RULES: tl.constexpr, IS_SQUARE: tl.constexpr
):
    """Return whether the backward pass over keys has written this tile; same condition as in product_kernel.py."""
    kept = (key_block >= 0) & (query_block * 64 < length) & (key_block * 64 < length)
    if HAS_RULES:
        x0 = key_block // 2 * 128
        x1 = tl.minimum(length, x0 + 128)
        end = x1 - 1 + window
        end = tl.where((end > length) | (x0 < num_context), length, tl.maximum(end, x1))
        prefix = tl.minimum((looking + 63) // 64, x0 // 64)
        kept = kept & (((query_block >= x0 // 64) & (query_block < (end + 63) // 64)) | (query_block < prefix))
    if not IS_SQUARE:
        kept = kept & (key_block <= query_block)
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
        apart = program // near_splits
        item = program % near_splits
        splits = near_splits
    else:
        apart = far // far_splits
        item = far % far_splits
        splits = far_splits
        apart = tl.where(apart < behind, apart + NEAR, apart - behind - ahead)
    total = tl.load(state)
    key = slab * SLAB + tl.arange(0, SLAB)
    query = tl.arange(0, SIDE)
    inside = key[:, None] * SIDE + query[None, :]
    by_diagonal = tl.zeros([SLAB, SIDE], tl.float32)
    slot = tl.arange(0, SLOTS)
    by_slot = tl.zeros([SLOTS], tl.float32)
    at_once = tl.zeros([SLAB, SIDE], tl.float32)
    while item < total:
        entry = schedule + 4 * item
        length = tl.load(entry + 1)
        query_block = item - tl.load(entry + 2)
        key_block = query_block - apart
        if _is_kept(query_block, key_block, length, num_context, window, looking, HAS_RULES, IS_SQUARE):
            tile = tl.load(first_tile + tl.load(entry + 3))
            if IS_SQUARE:
                tile += query_block * ((length + SIDE - 1) // SIDE) + key_block
            else:
                tile += query_block * (query_block + 1) // 2 + key_block
            pointers = kept + tile.to(tl.int64) * (HEADS * SIDE * SIDE) + inside
            g = tl.zeros([SLAB, SIDE], tl.float32)
            for head in tl.static_range(HEADS):
                g += tl.load(pointers + head * (SIDE * SIDE)).to(tl.float32)
            by_diagonal += g
            if (by_time is not None) & (function is None):
                bucket = tl.load(buckets + tile.to(tl.int64) * (SIDE * SIDE) + inside).to(tl.int32)
                # Bucket 0, which holds every event with itself, is summed separately, because the buckets between it
                # and the others of a tile are mostly empty.
                at_once += tl.where(bucket == 0, g, 0.0)
                high = tl.max(bucket)
                for b in range(tl.min(tl.where(bucket == 0, SLOTS, bucket)), high + 1):
                    by_slot += tl.where(slot == b, tl.sum(tl.where(bucket == b, g, 0.0)), 0.0)
            if function is not None:
                start = tl.load(entry).to(tl.int64)
                i = query_block * SIDE + query
                j = key_block * SIDE + key
                query_seconds = tl.load(query_time + start + i, mask=i < length, other=0.0)
                key_seconds = tl.load(key_time + start + j, mask=j < length, other=0.0)
                value, slope, exponent = time_function(function, key_seconds, query_seconds, FAST)
                g0 = g * value
                g1 = g * slope
                by_slot += tl.where(slot == 0, tl.sum(g0), 0.0) + tl.where(slot == 1, tl.sum(g1), 0.0)
                by_slot += tl.where(slot == 2, tl.sum(g1 * exponent), 0.0)
        # Sequences are sorted by length: all following ones are too short if this one is.
        item = tl.where(length <= apart * SIDE, total, item + splits)
    row = program * (SIDE // SLAB) + slab
    if by_time is not None:
        by_slot += tl.where(slot == 0, tl.sum(at_once), 0.0)
        tl.store(by_time + row * SLOTS + slot, by_slot * scale)
    if diagonals is not None:
        # After rotating row r by r, column c holds r - c = -c (straight) or SIDE - c (wrapped).
        r = tl.arange(0, SLAB)[:, None]
        c = query[None, :]
        turned = tl.gather(by_diagonal * scale, (r + c) % SIDE, 1)
        pointers = diagonals + row * (2 * SIDE) + query
        tl.store(pointers, tl.sum(tl.where(r + c < SIDE, turned, 0.0), 0))
        tl.store(pointers + SIDE, tl.sum(tl.where(r + c < SIDE, 0.0, turned), 0))


@triton.jit(do_not_specialize=["near_splits", "far_splits"])
def _splits_kernel(
    diagonals, totals, near_splits, far_splits, NEAR: tl.constexpr, SLAB: tl.constexpr, SIDE: tl.constexpr
):
    """Sum the results of the programs of one distance and slab."""
    number, slab = tl.program_id(0), tl.program_id(1)
    first = number * near_splits
    splits = near_splits
    if number >= NEAR:
        first = NEAR * near_splits + (number - NEAR) * far_splits
        splits = far_splits
    column = tl.arange(0, 2 * SIDE)
    total = tl.zeros([2 * SIDE], tl.float32)
    for low in range(0, splits, 2 * SIDE):
        split = low + column
        pointers = diagonals + ((first + split) * (SIDE // SLAB) + slab)[:, None] * (2 * SIDE) + column[None, :]
        total += tl.sum(tl.load(pointers, mask=(split < splits)[:, None], other=0.0), 0)
    tl.store(totals + (number * (SIDE // SLAB) + slab) * (2 * SIDE) + column, total)


@triton.jit(do_not_specialize=["size", "below", "behind", "ahead"])
def _diagonals_kernel(
    totals, out, size, below, behind, ahead, NEAR: tl.constexpr, SLAB: tl.constexpr, SIDE: tl.constexpr
):
    """Sum 64 adjacent distances (key - query) per program, which are spread over two block distances."""
    block = tl.program_id(0) - below
    distance = block * SIDE + tl.arange(0, SIDE)
    total = tl.zeros([SIDE], tl.float32)
    for n in tl.static_range(2):
        apart = -block - n
        number = tl.where(apart >= 0, apart, apart + NEAR + behind + ahead)
        is_there = (apart >= -ahead) & (apart < NEAR + behind)
        for slab in tl.static_range(SIDE // SLAB):
            r = distance + apart * SIDE - slab * SLAB  # key minus query within the slab
            column = tl.where(r <= 0, -r, 2 * SIDE - r)
            pointers = totals + (number * (SIDE // SLAB) + slab) * (2 * SIDE) + column
            total += tl.load(pointers, mask=is_there & (r > -SIDE) & (r < SLAB), other=0.0)
    index = distance + (size - 1) // 2
    tl.store(out + index, total, mask=(index >= 0) & (index < size))
