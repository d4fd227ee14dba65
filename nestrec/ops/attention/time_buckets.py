"""The bucket of a time difference inside a Triton kernel. Imported only where CUDA or Triton's interpreter is used."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


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
