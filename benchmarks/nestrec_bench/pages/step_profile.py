"""Breakdown of a step into parts by the time of their device kernels, from torch's profiler.

idle      time between the first and the last kernel of the profiled steps without a running kernel: the host was late
overlap   kernels that run on several streams at once are all counted, so the parts may add up to more than the wall
time

The profiled steps are not the timed steps. A power-limited device changes its clock, so the sum of the parts may differ
from the timed step.
"""

import re
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from nestrec_bench.harness.step_flops import StepFlops

PARTS = {
    "attention": r"stream_kernel|pair_kernel|product_kernel|schedule_kernel|_(first|buckets|words|distances)_kernel"
    r"|_(tables|sums|splits|diagonals)_kernel|attention|attend|bias_(product|weights|time|function|position)",
    "matmul": r"gemm|nvjet|cutlass|xmma|splitK",
    "loss": r"^_forward|^_backward|_sum_outer|_tile_logits|_add_tile|_to_slopes|logsumexp|unit_",
    "rows": r"norm_forward|norm_again|norm_backward|silu_|gate_|swiglu_|embed_|position_gradient",
    "embedding": r"_move_|_rows_kernel|_runs_kernel|_finish_kernel|_learn_|_update|adagrad|radix|sort|scan|gather"
    r"|scatter|index",
    "optimizer": r"multi_tensor|adam|lpnorm",
    "copies": r"memcpy|memset",
}
"""Part of a step to the pattern of its kernel names; the first match wins, and other kernels belong to `other`."""


class Steps(Protocol):
    def step(self) -> torch.Tensor: ...

    def wait(self) -> None: ...


def parts_of(runner: Steps, steps: int, flops: StepFlops) -> dict[str, Any]:
    """Profile steps and return, per part, its milliseconds, largest kernels, and FLOP rate if FLOPs are known."""
    runner.wait()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(steps):
            runner.step()
        runner.wait()
    kernels = {e.key: (e.self_device_time_total / 1e3 / steps, e.count / steps) for e in profiler.key_averages()}
    ranges = [e.time_range for e in profiler.events() if e.device_type.name == "CUDA"]
    idle_us = idle_time((r.start, r.end) for r in ranges)
    return summed(kernels, flops, idle_us / 1e3 / steps)


def idle_time(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time between the first start and the last end that no interval covers."""
    idle = 0.0
    covered_to = None
    for start, end in sorted(intervals):
        if covered_to is not None and start > covered_to:
            idle += start - covered_to
        covered_to = end if covered_to is None else max(covered_to, end)
    return idle


def summed(kernels: dict[str, tuple[float, float]], flops: StepFlops, idle_ms: float) -> dict[str, Any]:
    """Return the parts of a step as JSON-like data.

    Args:
        kernels: Kernel name to (milliseconds, launches) per step.
        flops: FLOPs of the step.
        idle_ms: Idle milliseconds per step.
    """
    found: dict[str, Any] = {}
    for name, (ms, launches) in sorted(kernels.items(), key=lambda item: -item[1][0]):
        if ms <= 0.0:
            continue
        part = found.setdefault(part_name(name), {"ms": 0.0, "launches": 0.0, "largest": {}})
        part["ms"] += ms
        part["launches"] += launches
        if len(part["largest"]) < 8:
            part["largest"][name[:60]] = round(ms, 3)
    for part in found.values():
        part["ms"], part["launches"] = round(part["ms"], 2), round(part["launches"], 1)
    for name, count in (("attention", flops.attention), ("matmul", flops.projections)):
        if name in found:
            found[name]["tflops"] = round(count / found[name]["ms"] / 1e9, 1)
    found["idle"] = {"ms": round(idle_ms, 2)}
    return found


def part_name(kernel: str) -> str:
    """Return the part to which a kernel belongs."""
    for part, pattern in PARTS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return part
    return "other"
