"""Attention whose weights depend only on distance or time: the positional and temporal channels of FuXi.

    positional[i] = sum_{j seen by i} position_table[j - i + center] * v[j]
    temporal[i]   = sum_{j seen by i} time_table[bucket(query_time[i] - time[j])] * v[j]    within each sequence
                    or, with a time function, b(query_time[i] - time[j]) instead of the value of the bucket

A causal mask sees j <= i; mask_and_bias.py defines the other masks. The kernels support windows and prefixes that do
not look ahead. Weights are shared by the heads, so all heads together are one matrix of rows.

Weights by distance are a strip: one row holds the weights of 64 adjacent tokens, and any 128 consecutive rows are a
tile of pairs. Weights by time are written to memory before a product, for at most `MAX_WEIGHTS` pairs at a time.

Legend: T tokens, W channels of all heads, B sequences, N longest length.
"""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from nestrec.ops.attention.mask_and_bias import (
    PLAIN,
    AttentionMask,
    RelativeBias,
    bucket_edges,
    function_gradient,
    mask_of_sequences,
    masked_weights,
)
from nestrec.ops.kernel_op import IS_INTERPRETED, kernel_op, power_of_two, runs_kernels
from nestrec.ops.layers.row_ops import check_rows, check_strided, like
from nestrec.ops.padding import padded_indices

if TYPE_CHECKING:
    from nestrec.ops.attention.work_schedule import WorkOrder


# ruff: noqa: PLR0917 - PyTorch operators take their arguments by position


BLOCK = 128
"""Number of tokens in a block of rows."""
OTHERS = 64
"""Number of tokens that a block of rows processes at a time."""
MAX_WEIGHTS = 1 << 30
"""Maximum number of time weights in memory at a time."""
SPLITS = 4
"""Number of programs that share the tiles of a block of queries."""
PROGRAMS = 4096
"""Approximate number of programs that compute the gradient of the position table."""


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
    """Compute sums of rows weighted by distance and by time (custom operator).

    Args:
        by_position: Rows to weight by distance, (T, W); None skips this sum.
        by_time: Rows to weight by time, (T, W); None skips this sum.
        position: Weight per distance, (2 * max_length - 1,).
        time_table: Weight per time bucket; None if there is a time function or no time.
        time_function: Scalars of a time function, (3,).
        offsets: Bounds of the sequences, (B + 1,) int64.
        time: Times of keys, (T,) float64 seconds.
        query_time: Times of queries, (T,) float64 seconds.
        buckets: Precomputed time buckets (see pair_tiles.py).
        max_length: Upper bound on the sequence lengths of the batch.
        window: Attention window in tokens; 0 disables it.
        context: Number of leading tokens that all later tokens attend to.
        is_reversed: Whether to sum over later tokens (for the gradient of the values) instead of earlier ones.

    Returns:
        Weighted sums, (T, W).
    """
    from nestrec.ops.attention.bias_only_kernels import bias_product_kernel
    from nestrec.ops.attention.work_schedule import make_schedule

    operands = [x for x in (by_position, by_time) if x is not None]
    check_strided(*operands)
    rows = operands[0]
    out = like(rows)
    tile = product_tile(rows.shape[1], rows.dtype)
    schedule = make_schedule(offsets, len(rows), BLOCK)
    columns, items, chunk = _chunks(schedule, max_length)
    strip = rows
    origin = 0
    weights = rows
    times = _Times.of(offsets, time, query_time, buckets, max_length)
    visible = (window, context)
    if by_position is not None:
        strip, origin = position_strip(position.to(rows.dtype), max_length, is_reversed=is_reversed)
    if by_time is not None:
        weights = rows.new_empty(chunk * BLOCK, columns)
    for first in range(0, items, chunk):
        if by_time is not None and time_table is not None:
            _write_weights(weights, pad(time_table, (0, 1)), schedule, times, first, visible, is_reversed=is_reversed)
        elif by_time is not None and time_function is not None:
            _write_weights(
                weights, time_function, schedule, times, first, visible, is_reversed=is_reversed, is_function=True
            )
        bias_product_kernel[(chunk * -(-rows.shape[1] // tile["BW"]),)](
            operands[0],
            operands[-1],
            out,
            strip,
            weights,
            *schedule,
            first,
            origin,
            columns,
            operands[0].stride(0),
            operands[-1].stride(0),
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
    """Return the tile sizes and launch parameters of `bias_product_kernel`."""
    channels = min(64 if dtype == torch.float32 else 256, power_of_two(max(16, width)))
    shape = {"WIDTH": width, "BM": BLOCK, "BN": OTHERS, "BW": channels}
    return {**shape, "PRECISION": _precision(), "num_warps": 8, "num_stages": 4}


def position_strip(table: torch.Tensor, max_length: int, *, is_reversed: bool) -> tuple[torch.Tensor, int]:
    """Return the strip of position weights and its origin.

    strip[origin + x - y, c] is the weight of the pair (x, y + c), or 0 if x does not attend to it.
    """
    reach = (-(-max_length // BLOCK) + 1) * BLOCK
    center = (len(table) - 1) // 2
    past = table[max(0, center - reach) : center + 1]
    line = pad(past, (reach + 1 - len(past), reach))  # weights of x - y from -reach to reach, where x is a key
    line = line if is_reversed else line.flip(0)
    return line.unfold(0, OTHERS, 1).flip(1).contiguous(), reach - OTHERS + 1


class _Times(NamedTuple):
    """Event times of a batch and, if precomputed, the time buckets of its pairs (see pair_tiles.py)."""

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


def _write_weights(
    out: torch.Tensor,
    table: torch.Tensor,
    schedule: "WorkOrder",
    times: _Times,
    first: int,
    visible: tuple[int, int],
    *,
    is_reversed: bool,
    is_function: bool = False,
) -> None:
    """Write the weights of a chunk of blocks to `out`.

    Args:
        out: Weights or bucket numbers, (rows, columns).
        table: Value per bucket followed by the value of masked pairs, or the scalars of a time function.
        schedule: Schedule of blocks of `BLOCK` rows.
        times: Event times of the batch.
        first: First item of the chunk.
        visible: Attention window and number of context tokens.
        is_reversed: Whether rows are keys instead of queries.
        is_function: Whether `table` holds a time function.
    """
    from nestrec.ops.attention.bias_only_kernels import bias_weights_kernel

    num_buckets = len(table) - 2
    splits = min(8, out.shape[1] // OTHERS)
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
        *visible,
        BM=BLOCK,
        BN=OTHERS,
        REVERSED=is_reversed,
        IS_FUNCTION=is_function,
        FAST=_is_fast(out),
        HAS_RULES=visible[0] > 0,
        num_warps=8,
    )


def _is_fast(x: torch.Tensor) -> bool:
    """Return whether approximate logarithm instructions are precise enough for the dtype."""
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
    """Compute the gradient of the scalars of a time function, (3,)."""
    from nestrec.ops.attention.bias_only_kernels import bias_function_kernel
    from nestrec.ops.attention.work_schedule import make_schedule

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
    pair_buckets: torch.Tensor | None,
    max_length: int,
    window: int,
    context: int,
    num_slots: int,
) -> torch.Tensor:
    """Compute the gradient of a time table, (num_slots,) float32."""
    from nestrec.ops.attention.bias_only_kernels import bias_time_kernel
    from nestrec.ops.attention.work_schedule import make_schedule

    check_rows(grad)
    check_strided(v)
    schedule = make_schedule(offsets, len(grad), BLOCK)
    columns, items, chunk = _chunks(schedule, max_length)
    number = torch.arange(num_slots + 1, device=grad.device).to(torch.uint8 if num_slots < 256 else torch.int16)
    buckets = number.new_empty(chunk * BLOCK, columns)
    slots = power_of_two(num_slots)
    times = _Times.of(offsets, time, query_time, pair_buckets, max_length)
    sums = torch.empty(-(-items // chunk) * chunk, SPLITS, slots, dtype=torch.float32, device=grad.device)
    for first in range(0, items, chunk):
        _write_weights(buckets, number, schedule, times, first, (window, context), is_reversed=False)
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
    """Compute the sums over the diagonals of all tiles of each block distance, (blocks, 2 * BLOCK) float32."""
    from nestrec.ops.attention.bias_only_kernels import bias_position_kernel

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
    """Return the tile sizes and launch parameters of kernels that compute tiles of pairs."""
    shape = {"WIDTH": width, "BM": BLOCK, "BW": min(64, power_of_two(max(16, width)))}
    return {**shape, "PRECISION": _precision(), "num_warps": 8, "num_stages": 3}


def _chunks(schedule: "WorkOrder", max_length: int) -> tuple[int, int, int]:
    """Return the number of weight columns, the maximum number of schedule items, and the items per chunk."""
    columns = max(1, -(-max_length // BLOCK)) * BLOCK
    items = schedule.table.shape[0]
    return columns, items, min(items, max(1, MAX_WEIGHTS // (BLOCK * columns)))


def _precision() -> str:
    """Return the precision of float32 matrix products that PyTorch is configured for."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def bias_attention_reference(
    v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias, rules: AttentionMask = PLAIN
) -> list[torch.Tensor]:
    """Reference implementation of `bias_attention`: loops over sequences."""
    results = []
    for channel in _channels(bias):
        outputs = []
        for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            own = channel if not channel.has_time else _of_tokens(channel, slice(start, end))
            own_rules = mask_of_sequences(rules, slice(b, b + 1))
            own_offsets = offsets[b : b + 2] - start
            weights_NN = masked_weights(own.dense(own_offsets, end - start, own_rules), own_offsets, own_rules)[0]
            outputs.append(weights_NN.to(v_TW.dtype) @ v_TW[start:end])
        results.append(torch.cat(outputs) if outputs else torch.zeros_like(v_TW))
    return results


def bias_attention_padded(
    v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias, *, max_length: int, rules: AttentionMask = PLAIN
) -> list[torch.Tensor]:
    """Compute `bias_attention` on padded blocks with PyTorch operators."""
    return [_channel_padded(v_TW, offsets, channel, max_length, rules) for channel in _channels(bias)]


def _channel_padded(
    v_TW: torch.Tensor, offsets: torch.Tensor, channel: RelativeBias, max_length: int, rules: AttentionMask = PLAIN
) -> torch.Tensor:
    index_T = padded_indices(offsets, len(v_TW), max_length)
    shape = (offsets.numel() - 1, max_length, v_TW.shape[1])
    flat = v_TW.new_zeros(shape[0] * shape[1], shape[2]).index_copy(0, index_T, v_TW)
    weights_BNN = masked_weights(channel.dense(offsets, max_length, rules), offsets, rules).to(v_TW.dtype)
    return (weights_BNN @ flat.view(shape)).flatten(0, 1).index_select(0, index_T)


def bias_attention(
    v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias, *, max_length: int, rules: AttentionMask = PLAIN
) -> list[torch.Tensor]:
    """Compute the positional channel and, if the bias has a time, the temporal channel.

    Uses kernels if they are available for the device and the mask.

    Args:
        v_TW: Values of all heads, (T, W).
        offsets: Bounds of the sequences from 0 to T, (B + 1,) int64.
        bias: Weights; must have a position table.
        max_length: Upper bound on the sequence lengths of the batch, known on the host.
        rules: Attention mask.

    Returns:
        One (T, W) tensor per channel.
    """
    assert bias.position_table is not None
    if not runs_kernels(v_TW) or rules.is_square or rules.num_targets_B is not None:
        return bias_attention_padded(v_TW, offsets, bias, max_length=max_length, rules=rules)
    channels = _BiasAttention.apply(
        v_TW,
        bias.position_table,
        bias.time_table,
        bias.time_function,
        offsets,
        bias.time_T,
        bias.query_time_T,
        bias.buckets,
        (max_length, rules.max_attention_length or 0, rules.num_context),
    )
    return list(channels)


def _channels(bias: RelativeBias) -> list[RelativeBias]:
    by_position = RelativeBias(position_table=bias.position_table)
    return [by_position] if not bias.has_time else [by_position, replace(bias, position_table=None)]


def _of_tokens(bias: RelativeBias, tokens: slice) -> RelativeBias:
    assert bias.time_T is not None
    assert bias.query_time_T is not None
    return replace(bias, time_T=bias.time_T[tokens], query_time_T=bias.query_time_T[tokens])


class _BiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        v: torch.Tensor,
        position: torch.Tensor,
        time_table: torch.Tensor | None,
        time_function: torch.Tensor | None,
        offsets: torch.Tensor,
        time: torch.Tensor | None,
        query_time: torch.Tensor | None,
        buckets: torch.Tensor | None,
        sizes: tuple[int, int, int],
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(v, position, time_table, time_function, offsets, time, query_time, buckets)
        ctx.sizes = sizes
        shared = (position, time_table, time_function, offsets, time, query_time, buckets, *sizes, False)
        by_position = bias_product(v, None, *shared)
        has_time = time_table is not None or time_function is not None
        return (by_position, bias_product(None, v, *shared)) if has_time else (by_position,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        v, position, time_table, time_function, offsets, time, query_time, buckets = ctx.saved_tensors
        sizes: tuple[int, int, int] = ctx.sizes
        max_length, visible = sizes[0], sizes[1:]
        by_position, *by_time = [grad.to(v.dtype).contiguous() for grad in grads]
        own_time = by_time[0] if by_time else None
        grad_v = bias_product(
            by_position,
            own_time,
            position,
            time_table,
            time_function,
            offsets,
            time,
            query_time,
            buckets,
            max_length,
            *visible,
            True,
        )
        grad_position = _position_gradient(by_position, v, position, offsets, sizes)
        grad_time, grad_function = None, None
        if own_time is not None and time_function is not None:
            grad_function = bias_function_gradient(own_time, v, time_function, offsets, time, query_time, *visible)
        elif own_time is not None:
            shared = (own_time, v, offsets, time, query_time, buckets)
            table_gradient = bias_time_gradient(*shared, max_length, *visible, len(time_table))
            grad_time = table_gradient.to(time_table.dtype)
        return grad_v, grad_position, grad_time, grad_function, None, None, None, None, None


def _position_gradient(
    grad: torch.Tensor, v: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, sizes: tuple[int, int, int]
) -> torch.Tensor:
    """Reduce the diagonals of tiles to the position table, where distance d has index center - d."""
    by_distance = bias_position_gradient(grad, v, offsets, *sizes)
    num_blocks = len(by_distance)
    upper = torch.zeros(num_blocks + 1, BLOCK, dtype=torch.float32, device=grad.device)
    # Column BLOCK + e of block distance k is the distance k * BLOCK + e, for e from -BLOCK to BLOCK - 1.
    upper[:num_blocks] += by_distance[:, BLOCK:]
    upper[: num_blocks - 1] += by_distance[1:, :BLOCK]
    center = (len(table) - 1) // 2
    count = min(upper.numel(), center + 1)
    gradient = torch.zeros(len(table), dtype=torch.float32, device=grad.device)
    gradient[center - count + 1 : center + 1] = upper.flatten()[:count].flip(0)
    return gradient.to(table.dtype)
