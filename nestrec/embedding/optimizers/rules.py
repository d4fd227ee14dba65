"""Row optimisers in plain torch: the definition, for any device and type.

g: deduplicated gradient of a row, w: weight, t: global step from 1, lr: learning rate of that step.

    sgd              w -= lr * g
    adagrad          s += g^2;                   w -= lr * g / (sqrt(s) + eps)
    rowwise_adagrad  s += mean(g^2);             w -= lr * g / (sqrt(s / c) + eps)
    adam             m += (1-b1) * (g - m);      v += (1-b2) * (g^2 - v);        w -= lr_t * m / (sqrt(v) + eps)
    rowwise_adam     m as adam;                  v += (1-b2) * (mean(g^2) - v);  w -= lr_t * m / (sqrt(v) + eps)
                     lr_t = lr * sqrt(1 - b2^t) / (1 - b1^t)

All are lazy: a row moves only in steps that use it. sgd, adagrad and adam are torch.optim's SGD, Adagrad and
SparseAdam. Lazy Adam is not dense Adam: dense Adam decays the moments of every row in every step and moves rows that
no sample used, by momentum alone; here an unused row keeps weight and moments as they are, while bias correction
counts every step.

Divisions by constants are multiplications by their inverses, as CUDA does them. Means over a row are sums by halves,
in the same order here, in the host loops and on a GPU, so results agree to the bit.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from nestrec.embedding.layout import RowLayout
from nestrec.embedding.table import RowOptimizerConfig

Views = dict[str, torch.Tensor]


def update_rows(
    rows: torch.Tensor,
    grad: torch.Tensor,
    layout: RowLayout,
    optimizer: RowOptimizerConfig,
    *,
    step: int,
    learning_rate: float,
) -> None:
    """One step on (n, num_words) rows, in place; `grad` is (n, dim) in the state's type."""
    views = {c.name: layout.view(rows, c.name) for c in layout.columns}
    change = _RULES[optimizer.kind](views, grad, optimizer, step, learning_rate)
    views["weight"].copy_(views["weight"].to(grad.dtype) - change)


def adam_learning_rate(optimizer: RowOptimizerConfig, step: int, learning_rate: float) -> float:
    """Learning rate with Adam's bias corrections of a global step."""
    return learning_rate * math.sqrt(1 - optimizer.beta2**step) / (1 - optimizer.beta1**step)


def root(x: torch.Tensor) -> torch.Tensor:
    """Square root, correctly rounded: torch's own on a CPU (MKL) may be off in the last bit."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def mean_of_squares(grad: torch.Tensor) -> torch.Tensor:
    """(n, 1) mean of g^2 over a row, summed by halves: elements i and i + half first."""
    total = grad * grad
    while total.shape[1] > 1:
        half = (total.shape[1] + 1) // 2
        upper = total[:, half:]
        total = torch.cat([total[:, : upper.shape[1]] + upper, total[:, upper.shape[1] : half]], dim=1)
    return total * (1 / grad.shape[1])


def _sgd(
    views: Views, grad: torch.Tensor, optimizer: RowOptimizerConfig, step: int, learning_rate: float
) -> torch.Tensor:
    return learning_rate * grad


def _adagrad(
    views: Views, grad: torch.Tensor, optimizer: RowOptimizerConfig, step: int, learning_rate: float
) -> torch.Tensor:
    views["state_sum"].add_(grad * grad)
    return learning_rate * (grad / (root(views["state_sum"]) + optimizer.eps))


def _rowwise_adagrad(
    views: Views, grad: torch.Tensor, optimizer: RowOptimizerConfig, step: int, learning_rate: float
) -> torch.Tensor:
    views["state_sum"].add_(mean_of_squares(grad))
    return learning_rate * (grad / (root(views["state_sum"] * (1 / optimizer.moment_scale)) + optimizer.eps))


def _adam(
    views: Views, grad: torch.Tensor, optimizer: RowOptimizerConfig, step: int, learning_rate: float
) -> torch.Tensor:
    return _adam_change(views, grad, grad * grad, optimizer, adam_learning_rate(optimizer, step, learning_rate))


def _rowwise_adam(
    views: Views, grad: torch.Tensor, optimizer: RowOptimizerConfig, step: int, learning_rate: float
) -> torch.Tensor:
    return _adam_change(
        views, grad, mean_of_squares(grad), optimizer, adam_learning_rate(optimizer, step, learning_rate)
    )


def _adam_change(
    views: Views, grad: torch.Tensor, square: torch.Tensor, optimizer: RowOptimizerConfig, learning_rate: float
) -> torch.Tensor:
    views["state_m"].add_((1 - optimizer.beta1) * (grad - views["state_m"]))
    views["state_v"].add_((1 - optimizer.beta2) * (square - views["state_v"]))
    return learning_rate * (views["state_m"] / (root(views["state_v"]) + optimizer.eps))


_RULES: dict[str, Callable[[Views, torch.Tensor, RowOptimizerConfig, int, float], torch.Tensor]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "rowwise_adam": _rowwise_adam,
}
