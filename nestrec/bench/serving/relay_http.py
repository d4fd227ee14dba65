"""The relay as a user gets it: a server of an exported model with its default options, behind its front, over HTTP.

Histories have mixed lengths, so that it shows whether the trigger is selective; a user who returns has the same events
and a few more. The budget of ranking is the SLO, as a user would set it; nothing else differs from the defaults but
what a mode is (`full` keeps no prefix and gets no signals).
"""

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nestrec.base.errors import UserError
from nestrec.bench.serving.relay_bed import RelayBench
from nestrec.bench.serving.relay_modes import MODES
from nestrec.serving.load.engine_load import RelayLoad, arrivals
from nestrec.serving.load.open_loop import Trial, largest
from nestrec.serving.load.replay import Reads, reads_from
from nestrec.serving.load.served import server
from nestrec.serving.load.socket_load import SocketLoad, post
from nestrec.serving.model.spec import ITEMS_FILE

_ENGINE = "--service.engine"
_OPTIONS = {
    "full": [f"{_ENGINE}.tiers.keeps_prefix", "false", f"{_ENGINE}.trigger.policy", "never"],
    "relay": [],
}
_ALONE, _MOST_VISITS = 20, 64


def measure_over_http(bench: RelayBench) -> Iterator[dict[str, Any]]:
    """The largest rate of each mode and share of returning users that meets the SLO of full inference."""
    modes = tuple(_OPTIONS) if bench.modes == tuple(MODES) else bench.modes
    if unknown := [mode for mode in modes if mode not in _OPTIONS]:
        raise UserError("is not measured over HTTP", field="modes", value=unknown, remedy="choose of full,relay")
    with _Bed(bench, "full", 0.0) as bed:
        unloaded_ms = bed.unloaded_ms()
    slo_ms = bench.slo_ms[0] if bench.slo_ms else bench.slo_factor * unloaded_ms
    first: dict[float, float] = {}
    for mode in modes:
        with _Bed(bench, mode, slo_ms) as bed:
            for returning in bench.returning:
                row = {**bed.row(returning, slo_ms, start=500.0 * bench.instances / unloaded_ms),
                       "full_p50_ms": round(unloaded_ms, 3)}  # fmt: skip
                first.setdefault(returning, row["max_qps"])
                yield {**row, "speedup": round(row["max_qps"] / first[returning], 3) if first[returning] else None}


@dataclass
class _Bed:
    """Servers of one mode."""

    bench: RelayBench
    mode: str
    budget_ms: float

    def __enter__(self) -> "_Bed":
        bench, options = self.bench, [*_OPTIONS[self.mode], "--device", self.bench.device]
        options += [f"{_ENGINE}.trigger.budget_ms", str(self.budget_ms)] if self.budget_ms else []
        if bench.instances > 1:
            options += ["--instances", str(bench.instances), "--front", "gateway"]
        self._serving = server(Path(bench.model), *options)
        self.port, _ = self._serving.__enter__()
        self._wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.__exit__(None, None, None)

    def unloaded_ms(self) -> float:
        """Median of requests that leave one after the other."""
        bodies = [self._bodies(user, 0)[1] for user in range(-_ALONE, 0)]
        outcomes = [SocketLoad(self.port).run([0.0], [post("/v1/rank", body)]) for body in bodies]
        return statistics.median(float(outcome.ended_s[0] - outcome.sent_s[0]) * 1e3 for outcome in outcomes)

    def row(self, returning: float, slo_ms: float, *, start: float) -> dict[str, Any]:
        bench, tried, counts = self.bench, list[dict[str, Any]](), dict[float, dict[str, int]]()
        end_s = time.perf_counter() + bench.search_s

        def measure(rate: float) -> Trial:
            trial, counts[rate] = self._trial(rate, returning)
            tried.append({"rate": round(rate, 2), "p99_ms": _finite(trial.percentile_ms(99)), "counts": counts[rate]})
            return trial

        rate, best = largest(
            measure, slo_ms, start=start, rounds=bench.rounds, factor=bench.factor,
            is_over=lambda: time.perf_counter() > end_s,
        )  # fmt: skip
        found = counts.get(rate, {})
        ranked = sum(found.get(f"rank_{source}", 0) for source in ("none", "device", "dram"))
        signals = sum(count for name, count in found.items() if name in _DECISIONS)
        return {
            "mode": self.mode, "history": list(self._lengths), "candidates": bench.candidates[0],
            "returning": returning, "slo_ms": round(slo_ms, 3), "max_qps": round(rate, 2), "bound_qps": None,
            "p50_ms": _finite(best.percentile_ms(50)) if best else None,
            "p99_ms": _finite(best.percentile_ms(99)) if best else None,
            "hit_rate": round(1 - found.get("rank_none", 0) / ranked, 3) if ranked else None,
            "dram_hits": round(found.get("rank_dram", 0) / ranked, 3) if ranked else None,
            "admitted": round(found.get("signal_admitted", 0) / signals, 3) if signals else None,
            "generator_late_p99_ms": round(best.lateness_ms, 3) if best else None,
            "is_cut": time.perf_counter() > end_s, "tried": sorted(tried, key=lambda one: one["rate"]),
            "in_process": False, "model": bench.model, "instances": bench.instances, "device": bench.device,
        }  # fmt: skip

    def _trial(self, rate: float, returning: float) -> tuple[Trial, dict[str, int]]:
        """Signals and ranking requests leave at their moments."""
        bench = self.bench
        load = RelayLoad(
            history=0, candidates=bench.candidates[0], returning=returning, new_events=bench.new_events,
            recent_users=bench.recent_users, signal_s=bench.signal_ms / 1e3, duration_s=bench.duration_s,
            warm_s=bench.warm_s, fewest=bench.fewest, seed=bench.seed,
            longest_s=max(bench.duration_s, bench.search_s / 4),
        )  # fmt: skip
        at_s, before = arrivals(rate, load), self._counts()
        made = [self._bodies(*visit) for visit in load.visits(at_s)]
        pairs = list(zip(at_s, made, strict=True))
        sent = [(at + load.signal_s, post("/v1/rank", body), True, at) for at, (_, body) in pairs]
        if self.mode != "full":
            sent += [(at, post("/v1/preinfer", signal), False, at) for at, (signal, _) in pairs]
        sent.sort(key=lambda one: one[0])
        moments = np.array([moment for moment, *_ in sent])
        outcome = SocketLoad(self.port, timeout_s=10.0).run(moments, [request for _, request, *_ in sent])
        latency_ms = np.where(outcome.status == 200, (outcome.ended_s - moments) * 1e3, np.inf)
        counted = np.array([is_rank and at >= load.warm_s for *_, is_rank, at in sent])
        late_ms = float(np.quantile((outcome.sent_s - moments)[counted], 0.99)) * 1e3
        after = self._counts()
        used = {name: after[name] - before.get(name, 0) for name in after if name.startswith(("rank_", "signal_"))}
        return Trial(rate, latency_ms[counted], late_ms, float(at_s[-1]) - load.warm_s), used

    def _bodies(self, user: int, visit: int) -> tuple[bytes, bytes]:
        """(signal, ranking request); a user's events are a function of the user."""
        bench, own = self.bench, np.random.default_rng((self.bench.seed, user % (1 << 32)))
        length = self._lengths[own.integers(len(self._lengths))] + visit * bench.new_events
        most = max(self._lengths) + _MOST_VISITS * bench.new_events
        history: dict[str, Any] = {
            "items": [self._items[i] for i in own.integers(0, len(self._items), most)[:length]],
            "times_ms": (np.arange(length) * 60_000 + 1_600_000_000_000).tolist(),
        }
        if self._reads.actions:
            history["actions"] = own.choice(self._reads.actions, most)[:length].tolist()
        if self._reads.features:
            history["features"] = {name: [None] * length for name in self._reads.features}
        common: dict[str, Any] = {"user": str(user), "history": history, "now_ms": 1_700_000_000_000}
        if self._reads.user_features:
            common["user_features"] = dict.fromkeys(self._reads.user_features)
        asked = [self._items[i] for i in own.integers(0, len(self._items), bench.candidates[0])]
        context = {"context": dict.fromkeys(self._reads.features)} if self._reads.features else {}
        signal = {**common, "num_candidates": bench.candidates[0]}
        return orjson.dumps(signal), orjson.dumps({**common, **context, "candidates": asked, "timeout_ms": 10_000})

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return self.bench.lengths or self.bench.history

    @cached_property
    def _items(self) -> list[str]:
        return list(json.loads((Path(self.bench.model) / ITEMS_FILE).read_text()))

    @cached_property
    def _reads(self) -> Reads:
        return reads_from(self._get("/v1/models")["models"])

    def _counts(self) -> dict[str, int]:
        """What the engines of the model that ranks have counted, over all instances."""
        gateway = self.bench.instances > 1
        told = [self._get(f"/v1/live?slot={slot}")["status"] for slot in range(self.bench.instances)] if gateway else [
            self._get("/v1/status")]  # fmt: skip
        total: dict[str, int] = {}
        for status in told:
            model = status["models"].get("ranking") or status["models"]["retrieval"]
            for name, count in model["counts"].items():
                total[name] = total.get(name, 0) + count
        return total

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30.0) as response:
            return json.loads(response.read())

    def _wait_until_ready(self) -> None:
        end_s = time.perf_counter() + 300.0
        while time.perf_counter() < end_s:
            try:
                if all(self._get("/health/ready").get("slots", [True])):
                    return
            except OSError:
                pass
            time.sleep(0.1)


_DECISIONS = tuple(f"signal_{reason}" for reason in ("admitted", "short", "safe", "live_cap", "rate_cap", "never"))


def _finite(value: float) -> float | None:
    return round(value, 3) if np.isfinite(value) else None
