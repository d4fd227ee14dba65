"""PyTorch operators on the rows of token matrices: SiLU, SwiGLU, norms, and norm with gate and dropout.

Also defines how row kernels divide matrices into tiles and checks their inputs. The operators have the dropout
arguments `key` (None disables dropout), `site`, `threshold` and `scale`, which are the values of `Dropout.arguments()`.
`centered` selects layer norm; otherwise it is RMS norm.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nestrec.base.errors import UserError
from nestrec.ops.kernel_op import kernel_op, power_of_two

ROW_TILE = 1024
"""Elements per program that needs full rows: one 16-byte load per thread of four warps, many concurrent programs."""
PART_TILE = 4096
"""Elements per elementwise program."""


def row_tile(width: int, parts: int = 1) -> dict[str, Any]:
    """Return the tile arguments of kernels that process full rows of `parts` matrices."""
    block = power_of_two(width)
    return {"WIDTH": width, "BLOCK": block, "ROWS": _rows(block, parts), "num_warps": 4 if block <= 1024 else 8}


def row_grid(x: torch.Tensor, parts: int = 1) -> tuple[int]:
    """Return the launch grid for `row_tile`."""
    return (max(1, -(-len(x) // _rows(power_of_two(x.shape[1]), parts))),)


def part_tile(width: int) -> dict[str, Any]:
    """Return the tile arguments of elementwise kernels, which split rows into at most 1024 channels."""
    block = min(1024, power_of_two(width))
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(1, PART_TILE // block), "num_warps": 8}


def part_grid(x: torch.Tensor) -> tuple[int, int]:
    """Return the launch grid for `part_tile`."""
    block = min(1024, power_of_two(x.shape[1]))
    return (max(1, -(-len(x) // max(1, PART_TILE // block))), -(-x.shape[1] // block))


def _rows(block: int, parts: int) -> int:
    return max(1, ROW_TILE // (block * power_of_two(parts)))


def check_rows(*rows: torch.Tensor | None) -> None:
    """Raise UserError unless all tensors are contiguous matrices; None is skipped."""
    for x in rows:
        if x is not None and (x.dim() != 2 or not x.is_contiguous()):
            raise UserError(
                "must be contiguous (tokens, channels) matrices",
                option="shape, strides",
                value=(tuple(x.shape), x.stride()),
                remedy="call .contiguous() first",
            )


def check_strided(*rows: torch.Tensor) -> None:
    """Raise UserError unless all tensors are matrices with contiguous channels; rows may be strided."""
    for x in rows:
        if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
            raise UserError(
                "the channels of a token must be contiguous in memory",
                option="shape, strides",
                value=(tuple(x.shape), x.stride()),
                remedy="call .contiguous() first",
            )


def check_parts(parts: Sequence[torch.Tensor], gate: torch.Tensor) -> None:
    """Raise UserError unless there are one to three parts of equal width that together are as wide as the gate."""
    check_strided(*parts, gate)
    widths = [x.shape[1] for x in parts]
    if not 1 <= len(parts) <= 3 or len(set(widths)) > 1 or sum(widths) != gate.shape[1]:
        raise UserError(
            "must be one to three parts of equal width that together are as wide as the gate",
            option="widths",
            value=(widths, gate.shape),
        )


def like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized contiguous tensor with the shape of `x`."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def column(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized float32 tensor with one value per row of `x`."""
    return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


@kernel_op("silu_columns", fake=lambda z, first: z.new_empty(z.shape[0], z.shape[1] - first))
def silu_columns(z: torch.Tensor, first: int) -> torch.Tensor:
    """Return silu(z[:, first:]) as a contiguous matrix."""
    from nestrec.ops.layers.row_kernels import silu_forward_kernel

    check_rows(z)
    columns = z[:, first:]
    out = like(columns)
    silu_forward_kernel[part_grid(columns)](columns, out, len(z), z.stride(0), **part_tile(columns.shape[1]))
    return out


@kernel_op("silu_columns_backward", fake=lambda *_: None, mutates=("grad_z",))
def silu_columns_backward(grad: torch.Tensor, z: torch.Tensor, grad_z: torch.Tensor, first: int) -> None:
    """Fill grad_z[:, first : first + width of grad] from the gradient of the SiLU of these columns.

    The rows of `grad` may be strided.
    """
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
    """Return silu(a) * b for z = [a, b] (SwiGLU)."""
    from nestrec.ops.layers.row_kernels import swiglu_forward_kernel

    check_rows(z)
    out = z.new_empty(len(z), z.shape[1] // 2)
    swiglu_forward_kernel[part_grid(out)](z, out, len(z), **part_tile(out.shape[1]))
    return out


@kernel_op("swiglu_backward", fake=lambda grad, z, again: [like(z), like(grad)] if again else [like(z)])
def swiglu_backward(grad: torch.Tensor, z: torch.Tensor, again: bool) -> list[torch.Tensor]:
    """Return the gradient of z and, if `again` is set, also the recomputed output of `swiglu`."""
    from nestrec.ops.layers.row_kernels import swiglu_backward_kernel

    check_rows(grad, z)
    grad_z, out = like(z), like(grad) if again else None
    swiglu_backward_kernel[part_grid(grad)](
        grad, z, grad_z, grad if out is None else out, len(z), **part_tile(grad.shape[1]), AGAIN=again
    )
    return [grad_z] if out is None else [grad_z, out]


# ruff: noqa: PLR0917 - torch operators have positional arguments


@kernel_op("gate_rows", fake=lambda parts, gate, *_: (like(gate), column(gate), column(gate)))
def gate_rows(
    parts: Sequence[torch.Tensor],
    gate: torch.Tensor,
    centered: bool,
    eps: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dropout(silu(gate) * norm(concatenated parts)) and the mean and reciprocal deviation of each row.

    There are one to three parts of equal width; the rows of parts and gate may be strided.
    """
    from nestrec.ops.layers.gate_kernels import gate_forward_kernel

    check_parts(parts, gate)
    out = like(gate)
    mean = column(gate)
    rstd = column(gate)
    a0, a1, a2 = _pad_to_three(parts)
    gate_forward_kernel[row_grid(a0, len(parts))](
        a0,
        a1,
        a2,
        gate,
        out,
        mean,
        rstd,
        gate if key is None else key,
        len(gate),
        a0.stride(0),
        a1.stride(0),
        a2.stride(0),
        gate.stride(0),
        eps,
        site,
        threshold,
        scale,
        **row_tile(a0.shape[1], len(parts)),
        PARTS=len(parts),
        CENTERED=centered,
        HAS_DROPOUT=key is not None,
    )
    return out, mean, rstd


@kernel_op("gate_rows_backward", fake=lambda *_: None, mutates=("grad_gate", "grad_parts", "out"))
def gate_rows_backward(
    grad: torch.Tensor,
    parts: Sequence[torch.Tensor],
    gate: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    grad_gate: torch.Tensor,
    grad_parts: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    centered: bool,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> None:
    """Fill the gradients of gate and parts and, unless it is None, `out` with the recomputed output of `gate_rows`.

    All results are mutated arguments, because torch.compile does not support operators that also return a list.
    """
    from nestrec.ops.layers.gate_kernels import gate_backward_kernel

    check_rows(grad, *grad_parts, out)
    check_parts(parts, gate)
    check_strided(grad_gate)
    (a0, a1, a2), (d0, d1, d2) = _pad_to_three(parts), _pad_to_three(grad_parts)
    gate_backward_kernel[row_grid(a0, len(parts))](
        grad,
        a0,
        a1,
        a2,
        gate,
        mean,
        rstd,
        d0,
        d1,
        d2,
        grad_gate,
        grad if out is None else out,
        gate if key is None else key,
        len(gate),
        a0.stride(0),
        a1.stride(0),
        a2.stride(0),
        gate.stride(0),
        grad_gate.stride(0),
        site,
        threshold,
        scale,
        **row_tile(a0.shape[1], len(parts)),
        PARTS=len(parts),
        CENTERED=centered,
        HAS_DROPOUT=key is not None,
        AGAIN=out is not None,
    )


def _pad_to_three(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three parts as the kernels expect; repeated ones are not read."""
    return parts[0], parts[min(1, len(parts) - 1)], parts[-1]


@kernel_op("norm_rows", fake=lambda x, out_type, *_: (like(x, out_type), column(x), column(x)))
def norm_rows(
    x: torch.Tensor,
    out_type: torch.dtype,
    centered: bool,
    eps: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dropout(norm(x)) and the mean and reciprocal deviation of each row."""
    return _norm(x, None, None, out_type, centered, eps, key, site, threshold, scale)


@kernel_op("add_norm_rows", fake=lambda x, delta, out_type, *_: (like(x), like(x, out_type), column(x), column(x)))
def add_norm_rows(
    x: torch.Tensor,
    delta: torch.Tensor,
    out_type: torch.dtype,
    centered: bool,
    eps: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x + delta and the results of `norm_rows` for it."""
    total = like(x)
    return total, *_norm(x, delta, total, out_type, centered, eps, key, site, threshold, scale)


def _norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    total: torch.Tensor | None,
    out_type: torch.dtype,
    centered: bool,
    eps: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from nestrec.ops.layers.row_kernels import norm_forward_kernel

    check_rows(x, delta)
    out = like(x, out_type)
    mean = column(x)
    rstd = column(x)
    norm_forward_kernel[row_grid(x)](
        x,
        x if delta is None else delta,
        x if total is None else total,
        out,
        mean,
        rstd,
        x if key is None else key,
        len(x),
        eps,
        site,
        threshold,
        scale,
        **row_tile(x.shape[1]),
        CENTERED=centered,
        HAS_DELTA=delta is not None,
        HAS_DROPOUT=key is not None,
    )
    return out, mean, rstd


@kernel_op("norm_rows_again", fake=lambda x, mean, rstd, out_type, *_: like(x, out_type))
def recompute_norm_rows(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    out_type: torch.dtype,
    centered: bool,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> torch.Tensor:
    """Recompute the first output of `norm_rows` from its statistics."""
    from nestrec.ops.layers.row_kernels import norm_again_kernel

    out = like(x, out_type)
    norm_again_kernel[row_grid(x)](
        x,
        out,
        mean,
        rstd,
        x if key is None else key,
        len(x),
        site,
        threshold,
        scale,
        **row_tile(x.shape[1]),
        CENTERED=centered,
        HAS_DROPOUT=key is not None,
    )
    return out


@kernel_op("norm_rows_backward", fake=lambda grad, grad_total, x, *_: like(x))
def norm_rows_backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    centered: bool,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> torch.Tensor:
    """Return the gradient of x from the gradient of its norm, plus `grad_total` unless it is None."""
    from nestrec.ops.layers.row_kernels import norm_backward_kernel

    check_rows(grad, grad_total, x)
    grad_x = like(x)
    norm_backward_kernel[row_grid(x)](
        grad,
        grad if grad_total is None else grad_total,
        x,
        mean,
        rstd,
        grad_x,
        x if key is None else key,
        len(x),
        site,
        threshold,
        scale,
        **row_tile(x.shape[1]),
        CENTERED=centered,
        HAS_TOTAL=grad_total is not None,
        HAS_DROPOUT=key is not None,
    )
    return grad_x
