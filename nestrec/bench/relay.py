"""`nestrec bench relay`: how many requests a second meet a P99, in several ways of serving the same model.

    full        every request computes history and candidates
    dram_fetch  prefixes of earlier visits wait in DRAM and are fetched when the ranking request is there
    relay       a signal precedes the request, the prefix is computed ahead and kept on the device
    relay_dram  the same, with DRAM behind the device

and the ablations of `relay_modes`. All use the same kernels, batches and engine. Requests go straight to the engine:
the front is measured by `nestrec bench front`.
"""

import gc
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from nestrec.base.config import config
from nestrec.bench.open_loop import Trial, largest
from nestrec.bench.relay_bound import Costs, measure_costs
from nestrec.bench.relay_load import NUM_ITEMS, Load, run_trial
from nestrec.bench.relay_modes import MODES, Mode, mode_named
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine import Engine, EngineConfig
from nestrec.serving.forms import Form, make_form
from nestrec.serving.page_pool import PagePool, bytes_a_token
from nestrec.serving.random_model import random_ranking
from nestrec.serving.runners import make_runner
from nestrec.serving.tiers import TiersConfig
from nestrec.serving.trigger import TriggerConfig

_MOST_VISITS = 64
_LONGEST = 2
"""times the longest history: how far `longest` looks"""


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
    recent_users: int = 64
    """a returning user is one of so many latest ones"""
    new_events: int = 4
    """of a user between two visits"""
    modes: tuple[str, ...] = tuple(MODES)
    """ways of serving; also reactive, relay_all, no_affinity and remote_fetch"""
    more_modes: tuple[str, ...] = ()
    """measured at the first size and the last share of returning users only, after everything else"""
    longest: bool = False
    """also find the longest history that meets the first size's SLO at half the largest rate of the first mode"""
    curve: tuple[float, ...] = ()
    """also the latency at these multiples of each mode's largest rate, with the first share of returning users"""
    slo_factor: float = 3.0
    """SLO over the unloaded P50 of full inference"""
    slo_ms: tuple[float, ...] = ()
    """SLOs beside that one, at the first size and share of returning users"""
    signal_ms: float = 150.0
    """from signal to ranking request"""
    warm_s: float = 0.5
    """of a trial before requests are counted"""
    duration_s: float = 8.0
    """of a trial after that"""
    fewest: int = 150
    """requests of a trial, however short"""
    factor: float = 1.3
    """between two rates that are tried, until one meets the SLO and the next does not"""
    rounds: int = 2
    """halvings of the interval between these two"""
    cache_bytes: int = 256 << 20
    """device memory for prefixes"""
    dram_bytes: int = 1 << 30
    """host memory for prefixes"""
    max_batch_tokens: int = 4096
    """new tokens of requests in a batch"""
    chunk_tokens: int = 256
    """tokens of signals in a batch that ranks nothing; 0: those of one history"""
    mixed_chunk_tokens: int = 0
    """tokens of signals in a batch that ranks; -1: as many"""
    is_paired: bool = False
    """each history with the candidates at its place only, instead of with all"""
    device: str = "cpu"
    """cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of weights, prefixes and products"""
    seed: int = 0
    """of weights, arrivals and histories"""


class Bed:
    """A model with its memory and graphs, on which engines of all modes run one after the other."""

    def __init__(self, bench: RelayBench):
        self.bench = bench
        events = max(bench.history) * (_LONGEST if bench.longest else 1) + _MOST_VISITS * bench.new_events
        encoder = replace(bench.encoder, max_length=2 * (events + 1))
        dtype = getattr(torch, bench.dtype)
        servable = random_ranking(encoder, num_items=NUM_ITEMS, seed=bench.seed, device=bench.device, dtype=dtype)
        self.form: Form = make_form(servable)
        page_tokens = TiersConfig().page_tokens
        pool = PagePool(
            encoder, num_pages=max(1, bench.cache_bytes // (bytes_a_token(encoder, dtype) * page_tokens)),
            page_tokens=page_tokens, device=torch.device(bench.device), dtype=dtype,
        )  # fmt: skip
        self.runner = make_runner(self.form, pool, EngineConfig(max_batch_tokens=2 * bench.max_batch_tokens))

    def load(self, history: int, candidates: int, returning: float) -> Load:
        bench = self.bench
        return Load(
            history=history, candidates=candidates, returning=returning, new_events=bench.new_events,
            recent_users=bench.recent_users, signal_s=bench.signal_ms / 1e3, duration_s=bench.duration_s,
            warm_s=bench.warm_s, fewest=bench.fewest, seed=bench.seed,
        )  # fmt: skip

    def trial(self, mode: Mode, load: Load, rate: float, slo_ms: float) -> tuple[Trial, dict[str, int]]:
        """An engine of its own with empty caches; its counts."""
        engine = Engine(self.form, engine_config(mode, self.bench, load.history, slo_ms), runner=self.runner)
        try:
            return run_trial(engine, mode, load, rate), engine.counts
        finally:
            engine.close()


def engine_config(mode: Mode, bench: RelayBench, history: int, slo_ms: float) -> EngineConfig:
    """The engine of a mode."""
    chunk = bench.chunk_tokens or 2 * history
    mixed = chunk if bench.mixed_chunk_tokens < 0 else bench.mixed_chunk_tokens
    tiers = TiersConfig(
        cache_bytes=bench.cache_bytes, dram_bytes=bench.dram_bytes if mode.uses_dram else 0,
        keeps_prefix=mode.keeps_prefix, keeps_on_device=mode.keeps_on_device,
        dram_link_gb_per_s=mode.fetch_gb_per_s,
    )  # fmt: skip
    trigger = TriggerConfig(policy=mode.policy, budget_ms=slo_ms, compute_share=0.95, burst_s=2.0)
    return EngineConfig(
        tiers=tiers, trigger=trigger, max_queue_s=max(1.0, 4 * slo_ms / 1e3), chunk_tokens=chunk,
        mixed_chunk_tokens=mixed, max_batch_tokens=bench.max_batch_tokens + (mixed if mode.sends_signals else 0),
    )  # fmt: skip


def measure_relay(bench: RelayBench) -> Iterator[dict[str, Any]]:
    """Rows, as they are ready."""
    for name in (*bench.modes, *bench.more_modes):
        mode_named(name)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)  # generator and engine share an interpreter: neither may keep it for milliseconds
    try:
        bed = Bed(bench)
        gc.collect()
        gc.freeze()  # what is there by now is never garbage, and looking through it again would stall requests
        sizes = list(zip(bench.history, bench.candidates, strict=True) if bench.is_paired
                     else itertools.product(bench.history, bench.candidates))  # fmt: skip
        first = Size(bed, *sizes[0])
        yield from first.rows()
        for size in sizes[1:]:
            yield from Size(bed, *size).rows()
        if bench.longest:
            yield from first.longest()
        yield from first.more()
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before_s)


class Size:
    """Everything about one history and one number of candidates."""

    def __init__(self, bed: Bed, history: int, candidates: int):
        self._bed, self._history, self._candidates = bed, history, candidates
        self._best: dict[tuple[str, float], float] = {}
        load = self._load(0.0)
        self._costs = measure_costs(bed.runner, load)
        quiet = replace(load, duration_s=bed.bench.duration_s / 2, fewest=30)
        unloaded, _ = bed.trial(MODES["full"], quiet, 100.0 / self._costs.full_ms, 1e3)
        self._unloaded_ms = unloaded.percentile_ms(50)
        self._slo_ms = bed.bench.slo_factor * self._unloaded_ms

    def rows(self) -> Iterator[dict[str, Any]]:
        """The largest rate of each mode for each share of returning users."""
        bench = self._bed.bench
        for returning in bench.returning:
            for name in bench.modes:
                sweep = self._sweep(name, returning)
                yield self._row(sweep, name, self._slo_ms)
                if returning == bench.returning[0]:
                    yield from sweep.curve(self._slo_ms, self._best[name, self._slo_ms])

    def more(self) -> Iterator[dict[str, Any]]:
        """Other SLOs, and other modes."""
        bench = self._bed.bench
        for slo_ms in bench.slo_ms:
            for name in bench.modes:
                yield self._row(self._sweep(name, bench.returning[0]), name, slo_ms)
        for name in bench.more_modes:
            yield self._row(self._sweep(name, bench.returning[-1]), name, self._slo_ms)

    def longest(self) -> Iterator[dict[str, Any]]:
        """The longest history of each mode at one rate and one SLO."""
        bench, load = self._bed.bench, self._load(self._bed.bench.returning[0])
        most, rate = _LONGEST * max(bench.history), self._best[bench.modes[0], self._slo_ms] / 2
        baseline = 0
        for name in bench.modes if rate else ():

            def measure(length: float, name: str = name) -> Trial:
                longer = replace(load, history=min(round(length), most))
                return self._bed.trial(mode_named(name), longer, rate, self._slo_ms)[0]

            found, best = largest(
                measure, self._slo_ms, start=1.5 * (baseline or load.history), rounds=bench.rounds, factor=1.2
            )
            length = min(round(found), most)
            baseline = baseline or length
            yield {
                "mode": name, "longest_history": length, "candidates": load.candidates, "returning": load.returning,
                "slo_ms": round(self._slo_ms, 3), "rate": round(rate, 2),
                "of_first_mode": round(length / max(baseline, 1), 3), **_percentiles(best), "device": bench.device,
                "dtype": bench.dtype,
            }  # fmt: skip

    def _row(self, sweep: "Sweep", name: str, slo_ms: float) -> dict[str, Any]:
        """A rate that does not depend on who returns, or that must be nothing, is not measured again."""
        known = self._best.get((name, slo_ms)) if not mode_named(name).keeps_prefix else None
        if name == "full" and slo_ms < self._unloaded_ms:
            known = 0.0
        row = sweep.row(slo_ms, known)
        self._best[name, slo_ms] = row["max_qps"]
        first = self._best[self._bed.bench.modes[0], slo_ms]
        speedup = round(row["max_qps"] / first, 3) if first else None
        return {**row, "speedup": speedup, "full_p50_ms": round(self._unloaded_ms, 3)}

    def _sweep(self, name: str, returning: float) -> "Sweep":
        return Sweep(self._bed, name, self._load(returning), self._costs, self._slo_ms)

    def _load(self, returning: float) -> Load:
        return self._bed.load(self._history, self._candidates, returning)


class Sweep:
    """Trials of one mode under one load; a rate is tried once."""

    def __init__(self, bed: Bed, name: str, load: Load, costs: Costs, budget_ms: float):
        self._bed, self._name, self._load, self._costs, self._budget_ms = bed, name, load, costs, budget_ms
        self._mode = mode_named(name)
        self._trials: dict[float, tuple[Trial, dict[str, int]]] = {}

    def measure(self, rate: float) -> Trial:
        if rate not in self._trials:
            self._trials[rate] = self._bed.trial(self._mode, self._load, rate, self._budget_ms)
        return self._trials[rate][0]

    def row(self, slo_ms: float, known: float | None = None) -> dict[str, Any]:
        """The largest rate that meets an SLO; `known` where another load has given it already."""
        bound, bench = self._costs.bound_qps(self._mode, self._load.returning), self._bed.bench
        best: Trial | None = None
        if known is None:
            start = bound * (0.85 if self._mode.sends_signals else 0.4)
            rate, best = largest(self.measure, slo_ms, start=start, rounds=bench.rounds, factor=bench.factor)
        else:
            rate = known
        return {
            **self._labels(), "slo_ms": round(slo_ms, 3), "max_qps": round(rate, 2), "bound_qps": round(bound, 1),
            **_percentiles(best), **_shares(self._trials[rate][1] if best is not None else {}),
            "full_device_ms": self._costs.full_ms, "prefix_device_ms": self._costs.prefix_ms,
            "rank_device_ms": self._costs.rank_ms, "reload_ms": self._costs.reload_ms,
            "prefix_mb": round(self._costs.prefix_mb, 2), "trials": len(self._trials),
        }  # fmt: skip

    def curve(self, slo_ms: float, capacity: float) -> Iterator[dict[str, Any]]:
        for share in self._bed.bench.curve if capacity else ():
            trial = self.measure(share * capacity)
            yield {
                **self._labels(), "slo_ms": round(slo_ms, 3), "load": share, "rate": round(share * capacity, 2),
                **_percentiles(trial), "refused": trial.num_refused,
            }  # fmt: skip

    def _labels(self) -> dict[str, Any]:
        load, bench = self._load, self._bed.bench
        return {
            "mode": self._name, "history": load.history, "candidates": load.candidates, "returning": load.returning,
            "device": bench.device, "dtype": bench.dtype, "emulated": self._mode.fetch_gb_per_s > 0,
        }  # fmt: skip


def _percentiles(trial: Trial | None) -> dict[str, float | None]:
    if trial is None:
        return {"p50_ms": None, "p99_ms": None, "generator_late_p99_ms": None}
    p50_ms, p99_ms = (trial.percentile_ms(q) for q in (50, 99))
    return {
        "p50_ms": round(p50_ms, 3) if math.isfinite(p50_ms) else None,
        "p99_ms": round(p99_ms, 3) if math.isfinite(p99_ms) else None,
        "generator_late_p99_ms": round(trial.lateness_ms, 3),
    }


def _shares(counts: dict[str, int]) -> dict[str, float | None]:
    if not counts:
        return {"hit_rate": None, "dram_hits": None, "admitted": None}
    ranked = {source: counts.get(f"rank_{source}", 0) for source in ("none", "device", "dram")}
    total = max(1, sum(ranked.values()))
    signals = max(1, sum(counts.get(f"signal_{reason}", 0) for reason in _DECISIONS))
    return {
        "hit_rate": round(1 - ranked["none"] / total, 3), "dram_hits": round(ranked["dram"] / total, 3),
        "admitted": round(counts.get("signal_admitted", 0) / signals, 3),
    }  # fmt: skip


_DECISIONS = ("admitted", "safe", "live_cap", "rate_cap", "never")
