"""Writes a log of any size with twelve columns by several processes, and measures prepare, training and append.

    python tests/multi/wide_log.py --events 100000000 --append 1000000,10000000 --folder /scratch/wide --json scale.json

`peak_mib` is the largest resident memory of one process of a command, as reported by the kernel; `together_mib` is the
largest memory of all its processes at one time, in which shared memory is counted once.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from nestrec.report.result_file import write_frame

PART_EVENTS = 2_000_000
EVENTS_PER_USER = 50
DEVICES, COUNTRIES = ["phone", "tablet", "web", "tv"], [f"c{i}" for i in range(40)]
START_MS = 1_700_000_000_000
SPAN_MS = 30 * 86_400_000
PREPARE = {
    "log.user": "user",
    "log.item": "item",
    "log.time": "at",
    "log.time_unit": "ms",
    "log.actions": "click=clicked,buy=bought",
    "log.categories": "device,country,campaign,hour",
    "log.numbers": "place,price",
    "log.transforms": "price=log",
    "log.outcome_features": "seconds=seconds",
}
TRAIN = {
    "task.encoder.dim": "32",
    "task.encoder.head_dim": "16",
    "task.encoder.num_layers": "1",
    "task.history.max_events": "64",
    "task.encoder.max_length": "64",
    "task.negatives.num_negatives": "32",
    "task.inputs.event_features": "device,country",
    "batch.batch_size": "256",
    "training.eval_every_epochs": "0",
    "training.device": "cpu",
}


def write_part(number: int, folder: Path, num_events: int, num_users: int, more: int = 0) -> None:
    """Write the events of one file, a function of its number.

    Args:
        number: Number of the file.
        folder: Folder of the log.
        num_events: Number of events of the log.
        num_users: Number of users of the first log.
        more: Number of the appended log, or 0 for the first log; appended logs have new users and items.
    """
    draw = np.random.default_rng([3, number, more])
    start = number * PART_EVENTS
    count = min(PART_EVENTS, num_events - start)
    num_items = max(100, num_users * EVENTS_PER_USER // 200)
    at = START_MS + more * SPAN_MS + draw.integers(0, SPAN_MS, count)
    table = {
        "user": draw.integers(0, num_users + more * num_users // 50, count),
        "item": (num_items * draw.random(count) ** 2).astype(np.int64) + more * num_items // 50,
        "at": at,
        "clicked": draw.integers(0, 2, count).astype(np.int8),
        "bought": (draw.random(count) < 0.05).astype(np.int8),
        "device": pa.DictionaryArray.from_arrays(draw.integers(0, len(DEVICES), count).astype(np.int8), DEVICES),
        "country": pa.DictionaryArray.from_arrays(draw.integers(0, len(COUNTRIES), count).astype(np.int8), COUNTRIES),
        "campaign": draw.integers(0, 1000, count),
        "hour": (at // 3_600_000) % 24,
        "place": draw.integers(0, 30, count).astype(np.float32),
        "price": draw.lognormal(2, 1, count).astype(np.float32),
        "seconds": draw.integers(0, 300, count).astype(np.float32),
    }
    assert len(table) == 12
    pq.write_table(pa.table(table), folder / f"part-{number:05}.parquet")


def write_log(folder: Path, num_events: int, num_users: int, processes: int, more: int = 0) -> None:
    folder.mkdir(parents=True)
    write = partial(write_part, folder=folder, num_events=num_events, num_users=num_users, more=more)
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(write, range(-(-num_events // PART_EVENTS))))


def run(command: list[str]) -> dict[str, float]:
    """Run a command and return its time and its memory."""
    start_s = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = psutil.Popen(command, env=environment, stdout=sys.stderr)
    total_mib = 0.0
    peak_mib = 0.0
    cpu_s_before = _cpu_s()
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            samples = [_memory_mib(each) for each in (process, *process.children(recursive=True))]
            total_mib = max(total_mib, sum(proportional for proportional, _ in samples))
            peak_mib = max(peak_mib, *(peak for _, peak in samples))
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0.2)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ... exited with {process.returncode}")
    return {
        "wall_s": round(time.perf_counter() - start_s, 1),
        "cpu_s": round(_cpu_s() - cpu_s_before, 1),
        "peak_mib": round(peak_mib, 1),
        "together_mib": round(total_mib, 1),
    }


def _cpu_s() -> float:
    """Return the CPU seconds of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _memory_mib(process: psutil.Process) -> tuple[float, float]:
    """Return the proportional set size of a process and its peak resident memory, in MiB."""
    now = process.memory_full_info().pss / 2**20
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
    return now, int(peak.split()[1]) / 1024


def train_ranks(data: str, run_folder: str, num_steps: int) -> None:
    """Train one rank of a run without evaluation, and write the amount of data that it has read to a file."""
    from nestrec.base.config_overrides import apply_overrides
    from nestrec.distributed import Topology
    from nestrec.training.recipes import recipe
    from nestrec.training.trainer import Trainer

    cfg = apply_overrides(
        recipe("demo"), {**TRAIN, "training.max_steps": str(num_steps), "data.folder": data, "data.synthetic": "none"}
    )
    trainer = Trainer(cfg, Path(run_folder), Topology.from_environment("cpu"))
    trainer.train()
    read = trainer.session.task._read
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"rank": trainer.session.topology.rank, "peak_mib": peak_mib, "decoded_mib": read.decoded_bytes / 2**20}
    result |= {"row_groups": read.num_row_groups, "loaded": read._cache.num_loads}
    result |= {"all_columns_mib": trainer.session.dataset.decoded_bytes / 2**20}
    result["shuffle_block"] = trainer.loader.order._block_size
    Path(run_folder, f"rank-{result['rank']}.json").write_text(json.dumps(result))


def measure(
    folder: Path, num_events: int, processes: int, *, num_steps: int = 200, appended: Sequence[int] = ()
) -> Iterator[dict[str, Any]]:
    """Write a log, prepare it, train on it and append to it; yield the time and memory of each."""
    shutil.rmtree(folder, ignore_errors=True)
    num_users = max(10, num_events // EVENTS_PER_USER)
    start_s = time.perf_counter()
    write_log(folder / "log", num_events, num_users, processes)
    yield {"what": "log", "events": num_events, "columns": 12, "wall_s": round(time.perf_counter() - start_s, 1)}
    nestrec = [sys.executable, "-m", "nestrec"]
    data = str(folder / "data")
    options = [f"--{name}={value}" for name, value in PREPARE.items()]
    prepare = run([*nestrec, "prepare", "log", str(folder / "log"), data, *options])
    yield {"what": "prepare", "events": num_events, "columns": 12, **prepare}
    shutil.rmtree(folder / "log")
    if num_steps:
        yield {"what": "train", "events": num_events, "steps": num_steps, **_train(data, folder / "run", num_steps)}
    num_prepared = num_events
    for number, more in enumerate(appended, start=1):
        write_log(folder / f"log-{number}", more, num_users, processes, more=number)
        append = run([*nestrec, "append", str(folder / f"log-{number}"), data])
        yield {"what": "append", "onto_events": num_prepared, "events": more, **append}
        num_prepared += more


def _train(data: str, folder: Path, num_steps: int) -> dict[str, Any]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    cost = run([*launch, "--train", data, "--folder", str(folder), "--steps", str(num_steps)])
    return {**cost, "ranks": [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--append", type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("--steps", type=int, default=200, help="Number of training steps; 0 skips training.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train")
    options = parser.parse_args()
    if options.train:
        train_ranks(options.train, str(options.folder), options.steps)
        return
    rows = []
    parts = measure(options.folder, options.events, options.processes, num_steps=options.steps, appended=options.append)
    for row in parts:
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.json:  # after each row, so that an interrupted run has results
            write_frame(options.json, bench="scale", command=f"python {' '.join(sys.argv)}", rows=rows)


if __name__ == "__main__":
    main()
