"""Gradients of HSTU attention's bias tables: sums over all heads and pairs of equal distance, and of equal time bucket.

    g[i, j]         = sum_heads SiLU'(q[i] . k[j] + bias) (d out[i] . v[j]) / normaliser
    d position[d]   = sum over pairs whose places are d apart of g
    d time[b]       = sum over pairs of bucket b of g

The tables are shared by the heads, so a tile of g is summed over them before anything else is done with it. A program
owns tiles of one distance between their blocks, whose elements lie on the same diagonals: it adds such tiles, and
their diagonals once at its end. What programs find is added as integers, whose sum does not depend on the order. So
all is repeatable to the bit. Where a pass has kept g, table_sums.py adds it up instead.

Legend: T tokens, H heads, D head dimension, B sequences.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0915, PLR0917

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.hstu_triton import Blocks, seen_pairs, sigmoid
from nestrec.ops.attention.inputs import AttentionInputs
from nestrec.ops.attention.time_buckets import time_bucket
from nestrec.ops.attention.work_order import make_schedule


def blocks_for(dim: int, dtype: torch.dtype) -> Blocks:
    """Queries (x) and keys (y) of a tile. Pinned: a timing never chooses them, so that results repeat."""
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 1)
    if dim <= 64:
        return Blocks(128, 64, 8, 3)
    return Blocks(128, 64, 8, 2) if dim <= 128 else Blocks(64, 64, 8, 1)


def table_gradients(
    grad_THD: torch.Tensor, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the position and of the time table, where they are."""
    bias, rules = inputs.bias, inputs.rules
    tables = (bias.position_table, bias.time_table)
    # A unit of the sums is 2^-34 of the largest gradient: far below rounding, and far from overflow.
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
    found = [
        None if total is None or table is None else (total.double() * quantum).to(table.dtype)
        for total, table in zip(sums, tables, strict=True)
    ]
    return found[0], found[1]


@triton.jit
def _add_integers(pointers, values, quantum, mask):
    units = values / quantum
    # Half away from zero; a NaN shows through the quantum.
    rounded = (units + tl.where(units >= 0, 0.5, -0.5)).to(tl.int64)
    tl.atomic_add(pointers, rounded, mask=mask, sem="relaxed")


@triton.jit
def _add_diagonals(g, table, quantum, BM: tl.constexpr, BN: tl.constexpr):
    """Sums of g[row, column] over equal column - row, to places of the table that begin with that of 0."""
    row = tl.arange(0, BM)[:, None]
    column = tl.arange(0, BN)
    # After rotating row r by r, column c holds distance c (not wrapped) or c - BN (wrapped) plus a constant.
    turned = tl.gather(g, (row + column[None, :]) % BN, 1)
    is_wrapped = (row % BN) + column[None, :] >= BN
    for part in tl.static_range(BM // BN):
        is_part = row // BN == part
        straight = tl.sum(tl.where(is_part & (is_wrapped == 0), turned, 0.0), 0)
        wrapped = tl.sum(tl.where(is_part & is_wrapped, turned, 0.0), 0)
        place = table + column - part * BN
        _add_integers(place, straight, quantum, straight != 0.0)
        _add_integers(place - BN, wrapped, quantum, wrapped != 0.0)


@triton.jit
def _slope(s, FAST: tl.constexpr):
    """SiLU'."""
    if FAST:
        half = s * 0.5
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, True, 1)
        return (0.5 * t + 0.5) * ((half + 1.0) - half * t)
    else:
        sigma = sigmoid(s)
        return sigma * (1.0 + s * (1.0 - sigma))


@triton.jit(
    do_not_specialize=["heads", "num_context", "window", "ahead", "centre", "num_buckets", "before", "num_splits"]
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
    centre,
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
    apart = (tl.program_id(0) - before) * BN  # first query less first key of every tile
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
            i, j = i0 + row, j0 + column
            at_i, at_j = (start + i)[:, None], (start + j)[None, :]
            bias = tl.zeros([BM, BN], tl.float32)
            distance = tl.minimum(j, history)[None, :] - tl.minimum(i, history)[:, None]
            if HAS_POSITION:
                is_inside = (distance >= -centre) & (distance <= centre)
                bias += tl.load(position_table + (distance + centre), mask=is_inside, other=0.0).to(tl.float32)
            bucket = tl.zeros([BM, BN], tl.int32)
            if HAS_TIME:
                asked = tl.load(query_time + start + i, mask=i < length, other=0.0)
                seen_at = tl.load(key_time + start + j, mask=j < length, other=0.0)
                bucket = time_bucket(asked[:, None] - seen_at[None, :], edges, num_buckets)
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
                    _add_integers(position_grad + (distance + centre), g, quantum, g != 0.0)
            if HAS_TIME:
                # A tile holds few buckets, since times are far apart or alike.
                low = tl.min(tl.where(seen, bucket, num_buckets))
                high = tl.max(tl.where(seen, bucket, 0))
                for b in range(low, high + 1):
                    part = tl.sum(tl.where(bucket == b, g, 0.0))
                    _add_integers(time_grad + b, part, quantum, part != 0.0)
        # Sequences come by length: the next ones may be too short.
        item = tl.where(length <= apart, total, item + num_splits)
    if HAS_POSITION:
        _add_diagonals(by_distance, position_grad + centre - apart, quantum, BM, BN)
