"""Measures checkpoints of a table of any size: ranks save it while they train, and other numbers of ranks load it.

    python tests/multi/large_checkpoint.py --gib 40 --worlds 4,3,8 --folder /scratch/rows --json checkpoint.json
    python tests/multi/large_checkpoint.py --gib 93.2 --on_device 0.5 --in_memory 0.42 --worlds 4,3,8 --folder ...

Each number of ranks (`--worlds`) loads the checkpoint of the previous one, compares its digest, and saves it for the
next one, several times (`--saves`). During a save, a rank trains on random rows, drawn uniformly or not (`--skews`, one
value per number of ranks). A step reads rows, multiplies matrices and writes the rows. Steps during a save are compared
with steps before and after it, in the same run:

- stall_share: fraction of training time that the save has cost: 1 - (mean step before and after) / (mean step during
  the save, including the time to create the snapshot); the mean over ranks, with a 95% confidence interval from blocks
  of half a second (step_records.py).
- cpu_share: the same fraction for the CPU time of the training thread, on which other programs have less influence.
- waited_share: fraction of the save's time that training spent creating the snapshot, copying rows before it overwrote
  them, and waiting for space in the copy-on-write ring.
- writer_cpu_s_per_gb: CPU time of all other threads of the process during the save.

Results are printed and written to `--json` after each part of the work, with the estimated seconds that remain. A part
that would exceed `--limit_s` is skipped. If a part is interrupted by that limit or by a signal, its results so far are
written and marked `ended_early`.

With `--pinned`, training threads have cores of their own if there are enough cores, because two threads on one core
slow each other down.

Memory is the largest memory of all ranks in excess of that before the save, or in excess of the rows if they load.

Rows are in host memory, or in the memory of the GPU for the first ranks (`--on_device`, a fraction of the ranks). Files
are on the disk, or in memory for a fraction of them (`--in_memory`) if the disk is too small.
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
from step_records import AFTER, BEFORE, DURING, StepRecords, read_steps, stall, step_ms

from nestrec.artifacts.atomic_files import write_file
from nestrec.base.thread_team import cores_per_rank, run_ahead
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
"""Width and number of matrix products of a step on a GPU; they take about as long as those on a CPU."""
SECONDS_PER_GIB = {"fill": 0.3, "save": 1.0, "load": 0.8}
"""Estimated time of each part of the work on 16 cores, used until it has been measured."""
SHARDS: dict[int, TableShard] = {}
"""Table shard of this process, under key 0; it remains between jobs."""


def table_of(num_rows: int, device: torch.device | None = None) -> TableConfig:
    store = StoreConfig(kind="device" if device is not None and device.type == "cuda" else "dram", num_threads=1)
    optimizer = RowOptimizerConfig(kind="rowwise_adagrad")
    return TableConfig(name="items", dim=DIM, num_rows=num_rows, store=store, optimizer=optimizer)


def device_of(topology: Topology, options: argparse.Namespace) -> torch.device:
    """Return the device of this rank's rows, and load the GPU libraries if it is a GPU."""
    if topology.rank >= options.on_device * topology.world:
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.randn(8, 8, device=device) @ torch.randn(8, 8, device=device)
    torch.cuda.synchronize(device)
    return device


def redirect_files_to_memory(options: argparse.Namespace) -> None:
    """Make this process write a fraction of the row files to a folder in memory, with symbolic links to them."""

    def write(path: Path, content: Iterator[memoryview], *, direct_io: bool = False) -> tuple[int, str]:
        number = zlib.crc32(path.name.encode()) % 1000
        if not path.name.startswith("rows-") or number >= 1000 * options.in_memory:
            return write_file(path, content, direct_io=direct_io and not options.through_cache)
        options.memory_folder.mkdir(parents=True, exist_ok=True)
        target = options.memory_folder / path.name
        result = write_file(target, content)
        path.symlink_to(target)
        return result

    checkpoint_writer.write_file = write  # type: ignore[attr-defined]


def cores_of(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Return the cores for the training thread of a rank and those for all other threads; empty lists if too few."""
    # Successive processors are treated as a core, because a virtual machine may not report which of them share one.
    usable = sorted(os.sched_getaffinity(0))
    cores = [usable[first : first + 2] for first in range(0, len(usable) - 1, 2)]
    rest = [processor for core in cores[world:] for processor in core]
    return (cores[rank][:1], rest) if len(rest) >= world else ([], [])


def remove_files(options: argparse.Namespace) -> None:
    shutil.rmtree(options.folder, ignore_errors=True)
    shutil.rmtree(options.memory_folder, ignore_errors=True)


def memory_mib(line: str, process: int | str = "self") -> float:
    """Return VmRSS or VmHWM of a process, in MiB."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(each.split()[1]) / 1024 for each in status if each.startswith(line))


def reset_peak() -> float:
    """Reset VmHWM of this process and return its current memory in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mib("VmRSS")


def bytes_read_by(process: int | str = "self") -> int:
    """Return the bytes that a process has read so far, from files of any kind."""
    return int(Path(f"/proc/{process}/io").read_text().split("rchar:")[1].split()[0])


def record_start(options: argparse.Namespace, rank: int, start_mib: float) -> None:
    """Record the start of a part of the work, so that the driver can report its progress if it is interrupted.

    Signals are ignored, because the driver handles them.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    record = {"time_s": time.time(), "process": os.getpid(), "mib": start_mib, "read": bytes_read_by()}
    (options.records / f"rank-{rank}.json").write_text(json.dumps(record))


@njit(cache=True, nogil=True)
def _digest(keys, words):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(len(keys)):
        h = np.uint64(keys[i])
        for j in range(words.shape[1]):
            h = h * np.uint64(6364136223846793005) + np.uint64(words[i, j])
        total += h ^ (h >> np.uint64(29))
    return total


def map_parts(num_rows: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` with the index of the first row of each part, on all cores of this rank, and return the results."""
    calls = (partial(work, start) for start in range(0, num_rows, PART_ROWS))
    return list(run_ahead(calls, cores_per_rank()))


def digest_of(shard: TableShard) -> int:
    """Return a digest of the rows; the sum over ranks does not depend on the distribution of rows over ranks."""
    keys = shard.keys()

    def digest_part(start: int) -> int:
        part = keys[start : start + PART_ROWS]
        words = shard.read(part).cpu().numpy()[:, : DIM + 1]  # without the padding to 16 bytes
        return int(_digest(part, words))

    return int(sum(map_parts(len(keys), digest_part)) % 2**64)


def fill(topology: Topology, num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Create the rows of this rank; their values are a function of their keys."""
    record_start(options, topology.rank, 0.0)
    device = device_of(topology, options)
    start_s = time.perf_counter()
    shard = TableShard(table_of(num_rows, device), topology.rank, topology.world, device)
    keys = shard.keys()
    words = torch.arange(shard.layout.num_words, dtype=torch.int32, device=device) * 7919
    shard.store.reserve(len(keys))
    slots = shard.key_index.restore(keys, None, None)

    def fill_part(start: int) -> None:
        part = keys[start : start + PART_ROWS]
        rows = torch.from_numpy((part * 40503).astype(np.int32)).to(device)[:, None] + words
        rows.bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000)  # numbers between 1 and 2
        shard.store.scatter(slots[start : start + PART_ROWS], rows)

    map_parts(len(keys), fill_part)
    SHARDS[0] = shard
    return {"seconds": time.perf_counter() - start_s, "is_on_device": device.type == "cuda"}


class Training:
    """Training steps on random rows, with records of their times."""

    def __init__(self, shard: TableShard, seed: int, skew: float) -> None:
        """Initialize the training.

        Args:
            shard: Rows of this rank.
            seed: Seed of the random keys.
            skew: With 1, all rows are equally likely; with s, half of the uses are of the most used 1 / 2**s of rows.
        """
        self._shard = shard
        self._keys = shard.keys()
        self._draw = np.random.default_rng(seed)
        self._skew = skew
        self._device = shard._device
        self._layout = shard.layout
        self.step = 10
        is_host = self._device.type == "cpu"
        self._width, self._products = (DIM, 3) if is_host else (WIDTH_ON_DEVICE, PRODUCTS_ON_DEVICE)
        self._projection, self._weight = (
            torch.randn(rows, self._width, device=self._device) / 1e4 for rows in (DIM, self._width)
        )
        self.records: StepRecords | None = None

    def run(self, seconds: float, phase: int) -> None:
        """Run steps for `seconds`."""
        assert self.records is not None
        self.records.phase = phase
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            self()

    def __call__(self) -> None:
        start_s = time.perf_counter()
        start_cpu_s = time.thread_time()
        self.step += 1
        indices = (len(self._keys) * self._draw.random(STEP_ROWS) ** self._skew).astype(np.int64)
        keys = np.unique(self._keys[indices])
        fetched = self._shard.fetch_rows(keys, self.step)
        weight = self._layout.view(fetched.rows, "weight")
        inner = weight @ self._projection
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
    redirect_files_to_memory(options)
    skew = options.skews[(step - 1) % len(options.skews)]
    training = Training(shard, 10 * step + topology.rank, skew)
    training()
    saves = [
        _save_once(shard, CheckpointManager(str(options.folder), peers=peers), step + 100 * number, training, options)
        for number in range(options.saves)
    ]
    return {"saves": saves, "digest": saves[-1]["digest"], "skew": skew, "is_on_device": shard._device.type == "cuda"}


def _save_once(
    shard: TableShard, checkpoints: CheckpointManager, step: int, training: Training, options: argparse.Namespace
) -> dict[str, Any]:
    peers = checkpoints._peers
    training_cores, other_cores = cores_of(peers.rank, peers.world) if options.pinned else ([], [])
    all_cores = os.sched_getaffinity(0)
    if training_cores:
        checkpoint_writer.cores_per_rank = lambda: 1 + len(other_cores) // peers.world  # type: ignore[attr-defined]
    if peers.is_first:
        remove_files(options)  # the disk may be too small for two checkpoints
    records = training.records = StepRecords(steps_file(options, peers.rank, step))
    record_start(options, peers.rank, memory_mib("VmRSS"))
    os.sched_setaffinity(0, training_cores or all_cores)
    peers.gather(None)
    training.run(options.alone_s, BEFORE)
    os.sched_setaffinity(0, all_cores)
    digest = digest_of(shard)
    before_mib = reset_peak()
    record_start(options, peers.rank, before_mib)
    os.sched_setaffinity(0, training_cores or all_cores)
    peers.gather(None)
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    start_thread_s = time.thread_time()
    records.phase = DURING
    snapshot = shard.snapshot_async(max_bytes=options.aside_mib << 20)
    snapshot_s = time.perf_counter() - start_s
    records.add(snapshot_s, time.thread_time() - start_thread_s, num_steps=0)
    content = RankCheckpoint(state={"step": step}, tables={"items": snapshot}, close=snapshot.close)
    os.sched_setaffinity(0, other_cores or all_cores)  # threads that save_async starts inherit the affinity
    checkpoints.save_async(step, content, is_copied=True)
    os.sched_setaffinity(0, training_cores or all_cores)
    while checkpoints._background._thread is not None and checkpoints._background._thread.is_alive():
        training()
    seconds = time.perf_counter() - start_s
    writer_s = time.process_time() - start_cpu_s - (time.thread_time() - start_thread_s)
    checkpoints.close()
    beyond_mib = memory_mib("VmHWM") - before_mib
    peers.gather(None)
    training.run(options.alone_s, AFTER)
    os.sched_setaffinity(0, all_cores)
    return {
        "digest": digest,
        "seconds": seconds,
        "waited_share": (snapshot_s + snapshot.rows.waited_s) / seconds,
        "rows_aside": snapshot.rows.ring.num_copied,
        "writer_cpu_s": writer_s,
        "beyond_mib": beyond_mib,
    }


def load(topology: Topology, num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    device = device_of(topology, options)
    before_mib = reset_peak()
    start_s = time.perf_counter()
    start_bytes = bytes_read_by()
    record_start(options, topology.rank, before_mib)
    shard = TableShard(table_of(num_rows, device), topology.rank, topology.world, device)
    keys_mib = memory_mib("VmRSS")
    shard.store.reserve(len(shard.keys()))
    record_start(options, topology.rank, keys_mib + shard.store.statistics()["host_bytes"] / 2**20)

    def load_rows(restored: LoadedCheckpoint) -> None:
        shard.load(restored.rows("items", shard=(topology.rank, topology.world)))

    checkpoints = CheckpointManager(str(options.folder), peers=CheckpointGroup.of_topology(topology))
    restored = checkpoints.restore_latest(load_rows)
    assert restored is not None
    seconds = time.perf_counter() - start_s
    rows_mib = shard.store.statistics()["host_bytes"] / 2**20
    beyond_mib = memory_mib("VmHWM") - keys_mib - rows_mib
    SHARDS[0] = shard
    return {
        "seconds": seconds,
        "bytes_read": restored.bytes_read,
        "process_bytes_read": bytes_read_by() - start_bytes,
        "beyond_mib": beyond_mib,
        "keys_mib": keys_mib - before_mib,
        "digest": digest_of(shard),
        "is_on_device": device.type == "cuda",
    }


def steps_file(options: argparse.Namespace, rank: int, step: int) -> Path:
    """Return the path of a rank's records of the steps before, during and after the save of a step."""
    path: Path = options.records / f"rank-{rank}-{step:04d}.npy"
    return path


def steps_of(options: argparse.Namespace, world: int, step: int) -> list[NDArray[np.float64]]:
    """Return the step records of each rank, concatenated over all of its saves (see `save`)."""
    saves = [sorted(options.records.glob(f"rank-{rank}-??{step % 100:02d}.npy")) for rank in range(world)]
    return [np.concatenate([read_steps(path) for path in paths]) for paths in saves if paths]


def summary(part: str, ranks: list[dict[str, Any]], table_bytes: int) -> dict[str, Any]:
    """Return a row that summarizes the results of all ranks for a part of the work."""
    row: dict[str, Any] = {"on_device": sum(rank["is_on_device"] for rank in ranks)}
    if part == "save":
        row |= {"skew": ranks[0]["skew"]} | _summary_of_saves(table_bytes, [rank["saves"] for rank in ranks])
    else:
        row["seconds"] = round(max(rank["seconds"] for rank in ranks), 1)
    if part == "load":
        row["gb_per_s"] = round(table_bytes / row["seconds"] / 1e9, 2)
        row["beyond_mib"] = round(sum(rank["beyond_mib"] for rank in ranks))
        row["bytes_read"] = sum(rank["bytes_read"] for rank in ranks)
        row["read_share"] = round(row["bytes_read"] / table_bytes, 4)
        row["asked_share"] = round(sum(rank["process_bytes_read"] for rank in ranks) / table_bytes, 4)
        row["keys_mib"] = round(sum(rank["keys_mib"] for rank in ranks))
    if part != "fill":
        row["digest"] = f"{sum(rank['digest'] for rank in ranks) % 2**64:016x}"
    return row


def _summary_of_saves(table_bytes: int, ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over the saves; each value is a maximum, a mean or a sum over ranks."""

    def over_ranks(name: str, reduce: Callable[[list[float]], float]) -> list[float]:
        return [reduce([save[name] for save in saves]) for saves in zip(*ranks, strict=True)]

    seconds = float(np.median(over_ranks("seconds", max)))
    row: dict[str, Any] = {"saves": len(ranks[0]), "seconds": round(seconds, 1)}
    row |= {"gb_per_s": round(table_bytes / seconds / 1e9, 3), "beyond_mib": round(max(over_ranks("beyond_mib", sum)))}
    row["waited_share"] = round(float(np.median(over_ranks("waited_share", lambda each: float(np.mean(each))))), 4)
    row["writer_cpu_s_per_gb"] = round(float(np.median(over_ranks("writer_cpu_s", sum))) / table_bytes * 1e9, 2)
    return row | {"rows_aside": int(np.median(over_ranks("rows_aside", sum)))}


def cost_of_saves(steps: list[NDArray[np.float64]], on_device: int) -> dict[str, Any]:
    """Return the cost of saves for training, computed from the steps recorded so far.

    Args:
        steps: Steps of each rank.
        on_device: Number of ranks whose rows are on a device; these are the first ranks.
    """
    phases = [set(rank_steps[:, 0]) for rank_steps in steps]
    row: dict[str, Any] = {"steps": int(min((e[e[:, 0] == DURING, 1].sum() for e in steps), default=0))}
    if not row["steps"] or not all({BEFORE, DURING} <= recorded for recorded in phases):
        return row
    for name, column in (("stall_share", 2), ("cpu_share", 3)):
        share, interval = stall(steps, column)
        row |= {name: round(share, 4), f"{name}_spread": [round(bound, 4) for bound in interval]}
    for name, phase in (("before", BEFORE), ("beside", DURING), ("after", AFTER)):  # language: allow beside
        if all(phase in recorded for recorded in phases):
            row[f"step_ms_{name}"] = round(step_ms(steps, [phase]), 2)
    if on_device and on_device < len(steps):
        for name, ranks in (("device", steps[:on_device]), ("host", steps[on_device:])):
            share, interval = stall(ranks)
            row |= {f"stall_share_of_{name}": round(share, 4)}
            row |= {f"stall_share_of_{name}_spread": [round(bound, 4) for bound in interval]}
    return row


def progress(options: argparse.Namespace) -> dict[str, Any]:
    """Return the progress of the current part of the work, measured from outside of the ranks."""
    records = [json.loads(path.read_text()) for path in sorted(options.records.glob("rank-*.json"))]
    alive = [record for record in records if Path(f"/proc/{record['process']}/status").exists()]
    folders = [each for each in (options.folder, options.memory_folder) if each.exists()]
    files = [path for folder in folders for path in folder.rglob("rows-*") if path.is_file() and not path.is_symlink()]
    row: dict[str, Any] = {"gb_on_disk": round(sum(path.stat().st_size for path in files) / 1e9, 2)}
    if alive:
        row["seconds"] = round(time.time() - max(each["time_s"] for each in alive), 1)
        row["beyond_mib"] = round(sum(memory_mib("VmHWM", each["process"]) - each["mib"] for each in alive))
        row["gb_asked_for"] = round(sum(bytes_read_by(e["process"]) - e["read"] for e in alive) / 1e9, 2)
    return row


class InterruptedWorkError(Exception):
    """Interruption of the work by a signal or by the time limit."""


class Work:
    """Sequence of parts of the work, whose results are printed and written to a file after each part."""

    def __init__(self, options: argparse.Namespace, table_bytes: int, parts: list[tuple[str, int]]) -> None:
        self._options = options
        self._table_bytes = table_bytes
        self._parts = parts
        self.rows = list[dict[str, Any]]()
        self._start_s = time.perf_counter()
        self._measured_s = dict[str, float]()
        self._current = ("nothing", 0)
        self._part_s = self._start_s
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._interrupt)
        if options.limit_s:
            signal.setitimer(signal.ITIMER_REAL, options.limit_s)

    def start_part(self, part: str, world: int) -> bool:
        """Start the next part if there is time for it; otherwise write a row that lists the skipped parts.

        Returns:
            Whether the part was started.
        """
        left_s = (
            self._options.limit_s - (time.perf_counter() - self._start_s) if self._options.limit_s else float("inf")
        )
        if self._estimate_s(part) > left_s:
            skipped = [f"{each} by {ranks}" for each, ranks in self._parts]
            needs_s = round(self._estimate_s(part))
            self._write({"what": "left out", "parts": skipped, "needs_s": needs_s, "left_s": round(left_s)})
            return False
        self._current = (part, world)
        self._part_s = time.perf_counter()
        return True

    def finish_part(self, step: int, ranks: list[dict[str, Any]]) -> None:
        """Write a row with the results of all ranks for the current part."""
        assert all(isinstance(rank, dict) for rank in ranks), ranks
        (part, world) = self._parts.pop(0)
        took_s = time.perf_counter() - self._part_s
        self._measured_s[part] = took_s
        row = self._row(part, world) | summary(part, ranks, self._table_bytes)
        if part == "save":
            row["past_cache"] = not self._options.through_cache
            row |= cost_of_saves(steps_of(self._options, world, step), row["on_device"])
        row |= {"part_s": round(took_s, 1), "left_s": round(sum(self._estimate_s(each) for each, _ in self._parts))}
        self._write(row)

    def interrupt_part(self, reason: str, step: int) -> None:
        """Write a row with the results so far of the current part, which was interrupted."""
        part, world = self._current
        row = self._row(part, world) | {"ended_early": reason, "part_s": round(time.perf_counter() - self._part_s, 1)}
        row |= progress(self._options)
        if part == "save":
            row |= cost_of_saves(steps_of(self._options, world, step), 0)
        self._write(row)

    def _row(self, part: str, world: int) -> dict[str, Any]:
        return {"what": part, "ranks": world, "rows_gib": round(self._table_bytes / 2**30, 2)}

    def _estimate_s(self, part: str) -> float:
        alone_s = 2 * self._options.alone_s * self._options.saves if part == "save" else 0.0
        return self._measured_s.get(part, SECONDS_PER_GIB[part] * self._table_bytes / 2**30 + alone_s)

    def _write(self, row: dict[str, Any]) -> None:
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGALRM])
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self._options.json:
            command = f"python {' '.join(sys.argv)}"
            write_frame(self._options.json, bench="checkpoint", command=command, rows=self.rows)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    @staticmethod
    def _interrupt(number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(each, signal.SIG_IGN)
        raise InterruptedWorkError(signal.Signals(number).name)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--worlds", type=lambda text: [int(each) for each in text.split(",")], default=[4, 3, 8])
    parser.add_argument("--aside_mib", type=int, default=256)
    parser.add_argument("--saves", type=int, default=1)
    parser.add_argument("--skews", type=lambda text: [float(each) for each in text.split(",")], default=[1.0])
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--through_cache", action="store_true", help="Write through the page cache, for comparison.")
    parser.add_argument("--alone_s", type=float, default=3.0)
    parser.add_argument(
        "--limit_s", type=float, default=0.0, help="Time limit of the script in seconds; 0 disables it."
    )
    parser.add_argument("--on_device", type=float, default=0.0)
    parser.add_argument("--in_memory", type=float, default=0.0)
    parser.add_argument("--memory_folder", type=Path, default=Path("/dev/shm/large_checkpoint"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    num_rows = int(options.gib * 2**30 / layout_of(table_of(1)).row_bytes)
    later = [(part, world) for world in options.worlds[1:] for part in ("load", "save")]
    parts = [("fill", options.worlds[0]), ("save", options.worlds[0]), *later[:-1]]
    work = Work(options, num_rows * layout_of(table_of(1)).row_bytes, list(parts))
    remove_files(options)
    pool = None
    step = 1
    with tempfile.TemporaryDirectory() as folder:
        options.records = Path(folder)
        try:
            for part, world in parts:
                if not work.start_part(part, world):
                    break
                if part != "save":
                    if pool is not None:
                        pool.close()
                    step += part == "load"
                    pool = RankPool(world, timeout_s=600)
                assert pool is not None
                job, argument = {"fill": (fill, num_rows), "load": (load, num_rows), "save": (save, step)}[part]
                work.finish_part(step, pool.outcomes(job, argument, options, timeout_s=600))
                if part == "load":
                    assert work.rows[-1]["digest"] == work.rows[-2]["digest"], "equal to the state when the save began"
        except InterruptedWorkError as interruption:
            work.interrupt_part(str(interruption), step)
        finally:
            if pool is not None:
                for process in pool._processes:
                    process.kill()
                pool.close()
            remove_files(options)


if __name__ == "__main__":
    main()
