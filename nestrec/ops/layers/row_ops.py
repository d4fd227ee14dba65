"""Operators on projected rows: activations, gates and norms.

Activations of projected rows, as operators: SiLU of columns, and SiLU times a second half.

How row kernels cut matrices into tiles, and what they refuse.

Norm, gate and dropout of attended rows, as operators. `drop` arguments as in norm_rows.

Norms of rows, as operators. `drop` arguments: key (none without dropout), site, threshold, scale of `Dropout`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nestrec.base.errors import UserError
from nestrec.ops.kernel_op import kernel_op, power_of_two

ROW_TILE = 1024
"""Elements of a program that needs whole rows: one 16-byte load a thread of four warps, many programs in flight."""
PART_TILE = 4096
"""Elements of an elementwise program."""


def row_tile(width: int, parts: int = 1) -> dict[str, Any]:
    """Whole rows of `parts` matrices."""
    block = power_of_two(width)
    return {"WIDTH": width, "BLOCK": block, "ROWS": _rows(block, parts), "num_warps": 4 if block <= 1024 else 8}


def row_grid(x: torch.Tensor, parts: int = 1) -> tuple[int]:
    return (max(1, -(-len(x) // _rows(power_of_two(x.shape[1]), parts))),)


def part_tile(width: int) -> dict[str, Any]:
    """Parts of rows of at most 1024 channels."""
    block = min(1024, power_of_two(width))
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(1, PART_TILE // block), "num_warps": 8}


def part_grid(x: torch.Tensor) -> tuple[int, int]:
    block = min(1024, power_of_two(x.shape[1]))
    return (max(1, -(-len(x) // max(1, PART_TILE // block))), -(-x.shape[1] // block))


def _rows(block: int, parts: int) -> int:
    return max(1, ROW_TILE // (block * power_of_two(parts)))


def check_rows(*rows: torch.Tensor | None) -> None:
    """Packed matrices; callers make them so, and what is not is refused."""
    for x in rows:
        if x is not None and (x.dim() != 2 or not x.is_contiguous()):
            raise UserError(
                "the kernel reads packed (tokens, channels) matrices",
                option="shape, strides",
                value=(tuple(x.shape), x.stride()),
                remedy="call .contiguous() first",
            )


def check_strided(*rows: torch.Tensor) -> None:
    """Matrices whose channels lie side by side; their rows may be apart."""
    for x in rows:
        if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
            raise UserError(
                "the channels of a token must lie side by side",
                option="shape, strides",
                value=(tuple(x.shape), x.stride()),
                remedy="call .contiguous() first",
            )


def check_parts(parts: Sequence[torch.Tensor], gate: torch.Tensor) -> None:
    """What a gate is laid on."""
    check_strided(*parts, gate)
    widths = [x.shape[1] for x in parts]
    if not 1 <= len(parts) <= 3 or len(set(widths)) > 1 or sum(widths) != gate.shape[1]:
        raise UserError(
            "one to three parts of one width, together as wide as the gate", option="widths", value=(widths, gate.shape)
        )


def like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Packed memory of the shape of `x`."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def column(x: torch.Tensor) -> torch.Tensor:
    """A float32 for each row."""
    return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


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


# ruff: noqa: PLR0917 - operators of torch take their arguments by position


@kernel_op("gate_rows", fake=lambda parts, gate, *_: (like(gate), column(gate), column(gate)))
def gate_rows(
    parts: Sequence[torch.Tensor],
    gate: torch.Tensor,
    centred: bool,
    eps: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dropout(silu(gate) * norm(parts side by side)) and the norm's statistics; one to three parts, rows strided."""
    from nestrec.ops.layers.gate_kernels import gate_forward_kernel

    check_parts(parts, gate)
    out = like(gate)
    mean = column(gate)
    rstd = column(gate)
    a0, a1, a2 = _three(parts)
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
        CENTRED=centred,
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
    centred: bool,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> None:
    """Fills the gradients of gate and parts and, where it is given, `out` with the first output of `gate_rows`.

    torch.compile takes operators that write into arguments, but not those that return a list besides.
    """
    from nestrec.ops.layers.gate_kernels import gate_backward_kernel

    check_rows(grad, *grad_parts, out)
    check_parts(parts, gate)
    check_strided(grad_gate)
    (a0, a1, a2), (d0, d1, d2) = _three(parts), _three(grad_parts)
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
        CENTRED=centred,
        HAS_DROPOUT=key is not None,
        AGAIN=out is not None,
    )


def _three(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Kernels take three; those that are not there are not read."""
    return parts[0], parts[min(1, len(parts) - 1)], parts[-1]


# ruff: noqa: PLR0917 - operators of torch take their arguments by position


@kernel_op("norm_rows", fake=lambda x, out_type, *_: (like(x, out_type), column(x), column(x)))
def norm_rows(
    x: torch.Tensor,
    out_type: torch.dtype,
    centred: bool,
    eps: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dropout(norm(x)), and the mean and reciprocal deviation of each row."""
    return _norm(x, None, None, out_type, centred, eps, key, site, threshold, scale)


@kernel_op("add_norm_rows", fake=lambda x, delta, out_type, *_: (like(x), like(x, out_type), column(x), column(x)))
def add_norm_rows(
    x: torch.Tensor,
    delta: torch.Tensor,
    out_type: torch.dtype,
    centred: bool,
    eps: float,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x + delta, and what `norm_rows` gives for it."""
    total = like(x)
    return total, *_norm(x, delta, total, out_type, centred, eps, key, site, threshold, scale)


def _norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    total: torch.Tensor | None,
    out_type: torch.dtype,
    centred: bool,
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
        CENTRED=centred,
        HAS_DELTA=delta is not None,
        HAS_DROPOUT=key is not None,
    )
    return out, mean, rstd


@kernel_op("norm_rows_again", fake=lambda x, mean, rstd, out_type, *_: like(x, out_type))
def norm_rows_again(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    out_type: torch.dtype,
    centred: bool,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> torch.Tensor:
    """The first output of `norm_rows`, from its statistics."""
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
        CENTRED=centred,
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
    centred: bool,
    key: torch.Tensor | None,
    site: int,
    threshold: int,
    scale: float,
) -> torch.Tensor:
    """Gradient of x from that of its norm, added to that of x itself where given."""
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
        CENTRED=centred,
        HAS_TOTAL=grad_total is not None,
        HAS_DROPOUT=key is not None,
    )
    return grad_x
