"""Triton kernels over the rows of token matrices. Imported only where CUDA or Triton's interpreter is used.

Every kernel reads each input once and writes each output once; sums are float32 whatever the tensors hold. A program
takes ROWS rows of BLOCK channels, where BLOCK covers a row (or, in the elementwise kernels, a part of it).

    keep        u24(key ^ site, channel) >= threshold: the integers of nestrec.base.random.uniform24
    norm        n = (x - mean) * rstd;  RMS norm has mean 0 (CENTRED false)
"""

import triton
import triton.language as tl

from nestrec.ops.random_kernels import draws24

# ruff: noqa: PLR0917


@triton.jit
def _kept(key, row, has_row, channel, site, threshold):  # type: ignore[no-untyped-def]
    """(ROWS, BLOCK) bool."""
    own = tl.load(key + row, mask=has_row, other=0) ^ site
    return draws24(own, channel) >= threshold


@triton.jit
def _row_mean(x, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, 1) mean over WIDTH channels; what lies beyond the width is 0."""
    return (tl.sum(x, axis=1) * (1.0 / WIDTH))[:, None]


@triton.jit
def _mean_of_parts(x0, x1, x2, WIDTH: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, 1) mean over the channels of the first PARTS matrices."""
    total = _row_mean(x0, WIDTH)
    if PARTS >= 2:
        total += _row_mean(x1, WIDTH)
    if PARTS == 3:
        total += _row_mean(x2, WIDTH)
    return total * (1.0 / PARTS)


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
    CENTRED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """total = x + delta (where given);  out = dropout(norm(total))."""
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
    if CENTRED:
        centre = _row_mean(value, WIDTH)
        value = tl.where(mask, value - centre, 0.0)
        tl.store(mean + row[:, None], centre, mask=has_row[:, None])
    scaled = 1.0 / tl.sqrt(_row_mean(value * value, WIDTH) + eps)
    tl.store(rstd + row[:, None], scaled, mask=has_row[:, None])
    value = value * scaled
    if HAS_DROPOUT:
        value = tl.where(_kept(key, row, has_row, channel, site, threshold), value * scale, 0.0)
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
    CENTRED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """out = dropout(norm(x)) with the statistics of the forward pass."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    at = row[:, None] * WIDTH + channel[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        value -= tl.load(mean + row, mask=has_row, other=0.0)[:, None]
    value *= tl.load(rstd + row, mask=has_row, other=0.0)[:, None]
    if HAS_DROPOUT:
        value = tl.where(_kept(key, row, has_row, channel, site, threshold), value * scale, 0.0)
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
    CENTRED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """dx = d total + rstd * (g - mean(g) - n * mean(g * n)),  g = gradient of the norm."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    at = row[:, None] * WIDTH + channel[None, :]
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        g = tl.where(_kept(key, row, has_row, channel, site, threshold), g * scale, 0.0)
    normed = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scaled = tl.load(rstd + row, mask=has_row, other=0.0)[:, None]
    if CENTRED:
        normed = tl.where(mask, normed - tl.load(mean + row, mask=has_row, other=0.0)[:, None], 0.0)
    normed *= scaled
    inner = g - normed * _row_mean(g * normed, WIDTH)
    if CENTRED:
        inner -= _row_mean(g, WIDTH)
    result = inner * scaled
    if HAS_TOTAL:
        result += tl.load(grad_total + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def silu_forward_kernel(  # type: ignore[no-untyped-def]
    z, out, num_rows, z_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """out = silu(z): `z` points at its first channel, `out` is packed."""
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
    """dz = d out * silu'(z); all three point at their first channel."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    value = tl.load(z + row[:, None] * z_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row[:, None] * grad_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    result = g * _silu_gradient(value)
    tl.store(grad_z + row[:, None] * grad_z_stride + channel[None, :], result.to(grad_z.dtype.element_ty), mask=mask)


@triton.jit
def _load_part(x, row, stride, channel, mask):  # type: ignore[no-untyped-def]
    return tl.load(x + row[:, None] * stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _open_gate(  # type: ignore[no-untyped-def]
    gate, key, row, has_row, channel, mask, gate_stride, site, threshold, HAS_DROPOUT: tl.constexpr
):
    """silu(gate), and which of it dropout keeps."""
    value = _load_part(gate, row, gate_stride, channel, mask)
    kept = mask
    if HAS_DROPOUT:
        kept = _kept(key, row, has_row, channel, site, threshold)
    return value * tl.sigmoid(value), kept


@triton.jit
def _gate_part(  # type: ignore[no-untyped-def]
    normed, opened, kept, out, row, channel, mask, out_stride, scale, HAS_DROPOUT: tl.constexpr
):
    """out = dropout(opened * normed)"""
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
    CENTRED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """out = dropout(silu(gate) * norm([a0, a1, a2])), each part WIDTH wide, one norm over all of them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    x0 = _load_part(a0, row, stride0, channel, mask)
    x1, x2 = x0, x0
    # Gates are loaded, and masks drawn, before the norm's sums: behind them they would cost a second wait for memory.
    open0, kept0 = _open_gate(gate, key, row, has_row, channel, mask, gate_stride, site, threshold, HAS_DROPOUT)
    open1, kept1, open2, kept2 = open0, kept0, open0, kept0
    if PARTS >= 2:
        x1 = _load_part(a1, row, stride1, channel, mask)
        open1, kept1 = _open_gate(
            gate, key, row, has_row, channel + WIDTH, mask, gate_stride, site, threshold, HAS_DROPOUT
        )
    if PARTS == 3:
        x2 = _load_part(a2, row, stride2, channel, mask)
        open2, kept2 = _open_gate(
            gate, key, row, has_row, channel + 2 * WIDTH, mask, gate_stride, site, threshold, HAS_DROPOUT
        )
    if CENTRED:
        centre = _mean_of_parts(x0, x1, x2, WIDTH, PARTS)
        x0 = tl.where(mask, x0 - centre, 0.0)
        x1 = tl.where(mask, x1 - centre, 0.0)
        x2 = tl.where(mask, x2 - centre, 0.0)
        tl.store(mean + row[:, None], centre, mask=has_row[:, None])
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
    """Gradient of the norm of a part; writes that of its gate and, where asked, the output of the forward pass."""
    g = _load_part(grad, row, out_stride, channel + offset, mask)
    value = _load_part(gate, row, gate_stride, channel + offset, mask)
    share = tl.sigmoid(value)
    opened = value * share
    if HAS_DROPOUT:
        kept = _kept(key, row, has_row, channel + offset, site, threshold)
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
def _store_part(x, row, channel, value, mask, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + row[:, None] * WIDTH + channel[None, :], value.to(x.dtype.element_ty), mask=mask)


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
    CENTRED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Gradients of the parts (packed each) and of the gate before its SiLU."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    scaled = tl.load(rstd + row, mask=has_row, other=0.0)[:, None]
    centre = tl.zeros_like(scaled)
    if CENTRED:
        centre = tl.load(mean + row, mask=has_row, other=0.0)[:, None]
    out_stride = PARTS * WIDTH
    n0 = tl.where(mask, (_load_part(a0, row, stride0, channel, mask) - centre) * scaled, 0.0)
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
    n1, g1, n2, g2 = n0, g0, n0, g0
    if PARTS >= 2:
        n1 = tl.where(mask, (_load_part(a1, row, stride1, channel, mask) - centre) * scaled, 0.0)
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
        n2 = tl.where(mask, (_load_part(a2, row, stride2, channel, mask) - centre) * scaled, 0.0)
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
    if CENTRED:
        level = _mean_of_parts(g0, g1, g2, WIDTH, PARTS)
    _store_part(d0, row, channel, (g0 - n0 * along - level) * scaled, mask, WIDTH)
    if PARTS >= 2:
        _store_part(d1, row, channel, (g1 - n1 * along - level) * scaled, mask, WIDTH)
    if PARTS == 3:
        _store_part(d2, row, channel, (g2 - n2 * along - level) * scaled, mask, WIDTH)


@triton.jit
def swiglu_forward_kernel(  # type: ignore[no-untyped-def]
    z, out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """out = silu(a) * b,  z = [a, b]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    a = _load_part(z, row, 2 * WIDTH, channel, mask)
    b = _load_part(z, row, 2 * WIDTH, channel + WIDTH, mask)
    _store_part(out, row, channel, a * tl.sigmoid(a) * b, mask, WIDTH)


@triton.jit
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad, z, grad_z, again, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AGAIN: tl.constexpr
):
    """da = g * b * silu'(a),  db = g * silu(a)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    g = _load_part(grad, row, WIDTH, channel, mask)
    a = _load_part(z, row, 2 * WIDTH, channel, mask)
    b = _load_part(z, row, 2 * WIDTH, channel + WIDTH, mask)
    opened = a * tl.sigmoid(a)
    if AGAIN:
        _store_part(again, row, channel, opened * b, mask, WIDTH)
    _store_part(grad_z, row, channel, g * b * _silu_gradient(a), mask, 2 * WIDTH)
    _store_part(grad_z, row, channel + WIDTH, g * opened, mask, 2 * WIDTH)


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
    """out = dropout(x * factor + table[position])."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    place = tl.load(position + row, mask=has_row, other=0)
    value = _load_part(x, row, WIDTH, channel, mask) * factor + _load_part(table, place, WIDTH, channel, mask)
    if HAS_DROPOUT:
        value = tl.where(_kept(key, row, has_row, channel, site, threshold), value * scale, 0.0)
    _store_part(out, row, channel, value, mask, WIDTH)


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
    """Gradient of x."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    g = _load_part(grad, row, WIDTH, channel, mask) * factor
    if HAS_DROPOUT:
        g = tl.where(_kept(key, row, has_row, channel, site, threshold), g * scale, 0.0)
    _store_part(grad_x, row, channel, g, mask, WIDTH)


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
    """Row p of the table's gradient: the gradients of every sequence's token p, the longest sequence first.

    order: sequences by length. longer: how many of them reach position p.
    """
    place = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.load(longer + place).to(tl.int32)
    for first in range(0, count, BATCH):
        number = first + tl.arange(0, BATCH)
        has_row = number < count
        sequence = tl.load(order + number, mask=has_row, other=0)
        row = tl.load(offsets + sequence, mask=has_row, other=0) + place
        mask = has_row[:, None] & (channel < WIDTH)[None, :]
        g = _load_part(grad, row, WIDTH, channel, mask)
        if HAS_DROPOUT:
            g = tl.where(_kept(key, row, has_row, channel, site, threshold), g * scale, 0.0)
        total += tl.sum(g, axis=0)
    tl.store(grad_table + place.to(tl.int64) * WIDTH + channel, total, mask=channel < WIDTH)


@triton.jit
def unit_forward_kernel(  # type: ignore[no-untyped-def]
    x, out, inverse, num_rows, eps, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """out = factor * x / max(|x|, eps)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    value = _load_part(x, row, WIDTH, channel, mask)
    size = tl.sqrt(tl.sum(value * value, axis=1))
    one_over = 1.0 / tl.maximum(size, eps)
    tl.store(inverse + row, one_over, mask=has_row)
    _store_part(out, row, channel, value * (factor * one_over)[:, None], mask, WIDTH)


@triton.jit
def unit_backward_kernel(  # type: ignore[no-untyped-def]
    grad, x, inverse, grad_x, num_rows, eps, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """dx = factor / |x| * (g - n (n . g)),  n = x / |x|; below eps the size is a constant."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    one_over = tl.load(inverse + row, mask=has_row, other=0.0)
    g = _load_part(grad, row, WIDTH, channel, mask)
    unit = _load_part(x, row, WIDTH, channel, mask) * one_over[:, None]
    along = tl.where(one_over * eps < 1.0, tl.sum(g * unit, axis=1), 0.0)
    result = (g - unit * along[:, None]) * (factor * one_over)[:, None]
    _store_part(grad_x, row, channel, result, mask, WIDTH)
