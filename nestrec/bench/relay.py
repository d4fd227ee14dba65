"""`nestrec bench relay`: how many requests a second meet a P99, in four ways of serving the same model.

    full        every request computes history and candidates
    dram_fetch  prefixes wait in DRAM and are fetched when the ranking request is there
    relay       a signal precedes the request, the prefix is computed ahead and kept on the device
    relay_dram  the same, with DRAM behind the device

and, as ablations,

    reactive    no signals: prefixes of earlier requests are found on the device or in DRAM, or not at all
    relay_all   a signal for every request within the bounds, at risk or not

All modes use the same kernels, batches and engine; they differ in where prefixes are kept and when they are computed.
Requests go straight to the engine: the front is measured by `nestrec replay`.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from nestrec.base.config import config
from nestrec.base.errors import UserError, did_you_mean
from nestrec.bench.open_loop import Trial, largest, poisson_arrivals, run_open_loop
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine import Engine, EngineConfig
from nestrec.serving.forms import make_form
from nestrec.serving.inputs import Candidates, History
from nestrec.serving.random_model import random_ranking
from nestrec.serving.servable import Servable
from nestrec.serving.tiers import TiersConfig
from nestrec.serving.trigger import TriggerConfig
from nestrec.serving.work import RefusedError

MODES = ("full", "dram_fetch", "relay", "relay_dram")


@config
class RelayBench:
    """What is measured. The defaults suit two CPU cores."""

    encoder: HSTUConfig = HSTUConfig(dim=64, num_layers=2, num_heads=2, head_dim=32, time_bias=True)
    """the model; max_length follows the history"""
    history: tuple[int, ...] = (512,)
    """events of a user; two tokens each"""
    candidates: tuple[int, ...] = (64,)
    """items of a ranking request"""
    returning: tuple[float, ...] = (0.0, 0.3, 0.6)
    """shares of requests of users who were here before"""
    modes: tuple[str, ...] = MODES
    """ways of serving; also reactive and relay_all"""
    longest: bool = False
    """also find the longest history that meets the SLO at half the largest rate of the first mode"""
    slo_factor: float = 3.0
    """SLO over the unloaded P50 of full inference"""
    slo_ms: float = 0.0
    """SLO, where it is not to follow from the factor"""
    signal_ms: float = 150.0
    """from signal to ranking request"""
    duration_s: float = 8.0
    """of a trial"""
    rounds: int = 4
    """halvings of the interval in which the largest rate is searched"""
    cache_bytes: int = 256 << 20
    """device memory for prefixes"""
    dram_bytes: int = 1 << 30
    """host memory for prefixes"""
    device: str = "cpu"
    """cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of weights, prefixes and products"""
    seed: int = 0
    """of weights, arrivals and histories"""


class Load:
    """Users and their requests; a user's history is a function of the user."""

    def __init__(self, bench: RelayBench, history: int, candidates: int, returning: float):
        self.bench, self.history, self.candidates, self.returning = bench, history, candidates, returning

    def users(self, count: int) -> list[int]:
        rng = np.random.default_rng(self.bench.seed)
        users: list[int] = []
        for number in range(count):
            is_back = bool(users) and rng.random() < self.returning
            users.append(users[int(rng.integers(len(users)))] if is_back else number)
        return users

    def request(self, user: int) -> tuple[History, Candidates]:
        rng = np.random.default_rng((self.bench.seed, user))
        length = self.history
        history = History(
            items=rng.integers(1, 10_000, length), times_ms=np.sort(rng.integers(0, 10**10, length)),
            actions=rng.integers(0, 4, length), features={"event_tab": rng.integers(0, 3, length)},
        )  # fmt: skip
        items, tab = rng.integers(1, 10_000, self.candidates), np.ones(self.candidates, np.int64)
        return history, Candidates(items=items, now_ms=2 * 10**10, features={"event_tab": tab})


def measure_relay(bench: RelayBench) -> Iterator[dict[str, Any]]:
    """Rows, as they are ready."""
    for history in bench.history:
        servable = model_for(bench, history)
        for candidates in bench.candidates:
            alone = Engine(make_form(servable), engine_config("full", bench, 1e3))
            unloaded = run_trial(alone, Load(bench, history, candidates, 0.0), 2.0, sends_signals=False)
            slo_ms = bench.slo_ms or bench.slo_factor * unloaded.percentile_ms(50)
            for returning in bench.returning:
                load = Load(bench, history, candidates, returning)
                rows = []
                for row in _compare(servable, bench, load, slo_ms, unloaded.percentile_ms(50)):
                    rows.append(row)
                    yield row
                if bench.longest and rows[0]["max_qps"]:
                    yield from _longest(bench, load, slo_ms, rows[0]["max_qps"] / 2)


def model_for(bench: RelayBench, history: int) -> Servable:
    encoder = replace(bench.encoder, max_length=2 * (history + 1))
    dtype = getattr(torch, bench.dtype)
    return random_ranking(encoder, num_items=10_000, seed=bench.seed, device=bench.device, dtype=dtype)


def _longest(bench: RelayBench, load: Load, slo_ms: float, rate: float) -> Iterator[dict[str, Any]]:
    """The longest history of each mode at one rate and one SLO."""
    baseline = 0.0
    for mode in bench.modes:

        def measure(length: float, mode: str = mode) -> Trial:
            engine = Engine(make_form(model_for(bench, round(length))), engine_config(mode, bench, slo_ms))
            longer = Load(bench, round(length), load.candidates, load.returning)
            return run_trial(engine, longer, rate, sends_signals=mode.startswith("relay"))

        length, best = largest(measure, slo_ms, start=float(load.history), rounds=bench.rounds)
        baseline = baseline or length
        yield {
            "mode": mode, "longest_history": round(length), "candidates": load.candidates, "returning": load.returning,
            "slo_ms": round(slo_ms, 2), "rate": round(rate, 2), "of_first_mode": round(length / max(baseline, 1.0), 3),
            "p50_ms": _ms(best, 50), "p99_ms": _ms(best, 99), "device": bench.device, "dtype": bench.dtype,
        }  # fmt: skip


def _compare(
    servable: Servable, bench: RelayBench, load: Load, slo_ms: float, unloaded_ms: float
) -> Iterator[dict[str, Any]]:
    baseline = 0.0
    for mode in bench.modes:
        counts_of: dict[float, dict[str, int]] = {}

        def measure(rate: float, mode: str = mode, counts_of: dict[float, dict[str, int]] = counts_of) -> Trial:
            engine = Engine(make_form(servable), engine_config(mode, bench, slo_ms))
            trial = run_trial(engine, load, rate, sends_signals=mode.startswith("relay"))
            counts_of[rate] = engine.counts
            return trial

        start = max(baseline, 0.3 * 1e3 / unloaded_ms)
        rate, best = largest(measure, slo_ms, start=start, rounds=bench.rounds)
        baseline = baseline or rate
        yield {
            "mode": mode, "history": load.history, "candidates": load.candidates, "returning": load.returning,
            "slo_ms": round(slo_ms, 2), "max_qps": round(rate, 2), "speedup": round(rate / max(baseline, 1e-9), 3),
            "p50_ms": _ms(best, 50), "p99_ms": _ms(best, 99), **_shares(counts_of.get(rate, {})),
            "full_p50_ms": round(unloaded_ms, 2), "device": bench.device, "dtype": bench.dtype,
        }  # fmt: skip


def _shares(counts: dict[str, int]) -> dict[str, float]:
    ranked = {source: counts.get(f"rank_{source}", 0) for source in ("none", "device", "dram")}
    total = max(1, sum(ranked.values()))
    signals = max(1, sum(counts.get(name, 0) for name in _DECISIONS))
    return {
        "hit_rate": round(1 - ranked["none"] / total, 3), "dram_hits": round(ranked["dram"] / total, 3),
        "admitted": round(counts.get("signal_admitted", 0) / signals, 3),
    }  # fmt: skip


_DECISIONS = {f"signal_{reason}" for reason in ("admitted", "safe", "live_cap", "rate_cap", "never")}


def _ms(trial: Trial | None, q: float) -> float | None:
    return None if trial is None else round(trial.percentile_ms(q), 2)


def engine_config(mode: str, bench: RelayBench, slo_ms: float) -> EngineConfig:
    """The engine of a mode."""
    if mode not in (*MODES, "reactive", "relay_all"):
        raise UserError("is no way of serving", field="modes", value=mode, remedy=did_you_mean(mode, MODES))
    tiers = TiersConfig(
        cache_bytes=bench.cache_bytes,
        dram_bytes=0 if mode in ("full", "relay") else bench.dram_bytes,
        keeps_prefix=mode != "full",
        keeps_on_device=mode != "dram_fetch",
    )
    policy = "all" if mode == "relay_all" else "at_risk" if mode.startswith("relay") else "never"
    trigger = TriggerConfig(policy=policy, budget_ms=slo_ms, compute_share=0.95, burst_s=2.0)
    is_cpu = bench.device == "cpu"
    return EngineConfig(
        tiers=tiers, trigger=trigger, max_queue_s=max(1.0, 4 * slo_ms / 1e3), chunk_tokens=256 if is_cpu else 2048,
        mixed_chunk_tokens=0 if is_cpu else 1024,
    )  # fmt: skip


def run_trial(engine: Engine, load: Load, rate: float, *, sends_signals: bool) -> Trial:
    """One rate on an engine of its own, which is closed at the end."""
    bench, signal_s = load.bench, load.bench.signal_ms / 1e3
    at_s = poisson_arrivals(rate, bench.duration_s, bench.seed)
    users = load.users(len(at_s))
    requests = {user: load.request(user) for user in set(users)}

    async def send(number: int) -> bool:
        user = users[number]
        history, candidates = requests[user]
        try:
            if sends_signals:
                engine.preinfer(str(user), history, candidates.now_ms, len(candidates), timeout_s=10.0)
            await asyncio.sleep(signal_s)
            work = engine.rank(str(user), history, candidates, timeout_s=10.0)
            await asyncio.wrap_future(work.future)
        except RefusedError:
            return False
        return True

    trial = asyncio.run(run_open_loop(at_s, send, lead_s=signal_s))
    engine.close()
    if bench.device == "cuda":
        torch.cuda.empty_cache()
    return trial
