"""Norms of rows, as operators. `drop` arguments: key (none without dropout), site, threshold, scale of `Dropout`."""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

import torch

from nestrec.ops.kernel_op import kernel_op
from nestrec.ops.layers.row_tiles import check_rows, column, like, row_grid, row_tile


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
    out, mean, rstd = like(x, out_type), column(x), column(x)
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
