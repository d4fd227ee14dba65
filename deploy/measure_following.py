"""Measures how deltas affect the latency of a server that follows versions:

    python deploy/measure_following.py --json FILE

A server of a ranking model (`nestrec serve --model ADDRESS --follow`, over HTTP) gets the same open-loop load in two
alternating phases: one without published versions, and one in which a delta of 1% of the rows is published every few
seconds. The order alternates between rounds. The ratio of the P99 latencies is computed within each round and over the
requests of all rounds, with a bootstrap interval over rounds. The model has random weights; its versions are written by
the code that training runs use, in a separate process.
"""

import argparse
import functools
import json
import math
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.artifacts.storage import storage_of
from nestrec.base.process import gc_disabled
from nestrec.checkpoint import CheckpointGroup
from nestrec.embedding.table_config import InitConfig
from nestrec.exporters.servable_writer import description_files, write_servable
from nestrec.exporters.version_content import ModelDescription, RankVersionData
from nestrec.exporters.version_writer import VersionInfo, VersionWriter
from nestrec.models.hstu import HSTUConfig
from nestrec.report.result_file import write_frame
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.model.servable import Servable
from nestrec.serving.versions.version_manifest import Parent, PublishedTable, Times, VersionManifest
from nestrec.serving.versions.version_store import VersionStore
from nestrec_bench.harness.random_model import random_ranking
from nestrec_bench.load_test.load_test import (
    LoadTestConfig,
    RequestSchedule,
    fetch_required_inputs,
    make_load,
    request_items,
    send_load,
)
from nestrec_bench.load_test.open_loop import Trial, poisson_arrivals, run_punctually

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def random_servable(encoder: HSTUConfig, num_items: int) -> Servable:
    """Return a random model with `num_items` items."""
    servable = random_ranking(encoder, num_items=2)
    spec = replace(servable.spec, num_items=num_items)
    return replace(servable, spec=spec, item_keys=tuple(map(str, range(1, num_items + 1))))


def publish(address: str, encoder: HSTUConfig, num_items: int, share: float, seed: int) -> VersionManifest:
    """Publish the first version in full, or one more as a delta that changes a fraction of the item rows."""
    servable = random_servable(encoder, num_items)
    tables = tuple(
        PublishedTable(name=name, num_rows=rows, dim=encoder.dim, dtype="float32", seed=1, init=InitConfig(scale=0.05))
        for name, rows in (("items", num_items + 1), ("event_tab", 3))
    )
    now = ModelDescription(tables=tables, files=description_files(servable), spec=servable.spec)
    versions = VersionStore(storage_of(address))
    newest = None
    if Path(address, "newest.json").exists():
        newest = versions.newest()
    about = VersionInfo(
        number=1 if newest is None else newest.number + 1,
        step=seed,
        run="",
        parent=None if newest is None else Parent(folder=newest.folder, version=newest.version),
        tables=tables,
        times=Times(trained_s=time.time()),
        weights={name: weight * (1 + 1e-3 * seed) for name, weight in servable.model.state_dict().items()},
        descriptions=now.diff_since(None if newest is None else now),
    )
    keys = np.sort(np.random.default_rng(seed).choice(num_items + 1, round(share * num_items), replace=False))
    rows = torch.from_numpy(np.random.default_rng(seed).normal(0, 0.05, (len(keys), encoder.dim)).astype(np.float32))
    content = RankVersionData(
        rows={} if newest is None else {"items": [{"keys": torch.from_numpy(keys), "weight": rows}]}
    )
    writer = VersionWriter(versions.storage, CheckpointGroup())
    return writer.write("full" if newest is None else "delta", about, content).manifest


def fetch_text(url: str, path: str) -> str:
    with urllib.request.urlopen(url + path, timeout=10) as response:
        return str(response.read().decode())


def metric(url: str, name: str) -> float:
    return float(next(line for line in fetch_text(url, "/metrics").splitlines() if line.startswith(name)).split()[-1])


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        try:
            fetch_text(url, "/health/ready")
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server has ended")


def load_of(url: str, cfg: LoadTestConfig, seed: int) -> RequestSchedule:
    """Arrival times are those of `cfg`; users are drawn with `seed`, so that no prefix of an earlier load is cached."""
    at_s = poisson_arrivals(cfg.requests_per_s, cfg.duration_s, cfg.seed).tolist()
    longer = replace(cfg, seed=seed, duration_s=cfg.duration_s + 1.0)
    inputs = fetch_required_inputs(url)
    load = make_load(longer, cfg.requests_per_s, cfg.history_events, inputs, request_items(url, cfg.items))
    assert len(load.bodies) >= len(at_s)
    return replace(load, at_s=at_s, paths=load.paths[: len(at_s)], bodies=load.bodies[: len(at_s)])


def sent(url: str, load: RequestSchedule) -> Trial:
    """Send a load and return its results."""
    with gc_disabled():  # a collection would take a tenth of a second here
        return run_punctually(send_load(url, load, 0.0))


def measure(chosen: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    address = str(folder / "published")
    port = free_port()
    start_s = time.monotonic()
    encoder = encoder_of(chosen)
    publish(address, encoder, chosen.items, 0.0, 0)
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "nestrec",
        "serve",
        "--model",
        address,
        "--follow",
        "--follow.poll_interval_s",
        "0.5",
    ]
    process = subprocess.Popen([*command, "--port", str(port), *shlex.split(chosen.serve)])
    writer = start_writer(chosen, address)
    rows = []
    try:
        wait_until_ready(url, process)
        print(f"ready after {time.monotonic() - start_s:.1f} s", flush=True)
        cfg = LoadTestConfig(
            requests_per_s=chosen.rate,
            duration_s=chosen.seconds,
            history_events=chosen.history,
            num_candidates=64,
            items=str(chosen.items),
        )
        ask_for_delta(writer)  # the first of its kind makes what all others use
        sent(url, load_of(url, replace(cfg, duration_s=3.0), 0))
        sent(url, load_of(url, replace(cfg, duration_s=2.0, requests_per_s=1.5 * cfg.requests_per_s), 2**31))
        trials: dict[str, list[Trial]] = {"still": [], "deltas": []}
        for number in range(chosen.rounds):
            found = {}
            for way in ("still", "deltas") if number % 2 == 0 else ("deltas", "still"):
                load = load_of(url, replace(cfg, seed=number), 1 + 2 * number + (way == "deltas"))
                before = metric(url, "nestrec_model_version_number")
                if way == "deltas":  # while the load lasts: each has time to be written and taken
                    moments = np.arange(0.2 * chosen.every, chosen.seconds - 0.5 * chosen.every, chosen.every)
                    threading.Thread(target=ask_for_deltas, args=(writer, moments.tolist())).start()
                trial = sent(url, load)
                found[way] = (trial, metric(url, "nestrec_model_version_number") - before)
                trials[way].append(trial)
            rows.append(row_of(found, chosen, number))
            in_all = over_all(trials, chosen, sum(row["versions_taken"] for row in rows))
            keep(chosen, [*rows, in_all])
        rows.append(in_all)
    finally:
        writer.terminate()
        process.terminate()
        process.wait()
    return rows if chosen.without_bytes else [*rows, bytes_of(chosen, address, folder)]


def keep(chosen: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print and store the results so far."""
    for row in rows[-2:]:
        print(json.dumps(row), flush=True)
    if chosen.json:
        write_frame(chosen.json, bench="fresh", command=" ".join(["python", *map(shlex.quote, sys.argv)]), rows=rows)


def row_of(found: dict[str, tuple[Trial, float]], chosen: argparse.Namespace, number: int) -> dict[str, Any]:
    (still, _), (deltas, taken) = found["still"], found["deltas"]
    fields = {f"{way}_p{q}_ms": finite(trial.percentile_ms(q)) for way, (trial, _) in found.items() for q in (50, 99)}
    return {
        "what": "p99_while_deltas_arrive",
        "device": DEVICE,
        "round": number,
        "requests": len(still.latency_ms),
        "rate": chosen.rate,
        "versions_taken": taken,
        "rows_a_delta": round(0.01 * chosen.items),
        "items": chosen.items,
        "dim": chosen.dim,
        **fields,
        **{f"{way}_generator_late_p99_ms": round(trial.lateness_ms, 3) for way, (trial, _) in found.items()},
        "p99_ratio": None if still.num_rejected else finite(deltas.percentile_ms(99) / still.percentile_ms(99)),
        "refused": still.num_rejected + deltas.num_rejected,
    }


def over_all(trials: dict[str, list[Trial]], chosen: argparse.Namespace, taken: float) -> dict[str, Any]:
    """Over the requests of all rounds; the interval is that of rounds drawn with replacement."""
    parts = {way: [trial.latency_ms for trial in found] for way, found in trials.items()}
    pooled = {way: np.concatenate(found) for way, found in parts.items()}
    drawn = []
    rounds = len(parts["still"])
    for numbers in np.random.default_rng(0).integers(0, rounds, (1000, rounds)):
        still, deltas = (p99(np.concatenate([parts[way][number] for number in numbers])) for way in ("still", "deltas"))
        drawn.append(deltas / still if math.isfinite(still) and math.isfinite(deltas) else math.inf)
    return {
        "what": "p99_while_deltas_arrive_in_all",
        "device": DEVICE,
        "rounds": rounds,
        "seconds": chosen.seconds,
        "requests": len(pooled["still"]),
        "rate": chosen.rate,
        "versions_taken": taken,
        "rows_a_delta": round(0.01 * chosen.items),
        "items": chosen.items,
        "dim": chosen.dim,
        "layers": chosen.layers,
        "history": chosen.history,
        **{f"{way}_p{q}_ms": finite(float(np.quantile(found, q / 100, method="inverted_cdf")))
           for way, found in pooled.items() for q in (50, 99)},
        "p99_ratio": finite(p99(pooled["deltas"]) / p99(pooled["still"])),
        "low": finite(float(np.quantile(drawn, 0.025))),
        "high": finite(float(np.quantile(drawn, 0.975))),
        "refused": int(sum(np.isinf(found).sum() for found in pooled.values())),
    }  # fmt: skip


def p99(latency_ms: NDArray[np.float64]) -> float:
    return float(np.quantile(latency_ms, 0.99, method="inverted_cdf"))


def finite(value: float) -> float | None:
    """Return a value for JSON, which has no infinity: None if more than one in a hundred requests was rejected."""
    return round(value, 3) if math.isfinite(value) else None


def bytes_of(chosen: argparse.Namespace, address: str, folder: Path) -> dict[str, Any]:
    """Compare the size of the newest delta with an export of the same model."""
    versions = VersionStore(storage_of(address))
    newest = versions.read_description(*next(versions.history()))
    assert newest is not None
    export = write_servable(random_ranking(encoder_of(chosen), num_items=chosen.items), folder / "export")
    full = sum(file.bytes for file in export.files)
    fields = {"delta_bytes": newest.num_bytes, "export_bytes": full, "share": round(newest.num_bytes / full, 4)}
    return {
        "what": "bytes",
        "items": chosen.items,
        "dim": chosen.dim,
        "rows_a_delta": round(0.01 * chosen.items),
        **fields,
    }


def start_writer(chosen: argparse.Namespace, address: str) -> "subprocess.Popen[bytes]":
    """Start a process that writes one delta per input line, and wait until it is ready."""
    options = [f"--{name}={getattr(chosen, name)}" for name in ("items", "dim", "layers", "history")]
    command = [sys.executable, __file__, "--write", address, *options]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    return writer


def ask_for_deltas(writer: "subprocess.Popen[bytes]", moments_s: list[float]) -> None:
    """Request one delta at each of these times, in seconds from now."""
    start_s = time.monotonic()
    for moment_s in moments_s:
        time.sleep(max(0.0, start_s + moment_s - time.monotonic()))
        ask_for_delta(writer)


def ask_for_delta(writer: "subprocess.Popen[bytes]") -> None:
    assert writer.stdin is not None
    writer.stdin.write(b"\n")
    writer.stdin.flush()


def write_deltas(chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    random_servable(encoder_of(chosen), chosen.items)
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        publish(chosen.write, encoder_of(chosen), chosen.items, 0.01, number + 1)


def encoder_of(chosen: argparse.Namespace) -> HSTUConfig:
    heads = max(1, chosen.dim // 64)
    length = 2 * (chosen.history + 2)
    return HSTUConfig(
        dim=chosen.dim, num_layers=chosen.layers, num_heads=heads, head_dim=chosen.dim // heads, max_length=length,
        position_bias=False, time_bias=False,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--history", type=int, default=32)
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--serve", default="", help="further options of `nestrec serve`, in quotes")
    parser.add_argument("--without-bytes", action="store_true", help="do not write an export to compare deltas with")
    parser.add_argument("--write", help="write deltas to this address, and nothing else")
    chosen = parser.parse_args()
    if chosen.write:
        write_deltas(chosen)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(chosen, Path(folder))
    keep(chosen, rows)


if __name__ == "__main__":
    main()
