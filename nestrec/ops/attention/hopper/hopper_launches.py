"""HSTU attention on Hopper GPUs: tile sizes, kernel launches, and the composition of forward and backward pass.

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
    max_tiles,
    needs_pairs,
    pair_buckets,
    plan_tiles,
    write_bias,
)
from nestrec.ops.attention.time_nodes import BLOCK, NODES, FunctionSums, TimeNodes, compute_nodes
from nestrec.ops.attention.work_schedule import WorkOrder, make_schedule

# ruff: noqa: PLR0917


_GL_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
WIDTHS = (32, 64, 128, 256)
"""Supported widths of a head in shared memory; a head is padded with zeros to the next width."""


class Tiles(NamedTuple):
    """Tile sizes and pipeline depth of one program."""

    consumers: int
    """Number of consumer warp groups, each with 64 rows of x."""
    block: int
    """Number of rows of y per block."""
    stages: int
    """Number of y blocks in shared memory (pipeline depth)."""
    x_stages: int
    """Number of x blocks in shared memory."""
    own_out: bool
    """Whether results have a shared memory buffer of their own instead of reusing that of x."""


WEIGHTS = {
    32: Tiles(3, 128, 3, 2, True),
    64: Tiles(3, 128, 3, 2, True),
    128: Tiles(2, 128, 2, 2, True),
    256: Tiles(2, 64, 2, 1, False),
}
"""Tiles of the forward pass without biases, by head width. Fixed instead of autotuned, for reproducible results."""
WITH_BIAS = {**WEIGHTS, 32: Tiles(2, 128, 3, 2, True), 64: Tiles(2, 128, 3, 2, True)}
"""Tiles with biases per pair. With three warp groups, each has too few registers to prefetch the biases of a block."""
BY_DISTANCE = {**WITH_BIAS, 64: Tiles(3, 64, 4, 2, True), 128: Tiles(3, 64, 4, 1, True)}
"""Tiles with biases per distance. These are read from the cache, so more rows that share keys and values are faster
than wide blocks."""
FAR = {
    32: Tiles(2, 128, 3, 2, True),
    64: Tiles(2, 128, 3, 2, True),
    128: Tiles(2, 128, 2, 2, False),
}
"""Tiles with the low-rank time bias. With its factors, shared memory cannot hold the results of heads of 128 too."""
GRADIENTS = {
    32: Tiles(2, 64, 3, 2, True),
    64: Tiles(2, 64, 3, 2, True),
    128: Tiles(2, 64, 3, 1, True),
    256: Tiles(2, 32, 3, 1, False),
}
"""Tiles of passes that compute gradients of queries or keys, by head width."""
BACKWARD_WEIGHTS = Tiles(2, 64, 2, 1, False)
"""Tiles of the d v pass for heads wider than 128, whose d k and d v together do not fit into the registers."""
PAIR_BLOCK, PAIR_STAGES = 64, 3
PRODUCT_STAGES = 5
MEMORY_DIVISOR = 8
"""Divisor of the device memory that limits the saved gradients of scores; heads are processed in groups that fit."""


def forward_pass(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> torch.Tensor:
    """Compute HSTU attention, (T, H, D)."""
    q, k, v = (to_tma_layout(x) for x in (q_THD, k_THD, v_THD))
    pairs = _Pairs(inputs, q)
    biases = pairs.biases(is_reversed=False)
    if biases.far_nodes is not None:
        shapes = FAR
    elif biases.words is None:
        shapes = WEIGHTS
    else:
        shapes = BY_DISTANCE if biases.origin >= 0 else WITH_BIAS
    tiles = shapes[width_of(q)]
    schedule = pairs.schedule(tiles.consumers)
    out = launch_stream(
        (q, q), (k, v), schedule, tiles, inputs, biases, is_gradient=False, is_reversed=False, counter=0
    )
    return _drop_padding(out, q_THD)


def backward_pass(
    grad_THD: torch.Tensor, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> Gradients:
    """Compute the gradients of queries, keys, values and learned biases."""
    vectors = [to_tma_layout(x) for x in (grad_THD, q_THD, k_THD, v_THD)]
    pairs = _Pairs(inputs, q_THD)
    group = pairs.heads_per_group(vectors[1])
    if group == 0:
        gradients = Gradients(
            *_backward_recomputing(vectors, inputs, pairs), *_separate_table_gradients(vectors, inputs)
        )
    else:
        gradients = _backward_from_saved_scores(vectors, inputs, pairs, group)
    dq, dk, dv, *learned = gradients
    return Gradients(*(_drop_padding(x, q_THD) for x in (dq, dk, dv)), *learned)


def saves_score_gradients(q_THD: torch.Tensor, inputs: AttentionInputs) -> bool:
    """Return whether the backward pass saves gradients of scores, which the gradient of a time function requires."""
    return inputs.rules.num_targets_B is None and _Pairs(inputs, q_THD).heads_per_group(q_THD) > 0


def _separate_table_gradients(vectors: list[torch.Tensor], inputs: AttentionInputs) -> tuple[torch.Tensor | None, ...]:
    """Compute the gradients of the bias tables in a separate pass that recomputes the scores."""
    if inputs.bias.is_empty:
        return None, None, None
    grad, q, k, v = vectors
    return *table_gradients(grad, q, k, v, inputs), None


def _backward_from_saved_scores(
    vectors: list[torch.Tensor], inputs: AttentionInputs, pairs: "_Pairs", group: int
) -> Gradients:
    """Compute d k and d v, which saves the gradients of the scores, then d q and the bias gradients from these."""
    grad, q, k, v = vectors
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    biases = pairs.biases(is_reversed=True, has_tiles=True)
    summed = inputs if biases.far_nodes is None else inputs._replace(bias=replace(inputs.bias, time_function=None))
    has_sums = not summed.bias.is_empty and inputs.rules.num_targets_B is None
    sums = TableSums(summed, len(q), pairs.plan, pairs.buckets) if has_sums else None
    by_function = None
    if biases.far_nodes is not None:
        by_function = FunctionSums(inputs.bias, pairs.plan, biases.far_nodes, inputs.normalizer)
    for first in range(0, q.shape[1], group):
        heads = slice(first, min(first + group, q.shape[1]))
        dscores = torch.empty((pairs.plan.max_tiles, heads.stop - first, SIDE, SIDE), dtype=q.dtype, device=q.device)
        schedule = pairs.schedule(2)
        own = [x[:, heads] for x in (q, k, v, grad, dq, dk, dv)]
        launch_pair((own[1], own[2]), (own[0], own[3]), (own[5], own[6]), dscores, schedule, inputs, biases, counter=0)
        far_sums = None if by_function is None else by_function.add_near(dscores)
        launch_product(own[1], dscores, own[4], schedule, inputs, biases, far_sums, counter=1)
        if sums is not None:
            sums.add(dscores)
    if by_function is not None:
        position = None if sums is None else sums.gradients()[0]
        return Gradients(dq, dk, dv, position, None, by_function.gradient())
    return Gradients(dq, dk, dv, *(_separate_table_gradients(vectors, inputs) if sums is None else sums.gradients()))


def _backward_recomputing(
    vectors: list[torch.Tensor], inputs: AttentionInputs, pairs: "_Pairs"
) -> tuple[torch.Tensor, ...]:
    """Compute d q, d k and d v in passes that each recompute the scores and their gradients."""
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
    """Biases of a batch in the form that the kernels read."""

    words: torch.Tensor | None
    origin: int
    first_tile_B: torch.Tensor | None
    far_nodes: TimeNodes | None = None
    """Factors of the low-rank time bias of far pairs; None if all biases are stored."""
    lines: BiasWords = NO_WORDS
    """Biases by distance of far pairs."""

    def arguments(self, *, is_reversed: bool, keys: int) -> tuple[Any, ...]:
        """Return the kernel arguments; `keys` is the number of keys whose basis is copied at a time."""
        own = (self.words, self.origin, self.first_tile_B)
        far = self.far_nodes
        if far is None:
            return *own, None, None, None, 0, None, 0
        bounds = far.far_from if is_reversed else far.near_from
        return *own, bounds, _columns_of(far.values, SIDE), _columns_of(far.basis, keys), far.zero_tile, *self.lines


class _Pairs:
    """Tile plan, schedules, time buckets and biases of a batch, created on first use."""

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
        """Return an unused schedule for blocks of this many consumers; the first call can reuse that of the plan."""
        blocks, self._blocks = self._blocks, None
        if blocks is not None and ROWS.value * consumers == BLOCK:
            return blocks
        return make_schedule(self._inputs.offsets, self._num_tokens, ROWS.value * consumers)

    @property
    def buckets(self) -> torch.Tensor | None:
        bias = self._inputs.bias
        is_computed = self._buckets is not None and len(self._buckets) == self.plan.max_tiles
        if bias.time_table is not None and not is_computed:
            assert bias.time_T is not None
            assert bias.query_time_T is not None
            self._buckets = pair_buckets(
                bias.time_T, bias.query_time_T, self._inputs.offsets, self.plan, bias.time_table.numel() - 1
            )
        return self._buckets

    def biases(self, *, is_reversed: bool, has_tiles: bool = False) -> _Biases:
        """Write and return the biases; `has_tiles` numbers the tiles of pairs even if no bias requires them."""
        bias = self._inputs.bias
        rules = self._inputs.rules
        if bias.is_empty:
            return _Biases(None, -1, self.plan.first_B if has_tiles else None)
        if bias.time_function is not None and rules.is_plain:
            plan = self.plan
            blocks = self._blocks
            assert blocks is not None
            far = compute_nodes(bias, plan, blocks, self._dtype, is_reversed=is_reversed)
            has_lines = bias.position_table is not None
            lines = self._write_bias(is_reversed=is_reversed, is_by_pair=False) if has_lines else NO_WORDS
            return _Biases(far.words, -1, self.plan.first_B, far, lines)
        is_by_pair = needs_pairs(bias, has_targets=rules.num_targets_B is not None)
        written = self._write_bias(is_reversed=is_reversed, is_by_pair=is_by_pair)
        return _Biases(*written, self.plan.first_B if is_by_pair or has_tiles else None)

    def _write_bias(self, *, is_reversed: bool, is_by_pair: bool) -> BiasWords:
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

    def heads_per_group(self, q: torch.Tensor) -> int:
        """Return the number of heads whose gradients of scores are saved together; 0 if they are not saved."""
        inputs = self._inputs
        is_sparse = inputs.rules.max_attention_length is not None and inputs.bias.is_empty
        if width_of(q) > 128 or is_sparse:
            return 0
        tiles = max_tiles(self._num_tokens, inputs.offsets.numel() - 1, inputs.max_length, is_square=inputs.is_square)
        heads = q.shape[1]
        max_heads = _memory(q) // MEMORY_DIVISOR // (tiles * SIDE * SIDE * 2)
        return -(-heads // -(-heads // max_heads)) if max_heads > 0 else 0  # groups of equal or nearly equal size


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
    """Compute sums over y for every row of x, (T, H, D)."""
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
    score_gradients: torch.Tensor | None,
    schedule: WorkOrder,
    inputs: AttentionInputs,
    biases: _Biases,
    *,
    counter: int,
) -> None:
    """Compute the gradients of keys and values.

    Args:
        x: Keys and values.
        y: Queries and the gradient of the attention output.
        out: Buffers for the gradients of keys and of values.
        score_gradients: Buffer for the gradients of the scores; None does not save them.
        schedule: Schedule of blocks of two consumers.
        inputs: All other inputs of the attention.
        biases: Biases with keys as rows.
        counter: Index of the item counter of the schedule.
    """
    keys = (rows_of(each, ROWS.value) for each in x)
    queries = (rows_of(each, PAIR_BLOCK) for each in y)
    pair_kernel[(_programs(x[0]),)](
        *keys,
        *queries,
        *(rows_of(each, ROWS.value) for each in out),
        None if score_gradients is None else _tiles_of(score_gradients),
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
    score_gradients: torch.Tensor,
    out: torch.Tensor,
    schedule: WorkOrder,
    inputs: AttentionInputs,
    biases: _Biases,
    sums: torch.Tensor | None,
    *,
    counter: int,
) -> None:
    """Compute the gradient of the queries from keys and saved gradients of the scores.

    Args:
        k: Keys.
        score_gradients: Saved gradients of the scores, (tiles, heads, keys, queries).
        out: Buffer for the gradient of the queries.
        schedule: Schedule of blocks of two consumers.
        inputs: All other inputs of the attention.
        biases: Biases with keys as rows.
        sums: Buffer for the sums of far pairs that the gradient of a time function needs; see time_nodes.py.
        counter: Index of the item counter of the schedule.
    """
    switches = _switches(k, inputs)
    del switches["FAST"]
    far = biases.far_nodes
    bias = inputs.bias
    arguments: tuple[Any, ...] = (None,) * 6
    if far is not None:
        basis = _columns_of(far.product_basis, SIDE)
        arguments = (basis, far.near_from, far.nodes, bias.time_function, bias.query_time_T, sums)
    product_kernel[(_programs(k),)](
        rows_of(k, SIDE),
        _tiles_of(score_gradients),
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
    """Return the TMA descriptor of a matrix with `NODES` columns, read `rows` rows at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, NODES], _GL_TYPES[x.dtype])
    return TensorDescriptor(x, [len(x), NODES], [NODES, 1], [rows, NODES], layout)


def _words_of(biases: _Biases, inputs: AttentionInputs) -> TensorDescriptor | None:
    """Return the TMA descriptor of biases per pair, one tile at a time; None if the mask is not plain causality."""
    words = biases.words
    if words is None or biases.origin >= 0 or not inputs.rules.is_plain:
        return None
    layout = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE // 2], gl.int32)
    return TensorDescriptor(words, [words.numel() * 2 // SIDE, SIDE // 2], [SIDE // 2, 1], [SIDE, SIDE // 2], layout)


def _tiles_of(score_gradients: torch.Tensor) -> TensorDescriptor:
    """Return the TMA descriptor of saved gradients of scores, one tile at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], _GL_TYPES[score_gradients.dtype])
    return TensorDescriptor(score_gradients, [score_gradients.numel() // SIDE, SIDE], [SIDE, 1], [SIDE, SIDE], layout)


def _memory(x: torch.Tensor) -> int:
    return int(torch.cuda.get_device_properties(x.device).total_memory)


def _programs(x: torch.Tensor) -> int:
    """Return the number of programs of a persistent kernel: one per multiprocessor."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _switches(out_THD: torch.Tensor, inputs: AttentionInputs) -> dict[str, Any]:
    return {
        "HAS_RULES": not inputs.rules.is_plain,
        "IS_SQUARE": inputs.is_square,
        "D": width_of(out_THD),
        "FAST": out_THD.dtype == torch.bfloat16,
    }


def width_of(x_THD: torch.Tensor) -> int:
    """Return the padded width of a head in shared memory."""
    return next(width for width in WIDTHS if x_THD.shape[2] <= width)


def _drop_padding(x_THD: torch.Tensor, like_THD: torch.Tensor) -> torch.Tensor:
    """Remove the padding columns that `to_tma_layout` added."""
    return x_THD if x_THD.shape[2] == like_THD.shape[2] else x_THD[:, :, : like_THD.shape[2]].contiguous()


def to_tma_layout(x_THD: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if TMA can read it, otherwise a copy.

    TMA requires contiguous heads, and rows and heads aligned to 16 bytes; heads of other widths are padded with zeros.
    """
    _, heads, dim = x_THD.shape
    if dim % 8:
        return pad(x_THD, (0, -dim % 8))
    has_rows = x_THD.stride(2) == 1 and (heads == 1 or x_THD.stride(1) == dim) and x_THD.stride(0) >= heads * dim
    is_aligned = x_THD.stride(0) % 8 == 0 and x_THD.data_ptr() % 16 == 0
    return x_THD if has_rows and is_aligned else x_THD.clone(memory_format=torch.contiguous_format)


def rows_of(x_THD: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the TMA descriptor of blocks of rows of one head, bounded by the end of a sequence and the head width.

    TMA bounds apply to the whole tensor. To bound each sequence, rows are addressed by two coordinates of the same
    stride: their sum selects the row, and the second one is bounded by 2^30. Coordinates are chosen so that the end of
    the sequence coincides with that bound. The outermost coordinate compensates by wrapping around in 64 bits.
    """
    _, heads, dim = x_THD.shape
    step = x_THD.stride(0)
    width = width_of(x_THD)
    box = [1, 1, rows, 1, width]
    layout = gl.NVMMASharedLayout.get_default_for(box, _GL_TYPES[x_THD.dtype])
    bounds = [0x7FFF0000, 0x7FFF0000, 1 << 30, heads, dim]
    return TensorDescriptor(x_THD, bounds, [2**34 - step, step, step, dim, 1], box, layout)
