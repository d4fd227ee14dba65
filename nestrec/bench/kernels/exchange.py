"""Bandwidth and latency of each transport between processes, and what a matmul beside it loses (on a GPU).

Ranks are processes on one device (or on the CPU, where only `host` exists), or those of torchrun. Fewer ranks are
measured as groups of them, at the same time. Every transport sends the same bytes, and what arrives is compared with
Gloo's to the bit. The matmul runs on the first rank alone, while the other ranks are quiet: several processes on one
device take turns, and would measure that. Beside it, chunks are copied the way the transport does it, at a given rate;
`sm_copy` is the same with a kernel, the thing to be compared with.

    nestrec bench exchange --ranks 2,4 --transports host,copy_engine --bytes 1048576
"""

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from nestrec.base.config import config
from nestrec.base.errors import PeerLostError
from nestrec.bench.bench import Bench
from nestrec.bench.kernels.exchange_matmul import ways_to_copy
from nestrec.distributed import Topology
from nestrec.distributed.exchange import all_gather_json, all_to_all_rows, barrier
from nestrec.distributed.local_ranks import run_on_ranks
from nestrec.distributed.options import RanksConfig

_SMALL_BYTES = 4096
_NAMES = {"HostStaged": "host", "CopyEngine": "copy_engine", "SharedMemory": "shared_memory"}
_ONLY_ON = {"copy_engine": "cuda", "shared_memory": "cpu"}


@config
class ExchangeBench:
    ranks: tuple[int, ...] = (2, 4)
    """ranks that exchange with each other; divisors of the largest"""
    transports: tuple[str, ...] = ("host", "copy_engine", "shared_memory")
    """which transports; copy_engine needs a GPU, shared_memory is for CPUs"""
    bytes: tuple[int, ...] = (1 << 20, 1 << 24, 1 << 26)
    """bytes that a rank sends in one exchange"""
    rounds: int = 15
    """exchanges of each size; medians are printed"""
    paced_gb_per_s: float = 400.0
    """rate of the copies beside a matmul"""
    matmul_size: int = 8192
    """of a square bf16 matmul"""
    matmul_rounds: int = 7
    """rounds with and without copies, by turns"""
    timeout_s: float = 60.0
    """after this long without an answer a peer counts as lost"""


def measure_exchange(bench: ExchangeBench) -> list[dict[str, Any]]:
    """A row for each number of ranks, transport and size; and on a GPU one for each way to copy beside a matmul.

    Under a launcher the first rank has the rows, the others have none.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        hosts = Topology.from_environment("cpu", timeout_s=bench.timeout_s)
        of_ranks = all_gather_json(hosts.control, _rank(hosts, bench))
        if not hosts.is_first:
            return []
    else:
        of_ranks = run_on_ranks(max(bench.ranks), _rank, bench)
    rows = [_slowest(same) for same in zip(*(answer["rows"] for answer in of_ranks), strict=True)]
    return [*rows, *of_ranks[0]["beside"]]


def _slowest(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failed = [row for row in of_ranks if "error" in row]
    if failed:
        return failed[0]
    slowest = min(of_ranks, key=lambda row: float(row["gb_per_s"]))
    latency_us = max(row["latency_us"] for row in of_ranks)
    return {**slowest, "latency_us": latency_us, "equal_to_gloo": all(row["equal_to_gloo"] for row in of_ranks)}


def _rank(hosts: Topology, bench: ExchangeBench) -> dict[str, list[dict[str, Any]]]:
    """One rank; `hosts` is the topology by which ranks keep in step."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(hosts.world))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rows: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    for transport in bench.transports:
        if _ONLY_ON.get(transport, device.type) != device.type:
            continue
        for ranks in bench.ranks:
            groups = RanksConfig(replicas=hosts.world // ranks, exchange=transport)  # type: ignore[arg-type]
            under_test = Topology.of_process_group(device, groups, timeout_s=bench.timeout_s)
            try:
                rows += _rows(hosts, under_test, bench)
            except PeerLostError as error:  # what the machine cannot do is a result too
                rows.append({"transport": transport, "ranks": ranks, "error": str(error)})
        if device.type == "cuda" and hosts.rank == 0 and "error" not in rows[-1]:
            beside += ways_to_copy(transport, under_test.vectors, bench)
        barrier(hosts.control)
    return {"rows": rows, "beside": beside}


def _rows(hosts: Topology, under_test: Topology, bench: ExchangeBench) -> list[dict[str, Any]]:
    reference = Topology.of_process_group(
        torch.device("cpu"), RanksConfig(replicas=under_test.num_replicas, exchange="collectives")
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
        rate = float(f"{size / seconds * 1e-9:.3g}")  # three decimals would be 0 for few bytes on a busy machine
        rows.append({**common, "bytes": size, "gb_per_s": rate, "matmul_slowdown": None})
    return rows


def _seconds(hosts: Topology, under_test: Topology, num_bytes: int, rounds: int) -> float:
    """Median time of an exchange from the moment that all ranks are ready to the moment the bytes are there."""
    device, world = under_test.device, under_test.num_shards
    share = num_bytes // world
    sent = torch.randint(0, 255, (share * world,), dtype=torch.uint8, device=device)
    taken = []
    for _ in range(rounds + 2):
        _finish(device)
        barrier(hosts.control)
        start = time.perf_counter()
        all_to_all_rows(under_test.vectors, sent, [share] * world, [share] * world)
        _finish(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _equals_gloo(reference: Topology, under_test: Topology, seed: int) -> bool:
    """Whether rows of uneven number arrive as over Gloo."""
    world, rank = under_test.num_shards, under_test.shard
    counts = torch.randint(0, 5000, (world, world), generator=torch.Generator().manual_seed(seed))
    counts[seed % world, 0] = 0
    send, receive = counts[rank].tolist(), counts[:, rank].tolist()
    rows = torch.randn(sum(send), 24, generator=torch.Generator().manual_seed(100 * seed + under_test.rank))
    expected = all_to_all_rows(reference.vectors, rows, send, receive)
    arrived = all_to_all_rows(under_test.vectors, rows.to(under_test.device), send, receive)
    return torch.equal(arrived.cpu(), expected)


BENCH = Bench(config=ExchangeBench, measure=measure_exchange)
