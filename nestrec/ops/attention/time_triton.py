"""Triton device functions for time buckets and for the time function (reference: mask_and_bias.py).

Imported only if CUDA or Triton's interpreter is used.
"""

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def"


@triton.jit
def time_bucket(delta_s, edges, num_buckets):
    """Return min(floor(ln(max(|delta|, 1)) / 0.301), num_buckets), equal to float64; edges are those of `bucket_edges`.

    Exponent and mantissa, read as one fixed-point number, approximate log2 from below by at most 0.09, which selects
    the bucket or the one below it; one comparison with an edge decides.
    """
    high = ((delta_s.to(tl.int64, bitcast=True) >> 32) & 0x7FFFFFFF).to(tl.int32)
    log2 = tl.maximum(high, 0x3FF00000) - 0x3FF00000  # in units of 2^-20
    below = ((log2.to(tl.int64) * 9432) >> 32).to(tl.int32)  # ln 2 / 0.301 = 9432.3 * 2^-12
    below = tl.minimum(below, num_buckets)
    return below + (tl.abs(delta_s) >= tl.load(edges + below + 1)).to(tl.int32)


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def log2(x, FAST: tl.constexpr):
    """Return log2(x); if FAST, by one special-function instruction that flushes denormals, else by tl.log2."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """Return 2 ** x; if FAST, by one special-function instruction that flushes denormals, else by tl.exp2."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def time_function(scalars, key_seconds, query_seconds, FAST: tl.constexpr):
    """Return e = exp(-u), e u and x for float64 times, where u = exp(x) and x = power (ln dt - ln scale).

    Results are (keys, queries); the bias is amplitude * e. A time is split into two float32 numbers relative to the
    latest key, so that differences are exact to the last bits without float64 arithmetic per pair.
    """
    origin = tl.max(key_seconds, 0)
    key = key_seconds - origin
    query = query_seconds - origin
    key_high = key.to(tl.float32)
    query_high = query.to(tl.float32)
    key_low, query_low = (key - key_high).to(tl.float32), (query - query_high).to(tl.float32)
    seconds = (query_high[None, :] - key_high[:, None]) + (query_low[None, :] - key_low[:, None])
    return time_function_of(scalars, seconds, FAST)


@triton.jit
def time_function_of(scalars, seconds, FAST: tl.constexpr):
    """Return the results of `time_function` for time differences in seconds."""
    log2_scale = tl.load(scalars + 1).to(tl.float32) * LOG2_E
    power = tl.exp(tl.load(scalars + 2).to(tl.float32))
    exponent = power * (log2(tl.maximum(seconds, 1.0), FAST) - log2_scale)
    inner = exp2(tl.minimum(exponent, 20.0 * LOG2_E), FAST)
    value = exp2(-LOG2_E * inner, FAST)
    # Above its bound the exponent is constant, so its derivative is zero; the value has underflowed to zero there.
    return value, tl.where(exponent < 20.0 * LOG2_E, value * inner, 0.0), exponent / LOG2_E
