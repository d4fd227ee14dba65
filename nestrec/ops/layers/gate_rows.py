"""Norm, gate and dropout of attended rows, as operators. `drop` arguments as in norm_rows."""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

from collections.abc import Sequence

import torch

from nestrec.ops.kernel_op import kernel_op
from nestrec.ops.layers.row_tiles import check_parts, check_rows, check_strided, column, like, row_grid, row_tile


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
    out, mean, rstd = like(gate), column(gate), column(gate)
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
