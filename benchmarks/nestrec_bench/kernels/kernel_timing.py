"""Timing of kernels by the clock of the device, upper bounds of the device, and PyTorch baselines of table training.

The baselines of `nestrec bench lookup` are written as by a user of PyTorch: row-wise AdaGrad on a weight (rows, dim)
and a sum of squares (rows,), with one gradient per looked-up position.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP = 3
"""Number of warm-up calls, which are not counted."""


def medians_ms(calls: Sequence[Callable[[int], object]], rounds: int, device: str = "cuda") -> list[float]:
    """Return the median time of each of several successive calls, in milliseconds.

    Args:
        calls: Functions of the number of the round, called in this order.
        rounds: Number of timed rounds.
        device: `cuda` measures by events of the stream, `cpu` by the host's clock.
    """
    found: list[list[float]] = [[] for _ in calls]
    for number in range(WARM_UP + rounds):
        for times, ms in zip(found, _milliseconds(calls, number, device), strict=True):
            times.append(ms)
    return [statistics.median(times[WARM_UP:]) for times in found]


def _milliseconds(calls: Sequence[Callable[[int], object]], number: int, device: str) -> list[float]:
    is_cuda = device == "cuda"
    if is_cuda:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        # Work before the first event hides the launch time of the host, like the preceding layers of a model.
        torch.cuda._sleep(5_000_000)
        events[0].record()
    seconds = [time.perf_counter()]
    for index, call in enumerate(calls):
        call(number)
        seconds.append(time.perf_counter())
        if is_cuda:
            events[index + 1].record()
    if is_cuda:
        torch.cuda.synchronize()
        return [float(events[i].elapsed_time(events[i + 1])) for i in range(len(calls))]
    return [(seconds[i + 1] - seconds[i]) * 1e3 for i in range(len(calls))]


def ceilings(rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the upper bounds of the device: a large matrix product and a large copy."""
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
    """Embedding table in PyTorch tensors, trained by row-wise AdaGrad."""

    weight: torch.Tensor
    state: torch.Tensor
    """(rows,) sums of mean squared gradients."""
    learning_rate: float = 0.01
    eps: float = 1e-8

    def update(self, keys: torch.Tensor, grad: torch.Tensor) -> None:
        """Update the rows of unique keys by row-wise AdaGrad."""
        total = self.state.index_select(0, keys) + grad.square().mean(1)
        self.state.index_copy_(0, keys, total)
        scale = total.sqrt_().add_(self.eps).reciprocal_().mul_(-self.learning_rate)
        self.weight.index_add_(0, keys, grad * scale[:, None])


def unique_and_index_add(table: TorchTable, keys: torch.Tensor, grad: torch.Tensor) -> None:
    """Update a table by torch.unique with the inverse, and atomic additions."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    table.update(unique, grad.new_zeros(len(unique), grad.shape[1]).index_add_(0, inverse, grad))


def sort_and_segment(table: TorchTable, keys: torch.Tensor, grad: torch.Tensor) -> None:
    """Update a table by a sort and one sum per segment of equal keys, which is deterministic."""
    ordered, order = keys.sort(stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    table.update(unique, torch.segment_reduce(grad.index_select(0, order), "sum", lengths=counts, unsafe=True))


def sparse_coalesce(table: TorchTable, keys: torch.Tensor, grad: torch.Tensor) -> None:
    """Update a table by a coalesced sparse gradient, as in nn.Embedding(sparse=True)."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        sparse = torch.sparse_coo_tensor(keys[None], grad, table.weight.shape).coalesce()
    table.update(sparse.indices()[0], sparse.values())


PATHS: dict[str, Callable[[TorchTable, torch.Tensor, torch.Tensor], None]] = {
    "unique + index_add": unique_and_index_add,
    "sort + segment": sort_and_segment,
    "sparse coalesce": sparse_coalesce,
}
