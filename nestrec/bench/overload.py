"""`nestrec bench overload`: a server process under several times its capacity, and `front`: what HTTP itself costs.

The model is slow on purpose (by its length), so that neither the front nor the generator is what saturates.
"""

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

from nestrec.base.config import config
from nestrec.bench.http_client import HttpClient
from nestrec.bench.open_loop import poisson_arrivals, run_open_loop
from nestrec.bench.replay import ReplayConfig, made_up_request
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.export import write_servable
from nestrec.serving.random_model import random_ranking, random_retrieval

_NUM_ITEMS = 1000


@config
class OverloadBench:
    encoder: HSTUConfig = HSTUConfig(dim=64, num_layers=2, num_heads=2, head_dim=32, time_bias=True)
    """the model; max_length follows the history"""
    history: int = 512
    """events of a user; no user returns, so that nothing is cached"""
    candidates: int = 64
    """items of a request"""
    multiples: tuple[float, ...] = (2.0, 5.0, 10.0)
    """loads, of the capacity"""
    duration_s: float = 30.0
    """of each load"""
    max_queue_s: float = 0.25
    """device seconds of work that may wait"""
    seed: int = 0
    """of arrivals and users"""


@config
class FrontBench:
    rate: float = 500.0
    """requests a second"""
    candidates: int = 256
    """items of a request"""
    duration_s: float = 20.0
    """of the load"""
    seed: int = 0
    """of arrivals and users"""


def measure_overload(bench: OverloadBench) -> list[dict[str, Any]]:
    """A row for the capacity, one for each multiple, and one for the load after them."""
    encoder = replace(bench.encoder, max_length=2 * (bench.history + 1))
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        write_servable(random_ranking(encoder, num_items=_NUM_ITEMS, seed=bench.seed), folder)
        with server(folder, *_engine_options(bench)) as (port, process):
            capacity = asyncio.run(_capacity(port, bench))
            rows = [_trial(port, process, bench, "half", rate=capacity / 2, capacity=capacity)]
            rows += [
                _trial(port, process, bench, f"{m:g}x", rate=m * capacity, capacity=capacity) for m in bench.multiples
            ]
            # The recovery begins at once: whatever the overload left behind is felt here.
            rows.append(_trial(port, process, bench, "after", rate=capacity / 2, capacity=capacity, duration_s=10.0))
    return rows


def measure_front(bench: FrontBench) -> list[dict[str, Any]]:
    """Latency of requests that compute next to nothing."""
    encoder = HSTUConfig(dim=4, num_layers=1, num_heads=1, head_dim=4, max_length=16, position_bias=False)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        write_servable(random_retrieval(encoder, num_items=_NUM_ITEMS), folder)
        with server(folder) as (port, process):
            load = OverloadBench(history=0, candidates=bench.candidates, seed=bench.seed, duration_s=bench.duration_s)
            _trial(port, process, load, "warm", rate=bench.rate, capacity=bench.rate, duration_s=2.0)
            return [_trial(port, process, load, "front", rate=bench.rate, capacity=bench.rate)]


def _engine_options(bench: OverloadBench) -> list[str]:
    """Caches that are full after the first seconds, so that growth of memory would be a leak."""
    engine = "--service.engine"
    sizes = [f"{engine}.tiers.cache_bytes", str(64 << 20), f"{engine}.tiers.dram_bytes", "0"]
    return [f"{engine}.max_queue_s", str(bench.max_queue_s), *sizes]


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[int, psutil.Process]]:
    """`nestrec serve` in a process of its own, ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port), *options]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        while child.poll() is None and not _listens(port):
            time.sleep(0.05)
        yield port, psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


async def _capacity(port: int, bench: OverloadBench) -> float:
    """Answers a second with a few requests always under way."""
    client, count = HttpClient("127.0.0.1", port), 0
    end_s = time.perf_counter() + min(5.0, bench.duration_s)

    async def worker(number: int) -> None:
        nonlocal count
        user = number << 32
        while time.perf_counter() < end_s:
            status, _ = await client.post("/v1/rank", _body(user, bench))
            count += status == 200
            user += 1

    start_s = time.perf_counter()
    await asyncio.gather(*(worker(i + 1) for i in range(4)))
    await client.close()
    return count / (time.perf_counter() - start_s)


def _trial(
    port: int, process: psutil.Process, bench: OverloadBench, load: str, *, rate: float, capacity: float,
    duration_s: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    at_s = poisson_arrivals(rate, duration_s or bench.duration_s, bench.seed)
    first_user = zlib.crc32(load.encode()) << 32  # no user of an earlier load returns
    bodies = [_body(first_user + i, bench) for i in range(len(at_s))]
    statuses, refusal_ms = np.zeros(len(at_s), np.int64), np.full(len(at_s), np.nan)
    before = process.memory_info().rss

    async def run() -> Any:
        client = HttpClient("127.0.0.1", port)

        async def send(number: int) -> bool:
            start_s = time.perf_counter()
            statuses[number], _ = await client.post("/v1/rank", bodies[number])
            if statuses[number] in (429, 503):
                refusal_ms[number] = (time.perf_counter() - start_s) * 1e3
            return bool(statuses[number] == 200)

        trial = await run_open_loop(at_s, send)
        await client.close()
        return trial

    trial = asyncio.run(run())
    after = process.memory_info().rss
    answered = np.sort(trial.latency_ms[np.isfinite(trial.latency_ms)])
    refused = refusal_ms[~np.isnan(refusal_ms)]
    return {
        "load": load, "rate": round(rate, 1), "capacity": round(capacity, 1), "requests": len(at_s),
        "answered": len(answered), "refused": len(refused), "failed": int(len(at_s) - len(answered) - len(refused)),
        "goodput": round(len(answered) / trial.duration_s, 1), "p50_ms": _quantile(answered, 50),
        "p99_ms": _quantile(answered, 99), "refusal_p99_ms": _quantile(np.sort(refused), 99),
        "rss_mb": round(after / 1e6), "rss_growth_mb": round((after - before) / 1e6),
        "generator_late_p99_ms": round(trial.lateness_ms, 2),
    }  # fmt: skip


def _quantile(ordered: np.ndarray[Any, Any], q: float) -> float | None:
    return round(float(ordered[math.ceil(q / 100 * len(ordered)) - 1]), 2) if len(ordered) else None


def _body(user: int, bench: OverloadBench) -> bytes:
    cfg = ReplayConfig(candidates=bench.candidates, items=_NUM_ITEMS, seed=bench.seed)
    _, body = made_up_request(user, bench.history, cfg, np.random.default_rng(user))
    return orjson.dumps({**body, "timeout_ms": 1000})
