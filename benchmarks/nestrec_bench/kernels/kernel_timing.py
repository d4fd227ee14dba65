"""Times of the benches of kernels and layers, by the device's clock, and what the device does at best.

What a user of plain torch would write to train the rows of a table: the baselines of `nestrec bench lookup`.

Row-wise AdaGrad on a (rows, dim) weight and a (rows,) sum of squares, from one gradient for each looked-up position.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP = 3
"""calls that are not counted"""


def medians_ms(calls: Sequence[Callable[[int], object]], rounds: int, device: str = "cuda") -> list[float]:
    """Median milliseconds of calls that follow each other, each given the number of its round."""
    found: list[list[float]] = [[] for _ in calls]
    for number in range(WARM_UP + rounds):
        for times, ms in zip(found, _milliseconds(calls, number, device), strict=True):
            times.append(ms)
    return [statistics.median(times[WARM_UP:]) for times in found]


def _milliseconds(calls: Sequence[Callable[[int], object]], number: int, device: str) -> list[float]:
    is_cuda = device == "cuda"
    if is_cuda:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        # Work ahead of the first mark hides the time that the host takes to launch, as other layers do in a model.
        torch.cuda._sleep(5_000_000)
        marks[0].record()
    seconds = [time.perf_counter()]
    for place, call in enumerate(calls):
        call(number)
        seconds.append(time.perf_counter())
        if is_cuda:
            marks[place + 1].record()
    if is_cuda:
        torch.cuda.synchronize()
        return [float(marks[i].elapsed_time(marks[i + 1])) for i in range(len(calls))]
    return [(seconds[i + 1] - seconds[i]) * 1e3 for i in range(len(calls))]


def ceilings(rounds: int) -> Iterator[dict[str, Any]]:
    """A large matrix product and a large copy."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    (ms,) = medians_ms([lambda _: a @ b], rounds)
    yield {"impl": "bf16 matmul 8192^3 (ceiling)", "tflops": round(2 * size**3 / ms / 1e9, 1), "ms": round(ms, 4)}
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    (ms,) = medians_ms([lambda _: target.copy_(source)], rounds)
    yield {"impl": "device copy (ceiling)", "gb_per_s": round(2 * source.nbytes / ms / 1e6, 1), "ms": round(ms, 4)}


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
