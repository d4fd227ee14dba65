"""Triton kernels of attention by bias alone. Imported only where CUDA or Triton's interpreter is used.

A program of the forward pass owns BM queries and BW channels, one of the backward pass BM keys and BW channels. The
tables' gradients are sums over tiles of pairs: a program owns the tiles at one distance in blocks and adds them in a
fixed order, so that runs agree to the bit.
"""

import triton
import triton.language as tl

from nestrec.ops.time_buckets import time_bucket

# ruff: noqa: PLR0917


@triton.jit
def _values(table, slot, mask):  # type: ignore[no-untyped-def]
    return tl.load(table + slot, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _times(time, at, mask):  # type: ignore[no-untyped-def]
    return tl.load(time + at, mask=mask, other=0.0)


@triton.jit
def bias_forward_kernel(  # type: ignore[no-untyped-def]
    v, out, table, offsets, query_time, time, edges, num_sequences, num_blocks, v_stride, centre, num_buckets,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    BY_TIME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[i] = sum_{j <= i} table[slot(i, j)] v[j]."""
    sequence = tl.program_id(0) % num_sequences
    first = (num_blocks - 1 - tl.program_id(0) // num_sequences) * BM
    start = tl.load(offsets + sequence)
    length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
    if first < length:
        i = first + tl.arange(0, BM)
        w = tl.program_id(1) * BW + tl.arange(0, BW)
        total = tl.zeros((BM, BW), tl.float32)
        query_time_M = _times(query_time, start + i, i < length) if BY_TIME else i
        for low in range(0, tl.minimum(first + BM, length), BN):
            j = low + tl.arange(0, BN)
            values = tl.load(v + (start + j)[:, None] * v_stride + w[None, :],
                             mask=(j < length)[:, None] & (w < WIDTH)[None, :], other=0.0)  # fmt: skip
            seen = (j[None, :] <= i[:, None]) & (i < length)[:, None]
            if BY_TIME:
                slot = time_bucket(
                    query_time_M[:, None] - _times(time, start + j, j < length)[None, :], edges, num_buckets
                )
            else:
                slot = j[None, :] - i[:, None] + centre
            weights = _values(table, slot, seen).to(values.dtype)
            total = tl.dot(weights, values, total, input_precision=PRECISION)
        place = out + (start + i)[:, None] * WIDTH + w[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(i < length)[:, None] & (w < WIDTH)[None, :])


@triton.jit
def bias_value_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_position, grad_time, out, position, time_table, offsets, query_time, time, edges, num_sequences, num_blocks,
    centre, num_buckets,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    HAS_TIME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv[j] = sum_{i >= j} position[slot] d positional[i] + time[slot] d temporal[i]."""
    sequence = tl.program_id(0) % num_sequences
    first = (tl.program_id(0) // num_sequences) * BM
    start = tl.load(offsets + sequence)
    length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
    if first < length:
        j = first + tl.arange(0, BM)
        w = tl.program_id(1) * BW + tl.arange(0, BW)
        total = tl.zeros((BM, BW), tl.float32)
        time_M = _times(time, start + j, j < length) if HAS_TIME else j
        for low in range(first, length, BN):
            i = low + tl.arange(0, BN)
            at = (start + i)[:, None] * WIDTH + w[None, :]
            mask = (i < length)[:, None] & (w < WIDTH)[None, :]
            seen = (j[:, None] <= i[None, :]) & (i < length)[None, :]
            grad = tl.load(grad_position + at, mask=mask, other=0.0)
            weights = _values(position, j[:, None] - i[None, :] + centre, seen).to(grad.dtype)
            total = tl.dot(weights, grad, total, input_precision=PRECISION)
            if HAS_TIME:
                grad = tl.load(grad_time + at, mask=mask, other=0.0)
                slot = time_bucket(
                    _times(query_time, start + i, i < length)[None, :] - time_M[:, None], edges, num_buckets
                )
                weights = _values(time_table, slot, seen).to(grad.dtype)
                total = tl.dot(weights, grad, total, input_precision=PRECISION)
        place = out + (start + j)[:, None] * WIDTH + w[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(j < length)[:, None] & (w < WIDTH)[None, :])


@triton.jit
def bias_table_gradient_kernel(  # type: ignore[no-untyped-def]
    grad, v, out, offsets, query_time, time, edges, num_sequences, num_blocks, num_splits, v_stride, num_buckets,
    WIDTH: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, SLOTS: tl.constexpr,
    BY_TIME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of grad[i] . v[j] by slot over the tiles whose key block lies program_id(0) blocks before their queries.

    out[distance, split, :]: by bucket, or by the 2 BM diagonals of a tile, the one with i - j = distance * BM at BM.
    """
    distance, split = tl.program_id(0), tl.program_id(1)
    row, slot = tl.arange(0, BM), tl.arange(0, SLOTS)
    total = tl.zeros((SLOTS,), tl.float32)
    for item in range(split, num_sequences * (num_blocks - distance), num_splits):
        sequence = item % num_sequences
        first = (item // num_sequences + distance) * BM
        start = tl.load(offsets + sequence)
        length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
        if first < length:
            i = first + row
            j = first - distance * BM + row
            products = tl.zeros((BM, BM), tl.float32)
            for low in range(0, WIDTH, BW):
                w = low + tl.arange(0, BW)
                left = tl.load(grad + (start + i)[:, None] * WIDTH + w[None, :],
                               mask=(i < length)[:, None] & (w < WIDTH)[None, :], other=0.0)  # fmt: skip
                right = tl.load(v + (start + j)[None, :] * v_stride + w[:, None],
                                mask=(j < length)[None, :] & (w < WIDTH)[:, None], other=0.0)  # fmt: skip
                products = tl.dot(left, right, products, input_precision=PRECISION)
            seen = (j[None, :] <= i[:, None]) & (i < length)[:, None]
            products = tl.where(seen, products, 0.0)
            if BY_TIME:
                asked = _times(query_time, start + i, i < length)[:, None]
                bucket = time_bucket(asked - _times(time, start + j, j < length)[None, :], edges, num_buckets)
                least = tl.min(tl.where(seen, bucket, num_buckets))
                most = tl.max(tl.where(seen, bucket, 0))
                for b in range(least, most + 1):
                    total += tl.where(slot == b, tl.sum(tl.where(bucket == b, products, 0.0)), 0.0)
            else:
                # Element (r, c) of a tile lies on the diagonal r - c: column BM + r - c of the skewed tile.
                column = row[:, None] + BM - slot[None, :]
                inside = (column >= 0) & (column < BM)
                skewed = tl.gather(products, tl.where(inside, column, 0), 1)
                total += tl.sum(tl.where(inside, skewed, 0.0), axis=0)
    tl.store(out + (distance * num_splits + split) * SLOTS + slot, total)
