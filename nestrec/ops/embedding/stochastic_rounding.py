"""Stochastic rounding of float32 to 16 bits: up or down, with the chances that keep the mean where it is.

    m       the bits of |x|, as an integer;  r = 24 random bits of (key of the row, element)
    bfloat16    (m + (r >> 8)) >> 16
    float16     (m - 112 * 2**23 + (r >> 11)) >> 13, where x is no smaller than the smallest normal number; below it
                the significand is shifted as far as the exponent says, with as many random bits added

A weight that changes by less than half of its last place would never move if it were rounded to nearest; so it moves
as far as it should on average. Everything is integer arithmetic: a CPU, a GPU and Triton's interpreter give the same
bits. What is too large becomes an infinity, as in rounding to nearest.

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
"""float16: how far its exponents lie below those of float32; those of its smallest and of no normal number"""


_0, _8, _11, _13, _16, _23 = (np.uint32(n) for n in (0, 8, 11, 13, 16, 23))
_SIZE, _INFINITE, _SIGN_16 = (np.uint32(n) for n in (0x7FFFFFFF, _INFINITY, _SIGN))
_FRACTION_BITS, _ONE_BIT, _REBIAS = np.uint32(_FRACTION), np.uint32(_ONE), np.uint32(_BIAS * _ONE)
_INFINITY_16, _NAN_16, _NAN_B16 = np.uint32(0x7C00), np.uint32(0x7E00), np.uint32(0x7FC0)


def whole(rows: torch.Tensor) -> torch.Tensor:
    """Rows of 16 bits as float32, so that their gradients are; others as they are."""
    return rows.float() if rows.dtype in HALF_TYPES else rows


def rounded(value_PD: torch.Tensor, draw_P: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(P, D) float32 values in a 16-bit type; draw: an int64 key for the random bits of each row. The definition."""
    bits_PD = value_PD.contiguous().view(torch.int32)
    random_PD = draws24(draw_P, value_PD.shape[1])
    size_PD = bits_PD & 0x7FFFFFFF
    of_type = _rounded_bfloat16 if dtype == torch.bfloat16 else _rounded_float16
    # a NaN has no sign: those that a GPU makes are positive, those of a CPU often negative
    sign_PD = (bits_PD >> 16) & _SIGN & -(size_PD <= _INFINITY).int()
    half_PD = of_type(size_PD, random_PD) | sign_PD
    return ((half_PD ^ _SIGN) - _SIGN).to(torch.int16).view(dtype)


def _rounded_bfloat16(size_PD: torch.Tensor, random_PD: torch.Tensor) -> torch.Tensor:
    finite_PD = (size_PD + (random_PD >> 8)) >> 16
    other_PD = 0x7F80 | ((size_PD > _INFINITY) * 0x40)
    return torch.where(size_PD < _INFINITY, finite_PD, other_PD)


def _rounded_float16(size_PD: torch.Tensor, random_PD: torch.Tensor) -> torch.Tensor:
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
    """`rounded` into (P, D) elements of a 16-bit type, by a loop on a CPU.

    dim: only the first so many of each row; rows that are whole in memory are quicker than columns cut out of them.
    """
    bits = value_PD.view(torch.int32).numpy().view(np.uint32)
    out = out_PD.view(torch.int16).numpy().view(np.uint16)
    store = _store_bfloat16 if out_PD.dtype == torch.bfloat16 else _store_float16
    draws = draw_P.view(torch.int32).view(-1, 2).numpy().view(np.uint32)
    store(bits, draws, out, out_PD.shape[1] if dim is None else dim)


# numba computes with 64 bits unless it is told: every step says that it has 32, and the loops become vector code.


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
        """(ROWS, BLOCK) int16 bits of float32 values; draw: (ROWS,) int64."""
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
