"""HSTU attention on Hopper GPUs: shapes of the work, launches, and which launch gives which tensor.

Legend: T tokens, H heads, D head dimension.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nestrec.ops.attention.attention_inputs import AttentionInputs, Gradients
from nestrec.ops.attention.bias_gradients import TableSums, table_gradients
from nestrec.ops.attention.hopper.hopper_common import ROWS
from nestrec.ops.attention.hopper.pair_kernel import pair_kernel
from nestrec.ops.attention.hopper.product_kernel import product_kernel
from nestrec.ops.attention.hopper.stream_kernel import stream_kernel
from nestrec.ops.attention.pair_tiles import (
    NO_WORDS,
    SIDE,
    BiasWords,
    TilePlan,
    most_tiles,
    needs_pairs,
    pair_buckets,
    plan_tiles,
    write_bias,
)
from nestrec.ops.attention.time_nodes import BLOCK, NODES, FunctionSums, TimeNodes, find_nodes
from nestrec.ops.attention.work_schedule import WorkOrder, make_schedule

# ruff: noqa: PLR0917


_GL_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
WIDTHS = (32, 64, 128, 256)
"""of a head in shared memory; columns behind its own are zeros"""


class Tiles(NamedTuple):
    """Shape of the work of one program."""

    consumers: int
    """warp groups, each with 64 rows of x"""
    block: int
    """rows of y at a time"""
    stages: int
    """blocks of y in shared memory"""
    x_stages: int
    """blocks of x in shared memory"""
    own_out: bool
    """whether results leave from shared memory of their own, or from where x was"""


WEIGHTS = {
    32: Tiles(3, 128, 3, 2, True),
    64: Tiles(3, 128, 3, 2, True),
    128: Tiles(2, 128, 2, 2, True),
    256: Tiles(2, 64, 2, 1, False),
}
"""By width of a head. Pinned: a timing never chooses them, so that results repeat."""
WITH_BIAS = {**WEIGHTS, 32: Tiles(2, 128, 3, 2, True), 64: Tiles(2, 128, 3, 2, True)}
"""Three warp groups leave each too few registers for biases of so many columns on their way."""
BY_DISTANCE = {**WITH_BIAS, 64: Tiles(3, 64, 4, 2, True), 128: Tiles(3, 64, 4, 1, True)}
"""Biases of distances come from the cache: more rows that share keys and values are worth more than wide blocks."""
FAR = {
    32: Tiles(2, 128, 3, 2, True),
    64: Tiles(2, 128, 3, 2, True),
    128: Tiles(2, 128, 2, 2, False),
}
"""Beside values at nodes, shared memory has no room for results of heads of 128."""
GRADIENTS = {
    32: Tiles(2, 64, 3, 2, True),
    64: Tiles(2, 64, 3, 2, True),
    128: Tiles(2, 64, 3, 1, True),
    256: Tiles(2, 32, 3, 1, False),
}
BACKWARD_WEIGHTS = Tiles(2, 64, 2, 1, False)
"""For heads wider than 128, whose d k and d v do not fit the registers together."""
PAIR_BLOCK, PAIR_STAGES = 64, 3
PRODUCT_STAGES = 5
KEPT_SHARE = 8
"""Gradients of scores that are kept at a time take an eighth of the device's memory; heads are taken in groups."""


def forward_pass(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> torch.Tensor:
    """(T, H, D) attention."""
    q, k, v = (readable(x) for x in (q_THD, k_THD, v_THD))
    pairs = _Pairs(inputs, q)
    biases = pairs.biases(is_reversed=False)
    if biases.far is not None:
        shapes = FAR
    else:
        shapes = WEIGHTS if biases.words is None else BY_DISTANCE if biases.origin >= 0 else WITH_BIAS
    tiles = shapes[width_of(q)]
    schedule = pairs.schedule(tiles.consumers)
    out = launch_stream(
        (q, q), (k, v), schedule, tiles, inputs, biases, is_gradient=False, is_reversed=False, counter=0
    )
    return _own_columns(out, q_THD)


def backward_pass(
    grad_THD: torch.Tensor, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> Gradients:
    """Gradients of queries, keys, values and tables."""
    vectors = [readable(x) for x in (grad_THD, q_THD, k_THD, v_THD)]
    pairs = _Pairs(inputs, q_THD)
    group = pairs.heads_at_a_time(vectors[1])
    if group == 0:
        found = Gradients(*_recomputed(vectors, inputs, pairs), *_found_apart(vectors, inputs))
    else:
        found = _kept(vectors, inputs, pairs, group)
    dq, dk, dv, *learned = found
    return Gradients(*(_own_columns(x, q_THD) for x in (dq, dk, dv)), *learned)


def keeps_gradients(q_THD: torch.Tensor, inputs: AttentionInputs) -> bool:
    """Whether gradients of scores are kept; without them a time function has no gradient here."""
    return inputs.rules.num_targets_B is None and _Pairs(inputs, q_THD).heads_at_a_time(q_THD) > 0


def _found_apart(vectors: list[torch.Tensor], inputs: AttentionInputs) -> tuple[torch.Tensor | None, ...]:
    """Gradients of tables by a pass of their own."""
    if inputs.bias.is_empty:
        return None, None, None
    grad, q, k, v = vectors
    return *table_gradients(grad, q, k, v, inputs), None


def _kept(vectors: list[torch.Tensor], inputs: AttentionInputs, pairs: "_Pairs", group: int) -> Gradients:
    """d k and d v first, which keep the gradients of scores; d q and those of tables are made of these."""
    grad, q, k, v = vectors
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    biases = pairs.biases(is_reversed=True, has_tiles=True)
    summed = inputs if biases.far is None else inputs._replace(bias=replace(inputs.bias, time_function=None))
    has_sums = not summed.bias.is_empty and inputs.rules.num_targets_B is None
    sums = TableSums(summed, len(q), pairs.plan, pairs.buckets) if has_sums else None
    by_function = None
    if biases.far is not None:
        by_function = FunctionSums(inputs.bias, pairs.plan, biases.far, inputs.normaliser)
    for first in range(0, q.shape[1], group):
        heads = slice(first, min(first + group, q.shape[1]))
        kept = torch.empty((pairs.plan.most, heads.stop - first, SIDE, SIDE), dtype=q.dtype, device=q.device)
        schedule = pairs.schedule(2)
        own = [x[:, heads] for x in (q, k, v, grad, dq, dk, dv)]
        launch_pair((own[1], own[2]), (own[0], own[3]), (own[5], own[6]), kept, schedule, inputs, biases, counter=0)
        far_sums = None if by_function is None else by_function.add_near(kept)
        launch_product(own[1], kept, own[4], schedule, inputs, biases, far_sums, counter=1)
        if sums is not None:
            sums.add(kept)
    if by_function is not None:
        position = None if sums is None else sums.gradients()[0]
        return Gradients(dq, dk, dv, position, None, by_function.gradient())
    return Gradients(dq, dk, dv, *(_found_apart(vectors, inputs) if sums is None else sums.gradients()))


def _recomputed(vectors: list[torch.Tensor], inputs: AttentionInputs, pairs: "_Pairs") -> tuple[torch.Tensor, ...]:
    """Every pass finds scores and their gradients itself."""
    grad, q, k, v = vectors
    tiles = GRADIENTS[width_of(q)]
    schedule = make_schedule(inputs.offsets, q.shape[0], ROWS.value * tiles.consumers)
    dq = launch_stream(
        (q, grad),
        (k, v),
        schedule,
        tiles,
        inputs,
        pairs.biases(is_reversed=False),
        is_gradient=True,
        is_reversed=False,
        counter=0,
    )
    biases = pairs.biases(is_reversed=True)
    if width_of(q) <= 128:
        dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        launch_pair((k, v), (q, grad), (dk, dv), None, schedule, inputs, biases, counter=1)
        return dq, dk, dv
    dk = launch_stream(
        (k, v), (q, grad), schedule, tiles, inputs, biases, is_gradient=True, is_reversed=True, counter=1
    )
    dv = launch_stream(
        (k, k), (q, grad), schedule, BACKWARD_WEIGHTS, inputs, biases, is_gradient=False, is_reversed=True, counter=2
    )
    return dq, dk, dv


class _Biases(NamedTuple):
    """As the kernels take them."""

    words: torch.Tensor | None
    origin: int
    first_tile_B: torch.Tensor | None
    far: TimeNodes | None = None
    """what far pairs have instead of words"""
    lines: BiasWords = NO_WORDS
    """and their biases of distances"""

    def arguments(self, *, is_reversed: bool, keys: int) -> tuple[Any, ...]:
        """keys: whose basis is copied at a time."""
        own = (self.words, self.origin, self.first_tile_B)
        far = self.far
        if far is None:
            return *own, None, None, None, 0, None, 0
        bounds = far.far_from if is_reversed else far.near_from
        return *own, bounds, _columns_of(far.values, SIDE), _columns_of(far.basis, keys), far.zero_tile, *self.lines


class _Pairs:
    """Tiles of the pairs of a batch, and what is written into them; each is made when it is first needed."""

    def __init__(self, inputs: AttentionInputs, x_THD: torch.Tensor):
        self._inputs = inputs
        self._num_tokens = x_THD.shape[0]
        self._dtype = x_THD.dtype
        self._plan: TilePlan | None = None
        self._blocks: WorkOrder | None = None
        self._buckets = inputs.bias.buckets

    @property
    def plan(self) -> TilePlan:
        if self._plan is None:
            inputs = self._inputs
            self._plan, self._blocks = plan_tiles(
                inputs.offsets, self._num_tokens, inputs.max_length, is_square=inputs.is_square, block=BLOCK
            )
        return self._plan

    def schedule(self, consumers: int) -> WorkOrder:
        """Of blocks of so many warp groups, with counters at zero: once the one that came with the plan."""
        blocks, self._blocks = self._blocks, None
        if blocks is not None and ROWS.value * consumers == BLOCK:
            return blocks
        return make_schedule(self._inputs.offsets, self._num_tokens, ROWS.value * consumers)

    @property
    def buckets(self) -> torch.Tensor | None:
        bias = self._inputs.bias
        is_given = self._buckets is not None and len(self._buckets) == self.plan.most
        if bias.time_table is not None and not is_given:
            assert bias.time_T is not None
            assert bias.query_time_T is not None
            self._buckets = pair_buckets(
                bias.time_T, bias.query_time_T, self._inputs.offsets, self.plan, bias.time_table.numel() - 1
            )
        return self._buckets

    def biases(self, *, is_reversed: bool, has_tiles: bool = False) -> _Biases:
        """has_tiles: number tiles of pairs even where no bias needs it."""
        bias = self._inputs.bias
        rules = self._inputs.rules
        if bias.is_empty:
            return _Biases(None, -1, self.plan.first_B if has_tiles else None)
        if bias.time_function is not None and rules.is_plain:
            plan = self.plan
            blocks = self._blocks
            assert blocks is not None
            far = find_nodes(bias, plan, blocks, self._dtype, is_reversed=is_reversed)
            has_lines = bias.position_table is not None
            lines = self._written(is_reversed=is_reversed, is_by_pair=False) if has_lines else NO_WORDS
            return _Biases(far.words, -1, self.plan.first_B, far, lines)
        is_by_pair = needs_pairs(bias, has_targets=rules.num_targets_B is not None)
        written = self._written(is_reversed=is_reversed, is_by_pair=is_by_pair)
        return _Biases(*written, self.plan.first_B if is_by_pair or has_tiles else None)

    def _written(self, *, is_reversed: bool, is_by_pair: bool) -> BiasWords:
        inputs = self._inputs
        return write_bias(
            inputs.bias,
            self.buckets,
            inputs.offsets,
            self._num_tokens,
            inputs.max_length,
            self.plan if is_by_pair else None,
            inputs.rules.num_targets_B,
            is_square=inputs.is_square,
            is_reversed=is_reversed,
            dtype=self._dtype,
        )

    def heads_at_a_time(self, q: torch.Tensor) -> int:
        """Whose gradients of scores are kept together; 0 where they are not kept."""
        inputs = self._inputs
        is_sparse = inputs.rules.max_attention_length is not None and inputs.bias.is_empty
        if width_of(q) > 128 or is_sparse:
            return 0
        tiles = most_tiles(self._num_tokens, inputs.offsets.numel() - 1, inputs.max_length, is_square=inputs.is_square)
        heads = q.shape[1]
        most = _memory(q) // KEPT_SHARE // (tiles * SIDE * SIDE * 2)
        return -(-heads // -(-heads // most)) if most > 0 else 0  # groups of one size, or nearly


def launch_stream(
    x: tuple[torch.Tensor, torch.Tensor],
    y: tuple[torch.Tensor, torch.Tensor],
    schedule: WorkOrder,
    tiles: Tiles,
    inputs: AttentionInputs,
    biases: _Biases,
    *,
    is_gradient: bool,
    is_reversed: bool,
    counter: int,
) -> torch.Tensor:
    """(T, H, D) sums over y for every row of x."""
    out = torch.empty(x[0].shape, dtype=x[0].dtype, device=x[0].device)
    stream_kernel[(_programs(out),)](
        rows_of(x[0], ROWS.value),
        rows_of(x[1], ROWS.value),
        rows_of(y[0], tiles.block),
        rows_of(y[1], tiles.block),
        rows_of(out, ROWS.value),
        *schedule,
        *inputs.scalars(out),
        *biases.arguments(is_reversed=is_reversed, keys=tiles.block),
        COUNTER=counter,
        BY_DISTANCE=biases.origin >= 0,
        BY_BLOCK=biases.words is not None and biases.origin < 0,
        **_switches(out, inputs),
        GRADIENT=is_gradient,
        REVERSED=is_reversed,
        CONSUMERS=tiles.consumers,
        YB=tiles.block,
        STAGES=tiles.stages,
        XSTAGES=tiles.x_stages,
        OWN_OUT=tiles.own_out,
        num_warps=4,
    )
    return out


def launch_pair(
    x: tuple[torch.Tensor, torch.Tensor],
    y: tuple[torch.Tensor, torch.Tensor],
    out: tuple[torch.Tensor, torch.Tensor],
    kept: torch.Tensor | None,
    schedule: WorkOrder,
    inputs: AttentionInputs,
    biases: _Biases,
    *,
    counter: int,
) -> None:
    """Gradients (out) of keys and values (x), from queries and the gradient of the output (y); of scores, if kept."""
    keys = (rows_of(each, ROWS.value) for each in x)
    queries = (rows_of(each, PAIR_BLOCK) for each in y)
    pair_kernel[(_programs(x[0]),)](
        *keys,
        *queries,
        *(rows_of(each, ROWS.value) for each in out),
        None if kept is None else _tiles_of(kept),
        *schedule,
        *inputs.scalars(x[0]),
        *biases.arguments(is_reversed=True, keys=ROWS.value),
        _words_of(biases, inputs),
        COUNTER=counter,
        BY_DISTANCE=biases.origin >= 0,
        BY_BLOCK=biases.words is not None and biases.origin < 0,
        **_switches(x[0], inputs),
        YB=PAIR_BLOCK,
        STAGES=PAIR_STAGES,
        num_warps=4,
    )


def launch_product(
    k: torch.Tensor,
    kept: torch.Tensor,
    out: torch.Tensor,
    schedule: WorkOrder,
    inputs: AttentionInputs,
    biases: _Biases,
    sums: torch.Tensor | None,
    *,
    counter: int,
) -> None:
    """Gradient (out) of queries, from keys and the kept gradients of scores.

    sums: where far pairs add theirs that the gradient of a time function is made of, see time_nodes.py.
    """
    switches = _switches(k, inputs)
    del switches["FAST"]
    far = biases.far
    bias = inputs.bias
    arguments: tuple[Any, ...] = (None,) * 6
    if far is not None:
        basis = _columns_of(far.product_basis, SIDE)
        arguments = (basis, far.near_from, far.nodes, bias.time_function, bias.query_time_T, sums)
    product_kernel[(_programs(k),)](
        rows_of(k, SIDE),
        _tiles_of(kept),
        rows_of(out, ROWS.value),
        *schedule,
        *inputs.scalars(k),
        biases.first_tile_B,
        *arguments,
        COUNTER=counter,
        **switches,
        STAGES=PRODUCT_STAGES,
        num_warps=4,
    )


def _columns_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of few columns, so many rows at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, NODES], _GL_TYPES[x.dtype])
    return TensorDescriptor(x, [len(x), NODES], [NODES, 1], [rows, NODES], layout)


def _words_of(biases: _Biases, inputs: AttentionInputs) -> TensorDescriptor | None:
    """Biases by pair, a tile at a time, where no rules say which tiles a block meets."""
    words = biases.words
    if words is None or biases.origin >= 0 or not inputs.rules.is_plain:
        return None
    layout = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE // 2], gl.int32)
    return TensorDescriptor(words, [words.numel() * 2 // SIDE, SIDE // 2], [SIDE // 2, 1], [SIDE, SIDE // 2], layout)


def _tiles_of(kept: torch.Tensor) -> TensorDescriptor:
    """Kept gradients of scores, as the copy engine moves them: a tile at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], _GL_TYPES[kept.dtype])
    return TensorDescriptor(kept, [kept.numel() // SIDE, SIDE], [SIDE, 1], [SIDE, SIDE], layout)


def _memory(x: torch.Tensor) -> int:
    return int(torch.cuda.get_device_properties(x.device).total_memory)


def _programs(x: torch.Tensor) -> int:
    """One for each multiprocessor."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _switches(out_THD: torch.Tensor, inputs: AttentionInputs) -> dict[str, Any]:
    return {
        "HAS_RULES": not inputs.rules.is_plain,
        "IS_SQUARE": inputs.is_square,
        "D": width_of(out_THD),
        "FAST": out_THD.dtype == torch.bfloat16,
    }


def width_of(x_THD: torch.Tensor) -> int:
    """Columns of a head in shared memory."""
    return next(width for width in WIDTHS if x_THD.shape[2] <= width)


def _own_columns(x_THD: torch.Tensor, like_THD: torch.Tensor) -> torch.Tensor:
    """Without the columns that the copy engine needed."""
    return x_THD if x_THD.shape[2] == like_THD.shape[2] else x_THD[:, :, : like_THD.shape[2]].contiguous()


def readable(x_THD: torch.Tensor) -> torch.Tensor:
    """As it is where the copy engine can read it: heads side by side, rows and heads on 16-byte bounds. A copy
    otherwise, with columns of zeros where heads are not that wide."""
    _, heads, dim = x_THD.shape
    if dim % 8:
        return pad(x_THD, (0, -dim % 8))
    has_rows = x_THD.stride(2) == 1 and (heads == 1 or x_THD.stride(1) == dim) and x_THD.stride(0) >= heads * dim
    is_aligned = x_THD.stride(0) % 8 == 0 and x_THD.data_ptr() % 16 == 0
    return x_THD if has_rows and is_aligned else x_THD.clone(memory_format=torch.contiguous_format)


def rows_of(x_THD: torch.Tensor, rows: int) -> TensorDescriptor:
    """Blocks of rows of one head, bounded by the end of a sequence and by the width of the head.

    A bound of the copy engine holds for the whole tensor. Here rows are addressed by two coordinates of one stride,
    whose sum selects the row and the second of which ends at 2^30: a sequence is placed so that its end falls on that
    bound. The outermost coordinate takes the surplus back, by wrapping around in 64 bits.
    """
    _, heads, dim = x_THD.shape
    step = x_THD.stride(0)
    width = width_of(x_THD)
    box = [1, 1, rows, 1, width]
    layout = gl.NVMMASharedLayout.get_default_for(box, _GL_TYPES[x_THD.dtype])
    bounds = [0x7FFF0000, 0x7FFF0000, 1 << 30, heads, dim]
    return TensorDescriptor(x_THD, bounds, [2**34 - step, step, step, dim, 1], box, layout)
