"""Low-rank time bias of far pairs: Chebyshev interpolation of the time function as a matrix product.

    b(query time - key time) = sum over nodes of b(query time - node) basis(node, key time)

For a query that is far from a block of 128 keys, the time function is smooth in log(age + gap). Here the age of a key
is its time before the last key of the block, and `gap` is the shortest time from that last key to any far query. A
polynomial through 16 Chebyshev nodes of that logarithm is accurate to well below rounding: if log(1 + span / gap) is at
most LONGEST (and at most LONGEST_BY_POWER / power), the error is at most 2^-9 of the amplitude; the largest error
observed is a twentieth of that. So far pairs need no stored bias: the dot product of queries and keys is extended by
16 columns, the values of queries at the nodes times the basis of keys. Near pairs, which are pairs within a block and
pairs whose times are too close for the span of their block, have stored biases as in pair_tiles.py.

The near blocks of keys of a block of queries are a contiguous range that ends at the diagonal, so that kernels process
the near blocks first and then only far ones. A block is 128 tokens of a sequence; arrays that are indexed by block
store the blocks of a sequence from index `first token // 128 + sequence index`.

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
"""Number of keys that share nodes, and of queries that share the set of far blocks."""
NODES = 16
LONGEST, LONGEST_BY_POWER = 10.4, 5.65
"""Upper bounds of log(1 + span / gap) for a far block: the first as is, the second divided by the power."""
LARGEST_AMPLITUDE = 60_000.0
"""Largest amplitude that float16 can hold; with a larger one no pair is far."""
NEAR_SPLITS, FAR_SPLITS = 1, 2
"""Number of programs that share the near tiles of 64 queries, and their far blocks. Few, because every program waits
for memory before it starts."""
REGISTERS = 96
"""Maximum number of registers per thread of the summing kernel, so that many programs wait for memory concurrently."""
SLAB = 8
"""Number of keys of a tile whose gradients one program sums."""
PARTS = 128
"""Number of programs that add these sums in a fixed order."""


class TimeNodes(NamedTuple):
    """Time biases of one pass: stored biases of near pairs, and factors of the low-rank bias of far pairs."""

    blocks: WorkOrder
    """Schedule of blocks of 128 tokens."""
    near_from: torch.Tensor
    """First near block of keys for each block of queries, int32."""
    far_from: torch.Tensor
    """First far block of queries for each block of keys, int32."""
    nodes: torch.Tensor
    """Time of the last key, span of the keys, earliest query time and gap of each block, (blocks, 4) float64."""
    words: torch.Tensor
    """Packed biases of near pairs in the layout of pair_tiles.py, (tiles, words per tile) int32."""
    values: torch.Tensor
    """Values of b for 64 queries at the nodes of a block of keys, (rows, NODES) float16; see `values_tile`."""
    zero_tile: int
    """Index of the tile of zeros in `values`, which near pairs use."""
    basis: torch.Tensor
    """Interpolation basis of every key, (T, NODES) float16."""
    product_basis: torch.Tensor
    """Same as `basis`, in the dtype of queries and keys."""


def compute_nodes(
    bias: RelativeBias, plan: TilePlan, blocks: WorkOrder, dtype: torch.dtype, *, is_reversed: bool
) -> TimeNodes:
    """Compute near biases and far factors of a batch, without a device synchronization.

    Args:
        bias: Bias with a time function, event times and optionally a position table.
        plan: Tiles of the batch.
        blocks: Schedule of blocks of 128 tokens.
        dtype: Dtype of queries and keys.
        is_reversed: Whether rows of a tile of packed biases are keys instead of queries.
    """
    time = bias.time_T
    query_time = bias.query_time_T
    scalars = bias.time_function
    position = bias.position_table
    assert time is not None
    assert query_time is not None
    assert scalars is not None
    assert not plan.is_square
    num_tokens = time.numel()
    device = time.device
    near_from, far_from = (
        torch.empty(num_tokens // BLOCK + len(plan.first_B) + 1, dtype=torch.int32, device=device) for _ in range(2)
    )
    nodes = torch.empty(len(near_from), 4, dtype=torch.float64, device=device)
    words = torch.empty(plan.max_tiles, WORDS, dtype=torch.int32, device=device)
    zero_tile = plan.max_tiles // 2 + 1
    values = torch.empty((zero_tile + 1) * SIDE, NODES, dtype=torch.float16, device=device)
    basis = torch.empty(num_tokens, NODES, dtype=torch.float16, device=device)
    product_basis = basis if dtype == torch.float16 else torch.empty_like(basis, dtype=dtype)
    _spans_kernel[(blocks.table.shape[0],)](nodes, *blocks, query_time, time, BLOCK=BLOCK, num_warps=4)
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
        query_time,
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
    """Store the time of the last key, the span of the keys and the earliest query time of every block."""
    item = tl.program_id(0)
    if item >= tl.load(state):
        return
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    block = item - before
    j = block * BLOCK + tl.arange(0, BLOCK)
    # Positions after the end repeat the last one.
    token = start + tl.minimum(j, length - 1)
    key_seconds = tl.load(key_time + token)
    last = tl.max(key_seconds, 0)
    out = nodes + 4 * (start // BLOCK + b + block)
    tl.store(out, last)
    tl.store(out + 1, last - tl.min(key_seconds, 0))
    tl.store(out + 2, tl.min(tl.load(query_time + token), 0))


@triton.jit
def _first_far_times(nodes, block, shortest, blocks):
    """Return the time before which a query is near, for blocks of keys, and whether each block exists."""
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
    """Compute the near and far ranges and the gap of each block.

    A block of keys is far from a block of queries if it and all earlier blocks are far from these and later queries.
    """
    item = tl.program_id(0)
    if item >= tl.load(state):
        return
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    own = item - before
    blocks = (length + BLOCK - 1) // BLOCK
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
        query_seconds = tl.load(nodes + 4 * block + 2, mask=block < blocks, other=never)
        earliest = tl.minimum(earliest, query_seconds)
    earliest = tl.min(earliest, 0)
    near = tl.zeros([CHUNK], tl.int32) + own
    latest = tl.full([CHUNK], -never, tl.float64)
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
        query_seconds = tl.load(nodes + 4 * block + 2, mask=block < blocks, other=never)
        far = tl.maximum(far, tl.where(query_seconds < latest, block + 1, 0))
    far = tl.max(far, 0)
    gap = tl.full([CHUNK], never, tl.float64)
    for low in range(far, blocks, CHUNK):
        block = low + chunk
        gap = tl.minimum(gap, tl.load(nodes + 4 * block + 2, mask=block < blocks, other=never))
    gap = tl.maximum(tl.min(gap, 0) - tl.load(nodes + 4 * own), 1.0)
    tl.store(near_from + first + own, tl.min(near, 0))
    tl.store(far_from + first + own, far)
    # Stored in a column of its own, because other programs still read the span.
    tl.store(nodes + 4 * own + 3, gap)


@triton.jit
def _chebyshev_nodes(NODES: tl.constexpr, FAST: tl.constexpr):
    """Return the Chebyshev nodes in (-1, 1)."""
    angle = (2 * tl.arange(0, NODES) + 1).to(tl.float32) * (3.141592653589793 / (2 * NODES))
    if FAST:
        # Same instruction as in product_kernel.py; angles this small need no range reduction.
        return tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    else:
        return tl.cos(angle)


@triton.constexpr_function
def _chebyshev_node(number, num_nodes):
    return math.cos((2 * number + 1) * math.pi / (2 * num_nodes))


@triton.constexpr_function
def _node_weight(number, num_nodes):
    """Return the barycentric weight of a node: the inverse of the product of its differences to all other nodes."""
    return (-1) ** number * math.sin((2 * number + 1) * math.pi / (2 * num_nodes)) * 2.0 ** (num_nodes - 1) / num_nodes


@triton.jit
def _logarithm(nodes, slot, FAST: tl.constexpr):
    """Return the last time, the gap and log2(1 + span / gap) of a block of keys."""
    last, span, gap = tl.load(nodes + 4 * slot), tl.load(nodes + 4 * slot + 1), tl.load(nodes + 4 * slot + 3)
    gap = gap.to(tl.float32)
    return last, gap, log2(1.0 + tl.maximum(span.to(tl.float32) / gap, 1e-3), FAST)


@triton.jit
def _differences(x, FIRST: tl.constexpr, STEP: tl.constexpr, NODES: tl.constexpr):
    """Return the product of the differences between x and every STEP-th node."""
    found = x - _chebyshev_node(FIRST, NODES)
    for number in tl.static_range(FIRST + STEP, NODES, STEP):
        found *= x - _chebyshev_node(number, NODES)
    return found


@triton.jit
def _without_each(x, others, FIRST: tl.constexpr, STEP: tl.constexpr, NODES: tl.constexpr):
    """Return the products of the differences to all nodes except one, (keys, every STEP-th node).

    `others` is the product of the differences to the nodes that are not among every STEP-th. The recursion is a tree:
    one half of the nodes shares the differences to the other half, which are multiplied once.
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
    """Return the Lagrange basis, (keys, nodes), of keys that are `age` seconds older than the last of their block."""
    x = tl.minimum(2.0 * log2(1.0 + age / gap, FAST) / log_span - 1.0, 1.0)
    return _without_each(x, x * 0.0 + 1.0, 0, 1, NODES)


@triton.jit
def _row_of_block(schedule, item, half, first_tile, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """Return `row_of_tiles` for one half of a block of queries; the half can be after the end of the sequence."""
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    row = (item - before) * (BLOCK // SIDE) + half
    return start, length, b, row, tl.load(first_tile + b) + row * (row + 1) // 2, row + 1


@triton.jit(do_not_specialize=["center", "zero_tile"])
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
    center,
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
    """Compute near biases and values at the nodes of far blocks for 64 queries, and the basis of 64 keys."""
    item, half, split = tl.program_id(0), tl.program_id(1) % (BLOCK // SIDE), tl.program_id(1) // (BLOCK // SIDE)
    if item >= tl.load(state):
        return
    row = _row_of_block(schedule, item, half, first_tile, BLOCK, SIDE)
    start, length, b, block, first, count = row
    if block * SIDE >= length:
        return
    slot = start // BLOCK + b
    own = block // (BLOCK // SIDE)
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
                center,
                None,
                REVERSED,
                IS_BF16,
                FAST,
                SIDE,
            )
    else:
        one, number = tl.arange(0, SIDE), tl.arange(0, NODES)[None, :]
        token = start + tl.minimum(block * SIDE + one, length - 1)
        query_seconds = tl.load(query_time + token)
        inside = one[:, None] * NODES + number
        rise = 0.5 + 0.5 * _chebyshev_nodes(NODES, FAST)
        amplitude = tl.load(scalars).to(tl.float32)
        for far in range(split - NEAR_SPLITS, bound, FAR_SPLITS):
            last, gap, log_span = _logarithm(nodes, slot + far, FAST)
            age = gap * (exp2(rise * log_span, FAST) - 1.0)
            seconds = (query_seconds - last).to(tl.float32)[:, None] + age[None, :]
            value, slope, exponent = time_function_of(scalars, seconds, FAST)
            tile = ((first + 2 * far + 1) // 2).to(tl.int64)
            tl.store(values + tile * (SIDE * NODES) + inside, (amplitude * value).to(tl.float16))
        if split == NEAR_SPLITS:
            last, gap, log_span = _logarithm(nodes, slot + own, FAST)
            found = _basis((last - tl.load(key_time + token)).to(tl.float32), gap, log_span, NODES, FAST)
            is_own = (block * SIDE + one < length)[:, None]
            to = token[:, None] * NODES + number
            tl.store(basis + to, found.to(tl.float16), mask=is_own)
            tl.store(product_basis + to, found.to(product_basis.dtype.element_ty), mask=is_own)
        if (item == 0) & (split == NEAR_SPLITS + FAR_SPLITS - 1):
            tl.store(values + zero_tile * (SIDE * NODES) + inside, (inside * 0).to(tl.float16))


class FunctionSums:
    """Accumulates the sums of score gradients that make up the gradient of a time function, over groups of heads."""

    def __init__(self, bias: RelativeBias, plan: TilePlan, nodes: TimeNodes, normalizer: float):
        self._bias = bias
        self._plan = plan
        self._nodes = nodes
        self._scale = 1.0 / normalizer
        self._sums = list[torch.Tensor]()

    def add_near(self, score_gradients: torch.Tensor) -> torch.Tensor:
        """Add the sums of near pairs and return the buffer for the sums of far pairs.

        Args:
            score_gradients: Gradients of the scores of a group of heads, (tiles, heads, keys, queries).

        Returns:
            Zeroed buffer for the sums of far pairs: three sums per query for each 64 queries and head,
            (blocks of 64 queries * heads, 3, 64) float32.
        """
        nodes = self._nodes
        heads = score_gradients.shape[1]
        blocks = nodes.blocks.table.shape[0]
        splits = SIDE // SLAB
        near = blocks * (BLOCK // SIDE)
        far = blocks * heads * (BLOCK // SIDE)
        # Rows of blocks that do not exist stay zero.
        sums = torch.zeros(far + near, 3, SIDE, dtype=torch.float32, device=score_gradients.device)
        _near_kernel[blocks, splits * (BLOCK // SIDE)](
            score_gradients,
            sums[far:],
            self._scale,
            *nodes.blocks,
            self._plan.first_B,
            nodes.near_from,
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
        """Return the gradient of the scalars of the time function, (3,); see `function_gradient`."""
        scalars = self._bias.time_function
        assert scalars is not None
        parts = torch.empty(len(self._sums), PARTS, 4, dtype=torch.float32, device=scalars.device)
        for sums, own in zip(self._sums, parts, strict=True):
            _parts_kernel[(PARTS,)](sums, own, len(sums), PARTS, CHUNK=16, SIDE=SIDE, num_warps=4)
        gradient = torch.empty_like(scalars)
        _gradient_kernel[(1,)](parts, scalars, gradient, len(self._sums), PARTS=PARTS, num_warps=1)
        return gradient


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
    query = tl.arange(0, SIDE)
    key = slab * SLAB + tl.arange(0, SLAB)
    query_seconds = tl.load(query_time + start + tl.minimum(block * SIDE + query, length - 1))
    inside = key[:, None] * SIDE + query[None, :]
    by_value = tl.zeros([SIDE], tl.float32)
    by_slope = tl.zeros([SIDE], tl.float32)
    by_exponent = tl.zeros([SIDE], tl.float32)
    per_block: tl.constexpr = BLOCK // SIDE
    for other in range(tl.load(near_from + start // BLOCK + b + block // per_block) * per_block, count):
        pointers = kept + (first + other).to(tl.int64) * (HEADS * SIDE * SIDE) + inside
        g = tl.zeros([SLAB, SIDE], tl.float32)
        for head in tl.static_range(HEADS):
            g += tl.load(pointers + head * (SIDE * SIDE)).to(tl.float32)
        key_seconds = tl.load(key_time + start + tl.minimum(other * SIDE + key, length - 1))
        value, slope, exponent = time_function(scalars, key_seconds, query_seconds, FAST)
        by_value += tl.sum(g * value, 0)
        by_slope += tl.sum(g * slope, 0)
        by_exponent += tl.sum(g * slope * exponent, 0)
    out = sums + (item * (BLOCK // SIDE) + half) * (3 * SIDE) + slab * SLAB + tl.arange(0, SLAB)
    tl.store(out, tl.sum(by_value.reshape([SLAB, SIDE // SLAB]), 1) * scale)
    tl.store(out + SIDE, tl.sum(by_slope.reshape([SLAB, SIDE // SLAB]), 1) * scale)
    tl.store(out + 2 * SIDE, tl.sum(by_exponent.reshape([SLAB, SIDE // SLAB]), 1) * scale)


@triton.jit(do_not_specialize=["count"])
def _parts_kernel(sums, parts, count, num_parts, CHUNK: tl.constexpr, SIDE: tl.constexpr):
    """Sum (rows, 3, SIDE) to (parts, 4), of which the last column is unused."""
    part = tl.program_id(0)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, SIDE)[None, :]
    by_value = tl.zeros([CHUNK, SIDE], tl.float32)
    by_slope = tl.zeros([CHUNK, SIDE], tl.float32)
    by_exponent = tl.zeros([CHUNK, SIDE], tl.float32)
    for first in range(part * CHUNK, count, num_parts * CHUNK):
        is_there = first + row < count
        pointers = sums + (first + row) * (3 * SIDE) + column
        by_value += tl.load(pointers, mask=is_there, other=0.0)
        by_slope += tl.load(pointers + SIDE, mask=is_there, other=0.0)
        by_exponent += tl.load(pointers + 2 * SIDE, mask=is_there, other=0.0)
    tl.store(parts + 4 * part, tl.sum(by_value))
    tl.store(parts + 4 * part + 1, tl.sum(by_slope))
    tl.store(parts + 4 * part + 2, tl.sum(by_exponent))


@triton.jit(do_not_specialize=["groups"])
def _gradient_kernel(parts, scalars, out, groups, PARTS: tl.constexpr):
    pointers = parts + 4 * tl.arange(0, PARTS)
    by_value = tl.zeros([PARTS], tl.float32)
    by_slope = tl.zeros([PARTS], tl.float32)
    by_exponent = tl.zeros([PARTS], tl.float32)
    for group in range(groups):
        by_value += tl.load(pointers + group * (4 * PARTS))
        by_slope += tl.load(pointers + group * (4 * PARTS) + 1)
        by_exponent += tl.load(pointers + group * (4 * PARTS) + 2)
    amplitude = tl.load(scalars).to(tl.float32)
    power = tl.exp(tl.load(scalars + 2).to(tl.float32))
    tl.store(out, tl.sum(by_value, 0))
    tl.store(out + 1, amplitude * power * tl.sum(by_slope, 0))
    tl.store(out + 2, -amplitude * tl.sum(by_exponent, 0))
