"""Triton kernels of paged attention (paged_attention.py), one kernel for all models.

A program processes one block of queries and iterates over blocks of keys: pages of the KV cache, then new tokens.

    SILU      out[i] = sum_j SiLU(q[i] . k[j] + bias[i, j]) v[j] * scale      HSTU, and the semantic channel of FuXi
    SOFTMAX   out[i] = sum_j softmax_j(q[i] . k[j] * scale) v[j]              SASRec
    CHANNEL   out[i] = sum_j bias[i, j] v[j]                                  positional and temporal channels of FuXi

Biases are written beforehand (paged_bias.py), one tile per block of keys. Keys outside a sequence and their values are
loaded as zeros, which masks them. An fp8 KV cache has one power-of-two scale per token and head, which is multiplied
into scores and weights, so that cached values are never dequantized to memory.

Legend: T rows of the batch, H heads, D head dimension.
"""

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0912, PLR0915, PLR0917, SIM300


SILU, SOFTMAX, CHANNEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LARGEST_FP8 = tl.constexpr(448.0)
BFLOAT16_OF_FP8 = tl.constexpr(
    """{
    .reg .b32 a, b, x, y;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 x, a, 0x7F007F00;
    and.b32 y, b, 0x7F007F00;
    shr.u32 x, x, 4;
    shr.u32 y, y, 4;
    lop3.b32 x, a, 0x80008000, x, 0xEA;
    lop3.b32 y, b, 0x80008000, y, 0xEA;
    mul.rn.bf16x2 $0, x, $3;
    mul.rn.bf16x2 $1, y, $4;
}"""
)
"""PTX that converts four fp8 numbers to bfloat16: moves their bits to the bfloat16 layout, then multiplies by the scale
of their token, which includes 2^120 for the different exponent bias. The hardware converts fp8 to float16 only, and
converting from there through float32 took longer than the matrix products."""
MOST_EXPONENT = tl.constexpr(134)
"""Largest exponent of a stored scale; multiplied by 2^120 the scale is still a bfloat16 number."""


@triton.jit
def _silu(x, IS_FAST: tl.constexpr):
    if IS_FAST:  # one special-function instruction per element instead of two, which would bound the kernel
        half = 0.5 * x
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        return half + half * tanh
    return x * tl.sigmoid(x)


@triton.jit
def _load(pointers, power, is_here, TYPE: tl.constexpr, IS_FP8: tl.constexpr, IS_FAST: tl.constexpr):
    if IS_FP8:
        words = tl.load(pointers, mask=is_here, other=0)
        if IS_FAST and TYPE == tl.bfloat16:
            powers, words = tl.broadcast(power[:, None], words)
            return tl.inline_asm_elementwise(
                BFLOAT16_OF_FP8, "=r,=r,r,r,r", [words, powers], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            return words.to(tl.float8e4nv, bitcast=True).to(TYPE)
    else:
        return tl.load(pointers, mask=is_here, other=0.0).to(TYPE)


@triton.jit
def _powers(scales, is_key, TYPE: tl.constexpr, IS_FP8: tl.constexpr, IS_FAST: tl.constexpr):
    """Load the power-of-two scales, stored as float32 exponents; includes a factor 2^120 if used by BFLOAT16_OF_FP8."""
    if IS_FP8:
        exponent = tl.load(scales, mask=is_key, other=127).to(tl.int32)
        if IS_FAST and TYPE == tl.bfloat16:
            return ((exponent + 120) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            return (exponent << 23).to(tl.float32, bitcast=True)
    else:
        return 1.0


@triton.jit
def tile_words(value, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Permute a tile to its order in memory, in which the elements of a matrix-instruction thread are contiguous."""
    parts = value.reshape([ROWS // 16, 2, 8, KEYS // 16, 2, 4, 2])
    return parts.permute((3, 0, 2, 5, 4, 1, 6)).reshape([ROWS * KEYS])


@triton.jit
def _tile_values(words, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Invert `tile_words`, without moving values between threads."""
    parts = words.reshape([KEYS // 16, ROWS // 16, 8, 4, 2, 2, 2])
    return parts.permute((1, 5, 2, 0, 4, 3, 6)).reshape([ROWS, KEYS])


@triton.jit
def _words(tiles, first, n, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr):
    """Load the biases of the n-th block of keys in memory order."""
    if not HAS_BIAS:
        return 0.0
    else:
        at = tl.multiple_of(first.to(tl.int64) * (ROWS * UNIT) + n * (ROWS * KEYS), 16)
        return tl.load(tiles + at + tl.arange(0, ROWS * KEYS))


@triton.jit
def _bias(words, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the biases of a tile, (rows, keys) float32."""
    if not HAS_BIAS:
        return 0.0
    else:
        return _tile_values(words, ROWS, KEYS).to(tl.float32)


@triton.jit
def _attend(
    acc,
    most,
    total,
    q,
    k_ptrs,
    v_ptrs,
    k_power,
    v_power,
    is_key,
    is_channel,
    is_seen,
    bias,
    scale,
    MODE: tl.constexpr,
    TYPE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one block of keys to the sums (online softmax: also updates the largest score and the sum of weights)."""
    IS_SCALED: tl.constexpr = IS_FAST and TYPE == tl.bfloat16
    is_here = is_key[:, None]
    if IS_PADDED:
        is_here = is_here & is_channel[None, :]
    v = _load(v_ptrs, v_power, is_here, TYPE, IS_FP8, IS_FAST)
    if MODE == CHANNEL:
        weights = tl.zeros([acc.shape[0], is_key.shape[0]], tl.float32) + bias
    else:
        k = _load(k_ptrs, k_power, is_here, TYPE, IS_FP8, IS_FAST)
        weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if IS_FP8 and not IS_SCALED:
            weights *= k_power[None, :]
        if HAS_BIAS:
            weights += bias
    if MODE == SILU:
        weights = _silu(weights, IS_FAST)
    if MODE == SOFTMAX:
        if IS_MASKED:
            is_seen = is_seen & is_key[None, :]
        else:
            is_seen = is_key[None, :]
        scores = tl.where(is_seen, weights * scale, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - base[:, None])
        shrunk = tl.exp(most - base)
        total = total * shrunk + tl.sum(weights, 1)
        acc = acc * shrunk[:, None]
        most = larger
    elif IS_MASKED:
        weights = tl.where(is_seen, weights, 0.0)
    if IS_FP8 and not IS_SCALED:
        weights *= v_power[None, :]
    return tl.dot(weights.to(TYPE), v, acc, input_precision=PRECISION), most, total


@triton.jit
def _is_near(query_position, key, REACH: tl.constexpr, CONTEXT: tl.constexpr):
    """Return whether keys are in the attention window of queries at these positions, or in the contextual prefix."""
    return (query_position[:, None] - key[None, :] < REACH) | (key < CONTEXT)[None, :]


@triton.jit
def _over_keys(
    acc,
    most,
    total,
    q,
    k,
    v,
    pool,
    scales,
    tiles,
    block,
    pages,
    column,
    is_channel,
    head,
    k_stride,
    v_stride,
    pool_value,
    pool_head,
    scale_value,
    scale_head,
    scale,
    MODE: tl.constexpr,
    TYPE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    REACH: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """Iterate over the keys of a block; returns sums, largest scores, sums of weights, and the number of tiles read."""
    num_rows, prefix, first_page = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    history_row, first, num_seen = tl.load(block + 4), tl.load(block + 5), tl.load(block + 6)
    candidate, prefix_begin = tl.load(block + 7), tl.load(block + 8)
    context, low, prefix_length = tl.load(block + 12), tl.load(block + 13), tl.load(block + 14)
    floor, first_tile = tl.load(block + 15), tl.load(block + 16)
    IS_PADDED: tl.constexpr = acc.shape[1] > DIM
    row, key, dim = tl.arange(0, acc.shape[0]), tl.arange(0, KEYS), tl.arange(0, acc.shape[1])
    is_row = (row < num_rows)[:, None]
    query_position = (
        prefix_length + first + tl.where(candidate > 0, 0, row)
    )  # candidates have the position of the next event
    pool_keys = pool + head.to(tl.int64) * pool_head
    ROWS: tl.constexpr = acc.shape[0]
    # Biases are prefetched one block ahead into registers: shared memory holds the keys and values of two programs.
    words = _words(tiles, first_tile, 0, HAS_BIAS, ROWS, KEYS, UNIT)
    for number in range(prefix_begin, prefix, KEYS):
        start = number
        is_seen = is_row
        is_key = start + key < prefix_length
        if REACH:
            start = tl.where(number < context, number, number - context + low)
            is_key = (start + key < prefix_length) & (start + key >= floor)
            is_seen = _is_near(query_position, start + key, REACH, CONTEXT)
        page = tl.load(pages + first_page + start // PAGE).to(tl.int64)
        slot = page * PAGE + start % PAGE + key
        at = slot[:, None] * DIM + dim[None, :]
        own_scales = scales + head * scale_head + slot if IS_FP8 else scales
        bias = _bias(words, HAS_BIAS, ROWS, KEYS)
        if HAS_BIAS:
            ahead = (number - prefix_begin) // KEYS + 1
            words = _words(tiles, first_tile, ahead, HAS_BIAS, ROWS, KEYS, UNIT)
        acc, most, total = _attend(
            acc,
            most,
            total,
            q,
            pool_keys + at,
            pool_keys + pool_value + at,
            _powers(own_scales, is_key, TYPE, IS_FP8, IS_FAST),
            _powers(own_scales + scale_value if IS_FP8 else own_scales, is_key, TYPE, IS_FP8, IS_FAST),
            is_key,
            is_channel,
            is_seen,
            bias,
            scale,
            MODE,
            TYPE,
            REACH > 0,
            IS_PADDED,
            HAS_BIAS,
            IS_FP8,
            IS_FAST,
            PRECISION,
        )
    num_old = (prefix - prefix_begin + KEYS - 1) // KEYS
    begin = num_seen * 0
    all_see = tl.minimum(first + 1, num_seen) // KEYS * KEYS
    if REACH:  # start at the first visible block
        begin = tl.minimum(tl.maximum(low - prefix_length, 0), num_seen)
        all_see = begin
    new = history_row.to(tl.int64) + key
    if not REACH:
        for start in range(0, all_see, KEYS):
            bias = _bias(words, HAS_BIAS, ROWS, KEYS)
            if HAS_BIAS:
                ahead = num_old + start // KEYS + 1
                words = _words(tiles, first_tile, ahead, HAS_BIAS, ROWS, KEYS, UNIT)
            acc, most, total = _attend(
                acc,
                most,
                total,
                q,
                k + (start + new)[:, None] * k_stride + column[None, :],
                v + (start + new)[:, None] * v_stride + column[None, :],
                1.0,
                1.0,
                start + key < num_seen,
                is_channel,
                is_row,
                bias,
                scale,
                MODE,
                TYPE,
                False,
                IS_PADDED,
                HAS_BIAS,
                False,
                IS_FAST,
                PRECISION,
            )
    for start in range(all_see, num_seen, KEYS):
        is_key = start + key < num_seen
        is_seen = (start + key)[None, :] <= (first + row)[:, None]
        if REACH:
            is_key = is_key & (prefix_length + start + key >= floor)
            is_seen = is_seen & _is_near(query_position, prefix_length + start + key, REACH, CONTEXT)
        bias = _bias(words, HAS_BIAS, ROWS, KEYS)
        if HAS_BIAS:
            ahead = num_old + (start - begin) // KEYS + 1
            words = _words(tiles, first_tile, ahead, HAS_BIAS, ROWS, KEYS, UNIT)
        acc, most, total = _attend(
            acc,
            most,
            total,
            q,
            k + (start + new)[:, None] * k_stride + column[None, :],
            v + (start + new)[:, None] * v_stride + column[None, :],
            1.0,
            1.0,
            is_key,
            is_channel,
            is_seen,
            bias,
            scale,
            MODE,
            TYPE,
            True,
            IS_PADDED,
            HAS_BIAS,
            False,
            IS_FAST,
            PRECISION,
        )
    return acc, most, total, num_old + (num_seen - begin + KEYS - 1) // KEYS


@triton.jit
def attention_kernel(
    q,
    k,
    v,
    out,
    pool,
    scales,
    tiles,
    blocks,
    pages,
    sums,
    statistics,
    arrived,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    pool_value,
    pool_head,
    scale_value,
    scale_head,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
    ARE_CANDIDATES: tl.constexpr,
    REACH: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    block = blocks + (tl.program_id(0) // HEADS) * FIELDS
    num_rows = tl.load(block + 1)
    if num_rows == 0:
        return
    TYPE: tl.constexpr = out.dtype.element_ty
    candidate, num_parts, part, first_part = (
        tl.load(block + 7),
        tl.load(block + 9),
        tl.load(block + 10),
        tl.load(block + 11),
    )
    dim, row = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    is_channel = dim < DIM
    is_row = row < num_rows
    is_here = is_row[:, None]
    if WIDTH > DIM:
        is_here = is_here & is_channel[None, :]
    rows = tl.load(block).to(tl.int64) + row
    asking = (candidate - 1).to(tl.int64) + row if ARE_CANDIDATES else rows
    column = head * DIM + dim
    q_RD = rows
    if MODE != CHANNEL:
        q_RD = tl.load(q + asking[:, None] * q_stride + column[None, :], mask=is_here, other=0.0)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc, most, total, read = _over_keys(
        acc,
        most,
        total,
        q_RD,
        k,
        v,
        pool,
        scales,
        tiles,
        block,
        pages,
        column,
        is_channel,
        head,
        k_stride,
        v_stride,
        pool_value,
        pool_head,
        scale_value,
        scale_head,
        scale,
        MODE,
        TYPE,
        DIM,
        PAGE,
        KEYS,
        UNIT,
        HAS_BIAS,
        IS_FP8,
        IS_FAST,
        PRECISION,
        REACH,
        CONTEXT,
    )
    if (candidate > 0) & (part == num_parts - 1):
        v_RD = tl.load(v + rows[:, None] * v_stride + column[None, :], mask=is_here, other=0.0).to(tl.float32)
        own = tl.zeros((ROWS,), tl.float32)
        if MODE != CHANNEL:
            k_RD = tl.load(k + rows[:, None] * k_stride + column[None, :], mask=is_here, other=0.0)
            own += tl.sum(q_RD.to(tl.float32) * k_RD.to(tl.float32), 1)
        if HAS_BIAS:
            own += tl.load(tiles + tl.load(block + 16).to(tl.int64) * (ROWS * UNIT) + read * (ROWS * KEYS)).to(
                tl.float32
            )
        if MODE == SILU:
            own = _silu(own, IS_FAST)
        if MODE == SOFTMAX:
            larger = tl.maximum(most, own * scale)
            shrunk = tl.exp(most - larger)
            own = tl.exp(own * scale - larger)
            acc, total, most = acc * shrunk[:, None], total * shrunk + own, larger
        acc += own[:, None] * v_RD
    is_complete = num_parts == 1
    if num_parts > 1:
        here = row[:, None] * (HEADS * WIDTH) + (head * WIDTH + dim)[None, :]
        tl.store(sums + (first_part + part).to(tl.int64) * (ROWS * HEADS * WIDTH) + here, acc)
        found = statistics + head * (2 * ROWS) + row
        if MODE == SOFTMAX:
            tl.store(found + (first_part + part) * (HEADS * 2 * ROWS), most)
            tl.store(found + (first_part + part) * (HEADS * 2 * ROWS) + ROWS, total)
        tl.debug_barrier()  # all threads must finish writing the part before the counter is incremented
        counter = arrived + first_part * HEADS + head
        is_complete = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1
        if is_complete:  # the last program to finish adds all parts in a fixed order
            tl.debug_barrier()
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
            if MODE == SOFTMAX:
                most = tl.full((ROWS,), float("-inf"), tl.float32)
                total = tl.zeros((ROWS,), tl.float32)
                for other in range(num_parts):
                    at = found + (first_part + other) * (HEADS * 2 * ROWS)
                    most = tl.maximum(most, tl.load(at, cache_modifier=".cg"))
            for other in range(num_parts):
                one = tl.load(
                    sums + (first_part + other).to(tl.int64) * (ROWS * HEADS * WIDTH) + here, cache_modifier=".cg"
                )
                if MODE == SOFTMAX:
                    at = found + (first_part + other) * (HEADS * 2 * ROWS)
                    weight = tl.exp(tl.load(at, cache_modifier=".cg") - most)
                    total += weight * tl.load(at + ROWS, cache_modifier=".cg")
                    one = weight[:, None] * one
                acc += one
            tl.store(counter, 0)
    if is_complete:
        if MODE == SOFTMAX:
            acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        else:
            acc = acc * scale
        tl.store(out + asking[:, None] * out_stride + column[None, :], acc.to(TYPE), mask=is_here)


@triton.jit
def _to_fp8(x):
    """Return the float8_e4m3fn bits of numbers up to 448, rounded to nearest, with equal results on all devices."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 round to units of 2^-9: adding 1.5 * 2^23, whose unit is 1, leaves the result in the last bits.
    small = (tl.abs(x) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return (sign | tl.where(size < 0x3C800000, small, normal)).to(tl.uint8)


@triton.jit
def store_kernel(
    k,
    v,
    pool,
    scales,
    slots,
    num_rows,
    k_stride,
    v_stride,
    pool_value,
    pool_head,
    scale_value,
    scale_head,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
    is_kept = (slot >= 0)[:, None] & (dim < DIM)[None, :]
    column = (head * DIM + dim)[None, :]
    pointers = pool + head.to(tl.int64) * pool_head + slot[:, None] * DIM + dim[None, :]
    for part in tl.static_range(2):
        if part == 0:
            x = tl.load(k + row[:, None] * k_stride + column, mask=is_kept, other=0.0)
        else:
            x = tl.load(v + row[:, None] * v_stride + column, mask=is_kept, other=0.0)
        if IS_FP8:
            x = x.to(tl.float32)
            bits = (tl.max(tl.abs(x), 1) / LARGEST_FP8).to(tl.int32, bitcast=True)
            exponent = tl.minimum(tl.maximum((bits + 0x7FFFFF) >> 23, 1), MOST_EXPONENT)
            inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            x = tl.minimum(tl.maximum(x * inverse[:, None], -LARGEST_FP8), LARGEST_FP8)
            tl.store(pointers + part * pool_value, _to_fp8(x), mask=is_kept)
            own = scales + part * scale_value + head * scale_head + slot
            tl.store(own, exponent.to(tl.uint8), mask=slot >= 0)
        else:
            tl.store(pointers + part * pool_value, x.to(pool.dtype.element_ty), mask=is_kept)
