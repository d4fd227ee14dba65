"""Gradients of keys and values of HSTU attention on Hopper in one kernel: four matrix products instead of five in two.

    for a block of keys, over blocks of queries:
    S = K Q^T    dP = V dO^T    W = SiLU(S)    G = SiLU'(S) dP
    dV += W dO    dK += G Q

Two warp groups hold 64 keys each, with d k and d v in registers, which suffice for heads of up to 128. G can be saved
tile by tile (pair_tiles.py); then d q is one product instead of three, and gradients of biases are sums of G.
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

from nestrec.ops.attention.hopper.hopper_bias import halves, load_words, staged_halves, staged_words, tile_of
from nestrec.ops.attention.hopper.hopper_common import (
    FIELDS,
    ROWS,
    barriers,
    get_item,
    is_unmasked,
    next_stage,
    producer,
    row_of_block,
    seen_pairs,
    silu_and_gradient,
    skipped_blocks,
    store_rows,
    tile_positions,
)

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0912, PLR0915, PLR0917, RUF059


@gluon.jit
def _elements(
    s,
    dp,
    words,
    x0,
    y0,
    history,
    rules,
    bias,
    HAS_RULES: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    FAST: gl.constexpr,
    LAYOUT: gl.constexpr,
    YB: gl.constexpr,
    DTYPE: gl.constexpr,
    STAGED: gl.constexpr,
):
    """Compute the attention weights and the gradients of the scores of a tile."""
    i, j = tile_positions(x0, y0, LAYOUT, True, YB)
    if STAGED:
        half = staged_halves(s, words, FAST, LAYOUT)
    else:
        half = halves(s, words, bias, FAST, LAYOUT, YB, BY_DISTANCE)
    w, g = silu_and_gradient(half, FAST)
    g *= dp
    if not is_unmasked(x0, y0, history, rules, True, HAS_RULES, YB):
        seen = seen_pairs(i, j, history, rules, HAS_RULES)
        w = gl.where(seen, w, 0.0)
        g = gl.where(seen, g, 0.0)
    return w.to(DTYPE), g.to(DTYPE)


@gluon.jit
def is_tile(x0, y0, IS_SQUARE: gl.constexpr):
    """Return whether there is a tile for keys from x0 on and queries from y0 on."""
    if IS_SQUARE:
        return x0 >= 0
    else:
        return y0 >= x0


@gluon.jit
def _keep(g, kept, buffer, is_kept, tile, head, C: gl.constexpr):
    """Save a tile of G to global memory through one of two buffers in shared memory."""
    g_desc, g_smem, heads = kept
    if g_desc is not None:
        tile_buffer = g_smem.index(2 * C + buffer)
        tma.store_wait(1)
        gl.thread_barrier()
        tile_buffer.store(g)
        fence_async_shared()
        gl.thread_barrier()
        if is_kept:
            tma.async_copy_shared_to_global(g_desc, [(tile * heads + head) * 64, 0], tile_buffer)
    return buffer ^ 1


@gluon.jit
def _scores(k_tile, ys, smem, far, C: gl.constexpr, YB: gl.constexpr, D: gl.constexpr):
    """Start the scores of a block of queries, including the low-rank biases of far pairs."""
    k_smem, v_smem, q_smem, do_smem, item_smem = smem
    values_desc, basis_desc, values_smem, basis_smem, zero_tile, far_bias = far
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, YB, 16])
    YTILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([YB, D], k_smem.dtype)
    q_tile = q_smem.index(ys)._reinterpret(k_smem.dtype, [YB, D], YTILE)
    zeros = gl.zeros([ROWS, YB], gl.float32, S_LAYOUT)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if values_desc is not None:
        s = warpgroup_mma(basis_smem.index(C), values_smem.index(ys).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _take_words(words, staged, STAGED: gl.constexpr, C: gl.constexpr):
    """Return the packed biases of a tile: already loaded, or from shared memory if STAGED.

    If STAGED, `words` is the phase of the barriers.
    """
    if STAGED:
        words_desc, words_smem, words_full, words_empty = staged
        mbarrier.wait(words_full.index(C), words)
        found = staged_words(words_smem.index(C))
        mbarrier.arrive(words_empty.index(C), count=1)
        return found
    else:
        return words


@gluon.jit
def _next_block(
    n,
    end,
    k_tile,
    v_tile,
    dk,
    dv,
    s,
    dp,
    words,
    y0,
    buffer,
    ys,
    yp,
    item,
    kept,
    smem,
    bars,
    rules,
    bias,
    far,
    staged,
    IS_NEAR: gl.constexpr,
    C: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    YB: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    FAST: gl.constexpr,
):
    """Compute the elements of a block and their products, and start the scores of the next block.

    `end` is the end of the range of near or far blocks that the block belongs to.
    """
    x0, low, high, prefix, length, history, first_tile, head = item
    k_smem, v_smem, q_smem, do_smem, item_smem = smem
    x_full, x_empty, q_full, q_empty, do_full, do_empty, item_full, item_empty = bars
    DTYPE: gl.constexpr = k_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, YB, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    YTILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([YB, D], DTYPE)
    zeros = gl.zeros([ROWS, YB], gl.float32, S_LAYOUT)
    s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    own_bias = bias if IS_NEAR else far[5]
    OWN: gl.constexpr = BY_DISTANCE or not IS_NEAR
    STAGED: gl.constexpr = staged[0] is not None
    own_words = _take_words(words, staged, STAGED, C)
    w, g = _elements(
        s, dp, own_words, x0, y0, history, rules, own_bias, HAS_RULES, OWN, FAST, S_LAYOUT, YB, DTYPE, STAGED
    )
    tile = tile_of(first_tile, x0, y0, length, True, IS_SQUARE)
    is_kept = is_tile(x0, y0, IS_SQUARE)
    y0 = row_of_block(n + 1, low, high, prefix, True, HAS_RULES, YB)
    q_tile = q_smem.index(ys)._reinterpret(DTYPE, [YB, D], YTILE)
    do_tile = do_smem.index(ys)._reinterpret(DTYPE, [YB, D], YTILE)
    dv = warpgroup_mma(gl.convert_layout(w, W_LAYOUT), do_tile, dv, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(g, W_LAYOUT), q_tile, dk, is_async=True)
    last = ys
    ys, yp = next_stage(ys, yp, STAGES)
    # The next scores start before these products end; there are not enough registers for more overlap.
    mbarrier.wait(q_full.index(ys), yp)
    s = _scores(k_tile, ys, smem, far, C, YB, D)
    buffer = _keep(g, kept, buffer, is_kept, tile, head, C)
    if STAGED:
        words = words ^ 1
    else:
        # Prefetch biases one block ahead, after the fence of the saved tile, which waits for all preceding loads.
        # After the last near block, its biases are fetched again from the cache, because far blocks have none.
        ahead = row_of_block(gl.minimum(n + 1, end - 1), low, high, prefix, True, HAS_RULES, YB)
        words = load_words(first_tile, x0, ahead, length, own_bias, True, IS_SQUARE, YB, OWN)
    dv, dk = warpgroup_mma_wait(1 if far[0] is None else 2, deps=(dv, dk))
    mbarrier.arrive(q_empty.index(last), count=1)
    mbarrier.arrive(do_empty.index(last), count=1)
    mbarrier.wait(do_full.index(ys), yp)
    do_tile = do_smem.index(ys)._reinterpret(DTYPE, [YB, D], YTILE)
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return dk, dv, s, dp, words, y0, buffer, ys, yp


@gluon.jit
def _last_block(
    dk,
    dv,
    s,
    dp,
    words,
    y0,
    buffer,
    ys,
    yp,
    item,
    kept,
    smem,
    bars,
    rules,
    bias,
    staged,
    C: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    YB: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    FAST: gl.constexpr,
):
    """Compute the elements of the last block and their products."""
    x0, low, high, prefix, length, history, first_tile, head = item
    k_smem, v_smem, q_smem, do_smem, item_smem = smem
    x_full, x_empty, q_full, q_empty, do_full, do_empty, item_full, item_empty = bars
    DTYPE: gl.constexpr = k_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, YB, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    YTILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([YB, D], DTYPE)
    s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    STAGED: gl.constexpr = staged[0] is not None
    own_words = _take_words(words, staged, STAGED, C)
    w, g = _elements(
        s, dp, own_words, x0, y0, history, rules, bias, HAS_RULES, BY_DISTANCE, FAST, S_LAYOUT, YB, DTYPE, STAGED
    )
    q_tile = q_smem.index(ys)._reinterpret(DTYPE, [YB, D], YTILE)
    do_tile = do_smem.index(ys)._reinterpret(DTYPE, [YB, D], YTILE)
    dv = warpgroup_mma(gl.convert_layout(w, W_LAYOUT), do_tile, dv, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(g, W_LAYOUT), q_tile, dk, is_async=True)
    tile = tile_of(first_tile, x0, y0, length, True, IS_SQUARE)
    is_kept = is_tile(x0, y0, IS_SQUARE)
    buffer = _keep(g, kept, buffer, is_kept, tile, head, C)
    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    mbarrier.arrive(q_empty.index(ys), count=1)
    mbarrier.arrive(do_empty.index(ys), count=1)
    ys, yp = next_stage(ys, yp, STAGES)
    return dk, dv, buffer, ys, yp


@gluon.jit
def _consumer(
    dk_desc,
    dv_desc,
    kept,
    smem,
    bars,
    scale,
    rules,
    bias,
    far,
    staged,
    C: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    YB: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    FAST: gl.constexpr,
):
    STAGED: gl.constexpr = staged[0] is not None
    NOT_STAGED: gl.constexpr = (None, None, None, None)
    HAS_FAR: gl.constexpr = far[0] is not None
    k_smem, v_smem, q_smem, do_smem, item_smem = smem
    x_full, x_empty, q_full, q_empty, do_full, do_empty, item_full, item_empty = bars
    DTYPE: gl.constexpr = k_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, YB, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    XTILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    YTILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([YB, D], DTYPE)
    xp = 0
    ys, yp = 0, 0
    its, itp = 0, 0
    buffer = 0
    phase = 0
    zeros = gl.zeros([ROWS, YB], gl.float32, S_LAYOUT)
    k_tile = k_smem.index(C)._reinterpret(DTYPE, [ROWS, D], XTILE)
    v_tile = v_smem.index(C)._reinterpret(DTYPE, [ROWS, D], XTILE)
    mbarrier.wait(item_full.index(its), itp)
    start, length, history, head, x0, low, high, prefix, first_tile, bound = get_item(item_smem, its)
    mbarrier.arrive(item_empty.index(its), count=1)
    its, itp = next_stage(its, itp, 2)
    while length >= 0:
        count = high - low + prefix
        x0 += C * ROWS
        skipped = skipped_blocks(x0, length, low, high, prefix, True, HAS_RULES, YB)
        for _ in range(skipped):
            mbarrier.wait(q_full.index(ys), yp)
            mbarrier.arrive(q_empty.index(ys), count=1)
            mbarrier.wait(do_full.index(ys), yp)
            mbarrier.arrive(do_empty.index(ys), count=1)
            ys, yp = next_stage(ys, yp, STAGES)
        # Load the first biases while keys and queries are being loaded.
        y0 = row_of_block(gl.minimum(skipped, count - 1), low, high, prefix, True, HAS_RULES, YB)
        inside = gl.minimum(x0, (length - 1) // ROWS * ROWS)
        if STAGED:
            words = phase
        else:
            words = load_words(first_tile, inside, y0, length, bias, True, IS_SQUARE, YB, BY_DISTANCE)
        mbarrier.wait(x_full.index(0), xp)
        if skipped < count:
            dk = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
            dv = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
            mbarrier.wait(q_full.index(ys), yp)
            s = _scores(k_tile, ys, smem, far, C, YB, D)
            mbarrier.wait(do_full.index(ys), yp)
            do_tile = do_smem.index(ys)._reinterpret(DTYPE, [YB, D], YTILE)
            dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            item = (x0, low, high, prefix, length, history, first_tile, head)
            near = count
            if HAS_FAR:
                near = gl.minimum(2 * bound - low, count)
            for n in range(skipped, gl.minimum(near, count - 1)):
                dk, dv, s, dp, words, y0, buffer, ys, yp = _next_block(
                    n, near, k_tile, v_tile, dk, dv, s, dp, words, y0, buffer, ys, yp, item, kept, smem, bars, rules,
                    bias, far, staged, True, C, HAS_RULES, IS_SQUARE, BY_DISTANCE, YB, D, STAGES, FAST,
                )  # fmt: skip
            if STAGED:
                phase = words
            if HAS_FAR:
                # A loop of its own, so that no prefetched words occupy registers.
                if row_of_block(count - 1, low, high, prefix, True, HAS_RULES, YB) >= 128 * bound:
                    far_words = load_words(first_tile, x0, y0, length, far[5], True, IS_SQUARE, YB, True)
                    for n in range(near, count - 1):
                        dk, dv, s, dp, far_words, y0, buffer, ys, yp = _next_block(
                            n, count, k_tile, v_tile, dk, dv, s, dp, far_words, y0, buffer, ys, yp, item, kept, smem,
                            bars, rules, bias, far, NOT_STAGED, False, C, HAS_RULES, IS_SQUARE, BY_DISTANCE, YB, D,
                            STAGES, FAST,
                        )  # fmt: skip
                    dk, dv, buffer, ys, yp = _last_block(
                        dk, dv, s, dp, far_words, y0, buffer, ys, yp, item, kept, smem, bars, rules, far[5], NOT_STAGED,
                        C, HAS_RULES, IS_SQUARE, True, YB, D, STAGES, FAST,
                    )  # fmt: skip
                else:
                    dk, dv, buffer, ys, yp = _last_block(
                        dk, dv, s, dp, words, y0, buffer, ys, yp, item, kept, smem, bars, rules, bias, staged,
                        C, HAS_RULES, IS_SQUARE, BY_DISTANCE, YB, D, STAGES, FAST,
                    )  # fmt: skip
                    if STAGED:
                        phase ^= 1
            else:
                dk, dv, buffer, ys, yp = _last_block(
                    dk, dv, s, dp, words, y0, buffer, ys, yp, item, kept, smem, bars, rules, bias, staged,
                    C, HAS_RULES, IS_SQUARE, BY_DISTANCE, YB, D, STAGES, FAST,
                )  # fmt: skip
                if STAGED:
                    phase ^= 1
            k_tile.store((dk * scale).to(DTYPE))
            v_tile.store((dv * scale).to(DTYPE))
            fence_async_shared()
            gl.thread_barrier()
            store_rows(dk_desc, start, length, x0, head, k_smem.index(C))
            store_rows(dv_desc, start, length, x0, head, v_smem.index(C))
            tma.store_wait(0)
        mbarrier.arrive(x_empty.index(0), count=1)
        xp ^= 1
        mbarrier.wait(item_full.index(its), itp)
        start, length, history, head, x0, low, high, prefix, first_tile, bound = get_item(item_smem, its)
        mbarrier.arrive(item_empty.index(its), count=1)
        its, itp = next_stage(its, itp, 2)


@gluon.jit(do_not_specialize=["heads", "num_context", "window", "ahead", "origin", "zero_tile", "lines_origin"])
def pair_kernel(
    k_desc,
    v_desc,
    q_desc,
    do_desc,
    dk_desc,
    dv_desc,
    g_desc,
    table,
    state,
    heads,
    scale,
    targets,
    num_context,
    window,
    ahead,
    words,
    origin,
    first_tile,
    bounds,
    values_desc,
    basis_desc,
    zero_tile,
    lines,
    lines_origin,
    words_desc,
    COUNTER: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    BY_BLOCK: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    YB: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    FAST: gl.constexpr,
):
    DTYPE: gl.constexpr = k_desc.dtype
    k_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, 1, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, YB, 1, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, YB, 1, D], do_desc.layout)
    item_smem = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    smem = (k_smem, v_smem, q_smem, do_smem, item_smem)
    if g_desc is None:
        g_smem = q_smem
    else:
        g_smem = gl.allocate_shared_memory(DTYPE, [4, ROWS, YB], g_desc.layout)
    bars = (
        barriers(1, 1),
        barriers(1, 2),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
        barriers(2, 1),
        barriers(2, 2),
    )
    if words_desc is None:
        staged = (None, None, None, None)
    else:
        words_smem = gl.allocate_shared_memory(gl.int32, [2, 64, 32], words_desc.layout)
        staged = (words_desc, words_smem, barriers(2, 1), barriers(2, 1))
    fence_async_shared()
    gl.thread_barrier()
    kept = (g_desc, g_smem, heads)
    rules = (targets, num_context, window, ahead)
    bias = (words, origin, first_tile, bounds)
    if values_desc is None:
        values_smem = q_smem
        basis_smem = q_smem
    else:
        values_smem = gl.allocate_shared_memory(gl.float16, [STAGES, YB, 16], values_desc.layout)
        basis_smem = gl.allocate_shared_memory(gl.float16, [2, ROWS, 16], basis_desc.layout)
    far = (values_desc, basis_desc, values_smem, basis_smem, zero_tile, (lines, lines_origin, None, None))
    descs = (k_desc, v_desc, q_desc, do_desc)
    # fmt: off
    gl.warp_specialize([
        (_consumer, (dk_desc, dv_desc, kept, smem, bars, scale, rules, bias, far, staged,
                     0, HAS_RULES, IS_SQUARE, BY_DISTANCE, YB, D, STAGES, FAST)),
        (_consumer, (dk_desc, dv_desc, kept, smem, bars, scale, rules, bias, far, staged,
                     1, HAS_RULES, IS_SQUARE, BY_DISTANCE, YB, D, STAGES, FAST)),
        (producer, (descs, smem, bars, table, state, heads, rules, bias, far, staged,
                    COUNTER, BY_BLOCK, HAS_RULES, True, True, 2, YB, D, STAGES, 1)),
    ], [4, 1], [240, 24])
    # fmt: on
