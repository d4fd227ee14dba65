"""The time function of far pairs: interpolated between sixteen nodes of each block of 128 keys, as a matrix product.

    b(asked - seen) = sum over nodes of b(asked - node) basis(node, seen)

Keys of a block are seen by a far query through a function that is smooth in the logarithm of their age: of the time
since each of them, counted behind the block's last one, plus `gap`, the least time to any far query. A polynomial
through Chebyshev nodes of that logarithm is then exact to far below rounding: where a logarithm of 1 + span / gap is at
most LONGEST (divided by the power, for powers beyond a half), its error has a bound of 2^-9 of the amplitude, and the
largest that is ever seen is a twentieth of it. So attention needs no bias of far pairs: the product of queries and keys
goes on for sixteen columns, values of queries at nodes by the basis of keys. Near pairs, those within a block and those
whose times are too close for their block's span, have biases written down as pair_tiles.py does.

Which blocks of keys are near for a block of queries: those from a first one on, so that kernels meet the near ones
first and then the far ones only. Blocks are 128 tokens of a sequence, and have a place in arrays that begins with
`first token // 128 + number of the sequence`.

Legend: T tokens, B sequences.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917, RUF059

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.mask_and_bias import RelativeBias
from nestrec.ops.attention.pair_tiles import SIDE, WORDS, TilePlan, write_tile
from nestrec.ops.attention.time_triton import exp2, log2, time_function, time_function_of
from nestrec.ops.attention.work_schedule import WorkOrder
from nestrec.ops.kernel_op import IS_INTERPRETED

BLOCK = 128
"""keys that share nodes, and queries that find the same blocks far"""
NODES = 16
LONGEST, LONGEST_BY_POWER = 10.4, 5.65
"""of log(1 + span / gap), see above: at most the first, and at most the second over the power"""
LARGEST_AMPLITUDE = 60_000.0
"""that float16 holds; with a larger one no pair is far"""
NEAR_SPLITS, FAR_SPLITS = 1, 2
"""programs that share the near tiles of 64 queries, and their far blocks: few, since each waits for memory before it
begins"""
REGISTERS = 96
"""of a thread that sums them, at most: programs that wait for memory should be many at a time"""
SLAB = 8
"""keys of a tile whose gradients one program sums"""
PARTS = 128
"""programs that add up such sums, in a fixed order"""


class TimeNodes(NamedTuple):
    """What pairs need in a pass, near and far."""

    blocks: WorkOrder
    """of 128 tokens"""
    near_from: torch.Tensor
    """int32, by block of queries: the first block of keys that is near"""
    far_from: torch.Tensor
    """int32, by block of keys: the first block of queries that is far"""
    nodes: torch.Tensor
    """float64 (blocks, 4), by block: time of the last key, span of the keys, first time asked, and the gap"""
    words: torch.Tensor
    """int32 (tiles, words of a tile), biases of near pairs as pair_tiles.py lays them out"""
    values: torch.Tensor
    """float16 (rows, NODES): b of 64 queries and the nodes of a block of keys, as `values_tile` numbers them"""
    zero_tile: int
    """of values, for near pairs"""
    basis: torch.Tensor
    """float16 (T, NODES), of every key"""
    product_basis: torch.Tensor
    """the same in the type of the vectors"""


def find_nodes(
    bias: RelativeBias, plan: TilePlan, blocks: WorkOrder, dtype: torch.dtype, *, is_reversed: bool
) -> TimeNodes:
    """Nothing waits for the device.

    blocks: of 128 tokens. dtype: of queries and keys. is_reversed: whether rows of words are keys.
    """
    time = bias.time_T
    asked = bias.query_time_T
    scalars = bias.time_function
    position = bias.position_table
    assert time is not None
    assert asked is not None
    assert scalars is not None
    assert not plan.is_square
    num_tokens = time.numel()
    device = time.device
    near_from, far_from = (
        torch.empty(num_tokens // BLOCK + len(plan.first_B) + 1, dtype=torch.int32, device=device) for _ in range(2)
    )
    nodes = torch.empty(len(near_from), 4, dtype=torch.float64, device=device)
    words = torch.empty(plan.most, WORDS, dtype=torch.int32, device=device)
    zero_tile = plan.most // 2 + 1
    values = torch.empty((zero_tile + 1) * SIDE, NODES, dtype=torch.float16, device=device)
    basis = torch.empty(num_tokens, NODES, dtype=torch.float16, device=device)
    product_basis = basis if dtype == torch.float16 else torch.empty_like(basis, dtype=dtype)
    _spans_kernel[(blocks.table.shape[0],)](nodes, *blocks, asked, time, BLOCK=BLOCK, num_warps=4)
    _bounds_kernel[(blocks.table.shape[0],)](
        nodes,
        near_from,
        far_from,
        *blocks,
        scalars,
        BLOCK=BLOCK,
        CHUNK=128,
        LONGEST=LONGEST,
        BY_POWER=LONGEST_BY_POWER,
        LARGEST=LARGEST_AMPLITUDE,
        num_warps=1,
    )
    _values_kernel[blocks.table.shape[0], (NEAR_SPLITS + FAR_SPLITS) * (BLOCK // SIDE)](
        values,
        words,
        basis,
        product_basis,
        *blocks,
        plan.first_B,
        near_from,
        nodes,
        scalars,
        asked,
        time,
        position,
        0 if position is None else (position.numel() - 1) // 2,
        zero_tile,
        BLOCK=BLOCK,
        SIDE=SIDE,
        NODES=NODES,
        NEAR_SPLITS=NEAR_SPLITS,
        FAR_SPLITS=FAR_SPLITS,
        REVERSED=is_reversed,
        IS_BF16=dtype == torch.bfloat16,
        FAST=not IS_INTERPRETED,
        num_warps=4,
    )
    return TimeNodes(blocks, near_from, far_from, nodes, words, values, zero_tile, basis, product_basis)


@triton.jit
def _spans_kernel(nodes, schedule, state, query_time, key_time, BLOCK: tl.constexpr):
    """Of every block: time of the last key, span of its keys, and the first time that its queries ask."""
    item = tl.program_id(0)
    if item >= tl.load(state):
        return
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    block = item - before
    j = block * BLOCK + tl.arange(0, BLOCK)
    # Places behind the end repeat the last one.
    place = start + tl.minimum(j, length - 1)
    seen_at = tl.load(key_time + place)
    last = tl.max(seen_at, 0)
    out = nodes + 4 * (start // BLOCK + b + block)
    tl.store(out, last)
    tl.store(out + 1, last - tl.min(seen_at, 0))
    tl.store(out + 2, tl.min(tl.load(query_time + place), 0))


@triton.jit
def _first_far_times(nodes, block, shortest, blocks):
    """Before which a query is near, of blocks of keys."""
    is_there = block < blocks
    last = tl.load(nodes + 4 * block, mask=is_there, other=0.0)
    span = tl.load(nodes + 4 * block + 1, mask=is_there, other=0.0)
    return last + tl.maximum(span * shortest, 1.0), is_there


@triton.jit
def _bounds_kernel(
    nodes,
    near_from,
    far_from,
    schedule,
    state,
    scalars,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LONGEST: tl.constexpr,
    BY_POWER: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """A block is far from queries where it and all blocks before it are, from them and from all queries behind."""
    item = tl.program_id(0)
    if item >= tl.load(state):
        return
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    own, blocks = item - before, (length + BLOCK - 1) // BLOCK
    first = start // BLOCK + b
    nodes += 4 * first
    power = tl.exp(tl.load(scalars + 2).to(tl.float64))
    longest = tl.minimum(BY_POWER / power, LONGEST)
    is_smooth = (longest > 0.01) & (tl.abs(tl.load(scalars).to(tl.float32)) <= LARGEST)
    shortest = tl.where(is_smooth, 1.0 / (tl.exp(longest) - 1.0), 1e300)
    never = 1e308
    chunk = tl.arange(0, CHUNK)
    earliest = tl.full([CHUNK], never, tl.float64)
    for low in range(own, blocks, CHUNK):
        block = low + chunk
        asked = tl.load(nodes + 4 * block + 2, mask=block < blocks, other=never)
        earliest = tl.minimum(earliest, asked)
    earliest = tl.min(earliest, 0)
    near, latest = tl.zeros([CHUNK], tl.int32) + own, tl.full([CHUNK], -never, tl.float64)
    for low in range(0, own + 1, CHUNK):
        block = low + chunk
        bound, is_there = _first_far_times(nodes, block, shortest, own + 1)
        bound = tl.where(is_smooth, bound, never)
        near = tl.minimum(near, tl.where(is_there & (bound > earliest), block, own))
        latest = tl.maximum(latest, tl.where(is_there, bound, -never))
    latest = tl.max(latest, 0)
    far = tl.zeros([CHUNK], tl.int32) + own + 1
    for low in range(own + 1, blocks, CHUNK):
        block = low + chunk
        asked = tl.load(nodes + 4 * block + 2, mask=block < blocks, other=never)
        far = tl.maximum(far, tl.where(asked < latest, block + 1, 0))
    far = tl.max(far, 0)
    gap = tl.full([CHUNK], never, tl.float64)
    for low in range(far, blocks, CHUNK):
        block = low + chunk
        gap = tl.minimum(gap, tl.load(nodes + 4 * block + 2, mask=block < blocks, other=never))
    gap = tl.maximum(tl.min(gap, 0) - tl.load(nodes + 4 * own), 1.0)
    tl.store(near_from + first + own, tl.min(near, 0))
    tl.store(far_from + first + own, far)
    # Not where the span was: other programs still read it.
    tl.store(nodes + 4 * own + 3, gap)


@triton.jit
def _node_places(NODES: tl.constexpr, FAST: tl.constexpr):
    """Chebyshev's nodes, in (-1, 1)."""
    angle = (2 * tl.arange(0, NODES) + 1).to(tl.float32) * (3.141592653589793 / (2 * NODES))
    if FAST:
        # As hopper/product.py finds them; of angles so small nothing has to be taken off first.
        return tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    else:
        return tl.cos(angle)


@triton.constexpr_function
def _node_place(number, num_nodes):
    return math.cos((2 * number + 1) * math.pi / (2 * num_nodes))


@triton.constexpr_function
def _node_weight(number, num_nodes):
    """The inverse of the product of the differences between a node and the others."""
    return (-1) ** number * math.sin((2 * number + 1) * math.pi / (2 * num_nodes)) * 2.0 ** (num_nodes - 1) / num_nodes


@triton.jit
def _logarithm(nodes, slot, FAST: tl.constexpr):
    """(last time, gap, log2(1 + span / gap)) of a block of keys."""
    last, span, gap = tl.load(nodes + 4 * slot), tl.load(nodes + 4 * slot + 1), tl.load(nodes + 4 * slot + 3)
    gap = gap.to(tl.float32)
    return last, gap, log2(1.0 + tl.maximum(span.to(tl.float32) / gap, 1e-3), FAST)


@triton.jit
def _differences(x, FIRST: tl.constexpr, STEP: tl.constexpr, NODES: tl.constexpr):
    """The product of those between x and every STEP-th node."""
    found = x - _node_place(FIRST, NODES)
    for number in tl.static_range(FIRST + STEP, NODES, STEP):
        found *= x - _node_place(number, NODES)
    return found


@triton.jit
def _without_each(x, others, FIRST: tl.constexpr, STEP: tl.constexpr, NODES: tl.constexpr):
    """(keys, every STEP-th node) products of the differences to all nodes but one; others: to those not among them.

    A tree: a half of the nodes has the differences to the other half in common, which are multiplied once.
    """
    if STEP == NODES:
        return (others * _node_weight(FIRST, NODES))[:, None]
    else:
        even = others * _differences(x, FIRST + STEP, 2 * STEP, NODES)
        odd = others * _differences(x, FIRST, 2 * STEP, NODES)
        found = tl.join(
            _without_each(x, even, FIRST, 2 * STEP, NODES), _without_each(x, odd, FIRST + STEP, 2 * STEP, NODES)
        )
        return found.reshape([x.shape[0], NODES // STEP])


@triton.jit
def _basis(age, gap, log_span, NODES: tl.constexpr, FAST: tl.constexpr):
    """(keys, nodes) of Lagrange, for keys so much older than the last of their block."""
    x = tl.minimum(2.0 * log2(1.0 + age / gap, FAST) / log_span - 1.0, 1.0)
    return _without_each(x, x * 0.0 + 1.0, 0, 1, NODES)


@triton.jit
def _row_of_block(schedule, item, half, first_tile, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """`row_of_tiles` of a part of a block of queries; it may lie behind the end."""
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    row = (item - before) * (BLOCK // SIDE) + half
    return start, length, b, row, tl.load(first_tile + b) + row * (row + 1) // 2, row + 1


@triton.jit(do_not_specialize=["centre", "zero_tile"])
def _values_kernel(
    values,
    words,
    basis,
    product_basis,
    schedule,
    state,
    first_tile,
    near_from,
    nodes,
    scalars,
    query_time,
    key_time,
    position_table,
    centre,
    zero_tile,
    BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
    NODES: tl.constexpr,
    NEAR_SPLITS: tl.constexpr,
    FAR_SPLITS: tl.constexpr,
    REVERSED: tl.constexpr,
    IS_BF16: tl.constexpr,
    FAST: tl.constexpr,
):
    """Of 64 queries: biases of near pairs, and values at the nodes of far blocks; and the basis of 64 keys."""
    item, half, split = tl.program_id(0), tl.program_id(1) % (BLOCK // SIDE), tl.program_id(1) // (BLOCK // SIDE)
    if item >= tl.load(state):
        return
    row = _row_of_block(schedule, item, half, first_tile, BLOCK, SIDE)
    start, length, b, block, first, count = row
    if block * SIDE >= length:
        return
    slot, own = start // BLOCK + b, block // (BLOCK // SIDE)
    bound = tl.load(near_from + slot + own)
    if split < NEAR_SPLITS:
        for other in range(bound * (BLOCK // SIDE) + split, count, NEAR_SPLITS):
            write_tile(
                words,
                row,
                other,
                None,
                None,
                scalars,
                query_time,
                key_time,
                position_table,
                centre,
                None,
                REVERSED,
                IS_BF16,
                FAST,
                SIDE,
            )
    else:
        one, number = tl.arange(0, SIDE), tl.arange(0, NODES)[None, :]
        place = start + tl.minimum(block * SIDE + one, length - 1)
        asked = tl.load(query_time + place)
        inside = one[:, None] * NODES + number
        rise = 0.5 + 0.5 * _node_places(NODES, FAST)
        amplitude = tl.load(scalars).to(tl.float32)
        for far in range(split - NEAR_SPLITS, bound, FAR_SPLITS):
            last, gap, log_span = _logarithm(nodes, slot + far, FAST)
            age = gap * (exp2(rise * log_span, FAST) - 1.0)
            seconds = (asked - last).to(tl.float32)[:, None] + age[None, :]
            value, slope, exponent = time_function_of(scalars, seconds, FAST)
            tile = ((first + 2 * far + 1) // 2).to(tl.int64)
            tl.store(values + tile * (SIDE * NODES) + inside, (amplitude * value).to(tl.float16))
        if split == NEAR_SPLITS:
            last, gap, log_span = _logarithm(nodes, slot + own, FAST)
            found = _basis((last - tl.load(key_time + place)).to(tl.float32), gap, log_span, NODES, FAST)
            is_own = (block * SIDE + one < length)[:, None]
            to = place[:, None] * NODES + number
            tl.store(basis + to, found.to(tl.float16), mask=is_own)
            tl.store(product_basis + to, found.to(product_basis.dtype.element_ty), mask=is_own)
        if (item == 0) & (split == NEAR_SPLITS + FAR_SPLITS - 1):
            tl.store(values + zero_tile * (SIDE * NODES) + inside, (inside * 0).to(tl.float16))


class FunctionSums:
    """Sums of gradients of scores that the gradient of a time function is made of, over groups of heads."""

    def __init__(self, bias: RelativeBias, plan: TilePlan, found: TimeNodes, normaliser: float):
        self._bias = bias
        self._plan = plan
        self._found = found
        self._scale = 1.0 / normaliser
        self._sums = list[torch.Tensor]()

    def add_near(self, kept: torch.Tensor) -> torch.Tensor:
        """Of near pairs; returned: a place for those of far ones, 3 by 64 for each 64 queries and head.

        kept: (tiles, heads, keys, queries).
        """
        found = self._found
        heads = kept.shape[1]
        blocks = found.blocks.table.shape[0]
        splits = SIDE // SLAB
        near = blocks * (BLOCK // SIDE)
        far = blocks * heads * (BLOCK // SIDE)
        # Rows of blocks that are not there stay zero.
        sums = torch.zeros(far + near, 3, SIDE, dtype=torch.float32, device=kept.device)
        _near_kernel[blocks, splits * (BLOCK // SIDE)](
            kept,
            sums[far:],
            self._scale,
            *found.blocks,
            self._plan.first_B,
            found.near_from,
            self._bias.time_function,
            self._bias.query_time_T,
            self._bias.time_T,
            HEADS=heads,
            BLOCK=BLOCK,
            SIDE=SIDE,
            SLAB=SLAB,
            FAST=not IS_INTERPRETED,
            num_warps=1,
            maxnreg=REGISTERS,
        )
        self._sums.append(sums)
        return sums[:far]

    def gradient(self) -> torch.Tensor:
        """(3,) of the scalars, as `function_gradient` has it."""
        scalars = self._bias.time_function
        assert scalars is not None
        parts = torch.empty(len(self._sums), PARTS, 4, dtype=torch.float32, device=scalars.device)
        for sums, own in zip(self._sums, parts, strict=True):
            _parts_kernel[(PARTS,)](sums, own, len(sums), PARTS, CHUNK=16, SIDE=SIDE, num_warps=4)
        found = torch.empty_like(scalars)
        _gradient_kernel[(1,)](parts, scalars, found, len(self._sums), PARTS=PARTS, num_warps=1)
        return found


@triton.jit
def _near_kernel(
    kept,
    sums,
    scale,
    schedule,
    state,
    first_tile,
    near_from,
    scalars,
    query_time,
    key_time,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
    SLAB: tl.constexpr,
    FAST: tl.constexpr,
):
    item, half, slab = tl.program_id(0), tl.program_id(1) % (BLOCK // SIDE), tl.program_id(1) // (BLOCK // SIDE)
    if item >= tl.load(state):
        return
    start, length, b, block, first, count = _row_of_block(schedule, item, half, first_tile, BLOCK, SIDE)
    if block * SIDE >= length:
        return
    query, key = tl.arange(0, SIDE), slab * SLAB + tl.arange(0, SLAB)
    asked = tl.load(query_time + start + tl.minimum(block * SIDE + query, length - 1))
    inside = key[:, None] * SIDE + query[None, :]
    by_value = tl.zeros([SIDE], tl.float32)
    by_slope = tl.zeros([SIDE], tl.float32)
    by_exponent = tl.zeros([SIDE], tl.float32)
    per_block: tl.constexpr = BLOCK // SIDE
    for other in range(tl.load(near_from + start // BLOCK + b + block // per_block) * per_block, count):
        place = kept + (first + other).to(tl.int64) * (HEADS * SIDE * SIDE) + inside
        g = tl.zeros([SLAB, SIDE], tl.float32)
        for head in tl.static_range(HEADS):
            g += tl.load(place + head * (SIDE * SIDE)).to(tl.float32)
        seen_at = tl.load(key_time + start + tl.minimum(other * SIDE + key, length - 1))
        value, slope, exponent = time_function(scalars, seen_at, asked, FAST)
        by_value += tl.sum(g * value, 0)
        by_slope += tl.sum(g * slope, 0)
        by_exponent += tl.sum(g * slope * exponent, 0)
    out = sums + (item * (BLOCK // SIDE) + half) * (3 * SIDE) + slab * SLAB + tl.arange(0, SLAB)
    tl.store(out, tl.sum(by_value.reshape([SLAB, SIDE // SLAB]), 1) * scale)
    tl.store(out + SIDE, tl.sum(by_slope.reshape([SLAB, SIDE // SLAB]), 1) * scale)
    tl.store(out + 2 * SIDE, tl.sum(by_exponent.reshape([SLAB, SIDE // SLAB]), 1) * scale)


@triton.jit(do_not_specialize=["count"])
def _parts_kernel(sums, parts, count, num_parts, CHUNK: tl.constexpr, SIDE: tl.constexpr):
    """(rows, 3, SIDE) to (parts, 4), of which the last is unused."""
    part = tl.program_id(0)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, SIDE)[None, :]
    by_value = tl.zeros([CHUNK, SIDE], tl.float32)
    by_slope = tl.zeros([CHUNK, SIDE], tl.float32)
    by_exponent = tl.zeros([CHUNK, SIDE], tl.float32)
    for first in range(part * CHUNK, count, num_parts * CHUNK):
        is_there = first + row < count
        place = sums + (first + row) * (3 * SIDE) + column
        by_value += tl.load(place, mask=is_there, other=0.0)
        by_slope += tl.load(place + SIDE, mask=is_there, other=0.0)
        by_exponent += tl.load(place + 2 * SIDE, mask=is_there, other=0.0)
    tl.store(parts + 4 * part, tl.sum(by_value))
    tl.store(parts + 4 * part + 1, tl.sum(by_slope))
    tl.store(parts + 4 * part + 2, tl.sum(by_exponent))


@triton.jit(do_not_specialize=["groups"])
def _gradient_kernel(parts, scalars, out, groups, PARTS: tl.constexpr):
    place = parts + 4 * tl.arange(0, PARTS)
    by_value = tl.zeros([PARTS], tl.float32)
    by_slope = tl.zeros([PARTS], tl.float32)
    by_exponent = tl.zeros([PARTS], tl.float32)
    for group in range(groups):
        by_value += tl.load(place + group * (4 * PARTS))
        by_slope += tl.load(place + group * (4 * PARTS) + 1)
        by_exponent += tl.load(place + group * (4 * PARTS) + 2)
    amplitude, power = tl.load(scalars).to(tl.float32), tl.exp(tl.load(scalars + 2).to(tl.float32))
    tl.store(out, tl.sum(by_value, 0))
    tl.store(out + 1, amplitude * power * tl.sum(by_slope, 0))
    tl.store(out + 2, -amplitude * tl.sum(by_exponent, 0))
