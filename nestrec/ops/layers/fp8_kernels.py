"""Triton kernel that quantizes rows to fp8. Import this module only if CUDA or Triton's interpreter is used."""

import triton
import triton.language as tl

# ruff: noqa: PLR0917

LARGEST: tl.constexpr = tl.constexpr(448.0)
SMALLEST: tl.constexpr = tl.constexpr(448.0 * 1.1754943508222875e-38)


@triton.jit
def eight_bit_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    scale,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantize ROWS rows, BLOCK channels at a time: compute the maximum, then scale the rows (read from cache)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    rows = row.to(tl.int64)[:, None]
    largest = tl.full([ROWS], SMALLEST, tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK):
        mask = has_row[:, None] & (first + channel < WIDTH)[None, :]
        values = tl.load(x + rows * x_stride + first + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(values), axis=1))
    tl.store(scale + row, largest * (1.0 / LARGEST), mask=has_row)
    factor = tl.div_rn(tl.full([ROWS], LARGEST, tl.float32), largest)[:, None]
    for first in tl.static_range(0, WIDTH, BLOCK):
        mask = has_row[:, None] & (first + channel < WIDTH)[None, :]
        values = tl.load(x + rows * x_stride + first + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum(values * factor, -LARGEST), LARGEST)
        tl.store(out + rows * WIDTH + first + channel[None, :], scaled.to(tl.float8e4nv), mask=mask)
