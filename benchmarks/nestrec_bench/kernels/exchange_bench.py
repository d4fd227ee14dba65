"""Measure bandwidth and latency of each transport and, on a GPU, the slowdown of a concurrent matmul.

Ranks are processes on one device (or on the CPU, with fewer transports), or those of torchrun. Smaller numbers of ranks
are measured as concurrent groups. Every transport sends the same bytes, and the received bytes are compared bitwise
with those of Gloo. The matmul runs only on the first rank while the other ranks are idle, because several processes
would share the device by time slicing. Concurrently, chunks are copied in the same way as by the transport, at a given
rate; `sm_copy` copies by a kernel, for comparison.

    nestrec bench exchange --ranks 2,4 --transports host,copy_engine --bytes 1048576
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from nestrec.base.config import config
from nestrec.base.errors import PeerLostError
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json, all_to_all_rows, barrier
from nestrec.distributed.topology import Communicator, ParallelConfig
from nestrec.distributed.transports import CopyEngineTransport
from nestrec_bench.bench import Bench
from nestrec_bench.harness.local_ranks import run_on_ranks

_CHUNK_BYTES = 16 << 20
_IN_FLIGHT = 4
_MATMULS = 24

Copy = Callable[[], None]


class _PaceOptions(Protocol):
    """Options of the benchmark that the copies need."""

    @property
    def paced_gb_per_s(self) -> float: ...

    @property
    def matmul_size(self) -> int: ...

    @property
    def matmul_rounds(self) -> int: ...


def measure_copies(transport: str, vectors: Communicator, bench: _PaceOptions) -> list[dict[str, Any]]:
    """Measure matmuls during the copies of a transport, and during copies by a kernel at the same rate."""
    device = torch.device("cuda", torch.cuda.current_device())
    target = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=device)
    local = torch.randint(0, 255, (_CHUNK_BYTES,), dtype=torch.uint8, device=device)
    of_transport = _transport_copy(transport, vectors, local, target)
    words = local.view(torch.int32), target.view(torch.int32)
    by_kernel: Mapping[str, Copy] = {"sm_copy": lambda: _kernel_copy(*words)}
    rows: list[dict[str, Any]] = []
    for name, copy in {**of_transport, **by_kernel}.items():
        unpaced = _rate(copy)
        target_rate = min(bench.paced_gb_per_s, unpaced) if name != "sm_copy" else rows[0]["beside_gb_per_s"]
        slowdown, achieved = _slowdown(copy, target_rate, bench)
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


def _transport_copy(
    transport: str, vectors: Communicator, local: torch.Tensor, target: torch.Tensor
) -> dict[str, Copy]:
    if transport == "copy_engine":
        assert isinstance(vectors.transport, CopyEngineTransport)
        peer = vectors.transport.peer_buffer(1)[:_CHUNK_BYTES]

        def copy_from_peer() -> None:
            target[: len(peer)].copy_(peer, non_blocking=True)

        return {"copy_engine": copy_from_peer}
    host = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy_both_ways() -> None:
        half = _CHUNK_BYTES // 2
        host[:half].copy_(local[:half], non_blocking=True)
        target[:half].copy_(other[:half], non_blocking=True)

    return {"host": copy_both_ways}


def _kernel_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.add(source, 0, out=target)


def _rate(copy: Copy) -> float:
    """Return the rate of successive copies of chunks, in GB/s."""
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
    """Return the relative slowdown of matmuls during copies, and the rate of the copies in GB/s."""
    size = bench.matmul_size
    factors = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    alone_ms = []
    with_copies_ms = []
    rates = []
    for _ in range(bench.matmul_rounds + 1):
        alone_ms.append(_matmuls_ms(factors, None, stream, gb_per_s)[0])
        duration_ms, copied = _matmuls_ms(factors, copy, stream, gb_per_s)
        with_copies_ms.append(duration_ms)
        rates.append(copied * 1e-6 / duration_ms)
    ratio = statistics.median(b / a for a, b in zip(alone_ms[1:], with_copies_ms[1:], strict=True))
    return ratio - 1, statistics.median(rates[1:])


def _matmuls_ms(
    factors: torch.Tensor, copy: Copy | None, stream: torch.cuda.Stream, gb_per_s: float
) -> tuple[float, int]:
    """Return the time of several matmuls in milliseconds, and the bytes copied meanwhile on another stream.

    Args:
        factors: The two factors of the matmuls.
        copy: Function that copies a chunk, or None.
        stream: Stream of the copies.
        gb_per_s: Rate of the copies.
    """
    out = torch.empty_like(factors[0])
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_MATMULS):
        torch.mm(factors[0], factors[1], out=out)
    end.record()
    interval_s = _CHUNK_BYTES / gb_per_s * 1e-9
    due = time.perf_counter()
    copied = 0
    pending: list[torch.cuda.Event] = []
    while not end.query():
        pending = [event for event in pending if not event.query()]
        if copy is not None and time.perf_counter() >= due and len(pending) < _IN_FLIGHT:
            with torch.cuda.stream(stream):
                copy()
                pending.append(torch.cuda.Event())
                pending[-1].record(stream)
            due += interval_s
            copied += _CHUNK_BYTES
    stream.synchronize()
    return start.elapsed_time(end), copied


def _device_work(copy: Copy) -> list[str]:
    """Return the names of a copy's operations on the device, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        copy()
        torch.cuda.synchronize()
    events = seen.events() or []
    return sorted({event.name[:80] for event in events if str(event.device_type).endswith("CUDA")})


_SMALL_BYTES = 4096
_NAMES = {"HostStagedTransport": "host", "CopyEngineTransport": "copy_engine", "SharedMemoryTransport": "shared_memory"}
_ONLY_ON = {"copy_engine": "cuda", "shared_memory": "cpu"}


@config
class ExchangeBenchConfig:
    """Options of the benchmark."""

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks that exchange with each other; divisors of the largest one."""
    transports: tuple[str, ...] = ("host", "copy_engine", "shared_memory")
    """Transports to measure; copy_engine needs a GPU, shared_memory works on CPUs only."""
    bytes: tuple[int, ...] = (1 << 20, 1 << 24, 1 << 26)
    """Numbers of bytes that a rank sends in one exchange."""
    rounds: int = 15
    """Number of exchanges per size, whose median is reported."""
    paced_gb_per_s: float = 400.0
    """Rate of the copies during a matmul, in GB/s."""
    matmul_size: int = 8192
    """Number of rows and columns of the square bf16 matrices."""
    matmul_rounds: int = 7
    """Number of alternating rounds with and without copies."""
    timeout_s: float = 60.0
    """Time in seconds after which a rank that does not respond is considered lost."""


def measure_exchange(bench: ExchangeBenchConfig) -> list[dict[str, Any]]:
    """Measure each number of ranks, transport and size and, on a GPU, matmuls during each kind of copy.

    Returns:
        One row per measurement; under torchrun, an empty list on all ranks but the first.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        hosts = Topology.from_environment("cpu", timeout_s=bench.timeout_s)
        of_ranks = all_gather_json(hosts.control, _rank(hosts, bench))
        if not hosts.is_first:
            return []
    else:
        of_ranks = run_on_ranks(max(bench.ranks), _rank, bench)
    rows = [_slowest(same) for same in zip(*(result["rows"] for result in of_ranks), strict=True)]
    return [*rows, *of_ranks[0]["copies"]]


def _slowest(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failed = [row for row in of_ranks if "error" in row]
    if failed:
        return failed[0]
    slowest = min(of_ranks, key=lambda row: float(row["gb_per_s"]))
    latency_us = max(row["latency_us"] for row in of_ranks)
    return {**slowest, "latency_us": latency_us, "equal_to_gloo": all(row["equal_to_gloo"] for row in of_ranks)}


def _rank(hosts: Topology, bench: ExchangeBenchConfig) -> dict[str, list[dict[str, Any]]]:
    """Measure on one rank, with the topology `hosts` for synchronization, and return rows of exchanges and copies."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(hosts.world))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rows: list[dict[str, Any]] = []
    copies: list[dict[str, Any]] = []
    for transport in bench.transports:
        if _ONLY_ON.get(transport, device.type) != device.type:
            continue
        for ranks in bench.ranks:
            groups = ParallelConfig(num_replicas=hosts.world // ranks, transport=transport)  # type: ignore[arg-type]
            under_test = Topology.of_process_group(device, groups, timeout_s=bench.timeout_s)
            try:
                rows += _rows(hosts, under_test, bench)
            except PeerLostError as error:  # a failure of the transport on this machine is a result, too
                rows.append({"transport": transport, "ranks": ranks, "error": str(error)})
        if device.type == "cuda" and hosts.rank == 0 and "error" not in rows[-1]:
            copies += measure_copies(transport, under_test.vectors, bench)
        barrier(hosts.control)
    return {"rows": rows, "copies": copies}


def _rows(hosts: Topology, under_test: Topology, bench: ExchangeBenchConfig) -> list[dict[str, Any]]:
    reference = Topology.of_process_group(
        torch.device("cpu"), ParallelConfig(num_replicas=under_test.num_replicas, transport="collectives")
    )
    transport = type(under_test.vectors.transport).__name__
    common: dict[str, Any] = {
        "transport": _NAMES.get(transport, "collectives"),
        "ranks": under_test.num_shards,
        "device": under_test.device.type,
        "equal_to_gloo": all(_equals_gloo(reference, under_test, seed) for seed in range(4)),
        "latency_us": round(1e6 * _seconds(hosts, under_test, _SMALL_BYTES, bench.rounds), 1),
    }
    rows = []
    for size in bench.bytes:
        seconds = _seconds(hosts, under_test, size, bench.rounds)
        rate = float(f"{size / seconds * 1e-9:.3g}")  # three decimals can be 0 for few bytes on a busy machine
        rows.append({**common, "bytes": size, "gb_per_s": rate, "matmul_slowdown": None})
    return rows


def _seconds(hosts: Topology, under_test: Topology, num_bytes: int, rounds: int) -> float:
    """Return the median time of an exchange, from the moment that all ranks are ready until the bytes have arrived."""
    device = under_test.device
    world = under_test.num_shards
    peer_bytes = num_bytes // world
    sent = torch.randint(0, 255, (peer_bytes * world,), dtype=torch.uint8, device=device)
    durations = []
    for _ in range(rounds + 2):
        _finish(device)
        barrier(hosts.control)
        start = time.perf_counter()
        all_to_all_rows(under_test.vectors, sent, [peer_bytes] * world, [peer_bytes] * world)
        _finish(device)
        durations.append(time.perf_counter() - start)
    return statistics.median(durations[2:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _equals_gloo(reference: Topology, under_test: Topology, seed: int) -> bool:
    """Return whether an all-to-all with uneven numbers of rows has the same result as with Gloo."""
    world = under_test.num_shards
    rank = under_test.shard
    counts = torch.randint(0, 5000, (world, world), generator=torch.Generator().manual_seed(seed))
    counts[seed % world, 0] = 0
    send, receive = counts[rank].tolist(), counts[:, rank].tolist()
    rows = torch.randn(sum(send), 24, generator=torch.Generator().manual_seed(100 * seed + under_test.rank))
    expected = all_to_all_rows(reference.vectors, rows, send, receive)
    arrived = all_to_all_rows(under_test.vectors, rows.to(under_test.device), send, receive)
    return torch.equal(arrived.cpu(), expected)


BENCH = Bench(config=ExchangeBenchConfig, measure=measure_exchange)
