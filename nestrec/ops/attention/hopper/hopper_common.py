"""Shared device functions of the Hopper attention kernels: work items, the producer warp, masks and activations.

A program is persistent and warp-specialized. One warp, the producer, takes items from the counter of the schedule,
passes them to the consumers through shared memory, and loads blocks with the tensor memory accelerator (TMA). Each
consumer, a warp group, owns 64 rows of x and runs matrix products over the blocks of y. They synchronize only at
mbarriers in shared memory, so that the elementwise work of one consumer overlaps with the products of the other.

Naming: x are the rows whose results an item computes, y are the rows that it sums over. Normally x are queries and y
are keys; reversed means that x are keys and y are queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0915, PLR0917, RUF059


ROWS = gl.constexpr(64)
"""Number of rows per consumer: one warp group, the height of one matrix instruction."""
FIELDS = gl.constexpr(16)
"""Number of int32 fields of an item in shared memory, rounded up to a power of two."""


@gluon.jit
def next_stage(stage, phase, NUM: gl.constexpr):
    stage += 1
    wraps = stage == NUM
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _entry(index, total, table, heads):
    """Load the schedule row of an item; any row if the index is after the last item."""
    entry = table + 4 * (gl.minimum(index, total - 1) // heads)
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)


@gluon.jit
def _item(
    index,
    entry,
    heads,
    rules,
    REVERSED: gl.constexpr,
    HAS_RULES: gl.constexpr,
    XB: gl.constexpr,
    BY_BLOCK: gl.constexpr,
):
    """Return first token, length and history length of the sequence, the head, and the first row of the block.

    Adjacent items are blocks of one head, which read the same y, or heads of one block, which read the same biases.
    """
    start, length, before, sequence = entry
    blocks = (length + XB - 1) // XB
    within = index - before * heads
    if BY_BLOCK:
        head = within % heads
        block = within // heads
    else:
        head = within // blocks
        block = within % blocks
    if not REVERSED:
        block = blocks - 1 - block
    history = length
    if HAS_RULES:
        targets, num_context, window, ahead = rules
        if targets is not None:
            history = gl.maximum(length - gl.load(targets + sequence).to(gl.int32), 0)
    return start, length, history, head, block * XB


@gluon.jit
def _first_tile(bias, entry):
    """Return the index of the first tile of the sequence among the tiles of the batch."""
    words, origin, first_tile, bounds = bias
    if first_tile is None:
        return 0
    else:
        return gl.load(first_tile + entry[3])


@gluon.jit
def bound_of(bounds, start, sequence, x0):
    """Return the block of the same sequence at which near pairs become far, for a block of 128 rows (time_nodes.py)."""
    if bounds is None:
        return 0
    else:
        return gl.load(bounds + start // 128 + sequence + x0 // 128)


@gluon.jit
def values_tile(first_tile, query_block, key_block):
    """Return the tile of time-function values at nodes for blocks of 64 queries and of 128 keys (time_nodes.py)."""
    return (first_tile + query_block * (query_block + 1) // 2 + 2 * key_block + 1) // 2


@gluon.jit
def item_of(
    index, total, table, heads, rules, first_tile, REVERSED: gl.constexpr, HAS_RULES: gl.constexpr, XB: gl.constexpr
):
    """Load an item without prefetching its schedule row."""
    entry = _entry(index, total, table, heads)
    start, length, history, head, x0 = _item(index, entry, heads, rules, REVERSED, HAS_RULES, XB, False)
    return start, length, history, head, x0, gl.load(first_tile + entry[3]), entry[3]


@gluon.jit
def _put(slots, slot, FIELD: gl.constexpr, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(slot * FIELDS + FIELD).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _get(slots, slot, FIELD: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(slots.index(slot * FIELDS + FIELD).load(layout), 0)


@gluon.jit
def put_item(slots, slot, start, length, history, head, x0, low, high, prefix, first_tile, bound, index):
    _put(slots, slot, 0, start)
    _put(slots, slot, 1, length)
    _put(slots, slot, 2, history)
    _put(slots, slot, 3, head)
    _put(slots, slot, 4, x0)
    _put(slots, slot, 5, low)
    _put(slots, slot, 6, high)
    _put(slots, slot, 7, prefix)
    _put(slots, slot, 8, first_tile)
    _put(slots, slot, 9, bound)
    _put(slots, slot, 10, index)


@gluon.jit
def put_sequence(slots, slot, sequence):
    _put(slots, slot, 11, sequence)


@gluon.jit
def get_index(slots, slot):
    """Read the index of an item and of its sequence; valid if the producer has stored them."""
    return _get(slots, slot, 10), _get(slots, slot, 11)


@gluon.jit
def put_end(slots, slot):
    """Store the end marker that follows the last item."""
    _put(slots, slot, 1, -1)


@gluon.jit
def get_item(slots, slot):
    return (
        _get(slots, slot, 0),
        _get(slots, slot, 1),
        _get(slots, slot, 2),
        _get(slots, slot, 3),
        _get(slots, slot, 4),
        _get(slots, slot, 5),
        _get(slots, slot, 6),
        _get(slots, slot, 7),
        _get(slots, slot, 8),
        _get(slots, slot, 9),
    )


@gluon.jit
def range_of_y(
    x0, length, history, rules, REVERSED: gl.constexpr, HAS_RULES: gl.constexpr, XB: gl.constexpr, YB: gl.constexpr
):
    """Return the range [low, high) of y blocks paired with a block of x, and the number of prefix blocks before it.

    The prefix blocks hold the contextual prefix.
    """
    x1 = gl.minimum(length, x0 + XB)
    low = 0
    prefix = 0
    if REVERSED:
        low = x0 // YB
        end = length
    else:
        end = x1
    if HAS_RULES:
        targets, num_context, window, ahead = rules
        if REVERSED:
            is_context = x0 < num_context
            end = x1 - 1 + window
            end = gl.where((end > history) | is_context, length, gl.maximum(end, x1))
            prefix = gl.minimum((ahead + YB - 1) // YB, low)
        else:
            is_context = x0 < ahead
            low = gl.where(is_context, 0, gl.maximum(0, gl.minimum(x0, history) - window + 1) // YB)
            end = gl.where(is_context, gl.maximum(x1, history), x1)
            prefix = gl.minimum((num_context + YB - 1) // YB, low)
    return low, (end + YB - 1) // YB, prefix


@gluon.jit
def row_of_block(i, low, high, prefix, REVERSED: gl.constexpr, HAS_RULES: gl.constexpr, YB: gl.constexpr):
    """Return the first row of the i-th block of y; blocks start at the diagonal, the contextual prefix comes last."""
    if REVERSED:
        block = low + i
    else:
        block = high - 1 - i
    if HAS_RULES:
        block = gl.where(i < high - low, block, i - (high - low))
    return block * YB


@gluon.jit
def skipped_blocks(x0, length, low, high, prefix, REVERSED: gl.constexpr, HAS_RULES: gl.constexpr, YB: gl.constexpr):
    """Return the number of leading y blocks that are completely masked for the rows from x0 on."""
    skipped = 0
    if not HAS_RULES:
        if REVERSED:
            skipped = x0 // YB - low
        else:
            skipped = high - (gl.minimum(length, x0 + ROWS) + YB - 1) // YB
    return gl.where(x0 < length, skipped, high - low + prefix)


@gluon.jit
def load_rows(desc, start, length, row, head, bar, smem):
    """Load rows of one sequence with TMA; rows after its end and columns after the width of a head are zero.

    Coordinates wrap around so that the bound of the tensor coincides with the end of the sequence.
    """
    billion: gl.constexpr = 1 << 30
    tma.async_copy_global_to_shared(desc, [billion, start + length, billion - length + row, head, 0], bar, smem)


@gluon.jit
def store_rows(desc, start, length, row, head, smem):
    """Store rows of one sequence with TMA; rows after its end and columns after the width of a head are not written."""
    billion: gl.constexpr = 1 << 30
    tma.async_copy_shared_to_global(desc, [billion, start + length, billion - length + row, head, 0], smem)


@gluon.jit
def producer(
    descs,
    smem,
    bars,
    table,
    state,
    heads,
    rules,
    bias,
    far,
    staged,
    COUNTER: gl.constexpr,
    BY_BLOCK: gl.constexpr,
    HAS_RULES: gl.constexpr,
    GRADIENT: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    YB: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    XSTAGES: gl.constexpr,
):
    x0_desc, x1_desc, y0_desc, y1_desc = descs
    x0_smem, x1_smem, y0_smem, y1_smem, item_smem = smem
    x_full, x_empty, y0_full, y0_empty, y1_full, y1_empty, item_full, item_empty = bars
    values_desc, basis_desc, values_smem, basis_smem, zero_tile, far_bias = far
    HAS_FAR: gl.constexpr = values_desc is not None
    X_FAR: gl.constexpr = 32 * CONSUMERS * ROWS if HAS_FAR and REVERSED else 0
    Y_FAR: gl.constexpr = (
        (32 * ROWS if REVERSED else 32 * (YB + CONSUMERS * ROWS)) if HAS_FAR else 0  # language: allow chained-ternary
    )
    XB: gl.constexpr = CONSUMERS * ROWS
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    counter = state + 1 + COUNTER + lane * 0
    total = gl.load(state) * heads
    index = gl.program_id(0)
    taken = gl.atomic_add(counter, lane * 0 + 1, mask=lane == 0, sem="relaxed")
    entry = _entry(index, total, table, heads)
    xs, xp = 0, 1
    ys, yp = 0, 1
    its, itp = 0, 1
    words_desc, words_smem, words_full, words_empty = staged  # None if no biases are loaded by TMA
    words_phase = 3  # one bit per consumer
    while index < total:
        start, length, history, head, x0 = _item(index, entry, heads, rules, REVERSED, HAS_RULES, XB, BY_BLOCK)
        low, high, prefix = range_of_y(x0, length, history, rules, REVERSED, HAS_RULES, XB, YB)
        first_tile = _first_tile(bias, entry)
        bound = bound_of(bias[3], start, entry[3], x0)
        # Fetch the next item while the blocks of this one are being loaded.
        index = gl.num_programs(0) + gl.max(gl.where(lane == 0, taken, 0), 0)
        taken = gl.atomic_add(counter, lane * 0 + 1, mask=lane == 0, sem="relaxed")
        entry = _entry(index, total, table, heads)
        mbarrier.wait(item_empty.index(its), itp)
        put_item(item_smem, its, start, length, history, head, x0, low, high, prefix, first_tile, bound, 0)
        mbarrier.arrive(item_full.index(its), count=1)
        its, itp = next_stage(its, itp, 2)
        mbarrier.wait(x_empty.index(xs), xp)
        mbarrier.expect(x_full.index(xs), (2 if GRADIENT else 1) * XB * D * 2 + X_FAR)
        for c in gl.static_range(CONSUMERS):
            slot_index = xs * CONSUMERS + c
            load_rows(x0_desc, start, length, x0 + c * ROWS, head, x_full.index(xs), x0_smem.index(slot_index))
            if GRADIENT:
                load_rows(x1_desc, start, length, x0 + c * ROWS, head, x_full.index(xs), x1_smem.index(slot_index))
            if HAS_FAR and REVERSED:
                row = start + x0 + c * ROWS
                tma.async_copy_global_to_shared(basis_desc, [row, 0], x_full.index(xs), basis_smem.index(slot_index))
        xs, xp = next_stage(xs, xp, XSTAGES)
        for i in range(high - low + prefix):
            row = row_of_block(i, low, high, prefix, REVERSED, HAS_RULES, YB)
            mbarrier.wait(y0_empty.index(ys), yp)
            mbarrier.expect(y0_full.index(ys), YB * D * 2 + Y_FAR)
            load_rows(y0_desc, start, length, row, head, y0_full.index(ys), y0_smem.index(ys))
            if HAS_FAR and REVERSED:
                tile = gl.where(row // 128 >= bound, values_tile(first_tile, row // 64, x0 // 128), zero_tile)
                tma.async_copy_global_to_shared(values_desc, [tile * 64, 0], y0_full.index(ys), values_smem.index(ys))
            elif HAS_FAR:
                tma.async_copy_global_to_shared(basis_desc, [start + row, 0], y0_full.index(ys), basis_smem.index(ys))
                for c in gl.static_range(CONSUMERS):
                    query_block = x0 // 64 + c
                    is_far = (row // 128 < bound) & (query_block * 64 < length)
                    tile = gl.where(is_far, values_tile(first_tile, query_block, row // 128), zero_tile)
                    into = values_smem.index(ys * CONSUMERS + c)
                    tma.async_copy_global_to_shared(values_desc, [tile * 64, 0], y0_full.index(ys), into)
            mbarrier.wait(y1_empty.index(ys), yp)
            mbarrier.expect(y1_full.index(ys), YB * D * 2)
            load_rows(y1_desc, start, length, row, head, y1_full.index(ys), y1_smem.index(ys))
            if words_desc is not None:
                # Load the near-pair biases that each consumer needs, after the block that they belong to.
                for c in gl.static_range(CONSUMERS):
                    query_block = row // 64
                    key_block = x0 // 64 + c
                    is_near = (row // 128 < bound) if HAS_FAR else True
                    if is_near & (key_block <= query_block) & (key_block * 64 < length):
                        bar = words_full.index(c)
                        tile = first_tile + query_block * (query_block + 1) // 2 + key_block
                        mbarrier.wait(words_empty.index(c), (words_phase >> c) & 1)
                        mbarrier.expect(bar, 64 * 64 * 2)
                        tma.async_copy_global_to_shared(words_desc, [tile * 64, 0], bar, words_smem.index(c))
                        words_phase = words_phase ^ (1 << c)
            ys, yp = next_stage(ys, yp, STAGES)
    mbarrier.wait(item_empty.index(its), itp)
    put_end(item_smem, its)
    mbarrier.arrive(item_full.index(its), count=1)


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tile_positions(x0, y0, LAYOUT: gl.constexpr, REVERSED: gl.constexpr, YB: gl.constexpr):
    """Return the positions of the queries and of the keys of a tile."""
    x = (x0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))[:, None]
    y = (y0 + gl.arange(0, YB, gl.SliceLayout(0, LAYOUT)))[None, :]
    if REVERSED:
        return y, x
    else:
        return x, y


@gluon.jit
def is_unmasked(x0, y0, history, rules, REVERSED: gl.constexpr, HAS_RULES: gl.constexpr, YB: gl.constexpr):
    """Return whether no pair of a tile is masked."""
    if REVERSED:
        is_unmasked = y0 >= x0 + ROWS - 1
    else:
        is_unmasked = y0 + YB - 1 <= x0
    if HAS_RULES:
        targets, num_context, window, ahead = rules
        if REVERSED:
            is_near = y0 + YB - 1 - x0 < window
        else:
            is_near = x0 + ROWS - 1 - y0 < window
        is_history = (x0 + ROWS <= history) & (y0 + YB <= history)
        is_unmasked = is_unmasked & is_near & is_history & (x0 >= num_context) & (y0 >= num_context)
    return is_unmasked


@gluon.jit
def seen_pairs(i, j, history, rules, HAS_RULES: gl.constexpr):
    if HAS_RULES:
        targets, num_context, window, ahead = rules
        position = gl.minimum(i, history)
        is_near = (position - j < window) | (j < num_context)
        return (i == j) | ((j < history) & (((j < position) & is_near) | (i < ahead)))
    else:
        return j <= i


@gluon.jit
def silu_and_gradient(half, FAST: gl.constexpr):
    """Return SiLU(2 * half) and its derivative; one special-function instruction if FAST, else exact with two."""
    if FAST:
        t = _tanh(half)
        silu = half * t + half
        sigmoid = 0.5 * t + 0.5
        return silu, silu * (0.5 - 0.5 * t) + sigmoid
    else:
        s = half + half
        sigmoid = 1.0 / (1.0 + gl.exp2(s * -1.4426950408889634))
        return s * sigmoid, sigmoid * (1.0 + s * (1.0 - sigmoid))


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars
