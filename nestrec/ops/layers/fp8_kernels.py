"""Triton kernel of eight-bit rows. Imported only where CUDA or Triton's interpreter is used."""

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
    """ROWS whole rows: largest number, scale, and the rows divided by it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    has_row = row < num_rows
    mask = has_row[:, None] & (channel < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None]
    values = tl.load(x + place * x_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    own = tl.maximum(tl.max(tl.abs(values), axis=1), SMALLEST) * (1.0 / LARGEST)
    scaled = tl.div_rn(values, own[:, None] + tl.zeros_like(values))
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    tl.store(out + place * WIDTH + channel[None, :], scaled.to(tl.float8e4nv), mask=mask)
    tl.store(scale + row, own, mask=has_row)
