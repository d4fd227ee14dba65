"""Times of the benches of kernels and layers, by the device's clock, and what the device does at best."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
