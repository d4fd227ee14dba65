"""State and counts of the engines: for Prometheus, by conventional names, and for the live page.

Labels are bounded: roles, versions in service, kinds of events and tables of a model. None is the id of a user or item.

How models follow their addresses: for Prometheus and for the live page.

The last ten minutes of a server, a sample a second: what the charts of the live page are made of.

Counters and latencies for Prometheus and for the live page. No id of a user or an item enters them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nestrec.base.config import to_plain
from nestrec.serving.core.background_tasks import FAILURES
from nestrec.serving.core.cost_model import Histogram
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.inference_service import Service
from nestrec.serving.service.version_follower import VersionFollower

_GAUGES = {
    "queued_s": ("nestrec_queued_seconds", "Device seconds of the work that waits"),
    "way_s": ("nestrec_way_seconds", "From a request's arrival to its engine, and back (90th percentile)"),
    "host_s": ("nestrec_batch_host_seconds", "The host's part of a batch"),
    "device_pages_used": ("nestrec_device_cache_used_pages", "Pages of the prefix cache that hold something"),
    "device_pages": ("nestrec_device_cache_pages", "Pages of the prefix cache"),
    "dram_bytes_used": ("nestrec_dram_cache_used_bytes", "Bytes of prefixes in host memory"),
    "dram_bytes": ("nestrec_dram_cache_bytes", "Bytes that prefixes may take in host memory"),
    "loaded_at_s": ("nestrec_model_loaded_timestamp_seconds", "When the model came into service here"),
    "exported_at_s": ("nestrec_model_exported_timestamp_seconds", "When the model was exported"),
}


def engine_status(service: Service, role: str) -> dict[str, Any]:
    """Sums over the instances of a model."""
    fleet = service.fleet(role)
    counts: dict[str, int] = {}
    for engine in fleet.engines:
        for name, count in dict(engine.counts).items():
            counts[name] = counts.get(name, 0) + count
    tiers = [engine.tiers for engine in fleet.engines]
    return {
        "version": shown_version(fleet.servable.version),
        "loaded_at_s": fleet.loaded_at_s,
        "exported_at_s": fleet.servable.exported_at_s,
        "counts": counts,
        "queued_s": sum(engine.queued_s for engine in fleet.engines),
        "way_s": max(engine.trigger.way_s for engine in fleet.engines),
        "host_s": max(engine.pace.host_s for engine in fleet.engines),
        "device_s": sum(engine.device_s for engine in fleet.engines),
        "device_pages_used": sum(t.device.num_pages - t.device.num_free_pages for t in tiers),
        "device_pages": sum(t.device.num_pages for t in tiers),
        "dram_bytes_used": sum(t.dram.num_bytes for t in tiers),
        "dram_bytes": sum(t.dram.max_bytes for t in tiers),
        "break_even_tokens": tiers[0].break_even_tokens(),
        "precision": to_plain(fleet.servable.precision),
        "tables": {name: table.statistics() for name, table in fleet.servable.tables.items()},
    }


class EngineCollector(Collector):
    """Of all engines of a service, put together when they are asked for."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterable[Metric]:
        states = {role: engine_status(self._service, role) for role in self._service.fleets}
        yield from _gauges(states)
        yield from _counts(states)
        yield from self._about_models()
        yield from self._times()
        router = CounterMetricFamily("nestrec_router_events", "Routes off a user's own instance", labels=["event"])
        router.add_metric(["diverted"], self._service.router.num_diverted)
        router.add_metric(["leaked"], self._service.router.num_leaked)
        yield router
        yield GaugeMetricFamily("nestrec_ready", "Whether requests can be served", float(self._service.is_ready))
        refused = float(self._service.reloads.is_refused)
        yield GaugeMetricFamily("nestrec_reload_refused", "Whether the last load left a model as it was", refused)

    def _about_models(self) -> Iterable[Metric]:
        info = InfoMetricFamily("nestrec_model", "Model in service", labels=["model"])
        for role, fleet in self._service.fleets.items():
            servable = fleet.servable
            info.add_metric([role], {"version": shown_version(servable.version), "name": servable.spec.name})
        yield info

    def _times(self) -> Iterable[Metric]:
        """Of ranking requests that were answered."""
        queued = HistogramMetricFamily(
            "nestrec_queue_duration_seconds", "Time in the queue of an engine", labels=["model"]
        )
        computed = HistogramMetricFamily("nestrec_compute_duration_seconds", "Time of the batches", labels=["model"])
        for role, fleet in self._service.fleets.items():
            for family, times in (
                (queued, Histogram.sum_of(engine.queue_times for engine in fleet.engines)),
                (computed, Histogram.sum_of(engine.compute_times for engine in fleet.engines)),
            ):
                family.add_metric([role], times.buckets(), times.seconds)
        yield queued
        yield computed


class BackgroundCollector(Collector):
    """Failures of background threads and tasks of this process."""

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "nestrec_background_failures", "Exceptions of background threads, which continue", labels=["task"]
        )
        for task, count in sorted(FAILURES.counts.items()):
            family.add_metric([task], count)
        yield family


class FilesCollector(Collector):
    """Files that a server reads again when they change."""

    def __init__(self, safety: Callable[[], ServerSecurity | None]):
        self._safety = safety

    def collect(self) -> Iterable[Metric]:
        ages = GaugeMetricFamily(
            "nestrec_file_age_seconds",
            "Seconds since the keys or the certificate in use were last the same as in their files",
            labels=["file"],
        )
        expiry = GaugeMetricFamily(
            "nestrec_certificate_expiry_timestamp_seconds", "When the certificate in use expires (Unix seconds)"
        )
        safety = self._safety()
        for name, age_s in (safety.file_ages_s if safety is not None else {}).items():
            ages.add_metric([name], age_s)
        if safety is not None and safety.certificate_expiry_s is not None:
            expiry.add_metric([], safety.certificate_expiry_s)
        yield from (ages, expiry)


class RefusalCollector(Collector):
    """Requests that were let in by no key."""

    def __init__(self, refusals: Callable[[], Mapping[str, int]]):
        self._refusals = refusals

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("nestrec_refused_credentials", "Requests not let in, by reason", labels=["reason"])
        for reason, count in sorted(self._refusals().items()):
            family.add_metric([reason], count)
        yield family


def _gauges(states: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    for field, (name, meaning) in _GAUGES.items():
        family = GaugeMetricFamily(name, meaning, labels=["model"])
        for role, state in states.items():
            if state[field] is not None:
                family.add_metric([role], state[field])
        yield family


def _counts(states: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    """Counts of an engine are named rank_SOURCE, signal_OUTCOME, or as they are."""
    rankings = CounterMetricFamily(
        "nestrec_rankings", "Requests ranked, by place of prefix", labels=["model", "prefix"]
    )
    signals = CounterMetricFamily(
        "nestrec_signals", "Pre-infer signals, by what became of them", labels=["model", "outcome"]
    )
    events = CounterMetricFamily("nestrec_engine_events", "Other events of the engines", labels=["model", "event"])
    busy = CounterMetricFamily("nestrec_device_busy_seconds", "Seconds of batches on the device", labels=["model"])
    rows = CounterMetricFamily(
        "nestrec_table_rows",
        "Rows of cached tables asked for and not on the device",
        labels=["model", "table", "event"],
    )
    for role, state in states.items():
        busy.add_metric([role], state["device_s"])
        for name, count in state["counts"].items():
            kind, _, what = name.partition("_")
            family = {"rank": rankings, "signal": signals}.get(kind, events)
            family.add_metric([role, name if family is events else what], count)
        for name, counts in state["tables"].items():
            for event in ("asked", "missed"):
                rows.add_metric([role, name, event], counts[event])
    yield from (rankings, signals, events, busy, rows)


Followers = Callable[[], Mapping[str, VersionFollower]]


class FollowCollector(Collector):
    """Of all models of a server that come from addresses, put together when they are asked for."""

    def __init__(self, followers: Followers):
        self._followers = followers

    def collect(self) -> Iterable[Metric]:
        events = CounterMetricFamily(
            "nestrec_versions", "Versions taken: applied, or loaded as a whole", labels=["model", "event"]
        )
        failures = CounterMetricFamily(
            "nestrec_follow_failures", "Looks for a newer version that failed", labels=["model", "reason"]
        )
        number = GaugeMetricFamily("nestrec_version_number", "Number of the version in service", labels=["model"])
        behind = GaugeMetricFamily("nestrec_versions_behind", "Newer versions at the address", labels=["model"])
        parts = GaugeMetricFamily(
            "nestrec_freshness_part_seconds", "From an event to an answer, by part", labels=["model", "part"]
        )
        total = HistogramMetricFamily(
            "nestrec_freshness_seconds", "From an event to the first answer that has learnt from it", labels=["model"]
        )
        for role, follower in dict(self._followers()).items():
            counts = follower.counts
            freshness = follower.told_freshness()
            events.add_metric([role, "applied"], counts.applied)
            events.add_metric([role, "loaded"], counts.loaded)
            for reason, count in sorted(counts.failures.items()):
                failures.add_metric([role, reason], count)
            number.add_metric([role], follower.number)
            behind.add_metric([role], counts.behind)
            total.add_metric([role], freshness.times.buckets(), freshness.times.seconds)
            for part, seconds in (freshness.last.told() if freshness.last is not None else {}).items():
                if seconds is not None:
                    parts.add_metric([role, part], seconds)
        yield from (events, failures, number, behind, parts, total)


def follow_status(followers: Mapping[str, VersionFollower]) -> dict[str, Any]:
    """What the live page shows, by model."""
    found = {}
    for role, follower in dict(followers).items():
        counts = follower.counts
        last = follower.told_freshness().last
        found[role] = {
            "address": str(follower.source),
            "number": follower.number,
            "behind": counts.behind,
            "problem": counts.problem,
            "applied": counts.applied,
            "loaded": counts.loaded,
            "fresh_s": None if last is None else last.seconds,
            "parts_s": {} if last is None else last.told(),
        }
    return found


STEP_S = 1.0
_MOST_SAMPLES = 600
_MOST_TIMES = 20_000
"""answers a sample whose times are kept"""
_SOURCES = ("none", "device", "dram")


class ServingTimeline:
    """Used inside one event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._samples: deque[dict[str, Any]] = deque(maxlen=_MOST_SAMPLES)
        self._outcomes: dict[str, int] = {}
        self._times: list[float] = []
        self._before: dict[str, int] = {}
        self._device_s = 0.0

    def observe(self, outcome: str, seconds: float) -> None:
        """An answer."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        if outcome == "answered" and len(self._times) < _MOST_TIMES:
            self._times.append(seconds)

    def sample(self, now_s: float) -> None:
        """What has happened since the last one, and how things stand. now_s: Unix seconds."""
        outcomes, self._outcomes = self._outcomes, {}
        times, self._times = np.array(self._times), []
        states = [engine_status(self._service, role) for role in self._service.fleets]
        ranked = {source: sum(s["counts"].get(f"rank_{source}", 0) for s in states) for source in _SOURCES}
        busy_s = sum(state["device_s"] for state in states)
        quantiles = np.quantile(times, (0.5, 0.99)) * 1e3 if times.size else (None, None)
        exported = [state["exported_at_s"] for state in states if state["exported_at_s"] is not None]
        since = {f"from_{s}": max(0, n - self._before.get(s, 0)) for s, n in ranked.items()}  # a swap begins anew
        sample = {
            "at_s": now_s,
            "answered": outcomes.pop("answered", 0),
            "refused": outcomes.pop("refused", 0),
            "failed": sum(outcomes.values()),
            "p50_ms": quantiles[0],
            "p99_ms": quantiles[1],
            **since,
            "queued_ms": 1e3 * sum(state["queued_s"] for state in states),
            "device_busy": min(1.0, max(0.0, busy_s - self._device_s) / STEP_S),
            "device_cache": _share(states, "device_pages_used", "device_pages"),
            "dram_cache": _share(states, "dram_bytes_used", "dram_bytes"),
            "age_s": None if not exported else now_s - min(exported),
            "versions": "+".join(state["version"] for state in states),
        }
        self._samples.append(sample)
        self._before = ranked
        self._device_s = busy_s

    def columns(self) -> dict[str, list[Any]]:
        """Of all samples, oldest first."""
        samples = list(self._samples)
        return {name: [sample[name] for sample in samples] for name in (samples[0] if samples else ())}


def _share(states: list[dict[str, Any]], used: str, of: str) -> float:
    return float(sum(state[used] for state in states) / max(1, sum(state[of] for state in states)))


_WINDOW = 4096


class Metrics:
    """Observed by the front, on the thread of its event loop."""

    def __init__(self, service: Service, followers: Mapping[str, VersionFollower] | None = None):
        """followers: of models that come from addresses, by role."""
        self._service = service
        self._followers = {} if followers is None else followers
        self._answers = _Answers()
        self._registry = CollectorRegistry()
        self._registry.register(self._answers)
        self._registry.register(EngineCollector(service))
        self.refusals: Mapping[str, int] = {}
        """requests that the gate let not in, by reason"""
        self._registry.register(RefusalCollector(lambda: self.refusals))
        self.safety: ServerSecurity | None = None
        """Keys and certificates of the server; None until `report_files_of` sets them."""
        self._registry.register(FilesCollector(lambda: self.safety))
        self._registry.register(BackgroundCollector())
        self._registry.register(FollowCollector(lambda: self._followers))
        ProcessCollector(registry=self._registry)
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self.timeline = ServingTimeline(service)
        self.gather: Callable[[], Awaitable[None]] | None = None
        """has everybody who answers requests of this service tell what they have observed"""

    async def gathered(self) -> "Metrics":
        """With what is known elsewhere."""
        if self.gather is not None:
            await self.gather()
        return self

    async def sample(self) -> None:
        """For the timeline, until it is cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            try:
                await self.gathered()
                self.timeline.sample(time.time())
            except Exception as error:
                FAILURES.add("nestrec-timeline", error)

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._answers.observe(route, status, seconds)
        if route.startswith("/v1"):
            self.timeline.observe(outcome_of(status), seconds)
            if status == 200:
                self._recent.append(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def status(self) -> dict[str, Any]:
        """What the live page shows."""
        recent = np.array(self._recent)
        percentiles = (
            {f"p{q}_ms": float(np.quantile(recent, q / 100) * 1e3) for q in (50, 90, 99)} if recent.size else {}
        )
        router = self._service.router
        reloads = self._service.reloads
        return {
            "reloads": {"asked": reloads.asked, "done": reloads.done, "refused": reloads.is_refused},
            "latency": {"answers": int(recent.size), **percentiles},
            "models": {role: engine_status(self._service, role) for role in self._service.fleets},
            "follow": follow_status(self._followers),
            "router": {"loads": list(router.loads), "diverted": router.num_diverted, "leaked": router.num_leaked},
        }


class _Answers(Collector):
    """Counts and times of answers, put together when they are asked for: counting a request with the objects of
    prometheus_client takes as long as parsing it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._times: dict[tuple[str, str], Histogram] = {}

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._counts[route, status] = self._counts.get((route, status), 0) + 1
        key = (route, outcome_of(status))
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = Histogram()
        times.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        answers = CounterMetricFamily("nestrec_requests", "Answers by route and status", labels=["route", "status"])
        for (route, status), count in self._counts.items():
            answers.add_metric([route, str(status)], count)
        yield answers
        seconds = HistogramMetricFamily(
            "nestrec_request_duration_seconds", "Time to answer", labels=["route", "outcome"]
        )
        for labels, times in self._times.items():
            seconds.add_metric(labels, times.buckets(), times.seconds)
        yield seconds


def outcome_of(status: int) -> str:
    """How a request ended, for those who look at times: a refusal takes none, and says nothing about the others."""
    match status:
        case 429 | 503:
            return "refused"
        case 499:
            return "gone"
        case _ if status >= 500:
            return "failed"
        case _:
            return "answered" if status < 400 else "rejected"
