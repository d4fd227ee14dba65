"""Products of eight-bit numbers: each row of both factors is scaled to the range of e4m3 by a scale of its own.

    product(a, b)  = (a8 b8) * (scale of a's row) * (scale of b's column)
    x8, scale      = round(x * 448 / largest), largest / 448         largest: |x| of the row

What is summed is the products of the eight-bit numbers, in float32. Gradients of the inputs are products of this kind
too; those of weights sum over tokens, whose scales differ, and stay in bf16.

Legend: T tokens, K inner width, N outer width.
"""

import contextlib
from collections.abc import Iterator

import torch

from nestrec.base.compat import scaled_mm
from nestrec.base.errors import UserError
from nestrec.ops.kernel_op import kernel_op, power_of_two
from nestrec.ops.layers.row_ops import check_strided, column

LARGEST = 448.0
"""of e4m3"""
WIDTH_STEP = 16
"""widths that the product of a GPU takes"""


class _Switch:
    """Plain, since torch.compile follows it: a context variable would cut its graphs. One a process."""

    is_on = False


@contextlib.contextmanager
def fp8_products(is_on: bool = True) -> Iterator[None]:
    """Inside the block, the projections of layers on a GPU are products of eight-bit numbers."""
    before, _Switch.is_on = _Switch.is_on, is_on
    try:
        yield
    finally:
        _Switch.is_on = before


def takes_fp8(x: torch.Tensor) -> bool:
    """Whether projections of `x` are such products."""
    return _Switch.is_on and x.is_cuda


def check_fp8(device: torch.device) -> None:
    """Refuse a GPU without such products."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            "this GPU multiplies no eight-bit floats",
            option="training.precision",
            value=f"fp8 on {torch.cuda.get_device_name(device)}",
            remedy="take bf16; fp8 needs Ada, Hopper or newer",
        )


def product(a_TK: torch.Tensor, b_KN: torch.Tensor, *, fp8: bool) -> torch.Tensor:
    """a b, in the type of `a`."""
    return fp8_product(a_TK, b_KN) if fp8 else a_TK @ b_KN


def fp8_product_reference(a_TK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """The definition, in float32 sums."""
    (a, a_scale), (b, b_scale) = eight_bit_rows_reference(a_TK), eight_bit_rows_reference(b_KN.T)
    return ((a.float() @ b.float().T) * a_scale[:, None] * b_scale).to(a_TK.dtype)


def fp8_product(a_TK: torch.Tensor, b_KN: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """The same by the GPU's own product, with `bias_N` added to each row where it is given."""
    inner, outer = b_KN.shape
    if inner % WIDTH_STEP or outer % WIDTH_STEP:
        raise UserError(
            f"products of eight bits take widths in steps of {WIDTH_STEP}",
            option="training.precision, widths of the model",
            value=("fp8", inner, outer),
            remedy="take bf16, or a model whose dim, head_dim * num_heads and ffn_dim are multiples of 16",
        )
    if len(a_TK) == 0:
        return a_TK.new_empty(0, outer)
    (a, a_scale), (b, b_scale) = eight_bit_rows(a_TK), eight_bit_rows(b_KN.T.contiguous())
    scales = {"scale_a": a_scale[:, None], "scale_b": b_scale[None, :]}
    return scaled_mm(a, b.T, **scales, bias=bias_N, out_dtype=a_TK.dtype, use_fast_accum=True)


def eight_bit_rows_reference(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows in e4m3, their scales); a row of zeros has the scale of a row of the smallest numbers."""
    x = x_TK.float()
    largest = x.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * LARGEST)
    factor = torch.full_like(largest, LARGEST) / largest  # a number over a tensor would be rounded twice
    rows = (x * factor[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return rows, largest * (1.0 / LARGEST)


@kernel_op("eight_bit_rows", fake=lambda x: (x.new_empty(x.shape, dtype=torch.float8_e4m3fn), column(x)))
def eight_bit_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a kernel; rows may be strided."""
    from nestrec.ops.layers.fp8_kernels import eight_bit_rows_kernel

    check_strided(x)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = column(x)
    block = min(1024, power_of_two(x.shape[1]))
    rows = 1024 // block
    eight_bit_rows_kernel[(-(-len(x) // rows),)](
        x, out, scale, len(x), x.stride(0), WIDTH=x.shape[1], BLOCK=block, ROWS=rows, num_warps=4
    )
    return out, scale
