"""HSTU attention on Hopper: one persistent, warp-specialized kernel for the forward pass and all gradients.

    weights    out[x] = sum_y w(x, y) Y1[y]            w = SiLU(X0[x] . Y0[y])
    gradient   out[x] = sum_y g(x, y) Y0[y]            g = SiLU'(X0[x] . Y0[y]) (X1[x] . Y1[y])

    forward    weights of X0 = q, Y0 = k, Y1 = v              over y <= x
    d v        weights of X0 = k, Y0 = q, Y1 = d out          over y >= x
    d q        gradient of X0, X1 = q, d out, Y0, Y1 = k, v   over y <= x
    d k        gradient of X0, X1 = k, v, Y0, Y1 = q, d out   over y >= x

Every sum runs in a fixed order in one program, so results are bitwise reproducible without atomics or float32 buffers.
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

from nestrec.ops.attention.hopper.hopper_bias import halves, load_words
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
    GRADIENT: gl.constexpr,
    REVERSED: gl.constexpr,
    HAS_RULES: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    FAST: gl.constexpr,
    LAYOUT: gl.constexpr,
    YB: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Compute the weights or the gradients of the scores, as the left operand of the next product."""
    i, j = tile_positions(x0, y0, LAYOUT, REVERSED, YB)
    w, g = silu_and_gradient(halves(s, words, bias, FAST, LAYOUT, YB, BY_DISTANCE), FAST)
    if GRADIENT:
        p = g * dp
    else:
        p = w
    if not is_unmasked(x0, y0, history, rules, REVERSED, HAS_RULES, YB):
        p = gl.where(seen_pairs(i, j, history, rules, HAS_RULES), p, 0.0)
    return p.to(DTYPE)


@gluon.jit
def _next_block(
    i,
    end,
    x0_tile,
    x1_tile,
    acc,
    p,
    words,
    ps,
    ks,
    kp,
    vs,
    vp,
    item,
    smem,
    bars,
    rules,
    bias,
    far,
    IS_NEAR: gl.constexpr,
    C: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    GRADIENT: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    YB: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    FAST: gl.constexpr,
):
    """Compute the scores and elements of the i-th block, overlapped with the product of the previous block.

    `end` is the end of the range of near or far blocks that the block belongs to.
    """
    x0, low, high, prefix, length, history, first_tile = item
    x0_smem, x1_smem, y0_smem, y1_smem, item_smem = smem
    x_full, x_empty, y0_full, y0_empty, y1_full, y1_empty, item_full, item_empty = bars
    values_desc, basis_desc, values_smem, basis_smem, zero_tile, far_bias = far
    DTYPE: gl.constexpr = x0_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, YB, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    YTILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([YB, D], DTYPE)
    zeros = gl.zeros([ROWS, YB], gl.float32, S_LAYOUT)
    dp = zeros
    mbarrier.wait(y0_full.index(ks), kp)
    y0_tile = y0_smem.index(ks)._reinterpret(DTYPE, [YB, D], YTILE)
    s = warpgroup_mma(x0_tile, y0_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not IS_NEAR:
        values = values_smem.index(ks * CONSUMERS + C)
        basis = basis_smem.index(ks)
        s = warpgroup_mma(values, basis.permute((1, 0)), s, is_async=True)
    y0 = row_of_block(i, low, high, prefix, REVERSED, HAS_RULES, YB)
    if GRADIENT:
        mbarrier.wait(y1_full.index(vs), vp)
        y1_tile = y1_smem.index(vs)._reinterpret(DTYPE, [YB, D], YTILE)
        dp = warpgroup_mma(x1_tile, y1_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        last = y0_smem.index(ps)._reinterpret(DTYPE, [YB, D], YTILE)
        acc = warpgroup_mma(p, last, acc, is_async=True)
        s, dp = warpgroup_mma_wait(1, deps=(s, dp))
        mbarrier.arrive(y1_empty.index(vs), count=1)
        vs, vp = next_stage(vs, vp, STAGES)
    else:
        mbarrier.wait(y1_full.index(vs), vp)
        y1_tile = y1_smem.index(vs)._reinterpret(DTYPE, [YB, D], YTILE)
        acc = warpgroup_mma(p, y1_tile, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(y0_empty.index(ks), count=1)
    own_bias = bias if IS_NEAR else far_bias
    OWN: gl.constexpr = BY_DISTANCE or not IS_NEAR
    new_p = _elements(
        s, dp, words, x0, y0, history, rules, own_bias, GRADIENT, REVERSED, HAS_RULES, OWN, FAST, S_LAYOUT, YB, DTYPE
    )
    ahead = row_of_block(gl.minimum(i + 1, end - 1), low, high, prefix, REVERSED, HAS_RULES, YB)
    words = load_words(first_tile, x0, ahead, length, own_bias, REVERSED, IS_SQUARE, YB, OWN)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    if GRADIENT:
        mbarrier.arrive(y0_empty.index(ps), count=1)
    else:
        mbarrier.arrive(y1_empty.index(vs), count=1)
        vs, vp = next_stage(vs, vp, STAGES)
    p = gl.convert_layout(new_p, P_LAYOUT)
    ps = ks
    ks, kp = next_stage(ks, kp, STAGES)
    return acc, p, words, ps, ks, kp, vs, vp


@gluon.jit
def _consumer(
    out_desc,
    smem,
    out_smem,
    bars,
    scale,
    rules,
    bias,
    far,
    C: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    GRADIENT: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    YB: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    XSTAGES: gl.constexpr,
    FAST: gl.constexpr,
    OWN_OUT: gl.constexpr,
):
    HAS_FAR: gl.constexpr = far[0] is not None
    x0_smem, x1_smem, y0_smem, y1_smem, item_smem = smem
    x_full, x_empty, y0_full, y0_empty, y1_full, y1_empty, item_full, item_empty = bars
    DTYPE: gl.constexpr = x0_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, YB, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    XTILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    YTILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([YB, D], DTYPE)
    xs, xp = 0, 0
    ks, kp = 0, 0
    vs, vp = 0, 0
    its, itp = 0, 0
    mbarrier.wait(item_full.index(its), itp)
    start, length, history, head, x0, low, high, prefix, first_tile, bound = get_item(item_smem, its)
    mbarrier.arrive(item_empty.index(its), count=1)
    its, itp = next_stage(its, itp, 2)
    zeros = gl.zeros([ROWS, YB], gl.float32, S_LAYOUT)
    while length >= 0:
        count = high - low + prefix
        x0 += C * ROWS
        skipped = skipped_blocks(x0, length, low, high, prefix, REVERSED, HAS_RULES, YB)
        for _ in range(skipped):
            mbarrier.wait(y0_full.index(ks), kp)
            mbarrier.arrive(y0_empty.index(ks), count=1)
            ks, kp = next_stage(ks, kp, STAGES)
            mbarrier.wait(y1_full.index(vs), vp)
            mbarrier.arrive(y1_empty.index(vs), count=1)
            vs, vp = next_stage(vs, vp, STAGES)
        # Load the first biases while rows of x and y are being loaded.
        y0 = row_of_block(gl.minimum(skipped, count - 1), low, high, prefix, REVERSED, HAS_RULES, YB)
        inside = gl.minimum(x0, (length - 1) // ROWS * ROWS)
        words = load_words(first_tile, inside, y0, length, bias, REVERSED, IS_SQUARE, YB, BY_DISTANCE)
        mbarrier.wait(x_full.index(xs), xp)
        if skipped < count:
            acc = gl.zeros([ROWS, D], gl.float32, OUT_LAYOUT)
            x0_tile = x0_smem.index(xs * CONSUMERS + C)._reinterpret(DTYPE, [ROWS, D], XTILE)
            x1_tile = x1_smem.index(xs * CONSUMERS + C)._reinterpret(DTYPE, [ROWS, D], XTILE)
            mbarrier.wait(y0_full.index(ks), kp)
            y0_tile = y0_smem.index(ks)._reinterpret(DTYPE, [YB, D], YTILE)
            s = warpgroup_mma(x0_tile, y0_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = zeros
            if GRADIENT:
                mbarrier.wait(y1_full.index(vs), vp)
                y1_tile = y1_smem.index(vs)._reinterpret(DTYPE, [YB, D], YTILE)
                dp = warpgroup_mma(x1_tile, y1_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
                s, dp = warpgroup_mma_wait(0, deps=(s, dp))
                mbarrier.arrive(y1_empty.index(vs), count=1)
                vs, vp = next_stage(vs, vp, STAGES)
            else:
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(y0_empty.index(ks), count=1)
            ps = ks
            ks, kp = next_stage(ks, kp, STAGES)
            p = _elements(
                s,
                dp,
                words,
                x0,
                y0,
                history,
                rules,
                bias,
                GRADIENT,
                REVERSED,
                HAS_RULES,
                BY_DISTANCE,
                FAST,
                S_LAYOUT,
                YB,
                DTYPE,
            )
            # Prefetch biases one block ahead: their registers are free between the elements of two blocks.
            # After the last near block, its biases are fetched again from the cache, because far blocks have none.
            near = count
            if HAS_FAR:
                near = gl.minimum(gl.maximum(high - bound, skipped + 1), count)
            ahead = row_of_block(gl.minimum(skipped + 1, near - 1), low, high, prefix, REVERSED, HAS_RULES, YB)
            words = load_words(first_tile, x0, ahead, length, bias, REVERSED, IS_SQUARE, YB, BY_DISTANCE)
            p = gl.convert_layout(p, P_LAYOUT)
            item = (x0, low, high, prefix, length, history, first_tile)
            for i in range(skipped + 1, near):
                acc, p, words, ps, ks, kp, vs, vp = _next_block(
                    i, near, x0_tile, x1_tile, acc, p, words, ps, ks, kp, vs, vp, item, smem, bars, rules, bias, far,
                    True, C, HAS_RULES, IS_SQUARE, BY_DISTANCE, GRADIENT, REVERSED, CONSUMERS, YB, D, STAGES, FAST,
                )  # fmt: skip
            if HAS_FAR:
                ahead = row_of_block(gl.minimum(near, count - 1), low, high, prefix, REVERSED, HAS_RULES, YB)
                far_words = load_words(first_tile, x0, ahead, length, far[5], REVERSED, IS_SQUARE, YB, True)
                for i in range(near, count):
                    acc, p, far_words, ps, ks, kp, vs, vp = _next_block(
                        i, count, x0_tile, x1_tile, acc, p, far_words, ps, ks, kp, vs, vp, item, smem, bars, rules,
                        bias, far, False, C, HAS_RULES, IS_SQUARE, BY_DISTANCE, GRADIENT, REVERSED, CONSUMERS, YB, D,
                        STAGES, FAST,
                    )  # fmt: skip
            if OWN_OUT:
                mbarrier.arrive(x_empty.index(xs), count=1)
            if GRADIENT:
                last = y0_smem.index(ps)._reinterpret(DTYPE, [YB, D], YTILE)
                acc = warpgroup_mma(p, last, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(y0_empty.index(ps), count=1)
            else:
                mbarrier.wait(y1_full.index(vs), vp)
                y1_tile = y1_smem.index(vs)._reinterpret(DTYPE, [YB, D], YTILE)
                acc = warpgroup_mma(p, y1_tile, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(y1_empty.index(vs), count=1)
                vs, vp = next_stage(vs, vp, STAGES)
            result = (acc * scale).to(DTYPE)
            if OWN_OUT:
                staging = out_smem.index(C)
                tma.store_wait(0)
                gl.thread_barrier()
            else:
                staging = x0_smem.index(xs * CONSUMERS + C)
            staging._reinterpret(DTYPE, [ROWS, D], XTILE).store(result)
            fence_async_shared()
            gl.thread_barrier()
            store_rows(out_desc, start, length, x0, head, staging)
            if not OWN_OUT:
                tma.store_wait(0)
                mbarrier.arrive(x_empty.index(xs), count=1)
        else:
            mbarrier.arrive(x_empty.index(xs), count=1)
        xs, xp = next_stage(xs, xp, XSTAGES)
        mbarrier.wait(item_full.index(its), itp)
        start, length, history, head, x0, low, high, prefix, first_tile, bound = get_item(item_smem, its)
        mbarrier.arrive(item_empty.index(its), count=1)
        its, itp = next_stage(its, itp, 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "num_context", "window", "ahead", "origin", "zero_tile", "lines_origin"])
def stream_kernel(
    x0_desc,
    x1_desc,
    y0_desc,
    y1_desc,
    out_desc,
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
    COUNTER: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    BY_BLOCK: gl.constexpr,
    HAS_RULES: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    GRADIENT: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    YB: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    XSTAGES: gl.constexpr,
    FAST: gl.constexpr,
    OWN_OUT: gl.constexpr,
):
    DTYPE: gl.constexpr = x0_desc.dtype
    x0_smem = gl.allocate_shared_memory(DTYPE, [XSTAGES * CONSUMERS, 1, 1, ROWS, 1, D], x0_desc.layout)
    if GRADIENT:
        x1_smem = gl.allocate_shared_memory(DTYPE, [XSTAGES * CONSUMERS, 1, 1, ROWS, 1, D], x1_desc.layout)
    else:
        x1_smem = x0_smem
    y0_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, YB, 1, D], y0_desc.layout)
    y1_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, YB, 1, D], y1_desc.layout)
    if OWN_OUT:
        out_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, 1, D], out_desc.layout)
    else:
        out_smem = x0_smem
    item_smem = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    smem = (x0_smem, x1_smem, y0_smem, y1_smem, item_smem)
    bars = (
        barriers(XSTAGES, 1),
        barriers(XSTAGES, CONSUMERS),
        barriers(STAGES, 1),
        barriers(STAGES, CONSUMERS),
        barriers(STAGES, 1),
        barriers(STAGES, CONSUMERS),
        barriers(2, 1),
        barriers(2, CONSUMERS),
    )
    fence_async_shared()
    gl.thread_barrier()
    rules = (targets, num_context, window, ahead)
    bias = (words, origin, first_tile, bounds)
    if values_desc is None:
        values_smem = x0_smem
        basis_smem = x0_smem
    else:
        values_smem = gl.allocate_shared_memory(gl.float16, [STAGES * CONSUMERS, ROWS, 16], values_desc.layout)
        basis_smem = gl.allocate_shared_memory(gl.float16, [STAGES, YB, 16], basis_desc.layout)
    far = (values_desc, basis_desc, values_smem, basis_smem, zero_tile, (lines, lines_origin, None, None))
    descs = (x0_desc, x1_desc, y0_desc, y1_desc)
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (out_desc, smem, out_smem, bars, scale, rules, bias, far,
                         0, HAS_RULES, IS_SQUARE, BY_DISTANCE, GRADIENT, REVERSED, CONSUMERS, YB, D, STAGES, XSTAGES,
                         FAST, OWN_OUT)),
            (_consumer, (out_desc, smem, out_smem, bars, scale, rules, bias, far,
                         1, HAS_RULES, IS_SQUARE, BY_DISTANCE, GRADIENT, REVERSED, CONSUMERS, YB, D, STAGES, XSTAGES,
                         FAST, OWN_OUT)),
            (producer, (descs, smem, bars, table, state, heads, rules, bias, far, (None, None, None, None),
                         COUNTER, BY_BLOCK, HAS_RULES, GRADIENT, REVERSED, CONSUMERS, YB, D, STAGES, XSTAGES)),
        ], [4, 1], [240 if values_desc is None else 232, 24 if values_desc is None else 40])
    else:
        gl.warp_specialize([
            (_consumer, (out_desc, smem, out_smem, bars, scale, rules, bias, far,
                         0, HAS_RULES, IS_SQUARE, BY_DISTANCE, GRADIENT, REVERSED, CONSUMERS, YB, D, STAGES, XSTAGES,
                         FAST, OWN_OUT)),
            (_consumer, (out_desc, smem, out_smem, bars, scale, rules, bias, far,
                         1, HAS_RULES, IS_SQUARE, BY_DISTANCE, GRADIENT, REVERSED, CONSUMERS, YB, D, STAGES, XSTAGES,
                         FAST, OWN_OUT)),
            (_consumer, (out_desc, smem, out_smem, bars, scale, rules, bias, far,
                         2, HAS_RULES, IS_SQUARE, BY_DISTANCE, GRADIENT, REVERSED, CONSUMERS, YB, D, STAGES, XSTAGES,
                         FAST, OWN_OUT)),
            (producer, (descs, smem, bars, table, state, heads, rules, bias, far, (None, None, None, None),
                         COUNTER, BY_BLOCK, HAS_RULES, GRADIENT, REVERSED, CONSUMERS, YB, D, STAGES, XSTAGES)),
        ], [4, 4, 1], [160, 160, 24])
    # fmt: on
