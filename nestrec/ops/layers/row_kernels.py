"""Triton kernels on the rows of token matrices: norm, SiLU, SwiGLU, input embedding and scaling to unit length.

Import this module only if CUDA or Triton's interpreter is used. Every kernel reads each input once and writes each
output once; sums are float32 for all dtypes. A program processes ROWS rows of BLOCK channels, where BLOCK covers a full
row (or, in the elementwise kernels, a part of it).

    keep        u24(key ^ site, channel) >= threshold: the integers of nestrec.base.random.uniform24
    norm        n = (x - mean) * rstd;  RMS norm uses mean 0 (`CENTERED` is false)
"""

import triton
import triton.language as tl

from nestrec.ops.random_triton import draws24

# ruff: noqa: PLR0917


@triton.jit
def is_kept(key, row, has_row, channel, site, threshold):  # type: ignore[no-untyped-def]
    """Return the (ROWS, BLOCK) dropout mask: True where a value is kept."""
    own = tl.load(key + row, mask=has_row, other=0) ^ site
    return draws24(own, channel) >= threshold


@triton.jit
def row_mean(x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the (ROWS, 1) mean over WIDTH channels; channels after the width must be 0."""
    return (tl.sum(x, axis=1) * (1.0 / WIDTH))[:, None]


@triton.jit
def load_part(x, row, stride, channel, mask):  # type: ignore[no-untyped-def]
    return tl.load(x + row[:, None] * stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_part(x, row, channel, value, mask, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + row[:, None] * WIDTH + channel[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def norm_forward_kernel(  # type: ignore[no-untyped-def]
    x,
    delta,
    total,
    out,
    mean,
    rstd,
    key,
    num_rows,
    eps,
    site,
    threshold,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute total = x + delta (if HAS_DELTA) and out = dropout(norm(total))."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    at = row[:, None] * WIDTH + channel[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if CENTERED:
        center = row_mean(value, WIDTH)
        value = tl.where(mask, value - center, 0.0)
        tl.store(mean + row[:, None], center, mask=has_row[:, None])
    scaled = 1.0 / tl.sqrt(row_mean(value * value, WIDTH) + eps)
    tl.store(rstd + row[:, None], scaled, mask=has_row[:, None])
    value = value * scaled
    if HAS_DROPOUT:
        value = tl.where(is_kept(key, row, has_row, channel, site, threshold), value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_again_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    mean,
    rstd,
    key,
    num_rows,
    site,
    threshold,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Recompute out = dropout(norm(x)) with the statistics of the forward pass."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    at = row[:, None] * WIDTH + channel[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        value -= tl.load(mean + row, mask=has_row, other=0.0)[:, None]
    value *= tl.load(rstd + row, mask=has_row, other=0.0)[:, None]
    if HAS_DROPOUT:
        value = tl.where(is_kept(key, row, has_row, channel, site, threshold), value * scale, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    grad_total,
    x,
    mean,
    rstd,
    grad_x,
    key,
    num_rows,
    site,
    threshold,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute dx = d total + rstd * (g - mean(g) - n * mean(g * n)),  g = gradient of the norm."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    at = row[:, None] * WIDTH + channel[None, :]
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        g = tl.where(is_kept(key, row, has_row, channel, site, threshold), g * scale, 0.0)
    normed = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scaled = tl.load(rstd + row, mask=has_row, other=0.0)[:, None]
    if CENTERED:
        normed = tl.where(mask, normed - tl.load(mean + row, mask=has_row, other=0.0)[:, None], 0.0)
    normed *= scaled
    inner = g - normed * row_mean(g * normed, WIDTH)
    if CENTERED:
        inner -= row_mean(g, WIDTH)
    result = inner * scaled
    if HAS_TOTAL:
        result += tl.load(grad_total + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def silu_forward_kernel(  # type: ignore[no-untyped-def]
    z, out, num_rows, z_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Compute out = silu(z): `z` points to its first channel, `out` is contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    value = tl.load(z + row[:, None] * z_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    result = value * tl.sigmoid(value)
    tl.store(out + row[:, None] * WIDTH + channel[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_gradient(value):  # type: ignore[no-untyped-def]
    share = tl.sigmoid(value)
    return share * (1.0 + value * (1.0 - share))


@triton.jit
def silu_backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    z,
    grad_z,
    num_rows,
    grad_stride,
    z_stride,
    grad_z_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute dz = d out * silu'(z); all three pointers point to the first channel."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    value = tl.load(z + row[:, None] * z_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row[:, None] * grad_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    result = g * _silu_gradient(value)
    tl.store(grad_z + row[:, None] * grad_z_stride + channel[None, :], result.to(grad_z.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_forward_kernel(  # type: ignore[no-untyped-def]
    z, out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Compute out = silu(a) * b,  z = [a, b]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    a = load_part(z, row, 2 * WIDTH, channel, mask)
    b = load_part(z, row, 2 * WIDTH, channel + WIDTH, mask)
    store_part(out, row, channel, a * tl.sigmoid(a) * b, mask, WIDTH)


@triton.jit
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad, z, grad_z, again, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AGAIN: tl.constexpr
):
    """Compute da = g * b * silu'(a) and db = g * silu(a); with AGAIN also recompute the output."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    g = load_part(grad, row, WIDTH, channel, mask)
    a = load_part(z, row, 2 * WIDTH, channel, mask)
    b = load_part(z, row, 2 * WIDTH, channel + WIDTH, mask)
    opened = a * tl.sigmoid(a)
    if AGAIN:
        store_part(again, row, channel, opened * b, mask, WIDTH)
    store_part(grad_z, row, channel, g * b * _silu_gradient(a), mask, 2 * WIDTH)
    store_part(grad_z, row, channel + WIDTH, g * opened, mask, 2 * WIDTH)


@triton.jit
def embed_forward_kernel(  # type: ignore[no-untyped-def]
    x,
    position,
    table,
    out,
    key,
    num_rows,
    factor,
    site,
    threshold,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute out = dropout(x * factor + table[position])."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    position_row = tl.load(position + row, mask=has_row, other=0)
    value = load_part(x, row, WIDTH, channel, mask) * factor + load_part(table, position_row, WIDTH, channel, mask)
    if HAS_DROPOUT:
        value = tl.where(is_kept(key, row, has_row, channel, site, threshold), value * scale, 0.0)
    store_part(out, row, channel, value, mask, WIDTH)


@triton.jit
def embed_backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    grad_x,
    key,
    num_rows,
    factor,
    site,
    threshold,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute the gradient of x."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    g = load_part(grad, row, WIDTH, channel, mask) * factor
    if HAS_DROPOUT:
        g = tl.where(is_kept(key, row, has_row, channel, site, threshold), g * scale, 0.0)
    store_part(grad_x, row, channel, g, mask, WIDTH)


@triton.jit
def position_gradient_kernel(  # type: ignore[no-untyped-def]
    grad,
    offsets,
    order,
    longer,
    key,
    grad_table,
    site,
    threshold,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute row p of the gradient of the position table: sum over token p of all sequences, longest sequence first.

    order: sequences by descending length. longer: number of sequences that reach position p.
    """
    position_row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.load(longer + position_row).to(tl.int32)
    for first in range(0, count, BATCH):
        number = first + tl.arange(0, BATCH)
        has_row = number < count
        sequence = tl.load(order + number, mask=has_row, other=0)
        row = tl.load(offsets + sequence, mask=has_row, other=0) + position_row
        mask = has_row[:, None] & (channel < WIDTH)[None, :]
        g = load_part(grad, row, WIDTH, channel, mask)
        if HAS_DROPOUT:
            g = tl.where(is_kept(key, row, has_row, channel, site, threshold), g * scale, 0.0)
        total += tl.sum(g, axis=0)
    tl.store(grad_table + position_row.to(tl.int64) * WIDTH + channel, total, mask=channel < WIDTH)


@triton.jit
def unit_forward_kernel(  # type: ignore[no-untyped-def]
    x, out, inverse, num_rows, eps, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Compute out = factor * x / max(|x|, eps)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    value = load_part(x, row, WIDTH, channel, mask)
    size = tl.sqrt(tl.sum(value * value, axis=1))
    one_over = 1.0 / tl.maximum(size, eps)
    tl.store(inverse + row, one_over, mask=has_row)
    store_part(out, row, channel, value * (factor * one_over)[:, None], mask, WIDTH)


@triton.jit
def unit_backward_kernel(  # type: ignore[no-untyped-def]
    grad, x, inverse, grad_x, num_rows, eps, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Compute dx = factor / |x| * (g - n (n . g)),  n = x / |x|; below eps |x| is treated as a constant."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    one_over = tl.load(inverse + row, mask=has_row, other=0.0)
    g = load_part(grad, row, WIDTH, channel, mask)
    unit = load_part(x, row, WIDTH, channel, mask) * one_over[:, None]
    along = tl.where(one_over * eps < 1.0, tl.sum(g * unit, axis=1), 0.0)
    result = (g - unit * along[:, None]) * (factor * one_over)[:, None]
    store_part(grad_x, row, channel, result, mask, WIDTH)
