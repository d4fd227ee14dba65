"""Input and output rows of an encoder, as operators: scaled and placed, or brought to one length."""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

import torch

from nestrec.ops.kernel_op import kernel_op, power_of_two
from nestrec.ops.layers.row_tiles import check_rows, column, like, row_grid, row_tile


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
    """dropout(factor * x + table[position])."""
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
    """Gradient of x."""
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
    """(num_positions, width) float32 gradient of the table."""
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
    """Sequences from the longest on, and for each position how many of them reach it; without waiting for the device.

    Otherwise every position would ask every sequence, which took 5 ms where most are short (224 sequences, H200).
    """
    sizes, ascending = offsets.diff().sort(stable=True)
    place = torch.arange(num_positions, device=offsets.device)
    return ascending.flip(0), len(sizes) - torch.searchsorted(sizes, place, right=True)


@kernel_op("scale_rows", fake=lambda x, out_type, *_: (like(x, out_type), column(x)))
def scale_rows(x: torch.Tensor, out_type: torch.dtype, factor: float, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """factor * x / max(|x|, eps), and one over that maximum."""
    from nestrec.ops.layers.row_kernels import unit_forward_kernel

    check_rows(x)
    out, inverse = like(x, out_type), column(x)
    unit_forward_kernel[row_grid(x)](x, out, inverse, len(x), eps, factor, **row_tile(x.shape[1]))
    return out, inverse


@kernel_op("scale_rows_backward", fake=lambda grad, x, inverse, out_type, *_: like(x, out_type))
def scale_rows_backward(
    grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, out_type: torch.dtype, factor: float, eps: float
) -> torch.Tensor:
    """Gradient of x."""
    from nestrec.ops.layers.row_kernels import unit_backward_kernel

    check_rows(grad, x)
    out = like(x, out_type)
    unit_backward_kernel[row_grid(x)](grad, x, inverse, out, len(x), eps, factor, **row_tile(x.shape[1]))
    return out
