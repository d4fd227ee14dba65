"""Measure a server under 2, 5 and 10 times its capacity: goodput, latency of accepted and rejected requests, memory.

The model is intentionally slow (long histories), so that neither the frontend nor the load generator saturates.

    nestrec bench overload --duration_s 30 --multiples 2,5,10
"""

import asyncio
import math
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

from nestrec.base.config import config
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec_bench.bench import Bench
from nestrec_bench.harness.random_model import random_ranking
from nestrec_bench.load_test.load_test import LoadTestConfig, fetch_required_inputs, synthetic_request
from nestrec_bench.load_test.open_loop import HttpClient
from nestrec_bench.load_test.server_under_load import ServedLoadResult, quantile, serve_load, server, synthetic_load

_NUM_ITEMS = 1000
_WORKERS = 4
_WARM_S = 3.0
_MAX_CAPACITY_S = 10.0
_MAX_RECOVERY_S = 20.0
_PAUSE_S = 0.02


@config
class OverloadBenchConfig:
    encoder: HSTUConfig = HSTUConfig(dim=64, num_layers=4, num_heads=2, head_dim=32, time_bias=True)
    """Encoder of the model; max_length is set according to the history."""
    history: int = 512
    """Number of events per user; users do not return, so that no prefix is reused."""
    candidates: int = 64
    """Number of candidates per request."""
    multiples: tuple[float, ...] = (2.0, 5.0, 10.0)
    """Loads as multiples of the measured capacity."""
    duration_s: float = 30.0
    """Duration of each load in a run, in seconds: half of it while loads increase and half while they decrease, so that
    a change of the machine's speed affects all of them."""
    runs: int = 1
    """Number of consecutive runs, each with its own peak."""
    slo_ms: float = 500.0
    """Latency objective at the 99th percentile of accepted requests, and their deadline."""
    max_queue_s: float = 0.25
    """Maximum queue delay in device seconds."""
    seed: int = 0
    """Seed of arrivals and users."""


def measure_overload(bench: OverloadBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield one row for half of the capacity, the rows of each run, and one for the load after them."""
    encoder = replace(bench.encoder, max_length=2 * (bench.history + 1))
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        write_servable(random_ranking(encoder, num_items=_NUM_ITEMS, seed=bench.seed), folder)
        with server(folder, *_engine_options(bench)) as (port, process):
            load = partial(_load, port, process, bench)
            first = asyncio.run(_capacity(port, bench, 0, _WARM_S))  # the server also learns the cost of requests
            half = load("half", rate=first / 2, duration_s=min(bench.duration_s, _MAX_RECOVERY_S) / 2)
            yield {"round": 0} | _row("half", [half], bench)
            for run in range(1, bench.runs + 1):
                yield from _run(port, load, bench, run)
            # There is no pause before the recovery, so that the effects of the overload are measured.
            after = load("after", rate=first / 2, duration_s=min(bench.duration_s, _MAX_RECOVERY_S))
            row = {"round": bench.runs} | _row("after", [after], bench)
            yield row | {"normal_after_s": normal_after_s(after, 2.0 * float(quantile(half.completed_ms, 99) or 0.0))}


def _run(
    port: int, load: Callable[..., ServedLoadResult], bench: OverloadBenchConfig, run: int
) -> list[dict[str, Any]]:
    """Measure increasing and then decreasing loads, and the fraction of the peak goodput that each achieves."""
    capacities = list[float]()
    loads = {m: list[ServedLoadResult]() for m in bench.multiples}
    for direction, multiples in enumerate((bench.multiples, bench.multiples[::-1])):
        seconds = min(_MAX_CAPACITY_S, bench.duration_s) / 2
        capacities.append(asyncio.run(_capacity(port, bench, 2 * run + direction, seconds)))
        for m in multiples:
            name = f"{m:g}x {run} {direction}"
            loads[m].append(load(name, rate=m * capacities[0], duration_s=bench.duration_s / 2))
    rows = [{"round": run} | _row(f"{m:g}x", served, bench) for m, served in loads.items()]
    capacity = float(np.mean(capacities))
    peak = max(capacity, *(row["goodput"] for row in rows))
    return [row | {"capacity": round(capacity, 1), "of_peak": round(row["goodput"] / peak, 3)} for row in rows]


def normal_after_s(served: ServedLoadResult, normal_ms: float) -> int | None:
    """Return the first second after which 99% of all requests have a normal latency; None if there is no such
    second."""
    is_normal = served.trial.latency_ms <= normal_ms
    for second in range(math.ceil(served.at_s[-1]) if len(served.at_s) else 0):
        if is_normal[served.at_s >= second].mean() >= 0.99:
            return second
    return None


def _engine_options(bench: OverloadBenchConfig) -> list[str]:
    """Return options with caches that are full after the first seconds, so that a growth of memory would be a leak."""
    engine = "--service.engine"
    sizes = [f"{engine}.prefix_cache.device_bytes", str(64 << 20), f"{engine}.prefix_cache.host_bytes", "0"]
    budget = [f"{engine}.preinfer.latency_budget_ms", str(bench.slo_ms)]
    return [f"{engine}.max_queue_delay_s", str(bench.max_queue_s), *budget, *sizes]


async def _capacity(port: int, bench: OverloadBenchConfig, number: int, seconds: float) -> float:
    """Return the number of responses per second with a few requests always in flight."""
    client = HttpClient("127.0.0.1", port)
    ends_s = list[float]()
    start_s = time.perf_counter()
    cfg = LoadTestConfig(num_candidates=bench.candidates, seed=bench.seed)
    reads = fetch_required_inputs(f"http://127.0.0.1:{port}")

    async def worker(index: int) -> None:
        user = (_WORKERS * number + index + 1) << 32
        while time.perf_counter() < start_s + seconds:
            rng = np.random.default_rng(user)
            _, body = synthetic_request(user, bench.history, cfg, rng, reads, items=range(1, _NUM_ITEMS + 1))
            if (await client.post("/v1/rank", orjson.dumps(body))).status == 200:
                ends_s.append(time.perf_counter())
            else:
                await asyncio.sleep(_PAUSE_S)
            user += 1

    await asyncio.gather(*(worker(index) for index in range(_WORKERS)))
    await client.close()
    return len(ends_s) / (max(ends_s) - start_s)


def _load(
    port: int, process: psutil.Process, bench: OverloadBenchConfig, load: str, *, rate: float, duration_s: float
) -> ServedLoadResult:
    arrivals = synthetic_load(
        rate, duration_s, first_user=zlib.crc32(load.encode()) << 32, history=bench.history,
        candidates=bench.candidates, items=_NUM_ITEMS, timeout_ms=round(bench.slo_ms), seed=bench.seed,
        reads=fetch_required_inputs(f"http://127.0.0.1:{port}"),
    )  # fmt: skip
    return serve_load(port, process, *arrivals)


def _row(load: str, parts: list[ServedLoadResult], bench: OverloadBenchConfig) -> dict[str, Any]:
    """Return the row of a load that was sent in parts; its duration ends with the last response."""
    latency_ms = np.concatenate([part.trial.latency_ms for part in parts])
    completed = np.sort(np.concatenate([part.completed_ms for part in parts]))
    rejected = np.sort(np.concatenate([part.rejected_ms for part in parts]))
    ended_s = [np.max((p.at_s + p.trial.latency_ms / 1e3)[np.isfinite(p.trial.latency_ms)], initial=0) for p in parts]
    seconds = sum(max(float(p.at_s[-1]), float(end_s)) for p, end_s in zip(parts, ended_s, strict=True))
    before, after = parts[0].rss_before, parts[-1].rss_after
    return {
        "load": load, "rate": round(float(np.mean([p.trial.rate for p in parts])), 1), "requests": len(latency_ms),
        "answered": len(completed), "refused": len(rejected),
        "failed": len(latency_ms) - len(completed) - len(rejected),
        "without_retry_after": sum(p.num_without_retry for p in parts),
        "goodput": round(float((latency_ms <= bench.slo_ms).sum()) / seconds, 1),
        "p50_ms": quantile(completed, 50), "p99_ms": quantile(completed, 99), "slo_ms": bench.slo_ms,
        "refusal_p50_ms": quantile(rejected, 50), "refusal_p99_ms": quantile(rejected, 99),
        "rss_mb": round(after / 1e6), "rss_growth_mb": round((after - before) / 1e6),
        "server_cores": round(float(np.mean([p.server_cores for p in parts])), 2),
        "generator_late_p99_ms": round(max(p.trial.lateness_ms for p in parts), 2),
    }  # fmt: skip


BENCH = Bench(config=OverloadBenchConfig, measure=measure_overload)
