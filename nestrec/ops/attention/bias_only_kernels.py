"""Triton kernels of bias-only attention (bias_only.py). Imported only if CUDA or Triton's interpreter is used.

weights          writes the values of a time table or function for blocks of rows and all tokens these attend to
product          sums rows weighted by these weights and by a strip: a program owns BM rows and BW channels
position, time   gradients of the tables as sums over tiles of pairs: a program owns the tiles of one block distance,
                 or the tiles of one block of queries
function         gradient of the scalars of a time function, a program owns tiles of one block of queries

Rows are queries, which see earlier tokens, or keys if reversed, which are seen by later tokens. With a window and a
contextual prefix (mask_and_bias.py), blocks outside of both are skipped. Every sum is computed by one program in a
fixed order, so that runs are bitwise reproducible.
"""

import triton
import triton.language as tl

from nestrec.ops.attention.time_triton import time_bucket, time_function

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0912, PLR0917


@triton.jit
def _block_of(schedule, item, BM: tl.constexpr, REVERSED: tl.constexpr):
    """Return the start and length of an item's sequence, the item's first row, and the range of tokens that form
    pairs with its rows.

    The blocks of a sequence with most work come first.
    """
    entry = schedule + 4 * item
    start, length = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    first = (item - tl.load(entry + 2)) * BM
    if REVERSED:
        return start, length, first, first, length
    else:
        first = (tl.cdiv(length, BM) - 1) * BM - first
        return start, length, first, 0, tl.minimum(first + BM, length)


@triton.jit
def _tile_bytes(buckets, tile, query_block, key_block, length):
    """Load the buckets of one tile, (keys, queries); of another tile if it is above the diagonal or after the end."""
    one = tl.arange(0, 64)
    query_block = tl.minimum(query_block, tl.cdiv(length, 64) - 1)
    number = tile + query_block * (query_block + 1) // 2 + tl.minimum(key_block, query_block)
    return tl.load(buckets + number.to(tl.int64) * 4096 + one[:, None] * 64 + one[None, :])


@triton.jit
def _bucket_of_tile(buckets, tile, first, low, length, BM: tl.constexpr, REVERSED: tl.constexpr):
    """Load the buckets of rows from `first` on and tokens from `low` on, (BM, 64), from the tiles of pair_tiles.py."""
    tl.static_assert(BM == 128)
    if REVERSED:
        upper = _tile_bytes(buckets, tile, low // 64, first // 64, length)
        lower = _tile_bytes(buckets, tile, low // 64, first // 64 + 1, length)
    else:
        upper = _tile_bytes(buckets, tile, first // 64, low // 64, length).T
        lower = _tile_bytes(buckets, tile, first // 64 + 1, low // 64, length).T
    return tl.join(upper, lower).permute((2, 0, 1)).reshape((BM, 64)).to(tl.int32)


@triton.jit
def _visible_blocks(
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
    """Return the number of blocks of BN tokens that form pairs with rows, of prefix blocks, and the first other block.

    Ranges are multiples of BM regardless of BN, because one kernel reads what another has written.
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
    """Return whether pairs of rows x and tokens y are in the window or the prefix; keys must not be after queries."""
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
    """Write out[x, y] = table[bucket], or table[num_buckets + 1] for masked pairs; or the time function in `table`."""
    slot = tl.program_id(0)
    item = first_item + slot
    if item >= tl.load(state):
        return
    start, length, first, begin, end = _block_of(schedule, item, BM, REVERSED)
    end = tl.cdiv(end, BM) * BM  # other kernels read full tiles
    row = tl.arange(0, BM)
    x = first + row
    own = tl.load((time if REVERSED else query_time) + start + x, mask=x < length, other=0.0)
    pointers = out + (slot * BM + row)[:, None] * columns
    tile = 0
    if buckets is not None:
        tile = tl.load(first_tile + tl.load(schedule + 4 * item + 3))
    count, prefix, near = _visible_blocks(first, begin, end, window, context, BM, BN, REVERSED, HAS_RULES)
    if HAS_RULES:
        count = prefix + tl.cdiv((count - prefix) * BN, BM) * (BM // BN)  # other kernels read full tiles
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
                bucket = _bucket_of_tile(buckets, tile, first, low, length, BM, REVERSED)
            value = tl.load(table + tl.where(seen, bucket, num_buckets + 1))
        tl.store(pointers + y[None, :], value.to(out.dtype.element_ty))


@triton.jit
def _rows(x, start, first, row, length, step, low, channel, WIDTH: tl.constexpr):
    """Load rows from `first` on of the sequence at `start` and channels from `low` on; zeros after their ends.

    An address is a scalar plus an offset that is loop-invariant.
    """
    pointers = x + (start + first) * step + low
    mask = (row < length - first)[:, None] & (channel < WIDTH - low)[None, :]
    return tl.load(pointers + (row[:, None] * step + channel[None, :]), mask=mask, other=0.0)


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
    """Compute out[x] = sum_y strip[x - y] by_position[y] + weights[x, y] by_time[y]."""
    chunks: tl.constexpr = (WIDTH + BW - 1) // BW
    slot = tl.program_id(0) // chunks  # channels of one block are adjacent and share its weights in the cache
    item = first_item + slot
    if item >= tl.load(state):
        return
    start, length, first, begin, end = _block_of(schedule, item, BM, REVERSED)
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    low_w = tl.program_id(0) % chunks * BW
    channel = tl.arange(0, BW)
    total = tl.zeros((BM, BW), tl.float32)
    count, prefix, near = _visible_blocks(first, begin, end, window, context, BM, BN, REVERSED, HAS_RULES)
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
    pointers = out + (start + first) * WIDTH + low_w + (row[:, None] * WIDTH + channel[None, :])
    mask = (row < length - first)[:, None] & (channel < WIDTH - low_w)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_products(
    products, grad, v, start, length, i0, j0, row, low, channel, v_step, WIDTH: tl.constexpr, PRECISION: tl.constexpr
):
    left = _rows(grad, start, i0, row, length, WIDTH, low, channel, WIDTH)
    right = _rows(v, start, j0, row, length, v_step, low, channel, WIDTH)
    return tl.dot(left, right.T, products, input_precision=PRECISION)


@triton.jit
def _by_bucket(products, bucket, masked_bucket, SLOTS: tl.constexpr):
    """Sum a tile by bucket; a tile contains few buckets, because times are either far apart or similar."""
    total = tl.zeros((SLOTS,), tl.float32)
    most = tl.max(tl.where(bucket == masked_bucket, -1, bucket))
    for b in range(tl.min(bucket), most + 1):
        total += tl.where(tl.arange(0, SLOTS) == b, tl.sum(tl.where(bucket == b, products, 0.0)), 0.0)
    return total


@triton.jit(do_not_specialize=["first_item", "masked_bucket", "window", "context"])
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
    masked_bucket,
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
    """Compute out[item, split, bucket], the sum of grad[i] . v[j] over the pairs of a bucket with i in the item."""
    slot, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    item = first_item + slot
    row, channel = tl.arange(0, BM), tl.arange(0, BW)
    total = tl.zeros((SLOTS,), tl.float32)
    if item < tl.load(state):
        start, length, i0, _, end = _block_of(schedule, item, BM, False)
        count, prefix, near = _visible_blocks(i0, 0, end, window, context, BM, BM, False, HAS_RULES)
        for number in range(split, count, SPLITS):
            j0 = tl.where(number < prefix, number, near + number - prefix) * BM
            products = tl.zeros((BM, BM), tl.float32)
            for low in range(0, WIDTH, BW):
                products = _add_products(
                    products, grad, v, start, length, i0, j0, row, low, channel, v_step, WIDTH, PRECISION
                )
            bucket = tl.load(buckets + slot * BM * columns + j0 + (row[:, None] * columns + row[None, :]))
            total += _by_bucket(products, bucket.to(tl.int32), masked_bucket, SLOTS)
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
    """Compute out[item, split, 0..2], the sums of grad[i] . v[j] times e, e u and e u x of `time_function`.

    Sums are over the pairs with i in the item.
    """
    item, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row, column, channel, slot = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BW), tl.arange(0, 4)
    total = tl.zeros((4,), tl.float32)
    if item < tl.load(state):
        start, length, i0, _, end = _block_of(schedule, item, BM, False)
        i = i0 + row
        query_seconds = tl.load(query_time + start + i, mask=i < length, other=0.0)
        count, prefix, near = _visible_blocks(i0, 0, end, window, context, BM, BN, False, HAS_RULES)
        for number in range(split, count, SPLITS):
            j0 = tl.where(number < prefix, number, near + number - prefix) * BN
            products = tl.zeros((BM, BN), tl.float32)
            for low in range(0, WIDTH, BW):
                left = _rows(grad, start, i0, row, length, WIDTH, low, channel, WIDTH)
                right = _rows(v, start, j0, column, length, v_step, low, channel, WIDTH)
                products = tl.dot(left, right.T, products, input_precision=PRECISION)
            j = j0 + column
            key_seconds = tl.load(time + start + j, mask=j < length, other=0.0)
            value, steep, exponent = time_function(scalars, key_seconds, query_seconds, FAST)
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
    """Sum a tile by diagonal; element (r, c) is on diagonal r - c, which is column BM + r - c of the skewed tile."""
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
    """Sum the tiles of one block distance whose key blocks are in the range from `first` to `end` (exclusive)."""
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
    """Sum grad[i] . v[j] over the tiles whose key block is program_id(0) blocks before their query block.

    out[split, distance, :] holds the 2 * BM diagonals of a tile; index BM is the one with i - j = distance * BM. All
    tiles of one distance have the same diagonals, so tiles are added before the diagonals are reduced.
    """
    distance, split = tl.program_id(0), tl.program_id(1)
    many: tl.constexpr = 1 << 28
    row = tl.arange(0, BM)
    seen = row[None, :] - distance * BM <= row[:, None]
    if HAS_RULES:
        # Tiles of the prefix, the tile in which it ends, and all others: each kind has one mask for all sequences.
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
