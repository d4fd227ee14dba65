"""Triton kernels of attention by bias alone. Imported only where CUDA or Triton's interpreter is used.

weights          values of a time table or function, for blocks of rows and all tokens these see, written to memory
product          sums of rows by such weights and by those of a strip: a program owns BM rows and BW channels
position, time   gradients of the tables, sums over tiles of pairs: a program owns tiles at one distance in blocks, or
                 tiles of one block of queries
function         gradients of a time function's numbers, alike

Rows are queries and see earlier tokens, or, where it is reversed, keys and see later ones. With a window and a prefix
that all see (mask.py), blocks outside of both are left out. Every sum is made by one program in a fixed order, so that
runs agree to the bit.
"""

import triton
import triton.language as tl

from nestrec.ops.attention.time_triton import time_bucket, time_function

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0912, PLR0917


@triton.jit
def _block_of(schedule, item, BM: tl.constexpr, REVERSED: tl.constexpr):
    """Sequence of an item, first of its rows, and the tokens that these see. Most work of a sequence comes first."""
    entry = schedule + 4 * item
    start, length = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    first = (item - tl.load(entry + 2)) * BM
    if REVERSED:
        return start, length, first, first, length
    else:
        first = (tl.cdiv(length, BM) - 1) * BM - first
        return start, length, first, 0, tl.minimum(first + BM, length)


@triton.jit
def _tile_bytes(buckets, tile, asks, sees, length):
    """(keys, queries) of one tile; those of another where it is behind the diagonal or the end."""
    one = tl.arange(0, 64)
    asks = tl.minimum(asks, tl.cdiv(length, 64) - 1)
    number = tile + asks * (asks + 1) // 2 + tl.minimum(sees, asks)
    return tl.load(buckets + number.to(tl.int64) * 4096 + one[:, None] * 64 + one[None, :])


@triton.jit
def _found_before(buckets, tile, first, low, length, BM: tl.constexpr, REVERSED: tl.constexpr):
    """(BM, 64) buckets of rows from `first` on with tokens from `low` on, out of tiles of pair_tiles.py."""
    tl.static_assert(BM == 128)
    if REVERSED:
        upper = _tile_bytes(buckets, tile, low // 64, first // 64, length)
        lower = _tile_bytes(buckets, tile, low // 64, first // 64 + 1, length)
    else:
        upper = _tile_bytes(buckets, tile, first // 64, low // 64, length).T
        lower = _tile_bytes(buckets, tile, first // 64 + 1, low // 64, length).T
    return tl.join(upper, lower).permute((2, 0, 1)).reshape((BM, 64)).to(tl.int32)


@triton.jit
def _blocks_met(
    first,
    begin,
    end,
    window,
    context,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REVERSED: tl.constexpr,
    HAS_RULES: tl.constexpr,
):
    """(blocks of BN tokens that rows from `first` on meet, how many of them are the prefix, the first of the others)

    In whole blocks of BM, whatever BN is: what one kernel writes, another reads.
    """
    if HAS_RULES:
        if REVERSED:
            end = tl.where(first < context, end, tl.minimum(end, first + BM - 1 + window))
            low = begin
            prefix = 0
        else:
            low = tl.maximum(0, first - window + 1) // BM * BM
            prefix = tl.minimum(tl.cdiv(context, BM) * BM, low)
        return prefix // BN + tl.cdiv(end - low, BN), prefix // BN, low // BN
    else:
        return tl.cdiv(end - begin, BN), 0, begin // BN


@triton.jit
def _is_near(x, y, window, context, REVERSED: tl.constexpr):
    """Of rows x and those that they meet: a query and a key not after it."""
    if REVERSED:
        return (y[None, :] - x[:, None] < window) | (x < context)[:, None]
    else:
        return (x[:, None] - y[None, :] < window) | (y < context)[None, :]


@triton.jit(do_not_specialize=["first_item", "num_buckets", "num_splits", "window", "context"])
def bias_weights_kernel(
    out,
    table,
    schedule,
    state,
    query_time,
    time,
    buckets,
    first_tile,
    edges,
    first_item,
    columns,
    num_buckets,
    num_splits,
    window,
    context,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REVERSED: tl.constexpr,
    IS_FUNCTION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_RULES: tl.constexpr,
):
    """out[x, y] = table[bucket], or table[num_buckets + 1] where x does not see y; or the function that table holds."""
    slot = tl.program_id(0)
    item = first_item + slot
    if item >= tl.load(state):
        return
    start, length, first, begin, end = _block_of(schedule, item, BM, REVERSED)
    end = tl.cdiv(end, BM) * BM  # others read whole tiles
    row = tl.arange(0, BM)
    x = first + row
    own = tl.load((time if REVERSED else query_time) + start + x, mask=x < length, other=0.0)
    place = out + (slot * BM + row)[:, None] * columns
    tile = 0
    if buckets is not None:
        tile = tl.load(first_tile + tl.load(schedule + 4 * item + 3))
    count, prefix, near = _blocks_met(first, begin, end, window, context, BM, BN, REVERSED, HAS_RULES)
    if HAS_RULES:
        count = prefix + tl.cdiv((count - prefix) * BN, BM) * (BM // BN)  # others read whole tiles
    for number in range(tl.program_id(1), count, num_splits):
        low = tl.where(number < prefix, number, near + number - prefix) * BN
        y = low + tl.arange(0, BN)
        other = tl.load((query_time if REVERSED else time) + start + y, mask=y < length, other=0.0)
        if REVERSED:
            delta = other[None, :] - own[:, None]
            seen = (x[:, None] <= y[None, :]) & (y < length)[None, :]
        else:
            delta = own[:, None] - other[None, :]
            seen = (y[None, :] <= x[:, None]) & (x < length)[:, None]
        if HAS_RULES:
            seen = seen & _is_near(x, y, window, context, REVERSED)
        if IS_FUNCTION:
            if REVERSED:
                value, _, _ = time_function(table, own, other, FAST)
            else:
                value, _, _ = time_function(table, other, own, FAST)
                value = value.T
            value = tl.where(seen, tl.load(table).to(tl.float32) * value, 0.0)
        else:
            if buckets is None:
                bucket = time_bucket(delta, edges, num_buckets)
            else:
                bucket = _found_before(buckets, tile, first, low, length, BM, REVERSED)
            value = tl.load(table + tl.where(seen, bucket, num_buckets + 1))
        tl.store(place + y[None, :], value.to(out.dtype.element_ty))


@triton.jit
def _rows(x, start, first, row, length, step, low, channel, WIDTH: tl.constexpr):
    """Rows from `first` on of the sequence at `start`, channels from `low` on; zeros behind their ends.

    An address is one number and an offset that no loop changes.
    """
    place = x + (start + first) * step + low
    mask = (row < length - first)[:, None] & (channel < WIDTH - low)[None, :]
    return tl.load(place + (row[:, None] * step + channel[None, :]), mask=mask, other=0.0)


@triton.jit(do_not_specialize=["first_item", "origin", "window", "context"])
def bias_product_kernel(
    by_position,
    by_time,
    out,
    strip,
    weights,
    schedule,
    state,
    first_item,
    origin,
    columns,
    position_step,
    time_step,
    window,
    context,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    REVERSED: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_RULES: tl.constexpr,
):
    """out[x] = sum_y strip[x - y] by_position[y] + weights[x, y] by_time[y]."""
    chunks: tl.constexpr = (WIDTH + BW - 1) // BW
    slot = tl.program_id(0) // chunks  # channels of one block are neighbours, and share its weights in the cache
    item = first_item + slot
    if item >= tl.load(state):
        return
    start, length, first, begin, end = _block_of(schedule, item, BM, REVERSED)
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    low_w, channel = tl.program_id(0) % chunks * BW, tl.arange(0, BW)
    total = tl.zeros((BM, BW), tl.float32)
    count, prefix, near = _blocks_met(first, begin, end, window, context, BM, BN, REVERSED, HAS_RULES)
    if HAS_POSITION:
        for number in range(0, count):
            low = (near + number) * BN
            if HAS_RULES:
                low = tl.where(number < prefix, number, near + number - prefix) * BN
            left = tl.load(strip + (origin + first - low) * BN + (row[:, None] * BN + column[None, :]))
            if HAS_RULES:
                left = tl.where(_is_near(first + row, low + column, window, context, REVERSED), left, 0.0)
            right = _rows(by_position, start, low, column, length, position_step, low_w, channel, WIDTH)
            total = tl.dot(left, right, total, input_precision=PRECISION)
    if HAS_TIME:
        for number in range(0, count):
            low = (near + number) * BN
            if HAS_RULES:
                low = tl.where(number < prefix, number, near + number - prefix) * BN
            left = tl.load(weights + slot * BM * columns + low + (row[:, None] * columns + column[None, :]))
            right = _rows(by_time, start, low, column, length, time_step, low_w, channel, WIDTH)
            total = tl.dot(left, right, total, input_precision=PRECISION)
    place = out + (start + first) * WIDTH + low_w + (row[:, None] * WIDTH + channel[None, :])
    mask = (row < length - first)[:, None] & (channel < WIDTH - low_w)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_products(
    products, grad, v, start, length, i0, j0, row, low, channel, v_step, WIDTH: tl.constexpr, PRECISION: tl.constexpr
):
    left = _rows(grad, start, i0, row, length, WIDTH, low, channel, WIDTH)
    right = _rows(v, start, j0, row, length, v_step, low, channel, WIDTH)
    return tl.dot(left, right.T, products, input_precision=PRECISION)


@triton.jit
def _by_bucket(products, bucket, unseen, SLOTS: tl.constexpr):
    """Sums of a tile; it holds few buckets, since times are far apart or alike."""
    total = tl.zeros((SLOTS,), tl.float32)
    most = tl.max(tl.where(bucket == unseen, -1, bucket))
    for b in range(tl.min(bucket), most + 1):
        total += tl.where(tl.arange(0, SLOTS) == b, tl.sum(tl.where(bucket == b, products, 0.0)), 0.0)
    return total


@triton.jit(do_not_specialize=["first_item", "unseen", "window", "context"])
def bias_time_kernel(
    grad,
    v,
    buckets,
    out,
    schedule,
    state,
    first_item,
    columns,
    v_step,
    unseen,
    window,
    context,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BW: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_RULES: tl.constexpr,
):
    """out[item, split, bucket] = sums of grad[i] . v[j] over the pairs of a bucket, i of an item."""
    slot, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    item = first_item + slot
    row, channel = tl.arange(0, BM), tl.arange(0, BW)
    total = tl.zeros((SLOTS,), tl.float32)
    if item < tl.load(state):
        start, length, i0, _, end = _block_of(schedule, item, BM, False)
        count, prefix, near = _blocks_met(i0, 0, end, window, context, BM, BM, False, HAS_RULES)
        for number in range(split, count, SPLITS):
            j0 = tl.where(number < prefix, number, near + number - prefix) * BM
            products = tl.zeros((BM, BM), tl.float32)
            for low in range(0, WIDTH, BW):
                products = _add_products(
                    products, grad, v, start, length, i0, j0, row, low, channel, v_step, WIDTH, PRECISION
                )
            bucket = tl.load(buckets + slot * BM * columns + j0 + (row[:, None] * columns + row[None, :]))
            total += _by_bucket(products, bucket.to(tl.int32), unseen, SLOTS)
    tl.store(out + (item * SPLITS + split) * SLOTS + tl.arange(0, SLOTS), total)


@triton.jit(do_not_specialize=["window", "context"])
def bias_function_kernel(
    grad,
    v,
    scalars,
    out,
    schedule,
    state,
    query_time,
    time,
    v_step,
    window,
    context,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_RULES: tl.constexpr,
):
    """out[item, split, 0..2] = sums of grad[i] . v[j] by e, e u and e u x of `time_function`, i of an item."""
    item, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row, column, channel, slot = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BW), tl.arange(0, 4)
    total = tl.zeros((4,), tl.float32)
    if item < tl.load(state):
        start, length, i0, _, end = _block_of(schedule, item, BM, False)
        i = i0 + row
        asked = tl.load(query_time + start + i, mask=i < length, other=0.0)
        count, prefix, near = _blocks_met(i0, 0, end, window, context, BM, BN, False, HAS_RULES)
        for number in range(split, count, SPLITS):
            j0 = tl.where(number < prefix, number, near + number - prefix) * BN
            products = tl.zeros((BM, BN), tl.float32)
            for low in range(0, WIDTH, BW):
                left = _rows(grad, start, i0, row, length, WIDTH, low, channel, WIDTH)
                right = _rows(v, start, j0, column, length, v_step, low, channel, WIDTH)
                products = tl.dot(left, right.T, products, input_precision=PRECISION)
            j = j0 + column
            seen_at = tl.load(time + start + j, mask=j < length, other=0.0)
            value, steep, exponent = time_function(scalars, seen_at, asked, FAST)
            seen = (j[:, None] <= i[None, :]) & (i < length)[None, :]
            if HAS_RULES:
                seen = seen & _is_near(j, i, window, context, True)
            by_key = tl.where(seen, products.T, 0.0)
            total += tl.where(slot == 0, tl.sum(by_key * value), 0.0)
            total += tl.where(slot == 1, tl.sum(by_key * steep), 0.0)
            total += tl.where(slot == 2, tl.sum(by_key * steep * exponent), 0.0)
    tl.store(out + (item * SPLITS + split) * 4 + slot, total)


@triton.jit
def _by_diagonal(products, BM: tl.constexpr):
    """Element (r, c) of a tile lies on the diagonal r - c: column BM + r - c of the skewed tile."""
    column = tl.arange(0, BM)[:, None] + BM - tl.arange(0, 2 * BM)[None, :]
    inside = (column >= 0) & (column < BM)
    skewed = tl.gather(products, tl.where(inside, column, 0), 1)
    return tl.sum(tl.where(inside, skewed, 0.0), axis=0)


@triton.jit
def _tiles_at(
    grad,
    v,
    offsets,
    num_sequences,
    split,
    num_splits,
    distance,
    first,
    end,
    v_step,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum of the tiles at a distance whose key blocks are those from `first` to `end`."""
    chunks: tl.constexpr = (WIDTH + BW - 1) // BW
    row, channel = tl.arange(0, BM), tl.arange(0, BW)
    products = tl.zeros((BM, BM), tl.float32)
    for sequence in range(split, num_sequences, num_splits):
        start = tl.load(offsets + sequence)
        length = (tl.load(offsets + sequence + 1) - start).to(tl.int32)
        for step in range(first * chunks, tl.minimum(end, tl.cdiv(length, BM) - distance) * chunks):
            j0 = step // chunks * BM
            i0 = j0 + distance * BM
            low = step % chunks * BW
            products = _add_products(
                products, grad, v, start, length, i0, j0, row, low, channel, v_step, WIDTH, PRECISION
            )
    return products


@triton.jit(do_not_specialize=["num_sequences", "num_splits", "window", "context"])
def bias_position_kernel(
    grad,
    v,
    out,
    offsets,
    num_sequences,
    num_splits,
    v_step,
    window,
    context,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BW: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_RULES: tl.constexpr,
):
    """Sums of grad[i] . v[j] over the tiles whose key block lies program_id(0) blocks before their queries.

    out[split, distance, :]: by the 2 BM diagonals of a tile, the one with i - j = distance * BM at BM. All such tiles
    have the same diagonals: they are added before these are.
    """
    distance, split = tl.program_id(0), tl.program_id(1)
    many: tl.constexpr = 1 << 28
    row = tl.arange(0, BM)
    seen = row[None, :] - distance * BM <= row[:, None]
    if HAS_RULES:
        # Tiles of the prefix, the one in which it ends, and the others: each of these has one mask for all sequences.
        near = distance * BM + row[:, None] - row[None, :] < window
        inside = context // BM
        edge = tl.cdiv(context, BM)
        some = _tiles_at(
            grad, v, offsets, num_sequences, split, num_splits, distance, 0, inside, v_step, WIDTH, BM, BW, PRECISION
        )
        total = _by_diagonal(tl.where(seen, some, 0.0), BM)
        some = _tiles_at(
            grad, v, offsets, num_sequences, split, num_splits, distance, inside, edge, v_step, WIDTH, BM, BW, PRECISION
        )
        total += _by_diagonal(tl.where(seen & (near | (row < context - inside * BM)[None, :]), some, 0.0), BM)
        end = tl.where((distance - 1) * BM + 1 < window, many, 0)  # no pair of the tiles is in the window
        some = _tiles_at(
            grad, v, offsets, num_sequences, split, num_splits, distance, edge, end, v_step, WIDTH, BM, BW, PRECISION
        )
        total += _by_diagonal(tl.where(seen & near, some, 0.0), BM)
    else:
        products = _tiles_at(
            grad, v, offsets, num_sequences, split, num_splits, distance, 0, many, v_step, WIDTH, BM, BW, PRECISION
        )
        total = _by_diagonal(tl.where(seen, products, 0.0), BM)
    tl.store(out + (split * tl.num_programs(0) + distance) * 2 * BM + tl.arange(0, 2 * BM), total)
