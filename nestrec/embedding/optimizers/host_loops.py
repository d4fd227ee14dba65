"""The row optimisers as fused host loops over rows; equal to `rules` to the bit.

Only for weights of the state's own type (float32 or float64); 16-bit weights take the torch path.
"""

import numpy as np
import torch
from numba import njit

from nestrec.base.parallel import for_parts
from nestrec.embedding.layout import RowLayout
from nestrec.embedding.optimizers.rules import adam_learning_rate
from nestrec.embedding.table import RowOptimizerConfig


def can_update_on_host(rows: torch.Tensor, layout: RowLayout) -> bool:
    return rows.device.type == "cpu" and layout.weight.dtype in (torch.float32, torch.float64)


def update_rows_on_host(
    rows: torch.Tensor,
    grad: torch.Tensor,
    layout: RowLayout,
    optimizer: RowOptimizerConfig,
    *,
    step: int,
    learning_rate: float,
    num_threads: int,
) -> None:
    """As `rules.update_rows`."""
    dtype = layout.weight.dtype
    values, gradients = rows.view(dtype).numpy(), grad.contiguous().numpy()
    real = values.dtype.type
    places = [c.offset_bytes // dtype.itemsize for c in layout.columns[1:]]
    lr, eps = real(learning_rate), real(optimizer.eps)
    decays = real(1 - optimizer.beta1), real(1 - optimizer.beta2)
    is_row_wise = optimizer.kind.startswith("rowwise")

    def work(a: int, b: int) -> None:
        part, part_grad = values[a:b], gradients[a:b]
        if optimizer.kind == "sgd":
            _sgd(part, part_grad, lr)
        elif optimizer.kind.endswith("adagrad"):
            _adagrad(part, part_grad, places[0], lr, eps, real(1 / optimizer.moment_scale), is_row_wise)
        else:
            lr_t = real(adam_learning_rate(optimizer, step, learning_rate))
            _adam(part, part_grad, places[0], places[1], lr_t, eps, *decays, is_row_wise)

    for_parts(len(rows), len(rows), work, num_threads)


@njit(cache=True, nogil=True, error_model="numpy")
def _mean_of_squares(grad, scratch):  # type: ignore[no-untyped-def]
    width = len(grad)
    for j in range(width):
        scratch[j] = grad[j] * grad[j]
    while width > 1:
        half = (width + 1) // 2
        for j in range(width - half):
            scratch[j] += scratch[half + j]
        width = half
    return scratch[0] * scratch.dtype.type(1 / len(grad))


@njit(cache=True, nogil=True, error_model="numpy")
def _sgd(rows, grad, lr):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        for j in range(grad.shape[1]):
            rows[i, j] -= lr * grad[i, j]


@njit(cache=True, nogil=True, error_model="numpy")
def _adagrad(rows, grad, sum_at, lr, eps, inverse_scale, is_row_wise):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    dim = grad.shape[1]
    scratch = np.empty(dim, rows.dtype)
    for i in range(len(rows)):
        if is_row_wise:
            rows[i, sum_at] += _mean_of_squares(grad[i], scratch)
            root = np.sqrt(rows[i, sum_at] * inverse_scale) + eps
            for j in range(dim):
                rows[i, j] -= lr * (grad[i, j] / root)
        else:
            for j in range(dim):
                rows[i, sum_at + j] += grad[i, j] * grad[i, j]
                rows[i, j] -= lr * (grad[i, j] / (np.sqrt(rows[i, sum_at + j]) + eps))


@njit(cache=True, nogil=True, error_model="numpy")
def _adam(rows, grad, m_at, v_at, lr, eps, decay1, decay2, is_row_wise):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    dim = grad.shape[1]
    scratch = np.empty(dim, rows.dtype)
    for i in range(len(rows)):
        if is_row_wise:
            rows[i, v_at] += decay2 * (_mean_of_squares(grad[i], scratch) - rows[i, v_at])
            root = np.sqrt(rows[i, v_at]) + eps
            for j in range(dim):
                rows[i, m_at + j] += decay1 * (grad[i, j] - rows[i, m_at + j])
                rows[i, j] -= lr * (rows[i, m_at + j] / root)
        else:
            for j in range(dim):
                rows[i, m_at + j] += decay1 * (grad[i, j] - rows[i, m_at + j])
                rows[i, v_at + j] += decay2 * (grad[i, j] * grad[i, j] - rows[i, v_at + j])
                rows[i, j] -= lr * (rows[i, m_at + j] / (np.sqrt(rows[i, v_at + j]) + eps))
