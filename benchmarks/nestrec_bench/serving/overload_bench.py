"""A server under 2, 5 and 10 times its capacity: goodput, latency of the accepted, time to refuse, memory.

The model is slow on purpose (by its length), so that neither the front nor the generator is what saturates.

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
from nestrec_bench.load_test.load_test import LoadTestConfig, made_up_request, reads_of
from nestrec_bench.load_test.open_loop import HttpClient
from nestrec_bench.load_test.server_under_load import ServedLoadResult, made_up_load, quantile, serve_load, server

_NUM_ITEMS = 1000
_WORKERS = 4
_WARM_S, _MOST_CAPACITY_S, _MOST_AFTER_S = 3.0, 10.0, 20.0
_PAUSE_S = 0.02


@config
class OverloadBench:
    encoder: HSTUConfig = HSTUConfig(dim=64, num_layers=4, num_heads=2, head_dim=32, time_bias=True)
    """the model; max_length follows the history"""
    history: int = 512
    """events of a user; no user returns, so that nothing is cached"""
    candidates: int = 64
    """items of a request"""
    multiples: tuple[float, ...] = (2.0, 5.0, 10.0)
    """loads, as multiples of the measured capacity"""
    duration_s: float = 30.0
    """how long each load lasts in a run, half of it on the way up and half on the way back: a machine that changes its
    pace does so for all of them"""
    runs: int = 1
    """in a row, each with a peak of its own"""
    slo_ms: float = 500.0
    """what the 99th percentile of accepted requests must meet; their deadline"""
    max_queue_s: float = 0.25
    """device seconds of work that may wait"""
    seed: int = 0
    """of arrivals and users"""


def measure_overload(bench: OverloadBench) -> Iterator[dict[str, Any]]:
    """A row for half the capacity, those of each run, and one for the load after them."""
    encoder = replace(bench.encoder, max_length=2 * (bench.history + 1))
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        write_servable(random_ranking(encoder, num_items=_NUM_ITEMS, seed=bench.seed), folder)
        with server(folder, *_engine_options(bench)) as (port, process):
            load = partial(_load, port, process, bench)
            first = asyncio.run(_capacity(port, bench, 0, _WARM_S))  # meanwhile the server learns what requests cost
            half = load("half", rate=first / 2, duration_s=min(bench.duration_s, _MOST_AFTER_S) / 2)
            yield {"round": 0} | _row("half", [half], bench)
            for run in range(1, bench.runs + 1):
                yield from _run(port, load, bench, run)
            # The recovery begins at once: whatever the overload left behind is felt here.
            after = load("after", rate=first / 2, duration_s=min(bench.duration_s, _MOST_AFTER_S))
            row = {"round": bench.runs} | _row("after", [after], bench)
            yield row | {"normal_after_s": normal_after_s(after, 2.0 * float(quantile(half.answered_ms, 99) or 0.0))}


def _run(port: int, load: Callable[..., ServedLoadResult], bench: OverloadBench, run: int) -> list[dict[str, Any]]:
    """All loads up and back, and what each is of the best of them."""
    capacities = list[float]()
    loads = {m: list[ServedLoadResult]() for m in bench.multiples}
    for way, multiples in enumerate((bench.multiples, bench.multiples[::-1])):
        seconds = min(_MOST_CAPACITY_S, bench.duration_s) / 2
        capacities.append(asyncio.run(_capacity(port, bench, 2 * run + way, seconds)))
        for m in multiples:
            name = f"{m:g}x {run} {way}"
            loads[m].append(load(name, rate=m * capacities[0], duration_s=bench.duration_s / 2))
    rows = [{"round": run} | _row(f"{m:g}x", served, bench) for m, served in loads.items()]
    capacity = float(np.mean(capacities))
    peak = max(capacity, *(row["goodput"] for row in rows))
    return [row | {"capacity": round(capacity, 1), "of_peak": round(row["goodput"] / peak, 3)} for row in rows]


def normal_after_s(served: ServedLoadResult, usual_ms: float) -> int | None:
    """The second from which on 99% of all later requests were answered as fast as usual; none where that never was."""
    is_usual = served.trial.latency_ms <= usual_ms
    for second in range(math.ceil(served.at_s[-1]) if len(served.at_s) else 0):
        if is_usual[served.at_s >= second].mean() >= 0.99:
            return second
    return None


def _engine_options(bench: OverloadBench) -> list[str]:
    """Caches that are full after the first seconds, so that growth of memory would be a leak."""
    engine = "--service.engine"
    sizes = [f"{engine}.tiers.cache_bytes", str(64 << 20), f"{engine}.tiers.dram_bytes", "0"]
    budget = [f"{engine}.trigger.budget_ms", str(bench.slo_ms)]
    return [f"{engine}.max_queue_s", str(bench.max_queue_s), *budget, *sizes]


async def _capacity(port: int, bench: OverloadBench, number: int, seconds: float) -> float:
    """Answers a second with a few requests always under way."""
    client = HttpClient("127.0.0.1", port)
    ends_s = list[float]()
    start_s = time.perf_counter()
    cfg = LoadTestConfig(candidates=bench.candidates, seed=bench.seed)
    reads = reads_of(f"http://127.0.0.1:{port}")

    async def worker(place: int) -> None:
        user = (_WORKERS * number + place + 1) << 32
        while time.perf_counter() < start_s + seconds:
            rng = np.random.default_rng(user)
            _, body = made_up_request(user, bench.history, cfg, rng, reads, items=range(1, _NUM_ITEMS + 1))
            if (await client.post("/v1/rank", orjson.dumps(body))).status == 200:
                ends_s.append(time.perf_counter())
            else:
                await asyncio.sleep(_PAUSE_S)
            user += 1

    await asyncio.gather(*(worker(place) for place in range(_WORKERS)))
    await client.close()
    return len(ends_s) / (max(ends_s) - start_s)


def _load(
    port: int, process: psutil.Process, bench: OverloadBench, load: str, *, rate: float, duration_s: float
) -> ServedLoadResult:
    arrivals = made_up_load(
        rate, duration_s, first_user=zlib.crc32(load.encode()) << 32, history=bench.history,
        candidates=bench.candidates, items=_NUM_ITEMS, timeout_ms=round(bench.slo_ms), seed=bench.seed,
        reads=reads_of(f"http://127.0.0.1:{port}"),
    )  # fmt: skip
    return serve_load(port, process, *arrivals)


def _row(load: str, parts: list[ServedLoadResult], bench: OverloadBench) -> dict[str, Any]:
    """Of a load that came in parts. Its seconds end with the last answer: until then the server was at work."""
    latency_ms = np.concatenate([part.trial.latency_ms for part in parts])
    answered, refused = (np.sort(np.concatenate([getattr(p, f"{name}_ms") for p in parts]))
                         for name in ("answered", "refused"))  # fmt: skip
    ended_s = [np.max((p.at_s + p.trial.latency_ms / 1e3)[np.isfinite(p.trial.latency_ms)], initial=0) for p in parts]
    seconds = sum(max(float(p.at_s[-1]), float(end_s)) for p, end_s in zip(parts, ended_s, strict=True))
    before, after = parts[0].rss_before, parts[-1].rss_after
    return {
        "load": load, "rate": round(float(np.mean([p.trial.rate for p in parts])), 1), "requests": len(latency_ms),
        "answered": len(answered), "refused": len(refused), "failed": len(latency_ms) - len(answered) - len(refused),
        "without_retry_after": sum(p.num_without_retry for p in parts),
        "goodput": round(float((latency_ms <= bench.slo_ms).sum()) / seconds, 1),
        "p50_ms": quantile(answered, 50), "p99_ms": quantile(answered, 99), "slo_ms": bench.slo_ms,
        "refusal_p50_ms": quantile(refused, 50), "refusal_p99_ms": quantile(refused, 99),
        "rss_mb": round(after / 1e6), "rss_growth_mb": round((after - before) / 1e6),
        "server_cores": round(float(np.mean([p.server_cores for p in parts])), 2),
        "generator_late_p99_ms": round(max(p.trial.lateness_ms for p in parts), 2),
    }  # fmt: skip


BENCH = Bench(config=OverloadBench, measure=measure_overload)
