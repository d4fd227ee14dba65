"""Gradient of the queries of HSTU attention on Hopper, one matrix product with saved gradients of the scores.

    dQ = sum over blocks of keys of G^T K        G: (tiles, heads, keys, queries), see pair_kernel.py and pair_tiles.py

The kernel is bound by reading G. Two warp groups hold 64 queries each and share the blocks of keys.

If biases of far pairs are values of a time function at nodes (time_nodes.py), the gradient of that function needs sums
over all pairs of G times its derivatives. The sums over far pairs are computed here, while G is in shared memory:

    sum over queries and nodes of (G^T basis) derivative(query, node)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nestrec.ops.attention.hopper.hopper_bias import tile_of
from nestrec.ops.attention.hopper.hopper_common import (
    FIELDS,
    ROWS,
    barriers,
    bound_of,
    get_index,
    get_item,
    item_of,
    load_rows,
    next_stage,
    put_end,
    put_item,
    put_sequence,
    range_of_y,
    row_of_block,
    store_rows,
)

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917, RUF059


@gluon.jit
def _is_kept(x0, y0, length, history, rules, HAS_RULES: gl.constexpr, IS_SQUARE: gl.constexpr):
    """Return whether the backward pass over keys has written this tile; tiles that it skips are completely masked."""
    if HAS_RULES:
        low, high, prefix = range_of_y(y0 // 128 * 128, length, history, rules, True, True, 128, 64)
        block = x0 // 64
        kept = (x0 < length) & (y0 < length) & (((block >= low) & (block < high)) | (block < prefix))
        if not IS_SQUARE:
            kept = kept & (y0 <= x0)
        return kept
    else:
        return (x0 < length) & (y0 <= x0)


@gluon.jit
def _producer(
    k_desc,
    g_desc,
    smem,
    bars,
    table,
    state,
    heads,
    rules,
    first_of,
    far,
    COUNTER: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    k_smem, g_smem, item_smem = smem
    full, empty, item_full, item_empty = bars
    basis_desc, basis_smem, near_from, nodes, scalars, query_time, sums = far
    FAR: gl.constexpr = 0 if basis_desc is None else 64 * 16 * 2
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    counter = state + 1 + COUNTER + lane * 0
    total = gl.load(state) * heads
    index = gl.program_id(0)
    stage, phase = 0, 1
    its, itp = 0, 1
    while index < total:
        start, length, history, head, x0, first_tile, sequence = item_of(
            index, total, table, heads, rules, first_of, False, HAS_RULES, 128
        )
        low, high, prefix = range_of_y(x0, length, history, rules, False, HAS_RULES, 128, 64)
        bound = bound_of(near_from, start, sequence, x0)
        mbarrier.wait(item_empty.index(its), itp)
        put_item(item_smem, its, start, length, history, head, x0, low, high, prefix, first_tile, bound, index)
        put_sequence(item_smem, its, sequence)
        mbarrier.arrive(item_full.index(its), count=1)
        its, itp = next_stage(its, itp, 2)
        for i in range(high - low + prefix):
            y0 = row_of_block(i, low, high, prefix, False, HAS_RULES, 64)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 64 * D * 2 + 2 * (64 * 64 * 2) + FAR)
            load_rows(k_desc, start, length, y0, head, full.index(stage), k_smem.index(stage))
            if basis_desc is not None:
                tma.async_copy_global_to_shared(basis_desc, [start + y0, 0], full.index(stage), basis_smem.index(stage))
            for c in gl.static_range(2):
                # For a tile that was not saved, load any other tile, so that the byte count is fixed; it is not read.
                tile = tile_of(first_tile, x0 + c * 64, y0, length, False, IS_SQUARE)
                tile = gl.where(
                    _is_kept(x0 + c * 64, y0, length, history, rules, HAS_RULES, IS_SQUARE), tile, first_tile
                )
                row = (tile * heads + head) * 64
                tma.async_copy_global_to_shared(g_desc, [row, 0], full.index(stage), g_smem.index(2 * stage + c))
            stage, phase = next_stage(stage, phase, STAGES)
        taken = gl.atomic_add(counter, lane * 0 + 1, mask=lane == 0, sem="relaxed")
        index = gl.num_programs(0) + gl.max(gl.where(lane == 0, taken, 0), 0)
    mbarrier.wait(item_empty.index(its), itp)
    put_end(item_smem, its)
    mbarrier.arrive(item_full.index(its), count=1)


@gluon.jit
def _cos(x):
    return gl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _tiles(stage, phase, smem, bars, C: gl.constexpr, D: gl.constexpr):
    """Wait for the tiles of score gradients and of keys and return them."""
    k_smem, g_smem, item_smem = smem
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_smem.dtype)
    mbarrier.wait(bars[0].index(stage), phase)
    return g_smem.index(2 * stage + C).permute((1, 0)), k_smem.index(stage)._reinterpret(k_smem.dtype, [ROWS, D], TILE)


@gluon.jit
def _far_blocks(
    acc,
    stage,
    phase,
    x0,
    start,
    length,
    bound,
    index,
    sequence,
    scale,
    smem,
    bars,
    far,
    C: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Process the blocks of 128 keys before `bound` in descending order.

    Accumulates d q and stores the sums for the gradient of the time function.
    """
    k_smem, g_smem, item_smem = smem
    full, empty, item_full, item_empty = bars
    basis_desc, basis_smem, near_from, nodes, scalars, query_time, sums = far
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    LOG2_E: gl.constexpr = 1.4426950408889634
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    number = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([ROWS, 16], gl.float32, LAYOUT)
    by_value, by_slope, by_exponent = zeros, zeros, zeros
    if bound > 0:
        query_seconds = gl.load(query_time + start + gl.minimum(x0 + row, length - 1))
        rise = 0.5 + 0.5 * _cos((2 * number + 1).to(gl.float32) * (3.141592653589793 / 32))
        log2_scale = gl.load(scalars + 1).to(gl.float32) * LOG2_E
        power = gl.exp(gl.load(scalars + 2).to(gl.float32))
        node = nodes + 4 * (start // 128 + sequence + bound - 1)
        last, span, gap = gl.load(node), gl.load(node + 1), gl.load(node + 3)
        for n in range(bound):
            g_tile, k_tile = _tiles(stage, phase, smem, bars, C, D)
            acc = warpgroup_mma(g_tile, k_tile, acc, is_async=True)
            g = warpgroup_mma(g_tile, basis_smem.index(stage), zeros, use_acc=False, is_async=True)
            # Compute everything that does not depend on the gradients while the products run.
            age = gap.to(gl.float32) * (_exp2(rise * _log2(1.0 + gl.maximum((span / gap).to(gl.float32), 1e-3))) - 1.0)
            seconds = (query_seconds - last).to(gl.float32)[:, None] + age[None, :]
            exponent = power * (_log2(gl.maximum(seconds, 1.0)) - log2_scale)
            inner = _exp2(gl.minimum(exponent, 20.0 * LOG2_E))
            value = _exp2(-LOG2_E * inner)
            slope = gl.where(exponent < 20.0 * LOG2_E, value * inner, 0.0)
            node = gl.where(n < bound - 1, node - 4, node)
            last, span, gap = gl.load(node), gl.load(node + 1), gl.load(node + 3)
            acc, g = warpgroup_mma_wait(0, deps=(acc, g))
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
            g_tile, k_tile = _tiles(stage, phase, smem, bars, C, D)
            acc = warpgroup_mma(g_tile, k_tile, acc, is_async=True)
            g = warpgroup_mma(g_tile, basis_smem.index(stage), g, is_async=True)
            acc, g = warpgroup_mma_wait(0, deps=(acc, g))
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
            by_value += g * value
            by_slope += g * slope
            by_exponent += g * (slope * exponent)
    if x0 < length:
        pointers = sums + ((index * 2 + C) * 3) * ROWS + row
        gl.store(pointers, gl.sum(by_value, 1) * scale)
        gl.store(pointers + ROWS, gl.sum(by_slope, 1) * scale)
        gl.store(pointers + 2 * ROWS, gl.sum(by_exponent, 1) * (scale / LOG2_E))
    return acc, stage, phase


@gluon.jit
def _consumer(
    out_desc,
    smem,
    out_smem,
    bars,
    scale,
    rules,
    far,
    C: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    k_smem, g_smem, item_smem = smem
    full, empty, item_full, item_empty = bars
    DTYPE: gl.constexpr = k_smem.dtype
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    HAS_FAR: gl.constexpr = far[0] is not None
    stage, phase = 0, 0
    its, itp = 0, 0
    mbarrier.wait(item_full.index(its), itp)
    start, length, history, head, x0, low, high, prefix, first_tile, bound = get_item(item_smem, its)
    index, sequence = get_index(item_smem, its)
    mbarrier.arrive(item_empty.index(its), count=1)
    its, itp = next_stage(its, itp, 2)
    while length >= 0:
        x0 += C * ROWS
        acc = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
        near = high - low + prefix
        if HAS_FAR:
            near = high - 2 * bound
        for i in range(near):
            y0 = row_of_block(i, low, high, prefix, False, HAS_RULES, 64)
            mbarrier.wait(full.index(stage), phase)
            if _is_kept(x0, y0, length, history, rules, HAS_RULES, IS_SQUARE):
                k_tile = k_smem.index(stage)._reinterpret(DTYPE, [ROWS, D], TILE)
                acc = warpgroup_mma(g_smem.index(2 * stage + C).permute((1, 0)), k_tile, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        if HAS_FAR:
            acc, stage, phase = _far_blocks(
                acc, stage, phase, x0, start, length, bound, index, sequence, scale, smem, bars, far, C, D, STAGES
            )
        if x0 < length:
            staging = out_smem.index(C)
            tma.store_wait(0)
            gl.thread_barrier()
            staging._reinterpret(DTYPE, [ROWS, D], TILE).store((acc * scale).to(DTYPE))
            fence_async_shared()
            gl.thread_barrier()
            store_rows(out_desc, start, length, x0, head, staging)
        mbarrier.wait(item_full.index(its), itp)
        start, length, history, head, x0, low, high, prefix, first_tile, bound = get_item(item_smem, its)
        index, sequence = get_index(item_smem, its)
        mbarrier.arrive(item_empty.index(its), count=1)
        its, itp = next_stage(its, itp, 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "num_context", "window", "ahead"])
def product_kernel(
    k_desc,
    g_desc,
    out_desc,
    table,
    state,
    heads,
    scale,
    targets,
    num_context,
    window,
    ahead,
    first_tile,
    basis_desc,
    near_from,
    nodes,
    scalars,
    query_time,
    sums,
    COUNTER: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    DTYPE: gl.constexpr = k_desc.dtype
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, 64, 1, D], k_desc.layout)
    g_smem = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 64, 64], g_desc.layout)
    out_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, 1, D], out_desc.layout)
    item_smem = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    smem = (k_smem, g_smem, item_smem)
    if basis_desc is None:
        basis_smem = k_smem
    else:
        basis_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 64, 16], basis_desc.layout)
    far = (basis_desc, basis_smem, near_from, nodes, scalars, query_time, sums)
    bars = (barriers(STAGES, 1), barriers(STAGES, 2), barriers(2, 1), barriers(2, 2))
    fence_async_shared()
    gl.thread_barrier()
    rules = (targets, num_context, window, ahead)
    # fmt: off
    gl.warp_specialize([
        (_consumer, (out_desc, smem, out_smem, bars, scale, rules, far, 0, HAS_RULES, IS_SQUARE, D, STAGES)),
        (_consumer, (out_desc, smem, out_smem, bars, scale, rules, far, 1, HAS_RULES, IS_SQUARE, D, STAGES)),
        (_producer, (k_desc, g_desc, smem, bars, table, state, heads, rules, first_tile, far,
                     COUNTER, HAS_RULES, IS_SQUARE, D, STAGES)),
    ], [4, 1], [160, 40])
    # fmt: on
