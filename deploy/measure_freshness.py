"""Measures the time from an event to the first response that learned from it:

    python deploy/measure_freshness.py --json FILE

The complete loop runs on this machine: files of events are added to a folder, `nestrec train-stream` trains on each
window and publishes a version, `nestrec serve --follow` loads it, and requests arrive all the time. The server reports
the time and its parts for each version.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from nestrec.report.result_file import write_frame
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec_bench.load_test.open_loop import nearest_rank

USERS, ITEMS, START_S = 400, 2000, 1_700_000_000


def write_events(path: Path, first_s: int, count: int, rng: np.random.Generator) -> None:
    """Write a file of events atomically."""
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "item", "time"])
        for number in range(count):
            rows.writerow([rng.integers(USERS), rng.integers(ITEMS), first_s + number])
    partial.rename(path)


def run(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "nestrec", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def started(*words: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "nestrec", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def request_json(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return dict(json.load(response))


def prepare(folder: Path, rng: np.random.Generator) -> None:
    """Train a run on the first events, and publish it."""
    write_events(folder / "first.csv", START_S, 20 * USERS, rng)
    columns = ("--log.user", "user", "--log.item", "item", "--log.time", "time")
    run("prepare", "log", folder / "first.csv", folder / "data", *columns)
    small = {"training.epochs": 1, "training.max_steps": 20, "training.eval_every_epochs": 0}
    options = [word for name, value in small.items() for word in (f"--{name}", value)]
    run("train", "demo", "--output", folder / "run", "--data.folder", folder / "data", *options)
    run("publish", folder / "run", folder / "published", "--last")


def measure(chosen: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    port = free_port()
    seen = dict[int, dict[str, Any]]()
    prepare(folder, rng)
    (folder / "drop").mkdir()
    server = started(
        "serve", "--model", folder / "published", "--follow", "--follow.poll_interval_s", 0.2, "--port", port
    )
    follower = started(
        "train-stream", folder / "drop", "--run", folder / "run",
        "--window.events", chosen.events, "--poll_interval_s", 0.1,
        "--run.publish.address", folder / "published",
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    is_over = threading.Event()
    body = {"user": "u", "history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3", "4"], "now_ms": 3}

    def send_requests() -> None:
        while not is_over.wait(0.02):
            try:
                request_json(f"{url}/v1/rank", body)
                status = request_json(f"{url}/v1/status")["follow"]["retrieval"]
            except OSError:
                continue
            if status["freshness_s"] is not None:
                seen[status["number"]] = status

    sender = threading.Thread(target=send_requests)
    sender.start()
    try:
        for number in range(chosen.windows):
            first_s = START_S + 100_000 * (number + 1)
            write_events(folder / "drop" / f"{number:05d}.csv", first_s, chosen.events, rng)
            wait_for(lambda: len(seen) > number or follower.poll() is not None, 60.0)  # noqa: B023
            if follower.poll() is not None:
                raise SystemExit("nestrec train-stream has exited")
            time.sleep(chosen.pause_s)
    finally:
        is_over.set()
        sender.join()
        for process in (follower, server):
            process.terminate()
            process.wait()
    return rows_of(list(seen.values())[1:], chosen)  # the first window waits for a process to start


def wait_for(is_met: Any, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not is_met() and time.monotonic() < end_s:
        time.sleep(0.02)


def rows_of(statuses: list[dict[str, Any]], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    if not statuses:
        raise SystemExit("no version was published")
    parts = {part: [status["parts_s"][part] or 0.0 for status in statuses] for part in statuses[0]["parts_s"]}
    rows = []
    for part, seconds in {"all": [status["freshness_s"] for status in statuses], **parts}.items():
        found = {"median_s": statistics.median(seconds), "p99_s": nearest_rank(np.sort(seconds), 99)}
        rounded = {name: round(value, 3) for name, value in found.items()}
        rows.append({"what": "freshness", "part": part, "versions": len(statuses), "events": chosen.events, **rounded})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--events", type=int, default=500, help="number of events per window")
    parser.add_argument("--pause_s", type=float, default=0.5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(chosen, Path(folder))
    for row in rows:
        print(json.dumps(row))
    if chosen.json:
        write_frame(chosen.json, bench="fresh", command=" ".join(["python", *sys.argv]), rows=rows)


if __name__ == "__main__":
    main()
