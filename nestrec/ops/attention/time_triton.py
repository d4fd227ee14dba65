"""Time buckets and the time function inside Triton kernels.

The bucket of a time difference inside a Triton kernel. Imported only where CUDA or Triton's interpreter is used.

The time function (time_function.py) inside a Triton kernel. Imported only where Triton is used.
"""

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def"


@triton.jit
def time_bucket(delta_s, edges, num_buckets):
    """min(floor(ln(max(|delta|, 1)) / 0.301), num_buckets), as float64 has it; edges: ops.attention.relative_bias.

    Exponent and mantissa, read as one fixed-point number, are log2 less up to 0.09: the bucket or the one below it.
    """
    high = ((delta_s.to(tl.int64, bitcast=True) >> 32) & 0x7FFFFFFF).to(tl.int32)
    log2 = tl.maximum(high, 0x3FF00000) - 0x3FF00000  # in units of 2^-20
    below = ((log2.to(tl.int64) * 9432) >> 32).to(tl.int32)  # ln 2 / 0.301 = 9432.3 * 2^-12
    below = tl.minimum(below, num_buckets)
    return below + (tl.abs(delta_s) >= tl.load(edges + below + 1)).to(tl.int32)


# mypy: disable-error-code="no-untyped-def"


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def log2(x, FAST: tl.constexpr):
    """By one special-function instruction without a branch for the smallest numbers, or as the language has it."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """The same, of powers of two."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def time_function(scalars, seen_at, asked, FAST: tl.constexpr):
    """(keys, queries) e = exp(-u), e u and x of u = exp(x), x = power (ln dt - ln scale), for float64 times.

    The bias is amplitude e. A time is split into two float32 numbers behind the first key's, so that a difference is
    right to its last bits without arithmetic in float64 for every pair.
    """
    origin = tl.max(seen_at, 0)
    key, query = seen_at - origin, asked - origin
    key_high, query_high = key.to(tl.float32), query.to(tl.float32)
    key_low, query_low = (key - key_high).to(tl.float32), (query - query_high).to(tl.float32)
    seconds = (query_high[None, :] - key_high[:, None]) + (query_low[None, :] - key_low[:, None])
    return time_function_of(scalars, seconds, FAST)


@triton.jit
def time_function_of(scalars, seconds, FAST: tl.constexpr):
    """The same of time differences."""
    log2_scale = tl.load(scalars + 1).to(tl.float32) * LOG2_E
    power = tl.exp(tl.load(scalars + 2).to(tl.float32))
    exponent = power * (log2(tl.maximum(seconds, 1.0), FAST) - log2_scale)
    inner = exp2(tl.minimum(exponent, 20.0 * LOG2_E), FAST)
    value = exp2(-LOG2_E * inner, FAST)
    # Behind its bound the exponent is a constant; nothing is left of the value there.
    return value, tl.where(exponent < 20.0 * LOG2_E, value * inner, 0.0), exponent / LOG2_E
