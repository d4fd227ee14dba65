"""What a user of plain torch would write to train the rows of a table: the baselines of `nestrec bench lookup`.

Row-wise AdaGrad on a (rows, dim) weight and a (rows,) sum of squares, from one gradient for each looked-up position.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TorchTable:
    """A table as plain torch holds it."""

    weight: torch.Tensor
    state: torch.Tensor
    """(rows,) sums of mean squared gradients"""
    learning_rate: float = 0.01
    eps: float = 1e-8

    def update(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        """Row-wise AdaGrad on the rows of distinct keys."""
        total = self.state.index_select(0, keys) + grad.square().mean(1)
        self.state.index_copy_(0, keys, total)
        scale = total.sqrt_().add_(self.eps).reciprocal_().mul_(-self.learning_rate)
        self.weight.index_add_(0, keys, grad * scale[:, None])


def unique_and_index_add(table: TorchTable, keys: torch.Tensor, grad: torch.Tensor) -> None:
    """torch.unique with its inverse, then atomics."""
    distinct, inverse = torch.unique(keys, return_inverse=True)
    table.update(distinct, grad.new_zeros(len(distinct), grad.shape[1]).index_add_(0, inverse, grad))


def sort_and_segment(table: TorchTable, keys: torch.Tensor, grad: torch.Tensor) -> None:
    """A sort, then one sum for each run of equal keys; deterministic."""
    ordered, order = keys.sort(stable=True)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    table.update(distinct, torch.segment_reduce(grad.index_select(0, order), "sum", lengths=counts, unsafe=True))


def sparse_coalesce(table: TorchTable, keys: torch.Tensor, grad: torch.Tensor) -> None:
    """A sparse gradient, as nn.Embedding(sparse=True) gives it."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        sparse = torch.sparse_coo_tensor(keys[None], grad, table.weight.shape).coalesce()
    table.update(sparse.indices()[0], sparse.values())


PATHS: dict[str, Callable[[TorchTable, torch.Tensor, torch.Tensor], None]] = {
    "unique + index_add": unique_and_index_add,
    "sort + segment": sort_and_segment,
    "sparse coalesce": sparse_coalesce,
}
