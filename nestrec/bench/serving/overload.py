"""A server under 2, 5 and 10 times its capacity: goodput, latency of the accepted, time to refuse, memory.

The model is slow on purpose (by its length), so that neither the front nor the generator is what saturates.

    nestrec bench overload --duration_s 30 --multiples 2,5,10
"""

import asyncio
import math
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

from nestrec.base.config import config
from nestrec.bench.bench import Bench
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.load.http_client import HttpClient
from nestrec.serving.load.replay import ReplayConfig, made_up_request, reads_of
from nestrec.serving.load.served import Served, made_up_load, quantile, serve_load, server
from nestrec.serving.model.export import write_servable
from nestrec.serving.model.random_model import random_ranking

_NUM_ITEMS = 1000
_WORKERS = 4
_WARM_S = 3.0
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
    """how long each load lasts"""
    slo_ms: float = 500.0
    """what the 99th percentile of accepted requests must meet; their deadline"""
    max_queue_s: float = 0.25
    """device seconds of work that may wait"""
    seed: int = 0
    """of arrivals and users"""


def measure_overload(bench: OverloadBench) -> list[dict[str, Any]]:
    """A row for half the capacity, one for each multiple, and one for the load after them."""
    encoder = replace(bench.encoder, max_length=2 * (bench.history + 1))
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        write_servable(random_ranking(encoder, num_items=_NUM_ITEMS, seed=bench.seed), folder)
        with server(folder, *_engine_options(bench)) as (port, process):
            capacity = asyncio.run(_capacity(port, bench))
            half = _load(port, process, bench, "half", rate=capacity / 2, duration_s=bench.duration_s)
            loads = {"half": half}
            for m in bench.multiples:
                loads[f"{m:g}x"] = _load(
                    port, process, bench, f"{m:g}x", rate=m * capacity, duration_s=bench.duration_s
                )
            # The recovery begins at once: whatever the overload left behind is felt here.
            loads["after"] = _load(port, process, bench, "after", rate=capacity / 2, duration_s=20.0)
    peak = max(capacity, *(served.trial.goodput(bench.slo_ms) for served in loads.values()))
    rows = [_row(load, served, bench, capacity=capacity, peak=peak) for load, served in loads.items()]
    rows[-1]["normal_after_s"] = normal_after_s(loads["after"], 2.0 * float(quantile(half.answered_ms, 99) or 0.0))
    return rows


def normal_after_s(served: Served, usual_ms: float) -> int | None:
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


async def _capacity(port: int, bench: OverloadBench) -> float:
    """Answers a second with a few requests always under way, after a while for the server to learn what they cost."""
    client, counts = HttpClient("127.0.0.1", port), [0, 0]
    cfg = ReplayConfig(candidates=bench.candidates, items=_NUM_ITEMS, seed=bench.seed)
    reads = reads_of(f"http://127.0.0.1:{port}")
    start_s = time.perf_counter()
    warm_s, end_s = start_s + _WARM_S, start_s + _WARM_S + min(10.0, bench.duration_s)

    async def worker(number: int) -> None:
        user = number << 32
        while time.perf_counter() < end_s:
            _, body = made_up_request(user, bench.history, cfg, np.random.default_rng(user), reads)
            if (await client.post("/v1/rank", orjson.dumps(body))).status == 200:
                counts[warm_s <= time.perf_counter() < end_s] += 1
            else:
                await asyncio.sleep(_PAUSE_S)
            user += 1

    await asyncio.gather(*(worker(i + 1) for i in range(_WORKERS)))
    await client.close()
    return counts[1] / (end_s - warm_s)


def _load(
    port: int, process: psutil.Process, bench: OverloadBench, load: str, *, rate: float, duration_s: float
) -> Served:
    arrivals = made_up_load(
        rate, duration_s, first_user=zlib.crc32(load.encode()) << 32, history=bench.history,
        candidates=bench.candidates, items=_NUM_ITEMS, timeout_ms=round(bench.slo_ms), seed=bench.seed,
        reads=reads_of(f"http://127.0.0.1:{port}"),
    )  # fmt: skip
    return serve_load(port, process, *arrivals)


def _row(load: str, served: Served, bench: OverloadBench, *, capacity: float, peak: float) -> dict[str, Any]:
    answered, refused, trial = served.answered_ms, served.refused_ms, served.trial
    goodput = trial.goodput(bench.slo_ms)
    return {
        "load": load, "rate": round(trial.rate, 1), "capacity": round(capacity, 1), "requests": len(served.at_s),
        "answered": len(answered), "refused": len(refused), "failed": len(served.at_s) - len(answered) - len(refused),
        "without_retry_after": served.num_without_retry, "goodput": round(goodput, 1),
        "of_peak": round(goodput / peak, 3), "p50_ms": quantile(answered, 50), "p99_ms": quantile(answered, 99),
        "slo_ms": bench.slo_ms, "refusal_p50_ms": quantile(refused, 50), "refusal_p99_ms": quantile(refused, 99),
        "rss_mb": round(served.rss_after / 1e6), "rss_growth_mb": round((served.rss_after - served.rss_before) / 1e6),
        "server_cores": round(served.server_cores, 2), "generator_late_p99_ms": round(trial.lateness_ms, 2),
    }  # fmt: skip


BENCH = Bench(config=OverloadBench, measure=measure_overload)
