"""Activations of projected rows, as operators: SiLU of columns, and SiLU times a second half."""

import torch

from nestrec.ops.kernel_op import kernel_op
from nestrec.ops.layers.row_tiles import check_rows, check_strided, like, part_grid, part_tile


@kernel_op("silu_columns", fake=lambda z, first: z.new_empty(z.shape[0], z.shape[1] - first))
def silu_columns(z: torch.Tensor, first: int) -> torch.Tensor:
    """silu(z[:, first:]), packed."""
    from nestrec.ops.layers.row_kernels import silu_forward_kernel

    check_rows(z)
    columns = z[:, first:]
    out = like(columns)
    silu_forward_kernel[part_grid(columns)](columns, out, len(z), z.stride(0), **part_tile(columns.shape[1]))
    return out


@kernel_op("silu_columns_backward", fake=lambda *_: None, mutates=("grad_z",))
def silu_columns_backward(grad: torch.Tensor, z: torch.Tensor, grad_z: torch.Tensor, first: int) -> None:
    """grad_z[:, first : first + width of grad] from the gradient of those columns' SiLU, whose rows may be strided."""
    from nestrec.ops.layers.row_kernels import silu_backward_kernel

    check_rows(z, grad_z)
    check_strided(grad)
    last = first + grad.shape[1]
    silu_backward_kernel[part_grid(grad)](
        grad,
        z[:, first:last],
        grad_z[:, first:last],
        len(z),
        grad.stride(0),
        z.stride(0),
        grad_z.stride(0),
        **part_tile(grad.shape[1]),
    )


@kernel_op("swiglu", fake=lambda z: z.new_empty(z.shape[0], z.shape[1] // 2))
def swiglu(z: torch.Tensor) -> torch.Tensor:
    """silu(a) * b of z = [a, b]."""
    from nestrec.ops.layers.row_kernels import swiglu_forward_kernel

    check_rows(z)
    out = z.new_empty(len(z), z.shape[1] // 2)
    swiglu_forward_kernel[part_grid(out)](z, out, len(z), **part_tile(out.shape[1]))
    return out


@kernel_op("swiglu_backward", fake=lambda grad, z, again: [like(z), like(grad)] if again else [like(z)])
def swiglu_backward(grad: torch.Tensor, z: torch.Tensor, again: bool) -> list[torch.Tensor]:
    """Gradient of z; with `again` also the output of `swiglu`."""
    from nestrec.ops.layers.row_kernels import swiglu_backward_kernel

    check_rows(grad, z)
    grad_z, out = like(z), like(grad) if again else None
    swiglu_backward_kernel[part_grid(grad)](
        grad, z, grad_z, grad if out is None else out, len(z), **part_tile(grad.shape[1]), AGAIN=again
    )
    return [grad_z] if out is None else [grad_z, out]
