"""HSTU attention on Hopper GPUs: shapes of the work, launches, and which launch gives which tensor.

Legend: T tokens, H heads, D head dimension.
"""

# ruff: noqa: PLR0917

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nestrec.ops.attention.bucket_tiles import LARGEST_BUCKET, BucketTiles, empty_tiles, fill_tiles
from nestrec.ops.attention.hopper.pair import pair_kernel
from nestrec.ops.attention.hopper.pieces import ROWS
from nestrec.ops.attention.hopper.stream import stream_kernel
from nestrec.ops.attention.inputs import AttentionInputs
from nestrec.ops.attention.work_order import WorkOrder, make_schedule

HEAD_DIMS = (64, 128, 256)
_GL_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


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


WEIGHTS = {64: Tiles(3, 128, 3, 2, True), 128: Tiles(2, 128, 2, 2, True), 256: Tiles(2, 64, 2, 1, False)}
"""By head dimension. Pinned: a timing never chooses them, so that results repeat."""
GRADIENTS = {64: Tiles(2, 64, 3, 2, True), 128: Tiles(2, 64, 3, 1, True), 256: Tiles(2, 32, 3, 1, False)}
BACKWARD_WEIGHTS = Tiles(2, 64, 2, 1, False)
"""For heads of 256, whose d k and d v do not fit the registers together."""
PAIR_BLOCK, PAIR_STAGES = 64, 3
MARGIN = 512
"""Values on either side of a position table, more than an item reaches behind the end of its sequence."""


def forward_pass(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> torch.Tensor:
    """(T, H, D) attention."""
    q, k, v = (readable(x) for x in (q_THD, k_THD, v_THD))
    tiles = WEIGHTS[q.shape[2]]
    schedule = make_schedule(inputs.offsets, q.shape[0], ROWS.value * tiles.consumers)
    biases = _biases(inputs, is_reversed=False)
    return launch_stream(
        (q, q), (k, v), schedule, tiles, inputs, biases, is_gradient=False, is_reversed=False, counter=0
    )


def backward_pass(
    grad_THD: torch.Tensor, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    grad, q, k, v = (readable(x) for x in (grad_THD, q_THD, k_THD, v_THD))
    tiles = GRADIENTS[q.shape[2]]
    schedule = make_schedule(inputs.offsets, q.shape[0], ROWS.value * tiles.consumers)
    biases = _biases(inputs, is_reversed=False)
    dq = launch_stream(
        (q, grad), (k, v), schedule, tiles, inputs, biases, is_gradient=True, is_reversed=False, counter=0
    )
    biases = _biases(inputs, is_reversed=True, before=biases)
    if q.shape[2] <= 128:
        return dq, *launch_pair((k, v), (q, grad), schedule, inputs, biases, counter=1)
    dk = launch_stream(
        (k, v), (q, grad), schedule, tiles, inputs, biases, is_gradient=True, is_reversed=True, counter=1
    )
    dv = launch_stream(
        (k, k), (q, grad), schedule, BACKWARD_WEIGHTS, inputs, biases, is_gradient=False, is_reversed=True, counter=2
    )
    return dq, dk, dv


class _Biases(NamedTuple):
    """As the kernels take them."""

    position_table: torch.Tensor | None
    centre: int
    time_table: torch.Tensor | None
    tiles: torch.Tensor | None
    first_tile_B: torch.Tensor | None


def _biases(inputs: AttentionInputs, *, is_reversed: bool, before: _Biases | None = None) -> _Biases:
    """Tables with margins, and time buckets as passes of one direction read them; over those of `before`, now done."""
    position, time = inputs.bias.position_table, inputs.bias.time_table
    if before is None:
        before = _Biases(
            None if position is None else pad(position, (MARGIN, MARGIN)),
            0 if position is None else (position.numel() - 1) // 2 + MARGIN,
            None if time is None else pad(time, (0, LARGEST_BUCKET + 1 - time.numel())), None, None,
        )  # fmt: skip
    if time is None:
        return before
    if before.tiles is not None and before.first_tile_B is not None:
        where = BucketTiles(before.tiles, before.first_tile_B)
    else:
        where = empty_tiles(inputs.bias, inputs.offsets, inputs.max_length, is_square=inputs.is_square)
    fill_tiles(where, inputs.bias, inputs.offsets, is_square=inputs.is_square, is_reversed=is_reversed)
    return before._replace(tiles=where.tiles, first_tile_B=where.first_B)


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
        rows_of(x[0], ROWS.value), rows_of(x[1], ROWS.value), rows_of(y[0], tiles.block), rows_of(y[1], tiles.block),
        rows_of(out, ROWS.value), *schedule, *inputs.scalars(out), *biases, COUNTER=counter, **_switches(out, inputs),
        GRADIENT=is_gradient, REVERSED=is_reversed, CONSUMERS=tiles.consumers, YB=tiles.block, STAGES=tiles.stages,
        XSTAGES=tiles.x_stages, OWN_OUT=tiles.own_out, num_warps=4,
    )  # fmt: skip
    return out


def launch_pair(
    x: tuple[torch.Tensor, torch.Tensor],
    y: tuple[torch.Tensor, torch.Tensor],
    schedule: WorkOrder,
    inputs: AttentionInputs,
    biases: _Biases,
    *,
    counter: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of keys and values (x), from queries and the gradient of the output (y)."""
    dk, dv = (torch.empty(x[0].shape, dtype=x[0].dtype, device=x[0].device) for _ in range(2))
    keys = (rows_of(each, ROWS.value) for each in x)
    queries = (rows_of(each, PAIR_BLOCK) for each in y)
    pair_kernel[(_programs(dk),)](
        *keys, *queries, rows_of(dk, ROWS.value), rows_of(dv, ROWS.value), *schedule, *inputs.scalars(dk),
        *biases, COUNTER=counter, **_switches(dk, inputs), YB=PAIR_BLOCK, STAGES=PAIR_STAGES, num_warps=4,
    )  # fmt: skip
    return dk, dv


def _programs(x: torch.Tensor) -> int:
    """One for each multiprocessor."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _switches(out_THD: torch.Tensor, inputs: AttentionInputs) -> dict[str, Any]:
    return {
        "HAS_RULES": not inputs.rules.is_plain, "IS_SQUARE": inputs.is_square,
        "D": out_THD.shape[2], "FAST": out_THD.dtype == torch.bfloat16,
    }  # fmt: skip


def readable(x_THD: torch.Tensor) -> torch.Tensor:
    """As it is where the copy engine can read it: heads side by side, rows on 16-byte bounds. A copy otherwise."""
    _, heads, dim = x_THD.shape
    has_rows = x_THD.stride(2) == 1 and (heads == 1 or x_THD.stride(1) == dim) and x_THD.stride(0) >= heads * dim
    is_aligned = x_THD.stride(0) % 8 == 0 and x_THD.data_ptr() % 16 == 0
    return x_THD if has_rows and is_aligned else x_THD.clone(memory_format=torch.contiguous_format)


def rows_of(x_THD: torch.Tensor, rows: int) -> TensorDescriptor:
    """Blocks of rows of one head, bounded by the end of a sequence.

    A bound of the copy engine holds for the whole tensor. Here rows are addressed by two coordinates of one stride,
    whose sum selects the row and the second of which ends at 2^30: a sequence is placed so that its end falls on that
    bound. The outermost coordinate takes the surplus back, by wrapping around in 64 bits.
    """
    _, heads, dim = x_THD.shape
    step = x_THD.stride(0)
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, dim], _GL_TYPES[x_THD.dtype])
    return TensorDescriptor(
        x_THD, [0x7FFF0000, 0x7FFF0000, 1 << 30, heads * dim], [2**34 - step, step, step, 1], [1, 1, rows, dim], layout
    )
