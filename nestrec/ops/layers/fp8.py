"""FP8 matrix multiplication with row-wise dynamic scaling: each row of both factors is quantized to float8_e4m3fn.

    matmul(a, b)  = (a8 b8) * (scale of a's row) * (scale of b's column)
    x8, scale     = round(x * 448 / largest), largest / 448         largest: maximum |x| of the row

Products of the fp8 values are summed in float32. Gradients of the inputs are fp8 products too. Gradients of weights sum
over tokens, whose scales differ, and stay in bf16.

Legend: T tokens, K inner width, N outer width.
"""

import contextlib
from collections.abc import Iterator

import torch

from nestrec.base.compat import scaled_mm
from nestrec.base.errors import UserError
from nestrec.ops.kernel_op import kernel_op, power_of_two
from nestrec.ops.layers.row_ops import check_strided, column

MAX_E4M3 = 448.0
"""Largest finite value of float8_e4m3fn."""
WIDTH_STEP = 16
"""Widths must be multiples of this for fp8 matrix multiplication on a GPU."""


class _Switch:
    """Process-wide flag; a plain attribute, because torch.compile would break the graph at a context variable."""

    is_on = False


@contextlib.contextmanager
def fp8_enabled(is_on: bool = True) -> Iterator[None]:
    """Compute the projections of layers on a GPU in fp8 within the context."""
    previous, _Switch.is_on = _Switch.is_on, is_on
    try:
        yield
    finally:
        _Switch.is_on = previous


def uses_fp8(x: torch.Tensor) -> bool:
    """Return whether projections of `x` are computed in fp8."""
    return _Switch.is_on and x.is_cuda


def check_fp8(device: torch.device) -> None:
    """Raise UserError if the device is a GPU without fp8 matrix multiplication."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            "this GPU does not support fp8 matrix multiplication",
            option="training.precision",
            value=f"fp8 on {torch.cuda.get_device_name(device)}",
            remedy="set --training.precision=bf16; fp8 requires an Ada, Hopper or newer GPU",
        )


def matmul(a_TK: torch.Tensor, b_KN: torch.Tensor, *, fp8: bool) -> torch.Tensor:
    """Return the matrix product a b in the dtype of `a`, computed in fp8 if `fp8` is set."""
    return fp8_matmul(a_TK, b_KN) if fp8 else a_TK @ b_KN


def fp8_matmul_reference(a_TK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Reference implementation of `fp8_matmul`, with float32 sums."""
    (a, a_scale), (b, b_scale) = quantize_fp8_rows_reference(a_TK), quantize_fp8_rows_reference(b_KN.T)
    return ((a.float() @ b.float().T) * a_scale[:, None] * b_scale).to(a_TK.dtype)


def fp8_matmul(a_TK: torch.Tensor, b_KN: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return the fp8 matrix product a b with the scaled matmul of the GPU, plus `bias_N` if given.

    Args:
        a_TK: Left factor.
        b_KN: Right factor; its widths must be multiples of `WIDTH_STEP`.
        bias_N: Values added to each row.

    Returns:
        (T, N) product in the dtype of `a_TK`.

    Raises:
        UserError: If a width is not a multiple of `WIDTH_STEP`.
    """
    inner, outer = b_KN.shape
    if inner % WIDTH_STEP or outer % WIDTH_STEP:
        raise UserError(
            f"fp8 requires widths that are multiples of {WIDTH_STEP}",
            option="training.precision, widths of the model",
            value=("fp8", inner, outer),
            remedy="set --training.precision=bf16, or choose a model whose dim, head_dim * num_heads and ffn_dim are "
            "multiples of 16",
        )
    if len(a_TK) == 0:
        return a_TK.new_empty(0, outer)
    (a, a_scale), (b, b_scale) = quantize_fp8_rows(a_TK), quantize_fp8_rows(b_KN.T.contiguous())
    scales = {"scale_a": a_scale[:, None], "scale_b": b_scale[None, :]}
    return scaled_mm(a, b.T, **scales, bias=bias_N, out_dtype=a_TK.dtype, use_fast_accum=True)


def quantize_fp8_rows_reference(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to fp8; return the rows in float8_e4m3fn and their float32 scales. Reference implementation.

    The scale of a row of zeros is that of a row with the smallest normal float32 value.
    """
    x = x_TK.float()
    largest = x.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * MAX_E4M3)
    factor = torch.full_like(largest, MAX_E4M3) / largest  # scalar / tensor would be rounded twice
    rows = (x * factor[:, None]).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    return rows, largest * (1.0 / MAX_E4M3)


@kernel_op("eight_bit_rows", fake=lambda x: (x.new_empty(x.shape, dtype=torch.float8_e4m3fn), column(x)))
def quantize_fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to fp8 with a Triton kernel; rows may be strided."""
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
