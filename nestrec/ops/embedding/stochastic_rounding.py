"""Stochastic rounding of float32 to bfloat16 and float16: up or down at random, with the value as the expectation.

    m       the bits of |x|, as an integer;  r = 24 random bits of (key of the row, element)
    bfloat16    (m + (r >> 8)) >> 16
    float16     (m - 112 * 2**23 + (r >> 11)) >> 13 for normal numbers; for subnormal numbers the significand is shifted
                right as the exponent requires, after as many random bits were added

A weight that changes by less than half a unit in the last place would never change with rounding to nearest; with
stochastic rounding it changes by the right amount on average. All computations are integer arithmetic, so a CPU, a GPU
and Triton's interpreter return bitwise identical results. Values that are too large become infinity, as with rounding
to nearest.

Shapes: P rows, D elements of a row.
"""

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import draw24, draws24
from nestrec.ops.kernel_op import HAS_TRITON

HALF_TYPES = (torch.bfloat16, torch.float16)
_SIGN, _INFINITY = 0x8000, 0x7F800000
_FRACTION = 0x7FFFFF
_ONE = 1 << 23
_BIAS, _FIRST_NORMAL, _FIRST_TOO_LARGE = 112, 113, 143
"""Constants of float16: difference of the exponent bias to float32; float32 exponents of its smallest normal number and
of the first numbers that are too large."""


_0, _8, _11, _13, _16, _23 = (np.uint32(n) for n in (0, 8, 11, 13, 16, 23))
_SIZE, _INFINITE, _SIGN_16 = (np.uint32(n) for n in (0x7FFFFFFF, _INFINITY, _SIGN))
_FRACTION_BITS, _ONE_BIT, _REBIAS = np.uint32(_FRACTION), np.uint32(_ONE), np.uint32(_BIAS * _ONE)
_INFINITY_16, _NAN_16, _NAN_B16 = np.uint32(0x7C00), np.uint32(0x7E00), np.uint32(0x7FC0)


def to_float32(rows: torch.Tensor) -> torch.Tensor:
    """Convert 16-bit rows to float32, so that their gradients are float32 too; return others unchanged."""
    return rows.float() if rows.dtype in HALF_TYPES else rows


def round_stochastically(value_PD: torch.Tensor, draw_P: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round (P, D) float32 values stochastically to a 16-bit dtype; reference implementation.

    Args:
        value_PD: Values to round, float32.
        draw_P: Key of the random bits of each row, int64.
        dtype: bfloat16 or float16.
    """
    bits_PD = value_PD.contiguous().view(torch.int32)
    random_PD = draws24(draw_P, value_PD.shape[1])
    size_PD = bits_PD & 0x7FFFFFFF
    of_type = _round_to_bfloat16 if dtype == torch.bfloat16 else _round_to_float16
    # NaNs get no sign: a GPU computes positive ones, a CPU often negative ones, and the results must be identical.
    sign_PD = (bits_PD >> 16) & _SIGN & -(size_PD <= _INFINITY).int()
    half_PD = of_type(size_PD, random_PD) | sign_PD
    return ((half_PD ^ _SIGN) - _SIGN).to(torch.int16).view(dtype)


def _round_to_bfloat16(size_PD: torch.Tensor, random_PD: torch.Tensor) -> torch.Tensor:
    finite_PD = (size_PD + (random_PD >> 8)) >> 16
    other_PD = 0x7F80 | ((size_PD > _INFINITY) * 0x40)
    return torch.where(size_PD < _INFINITY, finite_PD, other_PD)


def _round_to_float16(size_PD: torch.Tensor, random_PD: torch.Tensor) -> torch.Tensor:
    exponent_PD = size_PD >> 23
    normal_PD = (size_PD - _BIAS * _ONE + (random_PD >> 11)) >> 13
    shift_PD = (126 - exponent_PD).clamp(0, 24)
    lost_PD = (126 - exponent_PD - shift_PD).clamp(0, 31)
    significand_PD = ((size_PD & _FRACTION) | _ONE) >> lost_PD
    small_PD = (significand_PD + (random_PD >> (24 - shift_PD))) >> shift_PD
    finite_PD = torch.where(exponent_PD < _FIRST_NORMAL, small_PD, normal_PD)
    other_PD = 0x7C00 | ((size_PD > _INFINITY) * 0x200)
    return torch.where(exponent_PD < _FIRST_TOO_LARGE, finite_PD, other_PD)


def store_rounded(value_PD: torch.Tensor, draw_P: torch.Tensor, out_PD: torch.Tensor, dim: int | None = None) -> None:
    """Write `round_stochastically` of the values to (P, D) 16-bit elements, with a compiled loop on a CPU.

    Args:
        value_PD: Values to round, float32.
        draw_P: Key of the random bits of each row, int64.
        out_PD: Result, bfloat16 or float16.
        dim: Number of elements to convert at the start of each row; None converts all. Contiguous rows with `dim` are
            faster than a slice of their columns.
    """
    bits = value_PD.view(torch.int32).numpy().view(np.uint32)
    out = out_PD.view(torch.int16).numpy().view(np.uint16)
    store = _store_bfloat16 if out_PD.dtype == torch.bfloat16 else _store_float16
    draws = draw_P.view(torch.int32).view(-1, 2).numpy().view(np.uint32)
    store(bits, draws, out, out_PD.shape[1] if dim is None else dim)


# numba promotes integers to 64 bits by default. An explicit uint32 in every step lets it vectorize the loops.


@njit(cache=True, nogil=True, error_model="numpy")
def _store_bfloat16(bits: NDArray[np.uint32], draws: NDArray[np.uint32], out: NDArray[np.uint16], dim: int) -> None:
    for i in range(len(bits)):
        low, high = draws[i, 0], draws[i, 1]
        for j in range(dim):
            size = np.uint32(bits[i, j] & _SIZE)
            random = np.uint32(draw24(low, high, np.uint32(j)) >> _8)
            added = random if size < _INFINITE else _0
            half = np.uint32(np.uint32(bits[i, j] + added) >> _16)
            out[i, j] = np.uint16(half if size <= _INFINITE else _NAN_B16)


@njit(cache=True, nogil=True, error_model="numpy")
def _store_float16(bits: NDArray[np.uint32], draws: NDArray[np.uint32], out: NDArray[np.uint16], dim: int) -> None:
    for i in range(len(bits)):
        low, high = draws[i, 0], draws[i, 1]
        for j in range(dim):
            size = np.uint32(bits[i, j] & _SIZE)
            random = draw24(low, high, np.uint32(j))
            exponent = np.int32(size >> _23)
            normal = np.uint32(np.uint32(size - _REBIAS + np.uint32(random >> _11)) >> _13)
            shift = min(max(np.int32(126) - exponent, np.int32(0)), np.int32(24))
            lost = min(max(np.int32(126) - exponent - shift, np.int32(0)), np.int32(31))
            significand = np.uint32(np.uint32(np.uint32(size & _FRACTION_BITS) | _ONE_BIT) >> np.uint32(lost))
            added = np.uint32(random >> np.uint32(np.int32(24) - shift))
            small = np.uint32(np.uint32(significand + added) >> np.uint32(shift))
            finite = small if exponent < _FIRST_NORMAL else normal
            half = finite if exponent < _FIRST_TOO_LARGE else _INFINITY_16
            signed = np.uint32(half | np.uint32(np.uint32(bits[i, j] >> _16) & _SIGN_16))
            out[i, j] = np.uint16(signed if size <= _INFINITE else _NAN_16)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from nestrec.ops.random_triton import draws24 as kernel_draws24

    @triton.jit
    def round_tile(value, draw, BLOCK: tl.constexpr, IS_BFLOAT16: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the (ROWS, BLOCK) int16 bits of rounded float32 values; draw: (ROWS,) int64 keys of random bits."""
        bits = value.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        random = kernel_draws24(draw, tl.arange(0, BLOCK)).to(tl.int32)
        if IS_BFLOAT16:
            finite = (size + (random >> 8)) >> 16
            other = 0x7F80 | tl.where(size > 0x7F800000, 0x40, 0)
            half = tl.where(size < 0x7F800000, finite, other)
        else:
            exponent = size >> 23
            normal = (size - 112 * (1 << 23) + (random >> 11)) >> 13
            shift = tl.minimum(tl.maximum(126 - exponent, 0), 24)
            lost = tl.minimum(tl.maximum(126 - exponent - shift, 0), 31)
            small = ((((size & 0x7FFFFF) | (1 << 23)) >> lost) + (random >> (24 - shift))) >> shift
            finite = tl.where(exponent < 113, small, normal)
            half = tl.where(exponent < 143, finite, 0x7C00 | tl.where(size > 0x7F800000, 0x200, 0))
        sign = tl.where(size <= 0x7F800000, (bits >> 16) & 0x8000, 0)
        return (half | sign).to(tl.int16)
