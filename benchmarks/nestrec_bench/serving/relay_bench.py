"""Find the largest rate that meets a P99, with full inference, prefixes from DRAM, and relay without and with DRAM.

    full        every request computes history and candidates
    dram_fetch  prefixes of earlier visits are cached in DRAM and fetched when the ranking request arrives
    relay       a pre-infer request (signal) precedes the ranking request; the prefix is prefilled ahead on the device
    relay_dram  relay with DRAM as the second tier

and the ablations of `relay_modes`. All use the same kernels, batches and engine. Requests are passed to the engine
without HTTP, whose cost `nestrec bench front` measures.

    nestrec bench relay --history 512 --candidates 64 --returning 0,0.3 --duration_s 8
"""

import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nestrec_bench.bench import Bench
from nestrec_bench.load_test.engine_load import RelayLoad, RelayOutcome
from nestrec_bench.load_test.open_loop import Trial, largest
from nestrec_bench.pages.relay_page import short_rows, summary, write_page
from nestrec_bench.serving.relay_modes import RequestCosts, mode_named
from nestrec_bench.serving.relay_setup import LONGEST, RelayBed, RelayBenchConfig, TrialBed
from nestrec_bench.serving.relay_simulated import SimulatedBed


def measure_relay(bench: RelayBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows as they are measured."""
    if bench.model:
        from nestrec_bench.serving.relay_http import measure_over_http

        yield from measure_over_http(bench)
        return
    for name in (*bench.modes, *bench.more_modes):
        mode_named(name)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # as in a server: generator and engine share an interpreter
    try:
        bed = SimulatedBed(bench) if bench.costs_of else RelayBed(bench)
        gc.collect()
        gc.freeze()  # objects that exist now are never garbage, and scanning them again would delay requests
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
    """Measurements of one history length and one number of candidates."""

    def __init__(self, bed: TrialBed, history: int, candidates: int):
        self._bed = bed
        self._history = history
        self._candidates = candidates
        self._best: dict[tuple[str, float, float], float] = {}  # by mode, fraction of returning users and SLO
        self._sweeps: dict[tuple[str, float, float], Sweep] = {}  # by mode, fraction and budget
        load = replace(self._load(0.0), lengths=())
        self._costs = bed.costs(load)
        self._unloaded_ms = bed.unloaded_ms(load)
        self._slo_ms = bed.bench.slo_factor * self._unloaded_ms

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the largest rate of each mode for each fraction of returning users."""
        bench = self._bed.bench
        for factor, returning in itertools.product((bench.slo_factor, *bench.more_slo_factors), bench.returning):
            for name in bench.modes:
                yield self._row(name, returning, factor * self._unloaded_ms)

    def more(self) -> Iterator[dict[str, Any]]:
        """Yield latency over load, further SLOs, and further modes."""
        bench = self._bed.bench
        for name in bench.modes if bench.curve else ():
            sweep = self._sweep(name, bench.returning[0], self._slo_ms)
            yield from sweep.curve(self._slo_ms, self._best[name, bench.returning[0], self._slo_ms])
        for slo_ms in bench.slo_ms:
            for name in bench.modes:
                yield self._row(name, bench.returning[0], slo_ms)
        for name in bench.more_modes:
            yield self._row(name, bench.returning[-1], self._slo_ms)

    def longest(self) -> Iterator[dict[str, Any]]:
        """Yield the longest history of each mode at one rate and one SLO."""
        bench = self._bed.bench
        load = self._load(self._bed.bench.returning[0])
        max_length = LONGEST * max(bench.history)
        rate = self._best[bench.modes[0], load.returning, self._slo_ms] / 2
        baseline = 0
        for name in bench.modes if rate else ():

            def measure(length: float, name: str = name) -> Trial:
                longer = replace(load, history=round(length))
                return self._bed.trial(mode_named(name), longer, rate, self._slo_ms).trial

            start = 1.5 * (baseline or load.history)
            found, best = largest(measure, self._slo_ms, start=start, rounds=bench.rounds, factor=1.2, most=max_length)
            length = round(found)
            baseline = baseline or length
            yield {
                "mode": name, "longest_history": length, "candidates": load.candidates, "returning": load.returning,
                "slo_ms": round(self._slo_ms, 3), "rate": round(rate, 2),
                "of_first_mode": round(length / max(baseline, 1), 3), **_percentiles(best), "device": bench.device,
                "dtype": bench.dtype,
            }  # fmt: skip

    def _row(self, name: str, returning: float, slo_ms: float) -> dict[str, Any]:
        """Return the row of a mode; rates that do not depend on returning users, or must be 0, are not measured
        again."""
        others = [self._best[key] for key in self._best if (key[0], key[2]) == (name, slo_ms)]
        known = others[0] if others and not mode_named(name).keeps_prefix else None
        if name == "full" and slo_ms < self._unloaded_ms:
            known = 0.0
        key = (self._bed.bench.modes[0], returning, slo_ms)
        row = self._sweep(name, returning, slo_ms).row(slo_ms, known, self._best.get(key, 0.0))
        self._best[name, returning, slo_ms] = row["max_qps"]
        first = self._best[key]
        speedup = round(row["max_qps"] / first, 3) if first else None
        return {**row, "speedup": speedup, "full_p50_ms": round(self._unloaded_ms, 3)}

    def _sweep(self, name: str, returning: float, slo_ms: float) -> "Sweep":
        """Return the trials of a mode; a mode without a trigger does not depend on the SLO, so it shares its trials."""
        mode = mode_named(name)
        deadline = self._bed.bench.deadline_factor
        budget_ms = slo_ms if mode.sends_signals or deadline else self._slo_ms
        key = (name, returning, budget_ms)
        if key not in self._sweeps:
            load = self._load(returning)
            load = replace(load, timeout_s=deadline * slo_ms / 1e3) if deadline else load
            self._sweeps[key] = Sweep(self._bed, name, load, self._costs, budget_ms)
        return self._sweeps[key]

    def _load(self, returning: float) -> RelayLoad:
        return self._bed.load(self._history, self._candidates, returning)


class Sweep:
    """Trials of one mode under one load; each rate is measured once."""

    def __init__(self, bed: TrialBed, name: str, load: RelayLoad, costs: RequestCosts, budget_ms: float):
        self._bed = bed
        self._name = name
        self.load = load
        self._costs = costs
        self._budget_ms = budget_ms
        self._mode = mode_named(name)
        self._outcomes: dict[float, RelayOutcome] = {}

    def measure(self, rate: float) -> Trial:
        if rate not in self._outcomes:
            self._outcomes[rate] = self._bed.trial(self._mode, self.load, rate, self._budget_ms)
        return self._outcomes[rate].trial

    def row(self, slo_ms: float, known: float | None, first: float) -> dict[str, Any]:
        """Return the row with the largest rate that meets an SLO.

        Args:
            slo_ms: Latency objective at the 99th percentile.
            known: Result if another load has determined it already. None: search for it.
            first: Largest rate of the first mode, with which the search starts, so that one trial shows whether this
                mode is worse; 0 if unknown.
        """
        bound = self._costs.bound_qps(self._mode, self.load.returning)
        bench = self._bed.bench
        best: Trial | None = None
        if known is None and first and bench.at_least:
            rates = (first, bench.at_least * first)
            rate, best = next(((r, trial) for r in rates if (trial := self.measure(r)).meets(slo_ms)), (0.0, None))
        elif known is None:
            start = first or bound * (0.85 if self._mode.sends_signals else 0.35)
            end_s = time.perf_counter() + bench.search_s
            rate, best = largest(
                self.measure, slo_ms, start=start, rounds=bench.rounds, factor=bench.factor,
                is_over=lambda: time.perf_counter() > end_s,
            )  # fmt: skip
        else:
            rate = known
        outcome = self._outcomes[rate] if best is not None else None
        return {
            **self._labels(), "slo_ms": round(slo_ms, 3), "max_qps": round(rate, 2), "bound_qps": round(bound, 1),
            **_percentiles(best), **_shares(outcome.counts if outcome else {}), **(outcome.parts if outcome else {}),
            "full_device_ms": self._costs.full_ms, "prefix_device_ms": self._costs.prefix_ms,
            "rank_device_ms": self._costs.rank_ms, "reload_ms": self._costs.reload_ms,
            "prefix_mb": round(self._costs.prefix_mb, 2), "trials": len(self._outcomes),
            "requests": len(best.latency_ms) if best is not None else None,
            "tried": [_tried(rate, self._outcomes[rate]) for rate in sorted(self._outcomes)],
        }  # fmt: skip

    def curve(self, slo_ms: float, capacity: float) -> Iterator[dict[str, Any]]:
        for share in self._bed.bench.curve if capacity else ():
            trial = self.measure(share * capacity)
            goodput = trial.goodput(slo_ms)
            yield {
                **self._labels(), "slo_ms": round(slo_ms, 3), "load": share, "rate": round(share * capacity, 2),
                **_percentiles(trial), "refused": trial.num_rejected, "requests": len(trial.latency_ms),
                "goodput": round(goodput, 2), "of_largest": round(goodput / capacity, 3),
            }  # fmt: skip

    def _labels(self) -> dict[str, Any]:
        load = self.load
        bench = self._bed.bench
        return {
            "mode": self._name, "history": load.history, "candidates": load.candidates, "returning": load.returning,
            "in_process": True, "model": "random weights", "biases": _biases(bench), "lengths": list(load.lengths),
            "deadline_factor": bench.deadline_factor,
            "device": bench.device, "dtype": bench.dtype, "prefix_dtype": bench.prefix_dtype,
            "emulated": bool(self._mode.fetch_gb_per_s or bench.costs_of), **_simulated(bench),
        }  # fmt: skip


def _simulated(bench: RelayBenchConfig) -> dict[str, Any]:
    """Return the fields of a row that describe the device in simulated time."""
    if not bench.costs_of:
        return {}
    return {"device": "simulated", "costs_of": bench.costs_of, "costs_of_model": bench.costs_of_model,
            "host_ms": bench.host_ms, "way_ms": bench.way_ms}  # fmt: skip


def _biases(bench: RelayBenchConfig) -> str:
    found = [name for name in ("position", "time") if getattr(bench.encoder, f"{name}_bias")]
    return " and ".join(found) or "none"


def _tried(rate: float, outcome: RelayOutcome) -> dict[str, Any]:
    shares = {name: share for name, share in _shares(outcome.counts).items() if name != "dram_hits"}
    kinds = (("signals", "preinfer_"), ("ranks", "rank_"))
    counts = {key: {name.removeprefix(prefix): count for name, count in sorted(outcome.counts.items())
                    if name.startswith(prefix)} for key, prefix in kinds}  # fmt: skip
    return {"rate": round(rate, 2), **_percentiles(outcome.trial), **shares, **outcome.parts, **counts}


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
    ranked = {source: counts.get(f"rank_{source}", 0) for source in ("none", "device", "host")}
    total = max(1, sum(ranked.values()))
    signals = max(1, sum(counts.get(f"preinfer_{reason}", 0) for reason in _DECISIONS))
    return {
        "hit_rate": round(1 - ranked["none"] / total, 3), "dram_hits": round(ranked["host"] / total, 3),
        "admitted": round(counts.get("preinfer_admitted", 0) / signals, 3),
    }  # fmt: skip


_DECISIONS = ("admitted", "short", "safe", "live_cap", "rate_cap", "never")


BENCH = Bench(
    config=RelayBenchConfig,
    measure=measure_relay,
    show=lambda rows, more: [(f"relay: {title}", shown) for title, shown in short_rows(rows).items()],
    progress_line=summary,
    page=write_page,
)
