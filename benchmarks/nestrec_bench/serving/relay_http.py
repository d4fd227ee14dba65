"""The relay as a user gets it: a server of an exported model with its default options, behind its front, over HTTP.

Histories have mixed lengths, so that it shows whether the trigger is selective; a user who returns has the same events
and a few more. The budget of ranking is the SLO, as a user would set it; nothing else differs from the defaults but
what a mode is (`full` keeps no prefix and gets no signals).
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
from nestrec.base.process import uncollected
from nestrec.base.thread_team import usable_cores
from nestrec.serving.model.servable_spec import ITEMS_FILE, MANIFEST_FILE, SPEC_FILE
from nestrec_bench.load_test.engine_load import RelayLoad, arrivals
from nestrec_bench.load_test.load_test import reads_from
from nestrec_bench.load_test.open_loop import Trial, largest
from nestrec_bench.load_test.server_under_load import server
from nestrec_bench.load_test.socket_load import SocketLoad, post
from nestrec_bench.load_test.user_bodies import UserBodies
from nestrec_bench.serving.relay_modes import MODES
from nestrec_bench.serving.relay_setup import RelayBench

_ENGINE = "--service.engine"
_OPTIONS = {
    "full": [f"{_ENGINE}.tiers.keeps_prefix", "false", f"{_ENGINE}.trigger.policy", "never"],
    "relay": [],
}
_ALONE, _MANY_CORES = 20, 8
_BEGIN = 550.0
"""requests a second, times milliseconds of one alone, at which the search for full inference begins"""
_Size = tuple[tuple[int, ...], int]
"""events of users, and candidates"""


def measure_over_http(bench: RelayBench) -> Iterator[dict[str, Any]]:
    """The largest rate of each mode, size and share of returning users that meets the SLO of full inference."""
    modes = tuple(_OPTIONS) if bench.modes == tuple(MODES) else bench.modes
    if unknown := [mode for mode in modes if mode not in _OPTIONS]:
        raise UserError("is not measured over HTTP", option="modes", value=unknown, remedy="choose of full,relay")
    mixed = [bench.lengths] if bench.lengths else [(history,) for history in bench.history]
    sizes: list[_Size] = [(lengths, asked) for lengths in mixed for asked in bench.candidates]
    starts = bench.starts or tuple(2.5 * (1 + returning) for returning in bench.returning)
    if len(starts) != len(bench.returning):
        raise UserError("is not one for each share of returning users", option="starts", value=starts,
                        remedy=f"give {len(bench.returning)} of them, or none")  # fmt: skip
    longest = _Longest(bench, sizes[0])
    full: dict[_Size, dict[str, Any]] = {}
    alone_ms, parts_ms = dict[_Size, float](), dict[_Size, dict[str, float]]()
    if "full" not in modes and bench.slo_ms:  # nothing is to be learned of it
        slo_ms = dict.fromkeys(sizes, bench.slo_ms[0])
        alone_ms = {size: slo_ms[size] / bench.slo_factor for size in sizes}
    else:
        with _Bed(bench, "full", 0.0) as bed:
            for size in sizes:
                alone_ms[size] = bed.unloaded_ms(*size)
                parts_ms[size] = bed.parts_ms()
            slo_ms = {size: bench.slo_ms[0] if bench.slo_ms else bench.slo_factor * alone_ms[size] for size in sizes}
            for size in sizes if "full" in modes else ():  # whoever keeps nothing does not mind who returns
                start = _BEGIN * bench.instances / alone_ms[size]
                full[size] = bed.row(*size, bench.returning[0], slo_ms[size], start=start)
            yield from longest.rows(bed, slo_ms[sizes[0]], full.get(sizes[0], {}).get("max_qps", 0.0))
    for size in sizes:
        for returning in bench.returning if "full" in modes else ():
            yield {**full[size], "returning": returning, "full_p50_ms": round(alone_ms[size], 3), "speedup": 1.0,
                   "alone_parts_ms": parts_ms[size]}  # fmt: skip
    for lengths in mixed if "relay" in modes else ():
        budget_ms = min(slo_ms[lengths, asked] for asked in bench.candidates)
        with _Bed(bench, "relay", budget_ms) as bed:
            for asked, (returning, over) in itertools.product(
                bench.candidates, zip(bench.returning, starts, strict=True)
            ):
                size = (lengths, asked)
                base = full.get((lengths, asked), {}).get("max_qps")
                start = over * (base or _BEGIN * bench.instances / alone_ms[size])
                row = bed.row(*size, returning, slo_ms[size], start=start)
                yield {**row, "full_p50_ms": round(alone_ms[size], 3),
                       "speedup": round(row["max_qps"] / base, 3) if base else None}  # fmt: skip
            if lengths == sizes[0][0]:
                yield from longest.rows(bed, slo_ms[sizes[0]], full.get(sizes[0], {}).get("max_qps", 0.0))


@dataclass
class _Longest:
    """The longest history at half the largest rate of full inference, within the SLO of the first size."""

    bench: RelayBench
    size: _Size
    _of_first: int = 0

    def rows(self, bed: "_Bed", slo_ms: float, largest_rate: float) -> Iterator[dict[str, Any]]:
        bench = self.bench
        (lengths, asked) = self.size
        rate = largest_rate / 2
        if not bench.longest or not rate:
            return
        most = json.loads((Path(bench.model) / SPEC_FILE).read_text())["task"]["inputs"]["max_events"]
        end_s = time.perf_counter() + bench.search_s
        found, best = largest(
            lambda length: bed.trial((round(length),), asked, rate, bench.returning[0])[0], slo_ms,
            start=2.05 * self._of_first or 1.2 * max(lengths), rounds=bench.rounds, factor=1.2, most=most,
            is_over=lambda: time.perf_counter() > end_s,
        )  # fmt: skip
        length = round(found)
        self._of_first = self._of_first or length
        yield {
            "mode": bed.mode, "longest_history": length, "most": most, "candidates": asked,
            "returning": bench.returning[0], "slo_ms": round(slo_ms, 3), "rate": round(rate, 2),
            "of_first_mode": round(length / max(self._of_first, 1), 3), "is_cut": time.perf_counter() > end_s,
            "p50_ms": _finite(best.percentile_ms(50)) if best else None,
            "p99_ms": _finite(best.percentile_ms(99)) if best else None, "in_process": False, "model": bench.model,
            "device": bench.device, **_told(Path(bench.model)),
        }  # fmt: skip


@dataclass
class _Bed:
    """Servers of one mode."""

    bench: RelayBench
    mode: str
    budget_ms: float
    _first_user: int = 0

    def __enter__(self) -> "_Bed":
        bench = self.bench
        options = [*_OPTIONS[self.mode], "--device", self.bench.device]
        options += [f"{_ENGINE}.trigger.budget_ms", str(self.budget_ms)] if self.budget_ms else []
        for tier in ("cache_bytes", "dram_bytes"):
            options += [f"{_ENGINE}.tiers.{tier}", str(getattr(bench, tier))]
        options += [f"{_ENGINE}.prefix_dtype", bench.prefix_dtype]
        options += ["--front_processes", str(bench.front_processes)] if bench.front_processes is not None else []
        if bench.instances > 1:
            options += ["--instances", str(bench.instances), "--front", "gateway"]
        self._serving = server(Path(bench.model), *options)
        self.port, self._process = self._serving.__enter__()
        self._wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.__exit__(None, None, None)

    def unloaded_ms(self, lengths: tuple[int, ...], asked: int) -> float:
        """Median of requests that leave one after the other, over a connection that stays, as under load."""
        bodies = [self._users.of(lengths, asked, user, 0)[2] for user in range(_ALONE)]
        alone_s = float(np.median(self._client.run_in_turn([post("/v1/rank", body) for body in bodies])))
        if not np.isfinite(alone_s):
            remedy = "see whether the model reads so many events and the server takes so many candidates"
            raise UserError("is not answered by the server", option="history, candidates", value=(lengths, asked),
                            remedy=remedy)  # fmt: skip
        return alone_s * 1e3

    def parts_ms(self) -> dict[str, float]:
        """Where the time of those requests went (`engine.recent.parts_ms`), medians; `device` is a part of `compute`.
        What is missing of all is the way over the socket, and the front's reading of a body."""
        relay = self._get("/v1/live" + ("?slot=0" if self.bench.instances > 1 else ""))["relay"]
        ranked = [one for one in relay.get("ranking") or relay["retrieval"] if one["kind"] == "rank"][-_ALONE:]
        parts = [{**one["parts_ms"], "device": 1e3 * one["computed_s"]} for one in ranked]
        names = dict.fromkeys(name for its in parts for name in its)
        return {name: round(float(np.median([its[name] for its in parts if name in its])), 3) for name in names}

    @property
    def _client(self) -> SocketLoad:
        """That never sleeps where there are cores for it: what its own takes to wake is not the server's."""
        return SocketLoad(self.port, timeout_s=10.0, polls=usable_cores() >= _MANY_CORES)

    def row(
        self, lengths: tuple[int, ...], asked: int, returning: float, slo_ms: float, *, start: float
    ) -> dict[str, Any]:
        bench = self.bench
        tried = list[dict[str, Any]]()
        counts = dict[float, dict[str, int]]()
        end_s = time.perf_counter() + bench.search_s

        def measure(rate: float) -> Trial:
            trial, counts[rate] = self.trial(lengths, asked, rate, returning)
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
            "mode": self.mode, "history": lengths[0] if len(lengths) == 1 else list(lengths), "candidates": asked,
            "returning": returning, "slo_ms": round(slo_ms, 3), "max_qps": round(rate, 2), "bound_qps": None,
            "p50_ms": _finite(best.percentile_ms(50)) if best else None,
            "p99_ms": _finite(best.percentile_ms(99)) if best else None,
            "hit_rate": round(1 - found.get("rank_none", 0) / ranked, 3) if ranked else None,
            "dram_hits": round(found.get("rank_dram", 0) / ranked, 3) if ranked else None,
            "admitted": round(found.get("signal_admitted", 0) / signals, 3) if signals else None,
            "generator_late_p99_ms": round(best.lateness_ms, 3) if best else None,
            "is_cut": time.perf_counter() > end_s, "tried": sorted(tried, key=lambda one: one["rate"]),
            "in_process": False, "model": bench.model, "instances": bench.instances, "device": bench.device,
            "front_processes": bench.front_processes, "asks_first": bench.asks_first, "cache_bytes": bench.cache_bytes,
            "prefix_dtype": bench.prefix_dtype, **_told(Path(bench.model)),
        }  # fmt: skip

    def trial(
        self, lengths: tuple[int, ...], asked: int, rate: float, returning: float
    ) -> tuple[Trial, dict[str, int]]:
        """Signals and ranking requests leave at their moments."""
        bench = self.bench
        load = RelayLoad(
            history=0, candidates=asked, returning=returning, new_events=bench.new_events,
            recent_users=bench.recent_users, signal_s=bench.signal_ms / 1e3, duration_s=bench.duration_s,
            warm_s=bench.warm_s, fewest=bench.fewest, seed=bench.seed,
            longest_s=max(bench.duration_s, bench.search_s / 4),
        )  # fmt: skip
        self._first_user += _ALONE + 100_000  # nobody has been here in another trial
        at_s = arrivals(rate, load)
        before = self._counts()
        made = [self._users.of(lengths, asked, self._first_user + user, visit) for user, visit in load.visits(at_s)]
        pairs = list(zip(at_s, made, strict=True))
        sent = [(at + load.signal_s, post("/v1/rank", rank), True, at) for at, (*_, rank) in pairs]
        if self.mode != "full":  # the number of events alone, and the events where they are wanted
            sent += [(at, post("/v1/preinfer", its[0 if bench.asks_first else 1]), False, at) for at, its in pairs]
        order = sorted(range(len(sent)), key=lambda i: sent[i][0])
        wanted = {place: post("/v1/preinfer", pairs[i - len(pairs)][1][1])
                  for place, i in enumerate(order) if i >= len(pairs) and bench.asks_first}  # fmt: skip
        sent = [sent[i] for i in order]
        moments = np.array([moment for moment, *_ in sent])
        with uncollected():
            outcome = self._client.run(moments, [request for _, request, *_ in sent], wanted)
        latency_ms = np.where(outcome.status == 200, (outcome.ended_s - moments) * 1e3, np.inf)
        counted = np.array([is_rank and at >= load.warm_s for *_, is_rank, at in sent])
        late_ms = float(np.quantile((outcome.sent_s - moments)[counted], 0.99)) * 1e3
        after = self._counts()
        used = {name: after[name] - before.get(name, 0) for name in after if name.startswith(("rank_", "signal_"))}
        return Trial(rate, latency_ms[counted], late_ms, float(at_s[-1]) - load.warm_s), used

    @cached_property
    def _users(self) -> UserBodies:
        items = json.loads((Path(self.bench.model) / ITEMS_FILE).read_text())
        reads = reads_from(self._get("/v1/models")["models"])
        return UserBodies(items, reads, new_events=self.bench.new_events, seed=self.bench.seed)

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
        while self._process.is_running() and time.perf_counter() < end_s:
            try:
                if all(self._get("/health/ready").get("slots", [True])):
                    return
            except OSError:
                pass
            time.sleep(0.1)


def _told(folder: Path) -> dict[str, Any]:
    """What the export says of its model."""
    encoder = json.loads((folder / SPEC_FILE).read_text())["task"]["encoder"]
    precision = json.loads((folder / MANIFEST_FILE).read_text()).get("precision") or {}
    kinds = {
        "position": encoder.get("position_bias"),
        encoder.get("time_encoding", "buckets"): encoder.get("time_bias"),
    }
    biases = "+".join(kind for kind, is_on in kinds.items() if is_on) or "none"
    return {"backbone": encoder["kind"], "biases": biases, "dtype": precision.get("dtype", "float32")}


_DECISIONS = tuple(f"signal_{reason}" for reason in ("admitted", "short", "safe", "live_cap", "rate_cap", "never"))


def _finite(value: float) -> float | None:
    return round(value, 3) if np.isfinite(value) else None
