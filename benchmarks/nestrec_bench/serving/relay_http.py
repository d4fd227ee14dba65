"""Relay measured over HTTP: `nestrec serve` of an exported model with its default options.

Histories have mixed lengths, so that the results show whether the trigger is selective; a returning user has the same
events and a few more. The latency budget of ranking is the SLO, as an operator would set it. The other options are the
defaults, except those that define a mode (`full` caches no prefixes and receives no signals).
"""

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nestrec.base.errors import UserError
from nestrec.base.process import gc_disabled
from nestrec.base.thread_team import usable_cores
from nestrec.serving.model.servable_spec import ITEMS_FILE, MANIFEST_FILE, SPEC_FILE
from nestrec_bench.load_test.engine_load import RelayLoad, arrivals
from nestrec_bench.load_test.load_test import required_inputs_of
from nestrec_bench.load_test.open_loop import Trial, largest
from nestrec_bench.load_test.server_under_load import server
from nestrec_bench.load_test.socket_load import SocketLoad, post
from nestrec_bench.load_test.user_bodies import UserBodies
from nestrec_bench.serving.relay_modes import MODES
from nestrec_bench.serving.relay_setup import RelayBenchConfig

_ENGINE = "--service.engine"
_OPTIONS = {
    "full": [f"{_ENGINE}.prefix_cache.enabled", "false", f"{_ENGINE}.preinfer.policy", "never"],
    "relay": [],
}
_NUM_UNLOADED = 20
"""Number of requests that are sent one after another, to measure the latency without load."""
_MANY_CORES = 8
_INITIAL_LOAD = 550.0
"""Rate of full inference at which the search starts, in requests/s times the unloaded latency in milliseconds."""
_Size = tuple[tuple[int, ...], int]
"""Numbers of events of users, and number of candidates."""


def measure_over_http(bench: RelayBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield the largest rate that meets the SLO, for each mode, size and fraction of returning users."""
    modes = tuple(_OPTIONS) if bench.modes == tuple(MODES) else bench.modes
    if unknown := [mode for mode in modes if mode not in _OPTIONS]:
        problem = "these modes are not available over HTTP"
        raise UserError(problem, option="modes", value=unknown, remedy="choose from full,relay")
    mixed = [bench.lengths] if bench.lengths else [(history,) for history in bench.history]
    sizes: list[_Size] = [(lengths, num_candidates) for lengths in mixed for num_candidates in bench.candidates]
    starts = bench.starts or tuple(2.5 * (1 + returning) for returning in bench.returning)
    if len(starts) != len(bench.returning):
        problem = "expected one value per fraction of returning users"
        remedy = f"set {len(bench.returning)} values, or none"
        raise UserError(problem, option="starts", value=starts, remedy=remedy)
    longest = _Longest(bench, sizes[0])
    full: dict[_Size, dict[str, Any]] = {}
    alone_ms = dict[_Size, float]()
    parts_ms = dict[_Size, dict[str, float]]()
    if "full" not in modes and bench.slo_ms:  # full inference need not be measured
        slo_ms = dict.fromkeys(sizes, bench.slo_ms[0])
        alone_ms = {size: slo_ms[size] / bench.slo_factor for size in sizes}
    else:
        with _Bed(bench, "full", 0.0) as bed:
            for size in sizes:
                alone_ms[size] = bed.unloaded_ms(*size)
                parts_ms[size] = bed.parts_ms()
            slo_ms = {size: bench.slo_ms[0] if bench.slo_ms else bench.slo_factor * alone_ms[size] for size in sizes}
            for size in sizes if "full" in modes else ():  # without a cache, returning users make no difference
                start = _INITIAL_LOAD * bench.instances / alone_ms[size]
                full[size] = bed.row(*size, bench.returning[0], slo_ms[size], start=start)
            yield from longest.rows(bed, slo_ms[sizes[0]], full.get(sizes[0], {}).get("max_qps", 0.0))
    for size in sizes:
        for returning in bench.returning if "full" in modes else ():
            yield {**full[size], "returning": returning, "full_p50_ms": round(alone_ms[size], 3), "speedup": 1.0,
                   "alone_parts_ms": parts_ms[size]}  # fmt: skip
    for lengths in mixed if "relay" in modes else ():
        budget_ms = min(slo_ms[lengths, num_candidates] for num_candidates in bench.candidates)
        with _Bed(bench, "relay", budget_ms) as bed:
            for num_candidates, (returning, factor) in itertools.product(
                bench.candidates, zip(bench.returning, starts, strict=True)
            ):
                size = (lengths, num_candidates)
                base = full.get(size, {}).get("max_qps")
                start = factor * (base or _INITIAL_LOAD * bench.instances / alone_ms[size])
                row = bed.row(*size, returning, slo_ms[size], start=start)
                yield {**row, "full_p50_ms": round(alone_ms[size], 3),
                       "speedup": round(row["max_qps"] / base, 3) if base else None}  # fmt: skip
            if lengths == sizes[0][0]:
                yield from longest.rows(bed, slo_ms[sizes[0]], full.get(sizes[0], {}).get("max_qps", 0.0))


@dataclass
class _Longest:
    """Search for the longest history at half the largest rate of full inference, within the SLO of the first size."""

    bench: RelayBenchConfig
    size: _Size
    _first_length: int = 0

    def rows(self, bed: "_Bed", slo_ms: float, largest_rate: float) -> Iterator[dict[str, Any]]:
        bench = self.bench
        (lengths, num_candidates) = self.size
        rate = largest_rate / 2
        if not bench.longest or not rate:
            return
        max_events = _max_events(Path(bench.model))
        end_s = time.perf_counter() + bench.search_s
        found, best = largest(
            lambda length: bed.trial((round(length),), num_candidates, rate, bench.returning[0])[0], slo_ms,
            start=2.05 * self._first_length or 1.2 * max(lengths), rounds=bench.rounds, factor=1.2, most=max_events,
            is_over=lambda: time.perf_counter() > end_s,
        )  # fmt: skip
        length = round(found)
        self._first_length = self._first_length or length
        yield {
            "mode": bed.mode, "longest_history": length, "most": max_events, "candidates": num_candidates,
            "returning": bench.returning[0], "slo_ms": round(slo_ms, 3), "rate": round(rate, 2),
            "of_first_mode": round(length / max(self._first_length, 1), 3), "is_cut": time.perf_counter() > end_s,
            "p50_ms": _finite(best.percentile_ms(50)) if best else None,
            "p99_ms": _finite(best.percentile_ms(99)) if best else None, "in_process": False, "model": bench.model,
            "device": bench.device, **_model_fields(Path(bench.model)),
        }  # fmt: skip


@dataclass
class _Bed:
    """Servers of one mode."""

    bench: RelayBenchConfig
    mode: str
    budget_ms: float
    _first_user: int = 0

    def __enter__(self) -> "_Bed":
        bench = self.bench
        options = [*_OPTIONS[self.mode], "--device", self.bench.device]
        options += [f"{_ENGINE}.preinfer.latency_budget_ms", str(self.budget_ms)] if self.budget_ms else []
        options += [f"{_ENGINE}.prefix_cache.device_bytes", str(bench.cache_bytes)]
        options += [f"{_ENGINE}.prefix_cache.host_bytes", str(bench.dram_bytes)]
        options += [f"{_ENGINE}.kv_cache_dtype", bench.prefix_dtype]
        options += ["--frontend_workers", str(bench.frontend_workers)] if bench.frontend_workers is not None else []
        if bench.instances > 1:
            options += ["--num_instances", str(bench.instances), "--load_balancer", "gateway"]
        self._serving = server(Path(bench.model), *options)
        self.port, self._process = self._serving.__enter__()
        self._wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.__exit__(None, None, None)

    def unloaded_ms(self, lengths: tuple[int, ...], num_candidates: int) -> float:
        """Return the median latency of requests that are sent one after another over one connection."""
        bodies = [self._users.of(lengths, num_candidates, user, 0)[2] for user in range(_NUM_UNLOADED)]
        alone_s = float(np.median(self._client.run_in_turn([post("/v1/rank", body) for body in bodies])))
        if not np.isfinite(alone_s):
            problem = "the server rejects requests of this size"
            remedy = "compare the size with the maximum history of the model and the maximum number of candidates"
            raise UserError(problem, option="history, candidates", value=(lengths, num_candidates), remedy=remedy)
        return alone_s * 1e3

    def parts_ms(self) -> dict[str, float]:
        """Return the median milliseconds of the stages of these requests; `device` is a part of `compute`.

        The transfer over the socket, and reading the body in the frontend, are not included.
        """
        relay = self._get("/v1/live" + ("?slot=0" if self.bench.instances > 1 else ""))["relay"]
        requests = relay.get("ranking") or relay["retrieval"]
        ranked = [request for request in requests if request["kind"] == "rank"][-_NUM_UNLOADED:]
        parts = [{**request["parts_ms"], "device": 1e3 * request["computed_s"]} for request in ranked]
        names = dict.fromkeys(name for stages in parts for name in stages)
        return {name: round(float(np.median([one[name] for one in parts if name in one])), 3) for name in names}

    @property
    def _client(self) -> SocketLoad:
        """Client that polls if there are enough cores, so that latencies do not contain its own wake-ups."""
        return SocketLoad(self.port, timeout_s=10.0, polls=usable_cores() >= _MANY_CORES)

    def row(
        self, lengths: tuple[int, ...], num_candidates: int, returning: float, slo_ms: float, *, start: float
    ) -> dict[str, Any]:
        """Search for the largest rate that meets the SLO, from the rate `start`."""
        bench = self.bench
        tried = list[dict[str, Any]]()
        counts = dict[float, dict[str, int]]()
        end_s = time.perf_counter() + bench.search_s

        def measure(rate: float) -> Trial:
            trial, counts[rate] = self.trial(lengths, num_candidates, rate, returning)
            tried.append({"rate": round(rate, 2), "p99_ms": _finite(trial.percentile_ms(99)), "counts": counts[rate]})
            return trial

        rate, best = largest(
            measure, slo_ms, start=start, rounds=bench.rounds, factor=bench.factor,
            is_over=lambda: time.perf_counter() > end_s,
        )  # fmt: skip
        found = counts.get(rate, {})
        ranked = sum(found.get(f"rank_{source}", 0) for source in ("none", "device", "host"))
        signals = sum(count for name, count in found.items() if name in _DECISIONS)
        return {
            "mode": self.mode, "history": lengths[0] if len(lengths) == 1 else list(lengths),
            "candidates": num_candidates, "returning": returning, "slo_ms": round(slo_ms, 3), "max_qps": round(rate, 2),
            "bound_qps": None, "p50_ms": _finite(best.percentile_ms(50)) if best else None,
            "p99_ms": _finite(best.percentile_ms(99)) if best else None,
            "hit_rate": round(1 - found.get("rank_none", 0) / ranked, 3) if ranked else None,
            "dram_hits": round(found.get("rank_host", 0) / ranked, 3) if ranked else None,
            "admitted": round(found.get("preinfer_admitted", 0) / signals, 3) if signals else None,
            "generator_late_p99_ms": round(best.lateness_ms, 3) if best else None,
            "is_cut": time.perf_counter() > end_s, "tried": sorted(tried, key=lambda one: one["rate"]),
            "in_process": False, "model": bench.model, "instances": bench.instances, "device": bench.device,
            "front_processes": bench.frontend_workers, "asks_first": bench.asks_first, "cache_bytes": bench.cache_bytes,
            "prefix_dtype": bench.prefix_dtype, **_model_fields(Path(bench.model)),
        }  # fmt: skip

    def trial(
        self, lengths: tuple[int, ...], num_candidates: int, rate: float, returning: float
    ) -> tuple[Trial, dict[str, int]]:
        """Send signals and ranking requests at their times, and return latencies and the engine's counts."""
        bench = self.bench
        load = RelayLoad(
            history=0, candidates=num_candidates, returning=returning, new_events=bench.new_events,
            recent_users=bench.recent_users, signal_s=bench.signal_ms / 1e3, duration_s=bench.duration_s,
            warm_s=bench.warm_s, fewest=bench.fewest, seed=bench.seed,
            longest_s=max(bench.duration_s, bench.search_s / 4),
        )  # fmt: skip
        self._first_user += _NUM_UNLOADED + 100_000  # users of different trials are distinct
        at_s = arrivals(rate, load)
        before = self._counts()
        bodies = [
            self._users.of(lengths, num_candidates, self._first_user + user, visit) for user, visit in load.visits(at_s)
        ]
        pairs = list(zip(at_s, bodies, strict=True))
        sent = [(at + load.signal_s, post("/v1/rank", rank), True, at) for at, (*_, rank) in pairs]
        if self.mode != "full":  # only the number of events, and the events if the server requests them
            sent += [(at, post("/v1/preinfer", body[0 if bench.asks_first else 1]), False, at) for at, body in pairs]
        order = sorted(range(len(sent)), key=lambda i: sent[i][0])
        follow_ups = {index: post("/v1/preinfer", pairs[i - len(pairs)][1][1])
                      for index, i in enumerate(order) if i >= len(pairs) and bench.asks_first}  # fmt: skip
        sent = [sent[i] for i in order]
        send_s = np.array([send_at for send_at, *_ in sent])
        with gc_disabled():
            outcome = self._client.run(send_s, [request for _, request, *_ in sent], follow_ups)
        latency_ms = np.where(outcome.status == 200, (outcome.ended_s - send_s) * 1e3, np.inf)
        counted = np.array([is_rank and at >= load.warm_s for *_, is_rank, at in sent])
        late_ms = float(np.quantile((outcome.sent_s - send_s)[counted], 0.99)) * 1e3
        after = self._counts()
        used = {name: after[name] - before.get(name, 0) for name in after if name.startswith(("rank_", "preinfer_"))}
        return Trial(rate, latency_ms[counted], late_ms, float(at_s[-1]) - load.warm_s), used

    @cached_property
    def _users(self) -> UserBodies:
        items = json.loads((Path(self.bench.model) / ITEMS_FILE).read_text())
        reads = required_inputs_of(self._get("/v1/models")["models"])
        return UserBodies(items, reads, new_events=self.bench.new_events, seed=self.bench.seed)

    def _counts(self) -> dict[str, int]:
        """Return the counts of the engines of the ranking model, summed over all instances."""
        if self.bench.instances > 1:
            statuses = [self._get(f"/v1/live?slot={slot}")["status"] for slot in range(self.bench.instances)]
        else:
            statuses = [self._get("/v1/status")]
        total: dict[str, int] = {}
        for status in statuses:
            model = status["models"].get("ranking") or status["models"]["retrieval"]
            for name, count in model["counts"].items():
                total[name] = total.get(name, 0) + count
        return total

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30.0) as response:
            return json.loads(response.read())

    def _wait_until_ready(self) -> None:
        end_s = time.perf_counter() + 300.0
        while self._process.is_running() and time.perf_counter() < end_s:
            try:
                if all(self._get("/health/ready").get("slots", [True])):
                    return
            except OSError:
                pass
            time.sleep(0.1)


def _max_events(folder: Path) -> int:
    """Return the maximum number of history events of an exported model; earlier versions stored it in `inputs`."""
    task = json.loads((folder / SPEC_FILE).read_text())["task"]
    return int(task.get("history", task["inputs"])["max_events"])


def _model_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of a row that describe an exported model."""
    encoder = json.loads((folder / SPEC_FILE).read_text())["task"]["encoder"]
    precision = json.loads((folder / MANIFEST_FILE).read_text()).get("precision") or {}
    kinds = {
        "position": encoder.get("position_bias"),
        encoder.get("time_encoding", "buckets"): encoder.get("time_bias"),
    }
    biases = "+".join(kind for kind, is_on in kinds.items() if is_on) or "none"
    return {"backbone": encoder["kind"], "biases": biases, "dtype": precision.get("dtype", "float32")}


_DECISIONS = tuple(f"preinfer_{reason}" for reason in ("admitted", "short", "safe", "live_cap", "rate_cap", "never"))


def _finite(value: float) -> float | None:
    return round(value, 3) if np.isfinite(value) else None
