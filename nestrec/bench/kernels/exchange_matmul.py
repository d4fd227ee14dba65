"""What a matmul loses while chunks are copied beside it, by the copy engines, over the host, or by a kernel."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from nestrec.distributed.topology import Communicator
from nestrec.distributed.transports import CopyEngine

_CHUNK_BYTES = 16 << 20
_IN_FLIGHT = 4
_MATMULS = 24

Copy = Callable[[], None]


class _PaceOptions(Protocol):
    """What is needed of the benchmark's options."""

    @property
    def paced_gb_per_s(self) -> float: ...

    @property
    def matmul_size(self) -> int: ...

    @property
    def matmul_rounds(self) -> int: ...


def ways_to_copy(transport: str, vectors: Communicator, bench: _PaceOptions) -> list[dict[str, Any]]:
    """Rows of the transport's own way at its rate, and of a kernel at the same rate."""
    device = torch.device("cuda", torch.cuda.current_device())
    target = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=device)
    local = torch.randint(0, 255, (_CHUNK_BYTES,), dtype=torch.uint8, device=device)
    own = _own_way(transport, vectors, local, target)
    words = local.view(torch.int32), target.view(torch.int32)
    by_kernel: Mapping[str, Copy] = {"sm_copy": lambda: _kernel_copy(*words)}
    rows: list[dict[str, Any]] = []
    for name, copy in {**own, **by_kernel}.items():
        unpaced = _rate(copy)
        wanted = min(bench.paced_gb_per_s, unpaced) if name != "sm_copy" else rows[0]["beside_gb_per_s"]
        slowdown, achieved = _slowdown(copy, wanted, bench)
        rows.append(
            {
                "transport": name,
                "ranks": vectors.size,
                "device": "cuda",
                "equal_to_gloo": None,
                "latency_us": None,
                "bytes": _CHUNK_BYTES,
                "gb_per_s": round(unpaced, 1),
                "beside": transport,
                "beside_gb_per_s": round(achieved, 1),
                "matmul_slowdown": round(slowdown, 4),
                "device_work": _device_work(copy),
            }
        )
    return rows


def _own_way(transport: str, vectors: Communicator, local: torch.Tensor, target: torch.Tensor) -> dict[str, Copy]:
    if transport == "copy_engine":
        assert isinstance(vectors.transport, CopyEngine)
        peer = vectors.transport.memory_of(1)[:_CHUNK_BYTES]
        return {"copy_engine": lambda: _nothing(target[: len(peer)].copy_(peer, non_blocking=True))}
    host = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)

    def there_and_back() -> None:
        half = _CHUNK_BYTES // 2
        host[:half].copy_(local[:half], non_blocking=True)
        target[:half].copy_(other[:half], non_blocking=True)

    return {"host": there_and_back}


def _nothing(_: torch.Tensor) -> None:
    return None


def _kernel_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.add(source, 0, out=target)


def _rate(copy: Copy) -> float:
    """Gigabytes a second of chunks one after another."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number in range(60):
            if number == 10:
                start.record(stream)
            copy()
        end.record(stream)
    end.synchronize()
    return 50 * _CHUNK_BYTES / float(start.elapsed_time(end)) * 1e-6


def _slowdown(copy: Copy, gb_per_s: float, bench: _PaceOptions) -> tuple[float, float]:
    """(time of matmuls beside copies over that without them) - 1, and the rate of the copies."""
    size = bench.matmul_size
    factors = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    alone, beside, rates = [], [], []
    for _ in range(bench.matmul_rounds + 1):
        alone.append(_matmuls_ms(factors, None, stream, gb_per_s)[0])
        taken_ms, copied = _matmuls_ms(factors, copy, stream, gb_per_s)
        beside.append(taken_ms)
        rates.append(copied * 1e-6 / taken_ms)
    ratio = statistics.median(b / a for a, b in zip(alone[1:], beside[1:], strict=True))
    return ratio - 1, statistics.median(rates[1:])


def _matmuls_ms(
    factors: torch.Tensor, copy: Copy | None, stream: torch.cuda.Stream, gb_per_s: float
) -> tuple[float, int]:
    """Time of some matmuls, and bytes copied meanwhile on another stream at the given rate."""
    out = torch.empty_like(factors[0])
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_MATMULS):
        torch.mm(factors[0], factors[1], out=out)
    end.record()
    every_s, due, copied = _CHUNK_BYTES / gb_per_s * 1e-9, time.perf_counter(), 0
    pending: list[torch.cuda.Event] = []
    while not end.query():
        pending = [event for event in pending if not event.query()]
        if copy is not None and time.perf_counter() >= due and len(pending) < _IN_FLIGHT:
            with torch.cuda.stream(stream):
                copy()
                pending.append(torch.cuda.Event())
                pending[-1].record(stream)
            due, copied = due + every_s, copied + _CHUNK_BYTES
    stream.synchronize()
    return start.elapsed_time(end), copied


def _device_work(copy: Copy) -> list[str]:
    """What a copy makes the device do, as the profiler names it."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        copy()
        torch.cuda.synchronize()
    events = seen.events() or []
    return sorted({event.name[:80] for event in events if str(event.device_type).endswith("CUDA")})
