"""Attention whose weights are learned values of the distance or the time between tokens: FuXi's further channels.

    positional[i] = sum_{j <= i} position[j - i + centre] * v[j]
    temporal[i]   = sum_{j <= i} time[bucket(query_time[i] - time[j])] * v[j]          within each sequence

Weights are shared by the heads, so the values are taken as plain rows. No pair of tokens is ever in memory as more than
a tile on a GPU.

Legend: T tokens, W channels of all heads, B sequences, N longest length.
"""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

import itertools
from dataclasses import replace
from typing import Any

import torch

from nestrec.ops.kernel_op import kernel_op, power_of_two, runs_kernels
from nestrec.ops.padding import padded_slots
from nestrec.ops.relative_bias import RelativeBias, bucket_edges
from nestrec.ops.row_tiles import check_rows, check_strided, like

BLOCK = 128
"""Tokens of a tile."""
SPLITS = 16
"""Programs that share the tiles at one distance."""


def bias_attention_reference(v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias) -> list[torch.Tensor]:
    """The definition: (positional, and temporal where the bias has a time table), a loop over sequences."""
    found = []
    for channel in _channels(bias):
        outputs = []
        for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            own = channel if channel.time_table is None else _of_tokens(channel, slice(start, end))
            weights_NN = own.dense(offsets[b : b + 2] - start, end - start)[0].tril()
            outputs.append(weights_NN.to(v_TW.dtype) @ v_TW[start:end])
        found.append(torch.cat(outputs) if outputs else torch.zeros_like(v_TW))
    return found


def bias_attention_padded(
    v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias, *, max_length: int
) -> list[torch.Tensor]:
    """The same on padded blocks."""
    slot_T, shape = padded_slots(offsets, len(v_TW), max_length), (offsets.numel() - 1, max_length, v_TW.shape[1])
    flat = v_TW.new_zeros(shape[0] * shape[1], shape[2]).index_copy(0, slot_T, v_TW)
    found = []
    for channel in _channels(bias):
        weights_BNN = channel.dense(offsets, max_length).tril().to(v_TW.dtype)
        found.append((weights_BNN @ flat.view(shape)).flatten(0, 1).index_select(0, slot_T))
    return found


def bias_attention(
    v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias, *, max_length: int
) -> list[torch.Tensor]:
    """(positional, and temporal where the bias has a time table), by kernels where there are any.

    bias: has a position table. max_length: the longest sequence of the batch or more, known on the host.
    """
    assert bias.position_table is not None
    if not runs_kernels(v_TW):
        return bias_attention_padded(v_TW, offsets, bias, max_length=max_length)
    found = _BiasAttention.apply(
        v_TW, bias.position_table, bias.time_table, offsets, bias.time_T, bias.query_time_T, max_length
    )
    return list(found)


def _channels(bias: RelativeBias) -> list[RelativeBias]:
    by_position = RelativeBias(position_table=bias.position_table)
    return [by_position] if bias.time_table is None else [by_position, replace(bias, position_table=None)]


def _of_tokens(bias: RelativeBias, tokens: slice) -> RelativeBias:
    assert bias.time_T is not None
    assert bias.query_time_T is not None
    return replace(bias, time_T=bias.time_T[tokens], query_time_T=bias.query_time_T[tokens])


class _BiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, v: torch.Tensor, position: torch.Tensor, time_table: torch.Tensor | None, offsets: torch.Tensor,
        time: torch.Tensor | None, query_time: torch.Tensor | None, max_length: int,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(v, position, time_table, offsets, time, query_time)
        ctx.max_length = max_length
        found = [bias_rows(v, position, offsets, None, None, max_length)]
        if time_table is not None:
            found.append(bias_rows(v, time_table, offsets, time, query_time, max_length))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        v, position, time_table, offsets, time, query_time = ctx.saved_tensors
        by_position, *by_time = [grad.to(v.dtype).contiguous() for grad in grads]
        own_time = by_time[0] if by_time else None
        grad_v = bias_value_gradient(
            by_position, own_time, position, time_table, offsets, time, query_time, ctx.max_length
        )
        grad_position = _position_gradient(by_position, v, position, offsets, ctx.max_length)
        grad_time = None
        if own_time is not None:
            sums = bias_table_gradient(own_time, v, offsets, time, query_time, ctx.max_length, len(time_table))
            grad_time = sums.sum((0, 1))[: len(time_table)].to(time_table.dtype)
        return grad_v, grad_position, grad_time, None, None, None, None


def _position_gradient(
    grad: torch.Tensor, v: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, max_length: int
) -> torch.Tensor:
    """Diagonals of tiles to places of the table: that of distance d is centre - d."""
    by_distance = bias_table_gradient(grad, v, offsets, None, None, max_length, 0).sum(1)
    num_blocks = len(by_distance)
    upper = torch.zeros(num_blocks + 1, BLOCK, dtype=torch.float32, device=grad.device)
    # Slot BLOCK + e of block k is the distance k * BLOCK + e, for e from -BLOCK to BLOCK - 1.
    upper[:num_blocks] += by_distance[:, BLOCK:]
    upper[: num_blocks - 1] += by_distance[1:, :BLOCK]
    centre = (len(table) - 1) // 2
    count = min(upper.numel(), centre + 1)
    found = torch.zeros(len(table), dtype=torch.float32, device=grad.device)
    found[centre - count + 1 : centre + 1] = upper.flatten()[:count].flip(0)
    return found.to(table.dtype)


@kernel_op("bias_rows", fake=lambda v, *_: like(v))
def bias_rows(
    v: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, time: torch.Tensor | None,
    query_time: torch.Tensor | None, max_length: int,
) -> torch.Tensor:  # fmt: skip
    """One channel: by time where times are given, else by distance."""
    from nestrec.ops.bias_kernels import bias_forward_kernel

    check_strided(v)
    width, num_blocks = v.shape[1], -(-max_length // BLOCK)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    tile = bias_tile(width, v.dtype, products=1)
    bias_forward_kernel[_grid(offsets, num_blocks, tile)](
        v, out, table, offsets, table if query_time is None else query_time, table if time is None else time,
        _edges(table, time), len(offsets) - 1, num_blocks, v.stride(0), (len(table) - 1) // 2, len(table) - 1, **tile,
        BY_TIME=time is not None, PRECISION=_precision(v),
    )  # fmt: skip
    return out


@kernel_op("bias_value_gradient", fake=lambda grad, *_: like(grad))
def bias_value_gradient(
    grad_position: torch.Tensor, grad_time: torch.Tensor | None, position: torch.Tensor,
    time_table: torch.Tensor | None, offsets: torch.Tensor, time: torch.Tensor | None,
    query_time: torch.Tensor | None, max_length: int,
) -> torch.Tensor:  # fmt: skip
    """Gradient of the values from those of both channels."""
    from nestrec.ops.bias_kernels import bias_value_gradient_kernel

    check_rows(grad_position, grad_time)
    num_blocks = -(-max_length // BLOCK)
    out = torch.empty_like(grad_position)
    tile = bias_tile(out.shape[1], out.dtype, products=1 if grad_time is None else 2)
    given = [position if x is None else x for x in (time_table, query_time, time)]
    bias_value_gradient_kernel[_grid(offsets, num_blocks, tile)](
        grad_position, grad_position if grad_time is None else grad_time, out, position, given[0], offsets,
        given[1], given[2], _edges(given[0], time), len(offsets) - 1, num_blocks, (len(position) - 1) // 2,
        len(given[0]) - 1,
        **tile, HAS_TIME=grad_time is not None, PRECISION=_precision(out),
    )  # fmt: skip
    return out


@kernel_op("bias_table_gradient", fake=lambda grad, v, offsets, time, query, *sizes: _table_sums(grad, time, *sizes))
def bias_table_gradient(
    grad: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, time: torch.Tensor | None,
    query_time: torch.Tensor | None, max_length: int, num_slots: int,
) -> torch.Tensor:  # fmt: skip
    """(blocks, SPLITS, slots) sums: by bucket where times are given, else by the diagonals of tiles."""
    from nestrec.ops.bias_kernels import bias_table_gradient_kernel

    check_rows(grad)
    check_strided(v)
    out = _table_sums(grad, time, max_length, num_slots)
    given = [offsets if x is None else x for x in (query_time, time)]
    bias_table_gradient_kernel[out.shape[0], SPLITS](
        grad, v, out, offsets, *given, offsets if time is None else bucket_edges(num_slots - 1, time.device),
        len(offsets) - 1, out.shape[0], SPLITS, v.stride(0), num_slots - 1,
        WIDTH=grad.shape[1], BM=BLOCK, BW=min(64, power_of_two(max(16, grad.shape[1]))), SLOTS=out.shape[2],
        BY_TIME=time is not None, PRECISION=_precision(v), num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def _edges(table: torch.Tensor, time: torch.Tensor | None) -> torch.Tensor:
    """Of the buckets of a time table; anything where there is none."""
    return table if time is None else bucket_edges(len(table) - 1, table.device)


def _table_sums(grad: torch.Tensor, time: torch.Tensor | None, max_length: int, num_slots: int) -> torch.Tensor:
    slots = 2 * BLOCK if time is None else power_of_two(num_slots)
    return torch.empty(max(1, -(-max_length // BLOCK)), SPLITS, slots, dtype=torch.float32, device=grad.device)


def bias_tile(width: int, dtype: torch.dtype, *, products: int) -> dict[str, Any]:
    """Shape of the work of one program that has so many operands of a product on their way to shared memory."""
    block = min(64 if dtype == torch.float32 else 256, power_of_two(max(16, width)))
    return {"WIDTH": width, "BM": BLOCK, "BN": 64, "BW": block, "num_warps": 8, "num_stages": 4 - products}


def _grid(offsets: torch.Tensor, num_blocks: int, tile: dict[str, Any]) -> tuple[int, int]:
    return max(1, (len(offsets) - 1) * num_blocks), -(-tile["WIDTH"] // tile["BW"])


def _precision(x: torch.Tensor) -> str:
    """Of float32 products, as torch's own are set."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
