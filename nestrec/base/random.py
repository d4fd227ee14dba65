"""Counter-based random numbers: pure functions of a key, independent of when and on which rank they are drawn.

Samples move between ranks and micro-batches, so dropout masks, negatives, sample order and initial rows are functions
of keys such as (run seed, epoch, sample id, layer, token, channel). The functions for Python, numpy, torch and numba in
this module and the Triton functions in nestrec.ops.random_kernels return the same integers. The constants are defined
only here.

    mix64(x)   finalizer of splitmix64: a bijection on 64-bit integers
    mix32(x)   a 32-bit bijection with low bias, cheap enough for one draw per element
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

GOLDEN64, GOLDEN32 = 0x9E3779B97F4A7C15, 0x9E3779B9
"""2**64 (or 2**32) divided by the golden ratio; its multiples modulo 2**64 are far apart."""
MULTIPLIERS64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Multipliers of the finalizer of splitmix64."""
MULTIPLIERS32 = (0x7FEB352D, 0x846CA68B)
"""Multipliers of `mix32`."""
_MASK64 = (1 << 64) - 1


def mix64(x: int) -> int:
    """Return the splitmix64 finalizer of a Python integer (taken modulo 2**64)."""
    x = (x + GOLDEN64) & _MASK64
    x = ((x ^ (x >> 30)) * MULTIPLIERS64[0]) & _MASK64
    x = ((x ^ (x >> 27)) * MULTIPLIERS64[1]) & _MASK64
    return x ^ (x >> 31)


def fold(*parts: int) -> int:
    """Hash several integers into one 64-bit key; their order matters."""
    key = 0
    for part in parts:
        key = mix64(key ^ (part & _MASK64))
    return key


def mix64_array(x: NDArray[Any]) -> NDArray[np.uint64]:
    """Apply `mix64` to every element; int64 input is read as two's complement."""
    with np.errstate(over="ignore"):
        y = x.astype(np.uint64) + np.uint64(GOLDEN64)
        y = (y ^ (y >> np.uint64(30))) * np.uint64(MULTIPLIERS64[0])
        y = (y ^ (y >> np.uint64(27))) * np.uint64(MULTIPLIERS64[1])
        return y ^ (y >> np.uint64(31))


def fold_array(key: int | NDArray[np.uint64], part: NDArray[Any]) -> NDArray[np.uint64]:
    """Extend keys of `fold` by one more part, elementwise: `fold_array(fold(a, b), c)[i] == fold(a, b, c[i])`."""
    key_array = np.asarray(key, dtype=np.uint64)
    return mix64_array(key_array ^ part.astype(np.uint64))


def as_int64(x: NDArray[np.uint64]) -> torch.Tensor:
    """Reinterpret uint64 numbers as a torch int64 tensor."""
    return torch.from_numpy(np.ascontiguousarray(x).view(np.int64))


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift an int32 tensor right logically (torch shifts signed integers arithmetically)."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def mix32(x: torch.Tensor) -> torch.Tensor:
    """Apply a low-bias bijection to every int32 element; multiplication wraps around."""
    x = x ^ shift_right(x, 16)
    x = x * MULTIPLIERS32[0]
    x = x ^ shift_right(x, 15)
    x = x * _as_int32(MULTIPLIERS32[1])
    return x ^ shift_right(x, 16)


def uniform24(key_T: torch.Tensor, site: int, num_channels: int) -> torch.Tensor:
    """Draw one integer in [0, 2**24) per row key and channel.

    Args:
        key_T: 64-bit row keys, shape (T,), for example one per token.
        site: Number that distinguishes draws with the same row keys, for example the layer.
        num_channels: Number of draws per row key.

    Returns:
        Int32 tensor of shape (T, num_channels).
    """
    site_key = mix64(site)
    return draws24(key_T ^ (site_key - (1 << 64) if site_key >> 63 else site_key), num_channels)


def draws24(key_T: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Draw like `uniform24`, for row keys that are used at one site only."""
    low = key_T.view(torch.int32).view(-1, 2)
    channel = torch.arange(num_channels, dtype=torch.int32, device=key_T.device) * _as_int32(GOLDEN32)
    bits = mix32(mix32(low[:, :1] ^ channel) ^ low[:, 1:])
    return shift_right(bits, 8)


def _as_int32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = np.uint64(GOLDEN64), np.uint64(MULTIPLIERS64[0]), np.uint64(MULTIPLIERS64[1])
_GOLDEN_32, _MULTIPLY_1_32, _MULTIPLY_2_32 = (np.uint32(n) for n in (GOLDEN32, *MULTIPLIERS32))
_S8, _S15, _S16 = np.uint32(8), np.uint32(15), np.uint32(16)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@njit(cache=True, nogil=True, inline="always")
def finalize64(x: np.uint64) -> np.uint64:
    """Return `mix64(x - GOLDEN64)`, for loops that increment x by GOLDEN64."""
    x = (x ^ (x >> _S30)) * _MULTIPLY_1
    x = (x ^ (x >> _S27)) * _MULTIPLY_2
    return x ^ (x >> _S31)


@njit(cache=True, nogil=True, inline="always")
def mix64_jit(x: np.uint64) -> np.uint64:
    """Return the splitmix64 finalizer of a 64-bit integer; the numba version of `mix64`."""
    return finalize64(np.uint64(x) + _GOLDEN)


@njit(cache=True, nogil=True, inline="always")
def draw24(low: np.uint32, high: np.uint32, channel: np.uint32) -> np.uint32:
    """Draw an integer in [0, 2**24); equals `draws24` for the row key with these two 32-bit words."""
    return _mix32(_mix32(low ^ np.uint32(channel * _GOLDEN_32)) ^ high) >> _S8


@njit(cache=True, nogil=True, inline="always")
def _mix32(x: np.uint32) -> np.uint32:
    # numba multiplies with 64 bits, so the products are truncated explicitly
    x = np.uint32((x ^ (x >> _S16)) * _MULTIPLY_1_32)
    x = np.uint32((x ^ (x >> _S15)) * _MULTIPLY_2_32)
    return x ^ (x >> _S16)
