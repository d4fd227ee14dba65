"""HSTU attention with every option, for any GPU and for Triton's interpreter: one kernel in four roles.

    weights    out[x] = sum_y w(x, y) Y1[y]            w = SiLU(X0[x] . Y0[y] + bias)
    gradient   out[x] = sum_y g(x, y) Y0[y]            g = SiLU'(X0[x] . Y0[y] + bias) (X1[x] . Y1[y])

    forward    weights of X0 = q, Y0 = k, Y1 = v              rows x are queries, rows y are keys
    d v        weights of X0 = k, Y0 = q, Y1 = d out          reversed: rows x are keys, rows y are queries
    d q        gradient of X0, X1 = q, d out, Y0, Y1 = k, v
    d k        gradient of X0, X1 = k, v, Y0, Y1 = q, d out   reversed

Every output is summed by one program in a fixed order, so results are bitwise reproducible. bias_gradients.py computes
the gradients of the bias tables.

Legend: T tokens, H heads, D head dimension, B sequences.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0915, PLR0917

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.attention_inputs import AttentionInputs
from nestrec.ops.attention.time_triton import time_bucket
from nestrec.ops.attention.work_schedule import WorkOrder


@triton.jit
def sigmoid(s):
    return 1.0 / (1.0 + tl.exp2(s * -1.4426950408889634))


@triton.jit
def _blocks_of_y(
    x0, length, history, num_context, window, ahead, REVERSED: tl.constexpr, XB: tl.constexpr, YB: tl.constexpr
):
    """Return the range [low, high) of y blocks paired with a block of x, and the number of prefix blocks before it.

    The prefix blocks hold the contextual prefix.
    """
    x1 = tl.minimum(x0 + XB, length)
    if REVERSED:
        is_context = x0 < num_context
        low = x0 // YB
        end = x1 - 1 + window
        end = tl.where((end > history) | is_context, length, tl.maximum(end, x1))
        high = (end + YB - 1) // YB
        prefix = tl.minimum((ahead + YB - 1) // YB, low)
    else:
        is_context = x0 < ahead
        low = tl.where(is_context, 0, tl.maximum(0, tl.minimum(x0, history) - window + 1) // YB)
        high = (tl.where(is_context, tl.maximum(x1, history), x1) + YB - 1) // YB
        prefix = tl.minimum((num_context + YB - 1) // YB, low)
    return low, high, prefix


@triton.jit
def seen_pairs(i, j, history, num_context, window, ahead):
    position = tl.minimum(i, history)
    is_near = (position - j < window) | (j < num_context)
    return (i == j) | ((j < history) & (((j < position) & is_near) | (i < ahead)))


@triton.jit(do_not_specialize=["heads", "num_context", "window", "ahead", "center", "num_buckets"])
def _stream_kernel(
    x0_ptr,
    x1_ptr,
    y0_ptr,
    y1_ptr,
    out_ptr,
    x0_step,
    x1_step,
    y0_step,
    y1_step,
    x0_head,
    x1_head,
    y0_head,
    y1_head,
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
    GRADIENT: tl.constexpr,
    REVERSED: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    PRECISION: tl.constexpr,
    XB: tl.constexpr,
    YB: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    item = tl.program_id(0)
    if item >= tl.load(state) * heads:
        return
    entry = schedule + 4 * (item // heads).to(tl.int64)
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    blocks = (length + XB - 1) // XB
    within = item - before * heads
    head = within // blocks
    block = within % blocks
    x0 = (block if REVERSED else blocks - 1 - block) * XB
    history = length
    if HAS_TARGETS:
        history = tl.maximum(length - tl.load(targets + b).to(tl.int32), 0)

    column = tl.arange(0, WIDTH)
    x = x0 + tl.arange(0, XB)
    x_mask = (x < length)[:, None] & (column < D)[None, :]
    x_rows = start + x.to(tl.int64)
    x0_tile = tl.load(x0_ptr + x_rows[:, None] * x0_step + head * x0_head + column[None, :], mask=x_mask, other=0.0)
    x1_tile = x0_tile
    if GRADIENT:
        x1_tile = tl.load(x1_ptr + x_rows[:, None] * x1_step + head * x1_head + column[None, :], mask=x_mask, other=0.0)
    x_time = tl.zeros([XB], tl.float64)
    if HAS_TIME:
        x_time = tl.load((key_time if REVERSED else query_time) + x_rows, mask=x < length, other=0.0)
    acc = tl.zeros([XB, WIDTH], tl.float32)
    low, high, prefix = _blocks_of_y(x0, length, history, num_context, window, ahead, REVERSED, XB, YB)
    for n in range(0, high - low + prefix):
        y0 = tl.where(n < prefix, n, low + n - prefix) * YB
        y = y0 + tl.arange(0, YB)
        y_mask = (y < length)[:, None] & (column < D)[None, :]
        y_rows = start + y.to(tl.int64)
        y0_tile = tl.load(y0_ptr + y_rows[:, None] * y0_step + head * y0_head + column[None, :], mask=y_mask, other=0.0)
        y1_tile = tl.load(y1_ptr + y_rows[:, None] * y1_step + head * y1_head + column[None, :], mask=y_mask, other=0.0)
        s = tl.dot(x0_tile, tl.trans(y0_tile), input_precision=PRECISION)
        if REVERSED:
            i = y[None, :]
            j = x[:, None]
        else:
            i = x[:, None]
            j = y[None, :]
        if HAS_POSITION:
            distance = tl.minimum(j, history) - tl.minimum(i, history)
            is_inside = (distance >= -center) & (distance <= center)
            s += tl.load(position_table + (distance + center), mask=is_inside, other=0.0).to(tl.float32)
        if HAS_TIME:
            y_time = tl.load((query_time if REVERSED else key_time) + y_rows, mask=y < length, other=0.0)
            bucket = time_bucket(x_time[:, None] - y_time[None, :], edges, num_buckets)
            s += tl.load(time_table + bucket).to(tl.float32)
        seen = seen_pairs(i, j, history, num_context, window, ahead) & (i < length) & (j < length)
        sigma = sigmoid(s)
        if GRADIENT:
            dp = tl.dot(x1_tile, tl.trans(y1_tile), input_precision=PRECISION)
            g = tl.where(seen, sigma * (1.0 + s * (1.0 - sigma)) * dp, 0.0)
            acc += tl.dot(g.to(y0_tile.dtype), y0_tile, input_precision=PRECISION)
        else:
            p = tl.where(seen, s * sigma, 0.0)
            acc += tl.dot(p.to(y1_tile.dtype), y1_tile, input_precision=PRECISION)
    out = out_ptr + x_rows[:, None] * (heads * D) + head * D + column[None, :]
    tl.store(out, (acc * scale).to(out_ptr.dtype.element_ty), mask=x_mask)


class Blocks(NamedTuple):
    """Tile sizes and launch parameters of one program."""

    x: int
    y: int
    warps: int
    stages: int


def blocks_for(dim: int, dtype: torch.dtype) -> Blocks:
    """Return the fixed tile sizes of a head dimension; there is no autotuning, so that results are reproducible."""
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 1)
    if dim <= 64:
        return Blocks(64, 64, 4, 3)
    return Blocks(64, 64, 4, 2) if dim <= 128 else Blocks(64, 32, 8, 2)


def weights(
    xyz: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    schedule: WorkOrder,
    inputs: AttentionInputs,
    *,
    is_reversed: bool,
) -> torch.Tensor:
    """Compute weighted sums of z over y for every row of x, (T, H, D).

    The schedule must use blocks of `blocks_for(...).x` rows.
    """
    x, y, z = xyz
    return _launch((x, x), (y, z), schedule, inputs, is_gradient=False, is_reversed=is_reversed)


def gradient(
    x: tuple[torch.Tensor, torch.Tensor],
    y: tuple[torch.Tensor, torch.Tensor],
    schedule: WorkOrder,
    inputs: AttentionInputs,
    *,
    is_reversed: bool,
) -> torch.Tensor:
    """Compute the gradients for every row of x, (T, H, D)."""
    return _launch(x, y, schedule, inputs, is_gradient=True, is_reversed=is_reversed)


def _launch(
    x: tuple[torch.Tensor, torch.Tensor],
    y: tuple[torch.Tensor, torch.Tensor],
    schedule: WorkOrder,
    inputs: AttentionInputs,
    *,
    is_gradient: bool,
    is_reversed: bool,
) -> torch.Tensor:
    _, heads, dim = x[0].shape
    out = torch.empty(x[0].shape, dtype=x[0].dtype, device=x[0].device)
    tensors = [t if t.stride(2) == 1 else t.contiguous() for t in (*x, *y)]
    bias = inputs.bias
    blocks = blocks_for(dim, out.dtype)
    _stream_kernel[(schedule.table.shape[0] * heads,)](
        *tensors,
        out,
        *(t.stride(0) for t in tensors),
        *(t.stride(1) for t in tensors),
        *schedule,
        *inputs.scalars(out),
        *inputs.biases,
        GRADIENT=is_gradient,
        REVERSED=is_reversed,
        HAS_TARGETS=inputs.rules.num_targets_B is not None,
        HAS_POSITION=bias.position_table is not None,
        HAS_TIME=bias.time_table is not None,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        XB=blocks.x,
        YB=blocks.y,
        D=dim,
        WIDTH=max(16, triton.next_power_of_2(dim)),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out
