"""Triton kernels of gated rows: norm, gate and dropout, forward and backward (see `row_kernels`).

out = dropout(silu(gate) * norm(a)),   a = up to three matrices concatenated along the channels
"""

import triton
import triton.language as tl

from nestrec.ops.layers.row_kernels import is_kept, load_part, row_mean, store_part

# ruff: noqa: PLR0917


@triton.jit
def _mean_of_parts(x0, x1, x2, WIDTH: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the (ROWS, 1) mean over the channels of the first PARTS matrices."""
    total = row_mean(x0, WIDTH)
    if PARTS >= 2:
        total += row_mean(x1, WIDTH)
    if PARTS == 3:
        total += row_mean(x2, WIDTH)
    return total * (1.0 / PARTS)


@triton.jit
def _open_gate(  # type: ignore[no-untyped-def]
    gate, key, row, has_row, channel, mask, gate_stride, site, threshold, HAS_DROPOUT: tl.constexpr
):
    """Return silu(gate) and the dropout mask."""
    value = load_part(gate, row, gate_stride, channel, mask)
    kept = mask
    if HAS_DROPOUT:
        kept = is_kept(key, row, has_row, channel, site, threshold)
    return value * tl.sigmoid(value), kept


@triton.jit
def _gate_part(  # type: ignore[no-untyped-def]
    normed, opened, kept, out, row, channel, mask, out_stride, scale, HAS_DROPOUT: tl.constexpr
):
    """Compute out = dropout(opened * normed)."""
    result = opened * normed
    if HAS_DROPOUT:
        result = tl.where(kept, result * scale, 0.0)
    tl.store(out + row[:, None] * out_stride + channel[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_forward_kernel(  # type: ignore[no-untyped-def]
    a0,
    a1,
    a2,
    gate,
    out,
    mean,
    rstd,
    key,
    num_rows,
    stride0,
    stride1,
    stride2,
    gate_stride,
    eps,
    site,
    threshold,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute out = dropout(silu(gate) * norm([a0, a1, a2])); parts have WIDTH channels, one norm covers all parts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    x0 = load_part(a0, row, stride0, channel, mask)
    x1, x2 = x0, x0
    # Load gates and draw masks before the sums of the norm; after them, they would wait for memory a second time.
    open0, kept0 = _open_gate(gate, key, row, has_row, channel, mask, gate_stride, site, threshold, HAS_DROPOUT)
    open1 = open0
    kept1 = kept0
    open2 = open0
    kept2 = kept0
    if PARTS >= 2:
        x1 = load_part(a1, row, stride1, channel, mask)
        open1, kept1 = _open_gate(
            gate, key, row, has_row, channel + WIDTH, mask, gate_stride, site, threshold, HAS_DROPOUT
        )
    if PARTS == 3:
        x2 = load_part(a2, row, stride2, channel, mask)
        open2, kept2 = _open_gate(
            gate, key, row, has_row, channel + 2 * WIDTH, mask, gate_stride, site, threshold, HAS_DROPOUT
        )
    if CENTERED:
        center = _mean_of_parts(x0, x1, x2, WIDTH, PARTS)
        x0 = tl.where(mask, x0 - center, 0.0)
        x1 = tl.where(mask, x1 - center, 0.0)
        x2 = tl.where(mask, x2 - center, 0.0)
        tl.store(mean + row[:, None], center, mask=has_row[:, None])
    scaled = 1.0 / tl.sqrt(_mean_of_parts(x0 * x0, x1 * x1, x2 * x2, WIDTH, PARTS) + eps)
    tl.store(rstd + row[:, None], scaled, mask=has_row[:, None])
    out_stride = PARTS * WIDTH
    _gate_part(x0 * scaled, open0, kept0, out, row, channel, mask, out_stride, scale, HAS_DROPOUT)
    if PARTS >= 2:
        _gate_part(x1 * scaled, open1, kept1, out, row, channel + WIDTH, mask, out_stride, scale, HAS_DROPOUT)
    if PARTS == 3:
        _gate_part(x2 * scaled, open2, kept2, out, row, channel + 2 * WIDTH, mask, out_stride, scale, HAS_DROPOUT)


@triton.jit
def _gate_part_backward(  # type: ignore[no-untyped-def]
    normed,
    grad,
    gate,
    grad_gate,
    again,
    key,
    row,
    has_row,
    channel,
    mask,
    offset,
    gate_stride,
    grad_gate_stride,
    out_stride,
    site,
    threshold,
    scale,
    HAS_DROPOUT: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Return the gradient of the norm of a part; store the gradient of its gate and, with AGAIN, the forward output."""
    g = load_part(grad, row, out_stride, channel + offset, mask)
    value = load_part(gate, row, gate_stride, channel + offset, mask)
    share = tl.sigmoid(value)
    opened = value * share
    if HAS_DROPOUT:
        kept = is_kept(key, row, has_row, channel + offset, site, threshold)
        g = tl.where(kept, g * scale, 0.0)
    at = (channel + offset)[None, :]
    if AGAIN:
        result = opened * normed
        if HAS_DROPOUT:
            result = tl.where(kept, result * scale, 0.0)
        tl.store(again + row[:, None] * out_stride + at, result.to(again.dtype.element_ty), mask=mask)
    own = g * normed * share * (1.0 + value * (1.0 - share))
    tl.store(grad_gate + row[:, None] * grad_gate_stride + at, own.to(grad_gate.dtype.element_ty), mask=mask)
    return g * opened


@triton.jit
def gate_backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    a0,
    a1,
    a2,
    gate,
    mean,
    rstd,
    d0,
    d1,
    d2,
    grad_gate,
    again,
    key,
    num_rows,
    stride0,
    stride1,
    stride2,
    gate_stride,
    grad_gate_stride,
    site,
    threshold,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Compute the gradients of the parts (each contiguous) and of the gate before its SiLU."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    scaled = tl.load(rstd + row, mask=has_row, other=0.0)[:, None]
    center = tl.zeros_like(scaled)
    if CENTERED:
        center = tl.load(mean + row, mask=has_row, other=0.0)[:, None]
    out_stride = PARTS * WIDTH
    n0 = tl.where(mask, (load_part(a0, row, stride0, channel, mask) - center) * scaled, 0.0)
    g0 = _gate_part_backward(
        n0,
        grad,
        gate,
        grad_gate,
        again,
        key,
        row,
        has_row,
        channel,
        mask,
        0,
        gate_stride,
        grad_gate_stride,
        out_stride,
        site,
        threshold,
        scale,
        HAS_DROPOUT,
        AGAIN,
    )
    n1 = n0
    g1 = g0
    n2 = n0
    g2 = g0
    if PARTS >= 2:
        n1 = tl.where(mask, (load_part(a1, row, stride1, channel, mask) - center) * scaled, 0.0)
        g1 = _gate_part_backward(
            n1,
            grad,
            gate,
            grad_gate,
            again,
            key,
            row,
            has_row,
            channel,
            mask,
            WIDTH,
            gate_stride,
            grad_gate_stride,
            out_stride,
            site,
            threshold,
            scale,
            HAS_DROPOUT,
            AGAIN,
        )
    if PARTS == 3:
        n2 = tl.where(mask, (load_part(a2, row, stride2, channel, mask) - center) * scaled, 0.0)
        g2 = _gate_part_backward(
            n2,
            grad,
            gate,
            grad_gate,
            again,
            key,
            row,
            has_row,
            channel,
            mask,
            2 * WIDTH,
            gate_stride,
            grad_gate_stride,
            out_stride,
            site,
            threshold,
            scale,
            HAS_DROPOUT,
            AGAIN,
        )
    along = _mean_of_parts(g0 * n0, g1 * n1, g2 * n2, WIDTH, PARTS)
    level = tl.zeros_like(along)
    if CENTERED:
        level = _mean_of_parts(g0, g1, g2, WIDTH, PARTS)
    store_part(d0, row, channel, (g0 - n0 * along - level) * scaled, mask, WIDTH)
    if PARTS >= 2:
        store_part(d1, row, channel, (g1 - n1 * along - level) * scaled, mask, WIDTH)
    if PARTS == 3:
        store_part(d2, row, channel, (g2 - n2 * along - level) * scaled, mask, WIDTH)
