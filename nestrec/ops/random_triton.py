"""Counter-based random number generator for Triton kernels, with the same integers as `nestrec.base.random`.

Import this module only if CUDA or Triton's interpreter is used.
"""

import triton
import triton.language as tl

from nestrec.base.random import GOLDEN32, MULTIPLIERS32

_GOLDEN = tl.constexpr(GOLDEN32)
_MULTIPLY_1, _MULTIPLY_2 = tl.constexpr(MULTIPLIERS32[0]), tl.constexpr(MULTIPLIERS32[1])


@triton.jit
def _mix32(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * _MULTIPLY_1
    x = x ^ (x >> 15)
    x = x * _MULTIPLY_2
    return x ^ (x >> 16)


@triton.jit
def draws24(key, channel):  # type: ignore[no-untyped-def]
    """Return (ROWS, BLOCK) uint32 random numbers in [0, 2**24) for (ROWS,) int64 row keys and (BLOCK,) channels."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    spread = channel.to(tl.uint32) * _GOLDEN
    return _mix32(_mix32(low[:, None] ^ spread[None, :]) ^ high[:, None]) >> 8
