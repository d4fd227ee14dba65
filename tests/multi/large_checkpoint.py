"""A table of any size saved by some ranks while they train, and loaded by other numbers of them; what that takes.

    python tests/multi/large_checkpoint.py --gib 40 --worlds 4,3,8 --folder /scratch/rows --json checkpoint.json
    python tests/multi/large_checkpoint.py --gib 93.2 --on_device 0.5 --in_memory 0.42 --worlds 4,3,8 --folder ...

Each number of ranks loads what the one before it saved, checks every bit of it, and saves it for the next one, several
times (`--saves`). While it saves, a rank trains on random rows, drawn evenly or not (`--skews`, one for each number of
ranks); a step is a read and a write of rows with products of matrices between them. Steps beside a save are compared
with steps alone, before and after it, in the same run:

- stall_share: the part of training that the save has cost, 1 - (mean step alone) / (mean step beside, the freeze among
  them); the mean of all ranks, with an interval of 95% from blocks of half a second (step_records.py).
- cpu_share: the same of the processor time of the training thread, which other programs on the machine disturb less.
- waited_share: of the save's time, what the training spent in putting rows aside and in waiting for room.
- writer_cpu_s_per_gb: processor time of everything else in the process while it saved.

What was measured is printed and written to `--json` after each part of the work, with the seconds that are left to be
done. A part that does not fit into `--limit_s` is left out; a part that is cut off, by that limit or by a signal, is
told as far as it came, marked `ended_early`.

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
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from step_records import AFTER, BEFORE, BESIDE, StepRecords, read_steps, stall, step_ms

from nestrec.artifacts.atomic_files import write_file
from nestrec.base.thread_team import cores_of_rank, in_order
from nestrec.checkpoint import CheckpointGroup, CheckpointManager, LoadedCheckpoint, RankCheckpoint, checkpoint_writer
from nestrec.distributed import Topology
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.embedding.table_config import StoreConfig, TableConfig, layout_of
from nestrec.embedding.table_shard import TableShard
from nestrec.report.result_file import write_frame
from support.rank_pool import RankPool

DIM = 128
STEP_ROWS = 8192
PART_ROWS = 1 << 17
WIDTH_ON_DEVICE, PRODUCTS_ON_DEVICE = 2048, 16
"""Of the products of a step on a GPU, which take about as long there as those of a CPU."""
SECONDS_A_GIB = {"fill": 0.3, "save": 1.0, "load": 0.8}
"""What parts of the work may take that were not seen yet, on sixteen cores."""
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
            return write_file(path, content, past_cache=past_cache and not options.through_cache)
        options.memory_folder.mkdir(parents=True, exist_ok=True)
        place = options.memory_folder / path.name
        written = write_file(place, content)
        path.symlink_to(place)
        return written

    checkpoint_writer.write_file = write  # type: ignore[attr-defined]


def cores_of(rank: int, world: int) -> tuple[list[int], list[int]]:
    """For the training thread of a rank, and for what else the ranks do; none where there are too few."""
    usable = sorted(os.sched_getaffinity(0))  # pairs: a virtual machine may not say which of them share a core
    cores = [usable[first : first + 2] for first in range(0, len(usable) - 1, 2)]
    rest = [processor for core in cores[world:] for processor in core]
    return (cores[rank][:1], rest) if len(rest) >= world else ([], [])


def remove_files(options: argparse.Namespace) -> None:
    shutil.rmtree(options.folder, ignore_errors=True)
    shutil.rmtree(options.memory_folder, ignore_errors=True)


def memory_mib(line: str, process: int | str = "self") -> float:
    """VmRSS or VmHWM of a process."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(each.split()[1]) / 1024 for each in status if each.startswith(line))


def forget_peak() -> float:
    """Memory of this process now; VmHWM counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mib("VmRSS")


def bytes_asked_for(process: int | str = "self") -> int:
    """Bytes that a process has read so far, from wherever."""
    return int(Path(f"/proc/{process}/io").read_text().split("rchar:")[1].split()[0])


def begin(options: argparse.Namespace, rank: int, beyond_mib: float) -> None:
    """A part of the work begins here: whoever ends it early can tell how far it came, which a signal leaves to them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    told = {"time_s": time.time(), "process": os.getpid(), "mib": beyond_mib, "read": bytes_asked_for()}
    (options.records / f"rank-{rank}.json").write_text(json.dumps(told))


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
    begin(options, topology.rank, 0.0)
    device = device_of(topology, options)
    start_s = time.perf_counter()
    shard = TableShard(table_of(num_rows, device), topology.rank, topology.world, device)
    keys = shard.keys()
    words = torch.arange(shard.layout.num_words, dtype=torch.int32, device=device) * 7919
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
        self._shard = shard
        self._keys = shard.keys()
        self._draw = np.random.default_rng(seed)
        self._skew = skew
        self._device = shard._device
        self._vectors = shard.layout
        self.step = 10
        is_host = self._device.type == "cpu"
        self._width, self._products = (DIM, 3) if is_host else (WIDTH_ON_DEVICE, PRODUCTS_ON_DEVICE)
        self._into, self._weight = (
            torch.randn(rows, self._width, device=self._device) / 1e4 for rows in (DIM, self._width)
        )
        self.records: StepRecords | None = None

    def run(self, seconds: float, phase: int) -> None:
        """Steps for so long."""
        assert self.records is not None
        self.records.phase = phase
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            self()

    def __call__(self) -> None:
        start_s = time.perf_counter()
        start_cpu_s = time.thread_time()
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
        if self.records is not None:
            self.records.add(time.perf_counter() - start_s, time.thread_time() - start_cpu_s)


def save(topology: Topology, step: int, options: argparse.Namespace) -> dict[str, Any]:
    shard = SHARDS[0]
    peers = CheckpointGroup.of_topology(topology)
    files_in_memory(options)
    skew = options.skews[(step - 1) % len(options.skews)]
    training = Training(shard, 10 * step + topology.rank, skew)
    training()
    found = [
        _save_once(shard, CheckpointManager(str(options.folder), peers=peers), step + 100 * number, training, options)
        for number in range(options.saves)
    ]
    return {"saves": found, "digest": found[-1]["digest"], "skew": skew, "is_on_device": shard._device.type == "cuda"}


def _save_once(
    shard: TableShard, checkpoints: CheckpointManager, step: int, training: Training, options: argparse.Namespace
) -> dict[str, Any]:
    peers = checkpoints._peers
    own, others = cores_of(peers.rank, peers.world) if options.pinned else ([], [])
    everywhere = os.sched_getaffinity(0)
    if own:
        checkpoint_writer.cores_of_rank = lambda: 1 + len(others) // peers.world  # type: ignore[attr-defined]
    if peers.is_first:
        remove_files(options)  # a disk may not hold two of them
    records = training.records = StepRecords(steps_file(options, peers.rank, step))
    begin(options, peers.rank, memory_mib("VmRSS"))
    os.sched_setaffinity(0, own or everywhere)
    peers.gather(None)
    training.run(options.alone_s, BEFORE)
    os.sched_setaffinity(0, everywhere)
    digest = digest_of(shard)
    before_mib = forget_peak()
    begin(options, peers.rank, before_mib)
    os.sched_setaffinity(0, own or everywhere)
    peers.gather(None)
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    of_thread_s = time.thread_time()
    records.phase = BESIDE
    frozen = shard.freeze(max_bytes=options.aside_mib << 20)
    frozen_s = time.perf_counter() - start_s
    records.add(frozen_s, time.thread_time() - of_thread_s, num_steps=0)
    content = RankCheckpoint(state={"step": step}, tables={"items": frozen}, close=frozen.close)
    os.sched_setaffinity(0, others or everywhere)  # what it begins stays there
    checkpoints.save_async(step, content, is_copied=True)
    os.sched_setaffinity(0, own or everywhere)
    while checkpoints._background._thread is not None and checkpoints._background._thread.is_alive():
        training()
    seconds = time.perf_counter() - start_s
    writer_s = time.process_time() - start_cpu_s - (time.thread_time() - of_thread_s)
    checkpoints.close()
    beyond_mib = memory_mib("VmHWM") - before_mib
    peers.gather(None)
    training.run(options.alone_s, AFTER)
    os.sched_setaffinity(0, everywhere)
    return {
        "digest": digest,
        "seconds": seconds,
        "waited_share": (frozen_s + frozen.rows.waited_s) / seconds,
        "rows_aside": frozen.rows.aside.num_put,
        "writer_cpu_s": writer_s,
        "beyond_mib": beyond_mib,
    }


def load(topology: Topology, num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    device = device_of(topology, options)
    before_mib = forget_peak()
    start_s = time.perf_counter()
    start_bytes = bytes_asked_for()
    begin(options, topology.rank, before_mib)
    shard = TableShard(table_of(num_rows, device), topology.rank, topology.world, device)
    keys_mib = memory_mib("VmRSS")
    shard.store.reserve(len(shard.keys()))
    begin(options, topology.rank, keys_mib + shard.store.statistics()["host_bytes"] / 2**20)

    def take(restored: LoadedCheckpoint) -> None:
        shard.load(restored.rows("items", shard=(topology.rank, topology.world)))

    restored = CheckpointManager(str(options.folder), peers=CheckpointGroup.of_topology(topology)).restore_latest(take)
    assert restored is not None
    seconds = time.perf_counter() - start_s
    rows_mib = shard.store.statistics()["host_bytes"] / 2**20
    beyond_mib = memory_mib("VmHWM") - keys_mib - rows_mib
    SHARDS[0] = shard
    return {
        "seconds": seconds,
        "bytes_read": restored.bytes_read,
        "bytes_asked_for": bytes_asked_for() - start_bytes,
        "beyond_mib": beyond_mib,
        "keys_mib": keys_mib - before_mib,
        "digest": digest_of(shard),
        "is_on_device": device.type == "cuda",
    }


def steps_file(options: argparse.Namespace, rank: int, step: int) -> Path:
    """Where the steps around the save of a step are told by a rank."""
    path: Path = options.records / f"rank-{rank}-{step:04d}.npy"
    return path


def steps_of(options: argparse.Namespace, world: int, step: int) -> list[NDArray[np.float64]]:
    """Of each rank, those around all of its saves (`save`)."""
    saves = [sorted(options.records.glob(f"rank-{rank}-??{step % 100:02d}.npy")) for rank in range(world)]
    return [np.concatenate([read_steps(path) for path in of_rank]) for of_rank in saves if of_rank]


def summary(what: str, found: list[dict[str, Any]], table_bytes: int) -> dict[str, Any]:
    """What all ranks have told of a part of the work."""
    row: dict[str, Any] = {"on_device": sum(each["is_on_device"] for each in found)}
    if what == "save":
        row |= {"skew": found[0]["skew"]} | _summary_of_saves(table_bytes, [each["saves"] for each in found])
    else:
        row["seconds"] = round(max(each["seconds"] for each in found), 1)
    if what == "load":
        row["gb_per_s"] = round(table_bytes / row["seconds"] / 1e9, 2)
        row["beyond_mib"] = round(sum(each["beyond_mib"] for each in found))
        row["bytes_read"] = sum(each["bytes_read"] for each in found)
        row["read_share"] = round(row["bytes_read"] / table_bytes, 4)
        row["asked_share"] = round(sum(each["bytes_asked_for"] for each in found) / table_bytes, 4)
        row["keys_mib"] = round(sum(each["keys_mib"] for each in found))
    if what != "fill":
        row["digest"] = f"{sum(each['digest'] for each in found) % 2**64:016x}"
    return row


def _summary_of_saves(table_bytes: int, of_ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the saves, of the slowest rank, of the mean or of the sum of all ranks."""

    def over(name: str, join: Callable[[list[float]], float]) -> list[float]:
        return [join([save[name] for save in saves]) for saves in zip(*of_ranks, strict=True)]

    seconds = float(np.median(over("seconds", max)))
    row: dict[str, Any] = {"saves": len(of_ranks[0]), "seconds": round(seconds, 1)}
    row |= {"gb_per_s": round(table_bytes / seconds / 1e9, 3), "beyond_mib": round(max(over("beyond_mib", sum)))}
    row["waited_share"] = round(float(np.median(over("waited_share", lambda each: float(np.mean(each))))), 4)
    row["writer_cpu_s_per_gb"] = round(float(np.median(over("writer_cpu_s", sum))) / table_bytes * 1e9, 2)
    return row | {"rows_aside": int(np.median(over("rows_aside", sum)))}


def cost_of_saves(steps: list[NDArray[np.float64]], on_device: int) -> dict[str, Any]:
    """What saves have cost the training, as far as it was told; ranks with rows on a device are the first ones."""
    phases = [set(of_rank[:, 0]) for of_rank in steps]
    row: dict[str, Any] = {"steps": int(min((e[e[:, 0] == BESIDE, 1].sum() for e in steps), default=0))}
    if not row["steps"] or not all({BEFORE, BESIDE} <= found for found in phases):
        return row
    for name, column in (("stall_share", 2), ("cpu_share", 3)):
        share, interval = stall(steps, column)
        row |= {name: round(share, 4), f"{name}_spread": [round(bound, 4) for bound in interval]}
    for name, which in (("before", BEFORE), ("beside", BESIDE), ("after", AFTER)):
        if all(which in found for found in phases):
            row[f"step_ms_{name}"] = round(step_ms(steps, [which]), 2)
    if on_device and on_device < len(steps):
        for name, ranks in (("device", steps[:on_device]), ("host", steps[on_device:])):
            share, interval = stall(ranks)
            row |= {f"stall_share_of_{name}": round(share, 4)}
            row |= {f"stall_share_of_{name}_spread": [round(bound, 4) for bound in interval]}
    return row


def so_far(options: argparse.Namespace) -> dict[str, Any]:
    """Of a part of the work that is under way, what can be seen from outside."""
    told = [json.loads(path.read_text()) for path in sorted(options.records.glob("rank-*.json"))]
    alive = [each for each in told if Path(f"/proc/{each['process']}/status").exists()]
    folders = [each for each in (options.folder, options.memory_folder) if each.exists()]
    files = [path for folder in folders for path in folder.rglob("rows-*") if path.is_file() and not path.is_symlink()]
    row: dict[str, Any] = {"gb_on_disk": round(sum(path.stat().st_size for path in files) / 1e9, 2)}
    if alive:
        row["seconds"] = round(time.time() - max(each["time_s"] for each in alive), 1)
        row["beyond_mib"] = round(sum(memory_mib("VmHWM", each["process"]) - each["mib"] for each in alive))
        row["gb_asked_for"] = round(sum(bytes_asked_for(e["process"]) - e["read"] for e in alive) / 1e9, 2)
    return row


class Cut(Exception):
    """A signal, or the end of the time."""


class Work:
    """Parts of the work one after another; what they gave is told at once, and kept."""

    def __init__(self, options: argparse.Namespace, table_bytes: int, parts: list[tuple[str, int]]) -> None:
        self._options = options
        self._table_bytes = table_bytes
        self._parts = parts
        self.rows = list[dict[str, Any]]()
        self._start_s = time.perf_counter()
        self._seen_s = dict[str, float]()
        self._now = ("nothing", 0)
        self._part_s = self._start_s
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._cut)
        if options.limit_s:
            signal.setitimer(signal.ITIMER_REAL, options.limit_s)

    def fits(self, what: str, world: int) -> bool:
        """Whether there is time for the next part, which begins now; else it is told what is left out."""
        left_s = (
            self._options.limit_s - (time.perf_counter() - self._start_s) if self._options.limit_s else float("inf")
        )
        if self._about_s(what) > left_s:
            left_out = [f"{each} by {ranks}" for each, ranks in self._parts]
            self._keep(
                {"what": "left out", "parts": left_out, "needs_s": round(self._about_s(what)), "left_s": round(left_s)}
            )
            return False
        self._now = (what, world)
        self._part_s = time.perf_counter()
        return True

    def done(self, step: int, found: list[dict[str, Any]]) -> None:
        """All ranks have told what they found."""
        assert all(isinstance(each, dict) for each in found), found
        (what, world) = self._parts.pop(0)
        took_s = time.perf_counter() - self._part_s
        self._seen_s[what] = took_s
        row = self._row(what, world) | summary(what, found, self._table_bytes)
        if what == "save":
            row["past_cache"] = not self._options.through_cache
            row |= cost_of_saves(steps_of(self._options, world, step), row["on_device"])
        row |= {"part_s": round(took_s, 1), "left_s": round(sum(self._about_s(each) for each, _ in self._parts))}
        self._keep(row)

    def ended(self, why: str, step: int) -> None:
        """The part that is under way will not be done."""
        what, world = self._now
        row = self._row(what, world) | {"ended_early": why, "part_s": round(time.perf_counter() - self._part_s, 1)}
        row |= so_far(self._options)
        if what == "save":
            row |= cost_of_saves(steps_of(self._options, world, step), 0)
        self._keep(row)

    def _row(self, what: str, world: int) -> dict[str, Any]:
        return {"what": what, "ranks": world, "rows_gib": round(self._table_bytes / 2**30, 2)}

    def _about_s(self, what: str) -> float:
        waits = 2 * self._options.alone_s * self._options.saves if what == "save" else 0.0
        return self._seen_s.get(what, SECONDS_A_GIB[what] * self._table_bytes / 2**30 + waits)

    def _keep(self, row: dict[str, Any]) -> None:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGALRM])
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self._options.json:
            command = f"python {' '.join(sys.argv)}"
            write_frame(self._options.json, bench="checkpoint", command=command, rows=self.rows)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)

    @staticmethod
    def _cut(number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(each, signal.SIG_IGN)
        raise Cut(signal.Signals(number).name)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--worlds", type=lambda text: [int(each) for each in text.split(",")], default=[4, 3, 8])
    parser.add_argument("--aside_mib", type=int, default=256)
    parser.add_argument("--saves", type=int, default=1)
    parser.add_argument("--skews", type=lambda text: [float(each) for each in text.split(",")], default=[1.0])
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--through_cache", action="store_true", help="write as other programs do, to compare")
    parser.add_argument("--alone_s", type=float, default=3.0)
    parser.add_argument("--limit_s", type=float, default=0.0, help="for everything; 0: none")
    parser.add_argument("--on_device", type=float, default=0.0)
    parser.add_argument("--in_memory", type=float, default=0.0)
    parser.add_argument("--memory_folder", type=Path, default=Path("/dev/shm/large_checkpoint"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    num_rows = int(options.gib * 2**30 / layout_of(table_of(1)).row_bytes)
    after = [(what, world) for world in options.worlds[1:] for what in ("load", "save")]
    parts = [("fill", options.worlds[0]), ("save", options.worlds[0]), *after[:-1]]
    work = Work(options, num_rows * layout_of(table_of(1)).row_bytes, list(parts))
    remove_files(options)
    pool = None
    step = 1
    with tempfile.TemporaryDirectory() as folder:
        options.records = Path(folder)
        try:
            for what, world in parts:
                if not work.fits(what, world):
                    break
                if what != "save":
                    if pool is not None:
                        pool.close()
                    step += what == "load"
                    pool = RankPool(world, timeout_s=600)
                assert pool is not None
                job, argument = {"fill": (fill, num_rows), "load": (load, num_rows), "save": (save, step)}[what]
                work.done(step, pool.outcomes(job, argument, options, timeout_s=600))
                if what == "load":
                    assert work.rows[-1]["digest"] == work.rows[-2]["digest"], "every bit of when the save began"
        except Cut as cut:
            work.ended(str(cut), step)
        finally:
            if pool is not None:
                for process in pool._processes:
                    process.kill()
                pool.close()
            remove_files(options)


if __name__ == "__main__":
    main()
