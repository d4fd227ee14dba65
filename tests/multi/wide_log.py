"""A log of any size with twelve columns, written by several processes; prepared and trained on in bounded memory.

    python tests/multi/wide_log.py --events 100000000 --folder /scratch/wide --processes 8 --json scale.json

The peaks of memory are those of the processes that prepare and train, asked of the system.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PART_EVENTS = 2_000_000
EVENTS_A_USER = 50
DEVICES, COUNTRIES = ["phone", "tablet", "web", "tv"], [f"c{i}" for i in range(40)]
START_MS, SPAN_MS = 1_700_000_000_000, 30 * 86_400_000
PREPARE = {
    "log.user": "user",
    "log.item": "item",
    "log.time": "at",
    "log.time_unit": "ms",
    "log.actions": "click=clicked,buy=bought",
    "log.categories": "device,country,campaign,hour",
    "log.numbers": "place,price",
    "log.transforms": "price=log",
    "log.values": "seconds=seconds",
}
TRAIN = {
    "task.encoder.dim": "32",
    "task.encoder.head_dim": "16",
    "task.encoder.num_layers": "1",
    "task.history.max_length": "64",
    "task.encoder.max_length": "64",
    "task.num_negatives": "32",
    "task.inputs.event_features": "device,country",
    "batch.batch_samples": "256",
    "training.max_steps": "200",
    "training.evaluate_every_epochs": "0",
    "training.device": "cpu",
}


def write_part(number: int, folder: Path, num_events: int, num_users: int) -> None:
    """Events of one file, a function of its number."""
    draw, start = np.random.default_rng([3, number]), number * PART_EVENTS
    count = min(PART_EVENTS, num_events - start)
    num_items = max(100, num_events // 200)
    at = START_MS + draw.integers(0, SPAN_MS, count)
    table = {
        "user": draw.integers(0, num_users, count),
        "item": (num_items * draw.random(count) ** 2).astype(np.int64),
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


def write_log(folder: Path, num_events: int, processes: int) -> None:
    folder.mkdir(parents=True)
    write = partial(write_part, folder=folder, num_events=num_events, num_users=max(10, num_events // EVENTS_A_USER))
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(write, range(-(-num_events // PART_EVENTS))))


def run(command: list[str]) -> dict[str, float]:
    """Seconds of a command, and the largest memory of a process of its, read from the system."""
    start_s, environment = time.perf_counter(), {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command[:6])} ... ended with {os.waitstatus_to_exitcode(status)}")
    below_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of processes below it, such as ranks
    return {"wall_s": time.perf_counter() - start_s, "peak_mib": max(usage.ru_maxrss / 1024, below_mib)}


def train_ranks(data: str, run_folder: str) -> None:
    """One rank of a run without evaluation; prints what it has read."""
    from nestrec.base.config import with_overrides
    from nestrec.distributed import Topology
    from nestrec.training.recipes import recipe
    from nestrec.training.trainer import Trainer

    cfg = with_overrides(recipe("demo"), {**TRAIN, "data.folder": data, "data.synthetic": "none"})
    trainer = Trainer(cfg, Path(run_folder), Topology.from_environment("cpu"))
    trainer.train()
    read = trainer.session.task._read
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = {"rank": trainer.session.topology.rank, "peak_mib": peak_mib, "decoded_mib": read.decoded_bytes / 2**20}
    told |= {"row_groups": read.num_row_groups, "loaded": read._cache.num_loads}
    told |= {"all_columns_mib": trainer.session.dataset.decoded_bytes / 2**20}
    told["shuffle_block"] = trainer.batches.order._block_size
    Path(run_folder, f"rank-{told['rank']}.json").write_text(json.dumps(told))


def measure(folder: Path, num_events: int, processes: int) -> dict[str, Any]:
    """Write, prepare, train; what each took."""
    shutil.rmtree(folder, ignore_errors=True)
    start_s = time.perf_counter()
    write_log(folder / "log", num_events, processes)
    found: dict[str, Any] = {"events": num_events, "columns": 12, "write_s": time.perf_counter() - start_s}
    print(json.dumps(found), flush=True)
    options = [f"--{name}={value}" for name, value in PREPARE.items()]
    prepare = [sys.executable, "-m", "nestrec", "prepare", "log", str(folder / "log"), str(folder / "data"), *options]
    found["prepare"] = run(prepare)
    print(json.dumps(found), flush=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    found["train"] = run([*launch, __file__, "--train", str(folder / "data"), "--folder", str(folder / "run")])
    found["ranks"] = [json.loads((folder / "run" / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train")
    options = parser.parse_args()
    if options.train:
        train_ranks(options.train, str(options.folder))
        return
    found = measure(options.folder, options.events, options.processes)
    print(json.dumps(found), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
