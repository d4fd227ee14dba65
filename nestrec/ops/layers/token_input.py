"""Input and output rows of an encoder: token inputs with position embeddings, and normalization to a fixed length.

`token_input` scales item vectors and adds learned positions, with dropout:

    x[t] = dropout(factor * vector[t] + table[position[t]])

The gradient of a position is a sum over the sequences that reach it, longest first; no atomics, so it is deterministic.

`unit_rows` scales rows to the same length (L2 normalization):

    y = factor * x / max(|x|, eps)

Legend: T tokens (rows), D model width, N positions of the table, B sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize

from nestrec.ops.embedding.row_gather import HalfPrecisionRows, TableRows
from nestrec.ops.kernel_op import compute_type, kernel_op, power_of_two, runs_kernels
from nestrec.ops.layers.fused_layers import Dropout
from nestrec.ops.layers.row_ops import check_rows, column, like, row_grid, row_tile

# ruff: noqa: PLR0917 - torch operators have positional arguments


@kernel_op("embed_rows", fake=lambda x, table, position, out_type, *_: like(x, out_type))
def embed_rows(
    x: torch.Tensor,
    table: torch.Tensor,
    position: torch.Tensor,
    out_type: torch.dtype,
    factor: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> torch.Tensor:
    """Return dropout(factor * x + table[position])."""
    from nestrec.ops.layers.row_kernels import embed_forward_kernel

    check_rows(x, table)
    out = like(x, out_type)
    embed_forward_kernel[row_grid(x)](
        x,
        position,
        table,
        out,
        x if key is None else key,
        len(x),
        factor,
        site,
        threshold,
        scale,
        **row_tile(x.shape[1]),
        HAS_DROPOUT=key is not None,
    )
    return out


@kernel_op("embed_rows_backward", fake=lambda grad, out_type, *_: like(grad, out_type))
def embed_rows_backward(
    grad: torch.Tensor,
    out_type: torch.dtype,
    factor: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> torch.Tensor:
    """Return the gradient of x of `embed_rows`."""
    from nestrec.ops.layers.row_kernels import embed_backward_kernel

    check_rows(grad)
    out = like(grad, out_type)
    embed_backward_kernel[row_grid(grad)](
        grad,
        out,
        grad if key is None else key,
        len(grad),
        factor,
        site,
        threshold,
        scale,
        **row_tile(grad.shape[1]),
        HAS_DROPOUT=key is not None,
    )
    return out


def _positions(grad: torch.Tensor, num_positions: int) -> torch.Tensor:
    return torch.empty(num_positions, grad.shape[1], dtype=torch.float32, device=grad.device)


@kernel_op("position_gradient", fake=lambda grad, offsets, num_positions, *_: _positions(grad, num_positions))
def position_gradient(
    grad: torch.Tensor,
    offsets: torch.Tensor,
    num_positions: int,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> torch.Tensor:
    """Return the (num_positions, width) float32 gradient of the position table."""
    from nestrec.ops.layers.row_kernels import position_gradient_kernel

    check_rows(grad)
    width = grad.shape[1]
    block = min(256, power_of_two(width))
    out = _positions(grad, num_positions)
    order, longer = _by_length(offsets, num_positions)
    position_gradient_kernel[num_positions, -(-width // block)](
        grad,
        offsets,
        order,
        longer,
        grad if key is None else key,
        out,
        site,
        threshold,
        scale,
        WIDTH=width,
        BLOCK=block,
        BATCH=8,
        HAS_DROPOUT=key is not None,
        num_warps=4,
    )
    return out


def _by_length(offsets: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences by descending length and the number of them that reach each position, without device sync.

    Without this order every position would check every sequence, which took 5 ms with mostly short ones (224 sequences,
    H200).
    """
    sizes, ascending = offsets.diff().sort(stable=True)
    position = torch.arange(num_positions, device=offsets.device)
    return ascending.flip(0), len(sizes) - torch.searchsorted(sizes, position, right=True)


@kernel_op("scale_rows", fake=lambda x, out_type, *_: (like(x, out_type), column(x)))
def scale_rows(x: torch.Tensor, out_type: torch.dtype, factor: float, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factor * x / max(|x|, eps) and 1 / max(|x|, eps) of each row."""
    from nestrec.ops.layers.row_kernels import unit_forward_kernel

    check_rows(x)
    out = like(x, out_type)
    inverse = column(x)
    unit_forward_kernel[row_grid(x)](x, out, inverse, len(x), eps, factor, **row_tile(x.shape[1]))
    return out, inverse


@kernel_op("scale_rows_backward", fake=lambda grad, x, inverse, out_type, *_: like(x, out_type))
def scale_rows_backward(
    grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, out_type: torch.dtype, factor: float, eps: float
) -> torch.Tensor:
    """Return the gradient of x of `scale_rows`."""
    from nestrec.ops.layers.row_kernels import unit_backward_kernel

    check_rows(grad, x)
    out = like(x, out_type)
    unit_backward_kernel[row_grid(x)](grad, x, inverse, out, len(x), eps, factor, **row_tile(x.shape[1]))
    return out


def token_input_reference(
    vector_TD: torch.Tensor, table_ND: torch.Tensor, position_T: torch.Tensor, *, factor: float, drop: Dropout
) -> torch.Tensor:
    """Reference implementation of `token_input`."""
    return drop(vector_TD * factor + table_ND[position_T])


def token_input(
    vector_TD: torch.Tensor,
    table_ND: torch.Tensor,
    position_T: torch.Tensor,
    offsets: torch.Tensor,
    *,
    factor: float,
    drop: Dropout,
) -> torch.Tensor:
    """Return the (T, D) encoder inputs dropout(factor * vector + position embedding).

    Uses Triton kernels if they are available, otherwise the reference implementation. Under autocast the result has the
    autocast dtype, because it is the residual stream of the encoder.

    Args:
        vector_TD: Item vector of each token.
        table_ND: Position embeddings.
        position_T: Position of each token; the kernels require that it counts from 0 in each sequence.
        offsets: (B + 1,) start of each sequence.
        factor: Scale of the item vectors.
        drop: Dropout of the inputs.
    """
    if not runs_kernels(vector_TD):
        return token_input_reference(vector_TD, table_ND, position_T, factor=factor, drop=drop)
    options = _Options(factor, compute_type(vector_TD), drop)
    return _TokenInput.apply(vector_TD.contiguous(), table_ND, position_T, offsets, options)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Options:
    factor: float
    dtype: torch.dtype
    drop: Dropout


class _TokenInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vector: torch.Tensor,
        table: torch.Tensor,
        position: torch.Tensor,
        offsets: torch.Tensor,
        options: _Options,
    ) -> torch.Tensor:
        ctx.options = options
        ctx.types = (vector.dtype, table.dtype)
        ctx.table_rows = len(table)
        ctx.save_for_backward(offsets)
        return embed_rows(
            vector, table.contiguous(), position, options.dtype, options.factor, *options.drop.arguments()
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        options: _Options = ctx.options
        drop = options.drop.arguments()
        grad = grads[0].contiguous()
        grad_vector = embed_rows_backward(grad, ctx.types[0], options.factor, *drop)
        grad_table = position_gradient(grad, offsets, ctx.table_rows, *drop).to(ctx.types[1])
        return grad_vector, grad_table, None, None, None


def unit_rows_reference(x_TD: torch.Tensor, factor: float, eps: float) -> torch.Tensor:
    """Reference implementation of `unit_rows`."""
    return normalize(x_TD, dim=1, eps=eps) * factor


def unit_rows(x_TD: TableRows, factor: float, eps: float) -> torch.Tensor:
    """Return rows scaled to length `factor`: factor * x / max(|x|, eps).

    Uses Triton kernels if they are available, otherwise the reference implementation. Under autocast the result has the
    autocast dtype.
    """
    if isinstance(x_TD, HalfPrecisionRows):
        if not runs_kernels(x_TD.values):
            return unit_rows_reference(x_TD.to_float32(), factor, eps)
        leaf_TD = x_TD.anchor
        stored_TD = x_TD.values.contiguous()
        return _UnitRows.apply(leaf_TD, stored_TD, compute_type(leaf_TD), factor, eps)  # type: ignore[no-any-return]
    if not runs_kernels(x_TD):
        return unit_rows_reference(x_TD, factor, eps)
    return _UnitRows.apply(x_TD.contiguous(), None, compute_type(x_TD), factor, eps)  # type: ignore[no-any-return]


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, stored: torch.Tensor | None, dtype: torch.dtype, factor: float, eps: float
    ) -> torch.Tensor:
        """Scale rows; stored: the values if `x` is the anchor of `HalfPrecisionRows`, otherwise None."""
        read = x if stored is None else stored
        out, inverse = scale_rows(read, dtype, factor, eps)
        ctx.factor = factor
        ctx.eps = eps
        ctx.dtype = x.dtype
        ctx.save_for_backward(read, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        read, inverse = ctx.saved_tensors
        grad_x = scale_rows_backward(grads[0].contiguous(), read, inverse, ctx.dtype, ctx.factor, ctx.eps)
        return grad_x, None, None, None, None
