"""Launches of attention by bias alone: products of weights with rows, and gradients of the tables behind the weights.

Weights of a distance are a strip: a row of it holds those of 64 neighbouring tokens, and any 128 rows are a tile of
pairs. Weights of a time are written to memory before a product, for as many blocks of rows as are allowed at a time.

Legend: T tokens, W channels of all heads, B sequences.
"""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from nestrec.ops.attention.relative_bias import bucket_edges
from nestrec.ops.attention.time_function import function_gradient
from nestrec.ops.kernel_op import kernel_op, power_of_two
from nestrec.ops.layers.row_tiles import check_rows, check_strided, like
from nestrec.ops.registry import IS_INTERPRETED

if TYPE_CHECKING:
    from nestrec.ops.attention.work_order import WorkOrder

BLOCK = 128
"""tokens of a block of rows"""
OTHERS = 64
"""tokens that a block of rows sees at a time"""
MAX_WEIGHTS = 1 << 30
"""weights of times in memory at a time"""
SPLITS = 4
"""programs that share the tiles of a block of queries"""
PROGRAMS = 4096
"""that the position table's gradient is divided into, about"""


def _rows_of(by_position: torch.Tensor | None, by_time: torch.Tensor | None) -> torch.Tensor:
    rows = by_time if by_position is None else by_position
    assert rows is not None
    return rows


@kernel_op("bias_product", fake=lambda by_position, by_time, *_: like(_rows_of(by_position, by_time)))
def bias_product(
    by_position: torch.Tensor | None,
    by_time: torch.Tensor | None,
    position: torch.Tensor,
    time_table: torch.Tensor | None,
    time_function: torch.Tensor | None,
    offsets: torch.Tensor,
    time: torch.Tensor | None,
    query_time: torch.Tensor | None,
    buckets: torch.Tensor | None,
    max_length: int,
    window: int,
    context: int,
    is_reversed: bool,
) -> torch.Tensor:
    """(T, W) sums of (T, W) rows by the weights of distances and of times, whichever rows are given.

    Times have a table or a function. window, context: tokens that one sees, and first ones that all see; a window of 0
    is none. is_reversed: over later tokens, for the gradients of values, instead of over earlier ones.
    """
    from nestrec.ops.attention.bias_channel_kernels import bias_product_kernel
    from nestrec.ops.attention.work_order import make_schedule

    given = [x for x in (by_position, by_time) if x is not None]
    check_strided(*given)
    rows = given[0]
    out, tile = like(rows), product_tile(rows.shape[1], rows.dtype)
    schedule = make_schedule(offsets, len(rows), BLOCK)
    columns, items, chunk = _chunks(schedule, max_length)
    strip, origin, weights, times = rows, 0, rows, _Times.of(offsets, time, query_time, buckets, max_length)
    seen = (window, context)
    if by_position is not None:
        strip, origin = position_strip(position.to(rows.dtype), max_length, is_reversed=is_reversed)
    if by_time is not None:
        weights = rows.new_empty(chunk * BLOCK, columns)
    for first in range(0, items, chunk):
        if by_time is not None and time_table is not None:
            _fill(weights, pad(time_table, (0, 1)), schedule, times, first, seen, is_reversed=is_reversed)
        elif by_time is not None and time_function is not None:
            _fill(weights, time_function, schedule, times, first, seen, is_reversed=is_reversed, is_function=True)
        bias_product_kernel[(chunk * -(-rows.shape[1] // tile["BW"]),)](
            given[0],
            given[-1],
            out,
            strip,
            weights,
            *schedule,
            first,
            origin,
            columns,
            given[0].stride(0),
            given[-1].stride(0),
            window,
            context,
            **tile,
            HAS_POSITION=by_position is not None,
            HAS_TIME=by_time is not None,
            REVERSED=is_reversed,
            HAS_RULES=window > 0,
        )
    return out


def product_tile(width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Shape of the work of one program."""
    channels = min(64 if dtype == torch.float32 else 256, power_of_two(max(16, width)))
    shape = {"WIDTH": width, "BM": BLOCK, "BN": OTHERS, "BW": channels}
    return {**shape, "PRECISION": _precision(), "num_warps": 8, "num_stages": 4}


def position_strip(table: torch.Tensor, max_length: int, *, is_reversed: bool) -> tuple[torch.Tensor, int]:
    """(strip, origin): strip[origin + x - y, c] is the weight of the pair (x, y + c); 0 where x does not see it."""
    reach = (-(-max_length // BLOCK) + 1) * BLOCK
    centre = (len(table) - 1) // 2
    past = table[max(0, centre - reach) : centre + 1]
    line = pad(past, (reach + 1 - len(past), reach))  # of x - y from -reach to reach, x a key
    line = line if is_reversed else line.flip(0)
    return line.unfold(0, OTHERS, 1).flip(1).contiguous(), reach - OTHERS + 1


class _Times(NamedTuple):
    """Of the tokens of a batch, and the time buckets of its pairs (pair_tiles.py), where they have been found."""

    query_time: torch.Tensor | None
    time: torch.Tensor | None
    buckets: torch.Tensor | None
    first_tile_B: torch.Tensor | None

    @classmethod
    def of(
        cls,
        offsets: torch.Tensor,
        time: torch.Tensor | None,
        query_time: torch.Tensor | None,
        buckets: torch.Tensor | None,
        max_length: int,
    ) -> "_Times":
        from nestrec.ops.attention.pair_tiles import plan_tiles

        if buckets is None or time is None:
            return cls(query_time, time, None, None)
        plan, _ = plan_tiles(offsets, len(time), max_length, is_square=False)
        return cls(query_time, time, buckets, plan.first_B)


def _fill(
    out: torch.Tensor,
    table: torch.Tensor,
    schedule: "WorkOrder",
    times: _Times,
    first: int,
    seen: tuple[int, int],
    *,
    is_reversed: bool,
    is_function: bool = False,
) -> None:
    """table: values of the buckets, and one of pairs that do not see each other; or the numbers of a function."""
    from nestrec.ops.attention.bias_channel_kernels import bias_weights_kernel

    num_buckets, splits = len(table) - 2, min(8, out.shape[1] // OTHERS)
    bias_weights_kernel[len(out) // BLOCK, splits](
        out,
        table,
        *schedule,
        *times,
        bucket_edges(num_buckets, out.device),
        first,
        out.shape[1],
        num_buckets,
        splits,
        *seen,
        BM=BLOCK,
        BN=OTHERS,
        REVERSED=is_reversed,
        IS_FUNCTION=is_function,
        FAST=_is_fast(out),
        HAS_RULES=seen[0] > 0,
        num_warps=8,
    )


def _is_fast(x: torch.Tensor) -> bool:
    """Whether logarithms may be those of one instruction."""
    return not IS_INTERPRETED and x.dtype != torch.float32


@kernel_op("bias_function_gradient", fake=lambda grad, v, scalars, *_: torch.empty_like(scalars))
def bias_function_gradient(
    grad: torch.Tensor,
    v: torch.Tensor,
    scalars: torch.Tensor,
    offsets: torch.Tensor,
    time: torch.Tensor,
    query_time: torch.Tensor,
    window: int,
    context: int,
) -> torch.Tensor:
    """The gradient of a time function's numbers."""
    from nestrec.ops.attention.bias_channel_kernels import bias_function_kernel
    from nestrec.ops.attention.work_order import make_schedule

    check_rows(grad)
    check_strided(v)
    schedule = make_schedule(offsets, len(grad), BLOCK)
    items = schedule.table.shape[0]
    sums = torch.empty(items, SPLITS, 4, dtype=torch.float32, device=grad.device)
    bias_function_kernel[(items * SPLITS,)](
        grad,
        v,
        scalars,
        sums,
        *schedule,
        query_time,
        time,
        v.stride(0),
        window,
        context,
        **pairs_tile(grad.shape[1]),
        BN=OTHERS,
        SPLITS=SPLITS,
        FAST=_is_fast(grad),
        HAS_RULES=window > 0,
    )
    return function_gradient(scalars, sums.double().sum((0, 1)))


@kernel_op("bias_time_gradient", fake=lambda grad, *rest: grad.new_empty(rest[-1], dtype=torch.float32))
def bias_time_gradient(
    grad: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    time: torch.Tensor,
    query_time: torch.Tensor,
    given: torch.Tensor | None,
    max_length: int,
    window: int,
    context: int,
    num_slots: int,
) -> torch.Tensor:
    """(num_slots,) float32: the gradient of a time table."""
    from nestrec.ops.attention.bias_channel_kernels import bias_time_kernel
    from nestrec.ops.attention.work_order import make_schedule

    check_rows(grad)
    check_strided(v)
    schedule = make_schedule(offsets, len(grad), BLOCK)
    columns, items, chunk = _chunks(schedule, max_length)
    number = torch.arange(num_slots + 1, device=grad.device).to(torch.uint8 if num_slots < 256 else torch.int16)
    buckets = number.new_empty(chunk * BLOCK, columns)
    slots, times = power_of_two(num_slots), _Times.of(offsets, time, query_time, given, max_length)
    sums = torch.empty(-(-items // chunk) * chunk, SPLITS, slots, dtype=torch.float32, device=grad.device)
    for first in range(0, items, chunk):
        _fill(buckets, number, schedule, times, first, (window, context), is_reversed=False)
        bias_time_kernel[(chunk * SPLITS,)](
            grad,
            v,
            buckets,
            sums,
            *schedule,
            first,
            columns,
            v.stride(0),
            num_slots,
            window,
            context,
            **pairs_tile(grad.shape[1]),
            SLOTS=slots,
            SPLITS=SPLITS,
            HAS_RULES=window > 0,
        )
    return sums.sum((0, 1))[:num_slots]


@kernel_op("bias_position_gradient", fake=lambda grad, v, offsets, length, *_: _diagonals(grad, offsets, length).sum(0))
def bias_position_gradient(
    grad: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, max_length: int, window: int, context: int
) -> torch.Tensor:
    """(blocks, 2 BLOCK) float32: sums by the diagonals of the tiles at each distance in blocks."""
    from nestrec.ops.attention.bias_channel_kernels import bias_position_kernel

    check_rows(grad)
    check_strided(v)
    out = _diagonals(grad, offsets, max_length)
    bias_position_kernel[out.shape[1], out.shape[0]](
        grad,
        v,
        out,
        offsets,
        len(offsets) - 1,
        out.shape[0],
        v.stride(0),
        window,
        context,
        **pairs_tile(grad.shape[1]),
        HAS_RULES=window > 0,
    )
    return out.sum(0)


def _diagonals(grad: torch.Tensor, offsets: torch.Tensor, max_length: int) -> torch.Tensor:
    blocks = max(1, -(-max_length // BLOCK))
    splits = max(1, min(len(offsets) - 1, PROGRAMS // blocks))
    return torch.empty(splits, blocks, 2 * BLOCK, dtype=torch.float32, device=grad.device)


def pairs_tile(width: int) -> dict[str, Any]:
    """The same where it makes tiles of pairs."""
    shape = {"WIDTH": width, "BM": BLOCK, "BW": min(64, power_of_two(max(16, width)))}
    return {**shape, "PRECISION": _precision(), "num_warps": 8, "num_stages": 3}


def _chunks(schedule: "WorkOrder", max_length: int) -> tuple[int, int, int]:
    """(columns of weights, items of the schedule at most, items at a time)"""
    columns, items = max(1, -(-max_length // BLOCK)) * BLOCK, schedule.table.shape[0]
    return columns, items, min(items, max(1, MAX_WEIGHTS // (BLOCK * columns)))


def _precision() -> str:
    """Of float32 products, as torch's own are set."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
