"""Measures SIGKILLs of runs that train on streams: python tests/faults/stream_results.py --json FILE"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from killed_streams import Base, check_random_kills

from nestrec.report.result_file import make_frame, save_frame


def kill_stream(base: Base, kind: str, ranks: int, seed: int, number: int) -> dict[str, Any]:
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        row = check_random_kills(base, Path(folder), kind, ranks=ranks, number=number, seed=seed)
    return {**row, "seconds": round(time.monotonic() - start_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=13, help="Number of kills per stream.")
    parser.add_argument("--seeds", type=int, default=2, help="Number of streams per source and number of ranks.")
    parser.add_argument("--at-once", type=int, default=8, help="Number of streams that run concurrently.")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.at_once, get_context("spawn")) as pool:
        base = Base.make(Path(folder))
        streams = itertools.product((2, 1), ("kafka", "folder"), range(1, options.seeds + 1))
        futures = [pool.submit(kill_stream, base, kind, ranks, seed, options.kills) for ranks, kind, seed in streams]
        for future in as_completed(futures):
            rows.append(future.result())
            print(json.dumps(rows[-1]), flush=True)
            command = " ".join(["python", *sys.argv])
            ordered = sorted(rows, key=lambda row: (row["source"], row["ranks"], row["seed"]))
            save_frame(options.json, make_frame(bench="fresh", command=command, rows=ordered))


if __name__ == "__main__":
    main()
