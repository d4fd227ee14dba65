"""A table of any size saved by some ranks while they train, and loaded by other numbers of them; what that takes.

    python tests/multi/large_checkpoint.py --gib 40 --worlds 4,3,8 --folder /scratch/rows --json checkpoint.json
    python tests/multi/large_checkpoint.py --gib 93.2 --on_device 0.5 --in_memory 0.42 --worlds 4,3,8 --folder ...

Each number of ranks loads what the one before it saved, checks every bit of it, and saves it for the next one, several
times (`--saves`). While it saves, a rank trains on random rows, drawn evenly or not (`--skews`, one for each number of
ranks); a step is a read and a write of rows with products of matrices between them. Steps beside a save alternate with
steps alone, before and after:

- stall_share: the part of training that the save has cost, 1 - (mean step alone) / (mean step beside, the freeze among
  them); the mean of all ranks, of all saves the median, with the lowest and the highest.
- cpu_share: the same of the processor time of the training thread, which other programs on the machine disturb less.
- waited_share: of the save's time, what the training spent in putting rows aside and in waiting for room.
- writer_cpu_s_per_gb: processor time of everything else in the process while it saved.

Where there are enough cores, training threads have theirs to themselves (`--pinned`): two threads on one core slow each
other down whatever they do.

Memory is what all ranks had at the most beyond what they had before the save, or beyond their rows where they load.

What fits: the rows lie in host memory, those of the first ranks in that of the GPU (`--on_device`, a share of the
ranks), and the files on the disk, some of them in memory where it has no room for all (`--in_memory`, a share of them).
"""

import argparse
import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit

from nestrec.base.parallel import cores_of_rank, in_order
from nestrec.bench.harness.frame import write_frame
from nestrec.checkpoint import Checkpoints, Content, Peers, Restored, writer
from nestrec.checkpoint.durable import write_file
from nestrec.distributed import Topology
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.embedding.shard import TableShard
from nestrec.embedding.table import StoreConfig, TableConfig, layout_of
from nestrec.testing.ranks import RankPool

DIM, STEP_ROWS, PART_ROWS = 128, 8192, 1 << 17
WIDTH_ON_DEVICE, PRODUCTS_ON_DEVICE = 2048, 16
"""Of the products of a step on a GPU, which take about as long there as those of a CPU."""
SHARDS: dict[int, TableShard] = {}
"""The rows of this process, from job to job."""


def table_of(num_rows: int, device: torch.device | None = None) -> TableConfig:
    store = StoreConfig(kind="device" if device is not None and device.type == "cuda" else "dram", num_threads=1)
    optimizer = RowOptimizerConfig(kind="rowwise_adagrad")
    return TableConfig(name="items", dim=DIM, num_rows=num_rows, store=store, optimizer=optimizer)


def device_of(topology: Topology, options: argparse.Namespace) -> torch.device:
    """Where the rows of this rank lie; a process that uses a GPU has its libraries when this returns."""
    if topology.rank >= options.on_device * topology.world:
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.randn(8, 8, device=device) @ torch.randn(8, 8, device=device)
    torch.cuda.synchronize(device)
    return device


def files_in_memory(options: argparse.Namespace) -> None:
    """From here on this process writes a share of the rows' files to a folder in memory, with links to them."""

    def write(path: Path, content: Iterator[memoryview], *, past_cache: bool = False) -> tuple[int, str]:
        number = zlib.crc32(path.name.encode()) % 1000
        if not path.name.startswith("rows-") or number >= 1000 * options.in_memory:
            return write_file(path, content, past_cache=past_cache)
        options.memory_folder.mkdir(parents=True, exist_ok=True)
        place = options.memory_folder / path.name
        written = write_file(place, content)
        path.symlink_to(place)
        return written

    writer.write_file = write  # type: ignore[attr-defined]


def cores_of(rank: int, world: int) -> tuple[list[int], list[int]]:
    """For the training thread of a rank, and for what else the ranks do; none where there are too few."""
    usable = sorted(os.sched_getaffinity(0))  # pairs: a virtual machine may not say which of them share a core
    cores = [usable[first : first + 2] for first in range(0, len(usable) - 1, 2)]
    rest = [processor for core in cores[world:] for processor in core]
    return (cores[rank][:1], rest) if len(rest) >= world else ([], [])


def remove_files(options: argparse.Namespace) -> None:
    shutil.rmtree(options.folder, ignore_errors=True)
    shutil.rmtree(options.memory_folder, ignore_errors=True)


def memory_mib(line: str) -> float:
    """VmRSS or VmHWM of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) / 1024 for each in status if each.startswith(line))


def forget_peak() -> float:
    """Memory of this process now; VmHWM counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mib("VmRSS")


@njit(cache=True, nogil=True)
def _digest(keys, words):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(len(keys)):
        h = np.uint64(keys[i])
        for j in range(words.shape[1]):
            h = h * np.uint64(6364136223846793005) + np.uint64(words[i, j])
        total += h ^ (h >> np.uint64(29))
    return total


def of_parts(num_rows: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives for the start of each part, on all cores of this rank."""
    calls = (partial(work, start) for start in range(0, num_rows, PART_ROWS))
    return list(in_order(calls, cores_of_rank()))


def digest_of(shard: TableShard) -> int:
    """The same for the same rows, whoever holds which of them."""
    keys = shard.keys()

    def digest_part(start: int) -> int:
        part = keys[start : start + PART_ROWS]
        words = shard.read(part).cpu().numpy()[:, : DIM + 1]  # without what fills a row up to 16 bytes
        return int(_digest(part, words))

    return int(sum(of_parts(len(keys), digest_part)) % 2**64)


def fill(topology: Topology, num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rows of this rank, from their keys."""
    device, start_s = device_of(topology, options), time.perf_counter()
    shard = TableShard(table_of(num_rows, device), topology.rank, topology.world, device)
    keys, words = shard.keys(), torch.arange(shard.layout.num_words, dtype=torch.int32, device=device) * 7919
    shard.store.reserve(len(keys))
    slots = shard.residency.restore(keys, None, None)

    def fill_part(start: int) -> None:
        part = keys[start : start + PART_ROWS]
        rows = torch.from_numpy((part * 40503).astype(np.int32)).to(device)[:, None] + words
        rows.bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000)  # numbers between 1 and 2
        shard.store.scatter(slots[start : start + PART_ROWS], rows)

    of_parts(len(keys), fill_part)
    SHARDS[0] = shard
    return {"seconds": time.perf_counter() - start_s, "is_on_device": device.type == "cuda"}


class Training:
    """Steps on random rows, and how long each took."""

    def __init__(self, shard: TableShard, seed: int, skew: float) -> None:
        """skew: 1 draws all rows alike; with s, the most used 1 / 2**s of the rows get half of the uses."""
        self._shard, self._keys, self._draw, self._skew = shard, shard.keys(), np.random.default_rng(seed), skew
        self._device, self._vectors, self.step = shard._device, shard.layout, 10
        is_host = self._device.type == "cpu"
        self._width, self._products = (DIM, 3) if is_host else (WIDTH_ON_DEVICE, PRODUCTS_ON_DEVICE)
        self._into, self._weight = (
            torch.randn(rows, self._width, device=self._device) / 1e4 for rows in (DIM, self._width)
        )
        self.forget()

    def forget(self) -> None:
        """Times count from here."""
        self.seconds, self.cpu_seconds = list[float](), list[float]()

    def run(self, seconds: float) -> None:
        """Steps for so long."""
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            self()

    def __call__(self) -> None:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        self.step += 1
        places = (len(self._keys) * self._draw.random(STEP_ROWS) ** self._skew).astype(np.int64)
        keys = np.unique(self._keys[places])
        fetched = self._shard.fetch(keys, self.step)
        weight = self._vectors.view(fetched.rows, "weight")
        inner = weight @ self._into
        vectors = inner
        for _ in range(self._products):
            vectors = vectors @ self._weight + inner
        weight.copy_(weight * 0.999 + 1e-3 * vectors[:, :DIM])
        self._shard.write_back(fetched)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds.append(time.perf_counter() - start_s)
        self.cpu_seconds.append(time.thread_time() - start_cpu_s)


def save(topology: Topology, step: int, options: argparse.Namespace) -> dict[str, Any]:
    shard, peers = SHARDS[0], Peers.of_topology(topology)
    files_in_memory(options)
    skew = options.skews[(step - 1) % len(options.skews)]
    training = Training(shard, 10 * step + topology.rank, skew)
    training()
    found = [
        _save_once(shard, Checkpoints(str(options.folder), peers=peers), step + 100 * number, training, options)
        for number in range(options.saves)
    ]
    return {"saves": found, "digest": found[-1]["digest"], "skew": skew, "is_on_device": shard._device.type == "cuda"}


def _save_once(
    shard: TableShard, checkpoints: Checkpoints, step: int, training: Training, options: argparse.Namespace
) -> dict[str, Any]:
    peers = checkpoints._peers
    own, others = cores_of(peers.rank, peers.world) if options.pinned else ([], [])
    everywhere = os.sched_getaffinity(0)
    if own:
        writer.cores_of_rank = lambda: 1 + len(others) // peers.world  # type: ignore[attr-defined]
    os.sched_setaffinity(0, own or everywhere)
    if peers.is_first:
        remove_files(options)  # a disk may not hold two of them
    training.forget()
    peers.gather(None)
    training.run(options.alone_s)
    alone, alone_cpu = training.seconds, training.cpu_seconds
    training.forget()
    os.sched_setaffinity(0, everywhere)
    digest, before_mib = digest_of(shard), forget_peak()
    os.sched_setaffinity(0, own or everywhere)
    peers.gather(None)
    start_s, start_cpu_s, of_thread_s = time.perf_counter(), time.process_time(), time.thread_time()
    frozen = shard.freeze(max_bytes=options.aside_mib << 20)
    frozen_s = time.perf_counter() - start_s
    content = Content(state={"step": step}, tables={"items": frozen}, close=frozen.close)
    os.sched_setaffinity(0, others or everywhere)  # what it begins stays there
    checkpoints.save_async(step, content, is_copied=True)
    os.sched_setaffinity(0, own or everywhere)
    while checkpoints._background._thread is not None and checkpoints._background._thread.is_alive():
        training()
    seconds = time.perf_counter() - start_s
    writer_s = time.process_time() - start_cpu_s - (time.thread_time() - of_thread_s)
    checkpoints.close()
    beyond_mib = memory_mib("VmHWM") - before_mib
    beside, beside_cpu = training.seconds, training.cpu_seconds
    training.forget()
    peers.gather(None)
    training.run(options.alone_s)
    os.sched_setaffinity(0, everywhere)
    alone_ms, beside_ms = 1e3 * float(np.mean(alone + training.seconds)), 1e3 * seconds / len(beside)
    alone_cpu_ms, beside_cpu_ms = (1e3 * float(np.mean(e)) for e in (alone_cpu + training.cpu_seconds, beside_cpu))
    return {
        "digest": digest,
        "seconds": seconds,
        "waited_share": (frozen_s + frozen.rows.waited_s) / seconds,
        "steps": len(beside),
        "step_ms_alone": alone_ms,
        "step_ms_beside": beside_ms,
        "stall_share": 1 - alone_ms / beside_ms,
        "cpu_share": 1 - alone_cpu_ms / beside_cpu_ms,
        "rows_aside": frozen.rows.aside.num_put,
        "writer_cpu_s": writer_s,
        "beyond_mib": beyond_mib,
    }


def load(topology: Topology, num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    device = device_of(topology, options)
    before_mib, start_s = forget_peak(), time.perf_counter()
    shard = TableShard(table_of(num_rows, device), topology.rank, topology.world, device)
    keys_mib = memory_mib("VmRSS")
    shard.store.reserve(len(shard.keys()))

    def take(restored: Restored) -> None:
        shard.load(restored.rows("items", shard=(topology.rank, topology.world)))

    restored = Checkpoints(str(options.folder), peers=Peers.of_topology(topology)).restore_latest(take)
    assert restored is not None
    seconds, rows_mib = time.perf_counter() - start_s, shard.store.statistics()["host_bytes"] / 2**20
    beyond_mib = memory_mib("VmHWM") - keys_mib - rows_mib
    SHARDS[0] = shard
    return {
        "seconds": seconds,
        "bytes_read": restored.bytes_read,
        "beyond_mib": beyond_mib,
        "keys_mib": keys_mib - before_mib,
        "digest": digest_of(shard),
        "is_on_device": device.type == "cuda",
    }


def summary(what: str, world: int, table_bytes: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of all ranks."""
    row: dict[str, Any] = {"what": what, "ranks": world, "rows_gib": round(table_bytes / 2**30, 2)}
    row["on_device"] = sum(each["is_on_device"] for each in found)
    if what == "save":
        row["skew"] = found[0]["skew"]
        row |= _summary_of_saves(table_bytes, [each["saves"] for each in found])
        for kind, is_on_device in (("host", False), ("device", True)):
            of_kind = [save["stall_share"] for e in found if e["is_on_device"] == is_on_device for save in e["saves"]]
            if row["on_device"] and of_kind:
                row[f"stall_share_of_{kind}"] = round(float(np.mean(of_kind)), 4)
    else:
        row["seconds"] = round(max(each["seconds"] for each in found), 1)
    if what == "load":
        row["gb_per_s"] = round(table_bytes / row["seconds"] / 1e9, 2)
        row["beyond_mib"] = round(sum(each["beyond_mib"] for each in found))
        row["bytes_read"] = sum(each["bytes_read"] for each in found)
        row["read_share"] = round(row["bytes_read"] / table_bytes, 4)
        row["keys_mib"] = round(sum(each["keys_mib"] for each in found))
    if what != "fill":
        row["digest"] = f"{sum(each['digest'] for each in found) % 2**64:016x}"
    return row


def _summary_of_saves(table_bytes: int, of_ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the saves, of the slowest rank, of the mean or of the sum of all ranks; spreads of the shares."""

    def over(name: str, join: Callable[[list[float]], float]) -> list[float]:
        return [join([save[name] for save in saves]) for saves in zip(*of_ranks, strict=True)]

    seconds = float(np.median(over("seconds", max)))
    row: dict[str, Any] = {"saves": len(of_ranks[0]), "seconds": round(seconds, 1)}
    row |= {"gb_per_s": round(table_bytes / seconds / 1e9, 3), "beyond_mib": round(max(over("beyond_mib", sum)))}
    for name in ("stall_share", "cpu_share", "waited_share"):
        shares = over(name, lambda each: float(np.mean(each)))
        row[name] = round(float(np.median(shares)), 4)
        row[f"{name}_spread"] = [round(min(shares), 4), round(max(shares), 4)]
    for name in ("step_ms_alone", "step_ms_beside"):
        row[name] = round(float(np.median(over(name, lambda each: float(np.mean(each))))), 2)
    row["writer_cpu_s_per_gb"] = round(float(np.median(over("writer_cpu_s", sum))) / table_bytes * 1e9, 2)
    return row | {"steps": int(min(over("steps", min))), "rows_aside": int(np.median(over("rows_aside", sum)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--worlds", default="4,3,8")
    parser.add_argument("--aside_mib", type=int, default=256)
    parser.add_argument("--saves", type=int, default=1)
    parser.add_argument("--skews", type=lambda text: [float(each) for each in text.split(",")], default=[1.0])
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--alone_s", type=float, default=3.0)
    parser.add_argument("--on_device", type=float, default=0.0)
    parser.add_argument("--in_memory", type=float, default=0.0)
    parser.add_argument("--memory_folder", type=Path, default=Path("/dev/shm/large_checkpoint"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num_rows = int(options.gib * 2**30 / layout_of(table_of(1)).row_bytes)
    table_bytes = num_rows * layout_of(table_of(1)).row_bytes
    rows: list[dict[str, Any]] = []

    def tell(what: str, world: int, found: list[dict[str, Any]]) -> None:
        assert all(isinstance(each, dict) for each in found), found
        rows.append(summary(what, world, table_bytes, found))
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            write_frame(options.json, bench="checkpoint", command=f"python {' '.join(sys.argv)}", rows=rows)

    remove_files(options)
    worlds = [int(world) for world in options.worlds.split(",")]
    for step, world in enumerate(worlds, start=1):
        pool = RankPool(world, timeout_s=600)
        if step == 1:
            tell("fill", world, pool.outcomes(fill, num_rows, options, timeout_s=600))
        else:
            tell("load", world, pool.outcomes(load, num_rows, options, timeout_s=600))
            assert rows[-1]["digest"] == rows[-2]["digest"], "every bit of what was there when the save began"
            remove_files(options)  # a disk may not hold two of them
        if step < len(worlds):
            tell("save", world, pool.outcomes(save, step, options, timeout_s=600))
        pool.close()


if __name__ == "__main__":
    main()
