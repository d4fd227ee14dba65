"""Metrics of the server: collectors for Prometheus, and the status and time series of the live page.

Names follow the Prometheus conventions. The number of label values is bounded (routes, statuses, roles, model versions,
event types, tables); user ids and item ids are never labels. `ServingTimeline` keeps one sample per second of the last
ten minutes.
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
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.inference_service import Service
from nestrec.serving.service.version_follower import VersionFollower

_GAUGES = {
    "queued_s": ("nestrec_engine_queue_seconds", "Estimated device time of queued work"),
    "transit_s": ("nestrec_engine_transit_seconds", "90th percentile of the time between HTTP and engine, both ways"),
    "host_s": ("nestrec_engine_batch_host_seconds", "Host time per batch"),
    "loaded_at_s": ("nestrec_model_loaded_timestamp_seconds", "Time at which this process loaded the model"),
    "exported_at_s": ("nestrec_model_exported_timestamp_seconds", "Time at which the model was exported"),
}
_KV_CACHE_GAUGES = {
    "device_pages_used": ("nestrec_kv_cache_used_pages", "device", "Pages of the KV cache in use"),
    "device_pages": ("nestrec_kv_cache_pages", "device", "Pages of the KV cache"),
    "host_bytes_used": ("nestrec_kv_cache_used_bytes", "host", "Bytes of the KV cache in use"),
    "host_bytes": ("nestrec_kv_cache_bytes", "host", "Capacity of the KV cache in bytes"),
}
"""Field of `engine_status` to the name of the gauge, its label `tier`, and its help text."""


def engine_status(service: Service, role: str) -> dict[str, Any]:
    """Return the version, counters and cache fill of a model, summed over its engines."""
    deployment = service.deployment(role)
    counts: dict[str, int] = {}
    for engine in deployment.engines:
        for name, count in dict(engine.counts).items():
            counts[name] = counts.get(name, 0) + count
    tiers = [engine.tiers for engine in deployment.engines]
    return {
        "version": short_version(deployment.servable.version),
        "loaded_at_s": deployment.loaded_at_s,
        "exported_at_s": deployment.servable.exported_at_s,
        "counts": counts,
        "queued_s": sum(engine.queued_s for engine in deployment.engines),
        "transit_s": max(engine.trigger.transit_s for engine in deployment.engines),
        "host_s": max(engine.pacer.host_s for engine in deployment.engines),
        "device_s": sum(engine.device_s for engine in deployment.engines),
        "device_pages_used": sum(t.device.num_pages - t.device.num_free_pages for t in tiers),
        "device_pages": sum(t.device.num_pages for t in tiers),
        "host_bytes_used": sum(t.host_cache.num_bytes for t in tiers),
        "host_bytes": sum(t.host_cache.max_bytes for t in tiers),
        "break_even_tokens": tiers[0].break_even_tokens(),
        "precision": to_plain(deployment.servable.precision),
        "tables": {name: table.statistics() for name, table in deployment.servable.tables.items()},
    }


class EngineCollector(Collector):
    """Prometheus collector of the engines of a service; reads their counters when it is scraped."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterable[Metric]:
        states = {role: engine_status(self._service, role) for role in self._service.deployments}
        yield from _gauges(states)
        yield from _counts(states)
        yield from self._about_models()
        yield from self._times()
        router = CounterMetricFamily(
            "nestrec_engine_router_events",
            "Requests routed to a different engine than the preferred one",
            labels=["event"],
        )
        router.add_metric(["diverted"], self._service.router.num_diverted)
        router.add_metric(["spilled"], self._service.router.num_spilled)
        yield router
        yield GaugeMetricFamily("nestrec_ready", "Whether requests can be served", float(self._service.is_ready))
        has_failed = float(self._service.reloads.has_failed)
        yield GaugeMetricFamily(
            "nestrec_model_last_reload_failed",
            "1 if the last reload failed and the previous model still serves",
            has_failed,
        )

    def _about_models(self) -> Iterable[Metric]:
        info = InfoMetricFamily("nestrec_model", "Model in service", labels=["model"])
        for role, deployment in self._service.deployments.items():
            servable = deployment.servable
            info.add_metric([role], {"version": short_version(servable.version), "name": servable.spec.name})
        yield info

    def _times(self) -> Iterable[Metric]:
        """Yield the histograms of the queue time and device time of completed ranking requests."""
        queued = HistogramMetricFamily(
            "nestrec_engine_queue_duration_seconds", "Queue time of ranking requests", labels=["model"]
        )
        computed = HistogramMetricFamily(
            "nestrec_engine_compute_duration_seconds",
            "Device time of the batches of ranking requests",
            labels=["model"],
        )
        for role, deployment in self._service.deployments.items():
            for family, times in (
                (queued, Histogram.sum_of(engine.queue_times for engine in deployment.engines)),
                (computed, Histogram.sum_of(engine.compute_times for engine in deployment.engines)),
            ):
                family.add_metric([role], times.buckets(), times.seconds)
        yield queued
        yield computed


class BackgroundCollector(Collector):
    """Prometheus collector of failures of background threads and tasks in this process."""

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "nestrec_background_failures", "Exceptions of background threads, which continue", labels=["task"]
        )
        for task, count in sorted(FAILURES.counts.items()):
            family.add_metric([task], count)
        yield family


class FilesCollector(Collector):
    """Prometheus collector of the age of key and certificate files, which the server reads again when they change.

    Args:
        security: Returns the security of the server; None if it is not known yet.
    """

    def __init__(self, security: Callable[[], ServerSecurity | None]):
        self._security = security

    def collect(self) -> Iterable[Metric]:
        ages = GaugeMetricFamily(
            "nestrec_file_age_seconds",
            "Time since the keys or the certificate in use were last known to match their files",
            labels=["file"],
        )
        expiry = GaugeMetricFamily(
            "nestrec_certificate_expiry_timestamp_seconds", "Expiry time of the certificate in use (Unix seconds)"
        )
        security = self._security()
        for name, age_s in (security.file_ages_s if security is not None else {}).items():
            ages.add_metric([name], age_s)
        if security is not None and security.certificate_expiry_s is not None:
            expiry.add_metric([], security.certificate_expiry_s)
        yield from (ages, expiry)


class AuthFailureCollector(Collector):
    """Prometheus collector of failed authentications.

    Args:
        auth_failures: Returns the number of rejected requests by reason.
    """

    def __init__(self, auth_failures: Callable[[], Mapping[str, int]]):
        self._auth_failures = auth_failures

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "nestrec_auth_failures",
            "Requests that authentication or rate limits rejected, by reason",
            labels=["reason"],
        )
        for reason, count in sorted(self._auth_failures().items()):
            family.add_metric([reason], count)
        yield family


def _gauges(states: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    for field, (name, description) in _GAUGES.items():
        family = GaugeMetricFamily(name, description, labels=["model"])
        for role, state in states.items():
            if state[field] is not None:
                family.add_metric([role], state[field])
        yield family
    for field, (name, tier, description) in _KV_CACHE_GAUGES.items():
        family = GaugeMetricFamily(name, description, labels=["model", "tier"])
        for role, state in states.items():
            family.add_metric([role, tier], state[field])
        yield family


def _counts(states: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    """Yield the counters of the engines: rank_SOURCE and preinfer_OUTCOME become labels, other names are events."""
    rankings = CounterMetricFamily(
        "nestrec_rank_requests", "Ranking requests by prefix-cache result", labels=["model", "cache_source"]
    )
    preinfers = CounterMetricFamily(
        "nestrec_preinfer_requests", "Pre-infer requests by outcome", labels=["model", "outcome"]
    )
    events = CounterMetricFamily("nestrec_engine_events", "Other events of the engines", labels=["model", "event"])
    busy = CounterMetricFamily("nestrec_engine_device_busy_seconds", "Device time of batches", labels=["model"])
    lookups = CounterMetricFamily(
        "nestrec_table_row_lookups", "Rows looked up in cached tables", labels=["model", "table"]
    )
    misses = CounterMetricFamily(
        "nestrec_table_row_misses", "Looked-up rows that were not in the device cache", labels=["model", "table"]
    )
    for role, state in states.items():
        busy.add_metric([role], state["device_s"])
        for name, count in state["counts"].items():
            kind, _, label = name.partition("_")
            family = {"rank": rankings, "preinfer": preinfers}.get(kind, events)
            family.add_metric([role, name if family is events else label], count)
        for name, counts in state["tables"].items():
            lookups.add_metric([role, name], counts["lookups"])
            misses.add_metric([role, name], counts["misses"])
    yield from (rankings, preinfers, events, busy, lookups, misses)


Followers = Callable[[], Mapping[str, VersionFollower]]
"""Function that returns the version followers by role."""


class FollowCollector(Collector):
    """Prometheus collector of models that follow the published versions of an address."""

    def __init__(self, followers: Followers):
        self._followers = followers

    def collect(self) -> Iterable[Metric]:
        events = CounterMetricFamily(
            "nestrec_model_versions_applied",
            "Model versions applied, as a delta or in full",
            labels=["model", "method"],
        )
        failures = CounterMetricFamily(
            "nestrec_model_poll_failures", "Failed polls for a newer model version", labels=["model", "reason"]
        )
        number = GaugeMetricFamily(
            "nestrec_model_version_number", "Number of the model version in service", labels=["model"]
        )
        behind = GaugeMetricFamily(
            "nestrec_model_versions_behind",
            "Newer model versions that are published, also while a version is pinned",
            labels=["model"],
        )
        parts = GaugeMetricFamily(
            "nestrec_model_freshness_part_seconds",
            "Time from an event to a response, by part",
            labels=["model", "part"],
        )
        total = HistogramMetricFamily(
            "nestrec_model_freshness_seconds",
            "Time from an event to the first response of a model that was trained on it",
            labels=["model"],
        )
        for role, follower in dict(self._followers()).items():
            counts = follower.counts
            freshness = follower.current_freshness()
            events.add_metric([role, "delta"], counts.applied)
            events.add_metric([role, "full"], counts.loaded)
            for reason, count in sorted(counts.failures.items()):
                failures.add_metric([role, reason], count)
            number.add_metric([role], follower.version_number)
            behind.add_metric([role], counts.versions_behind)
            total.add_metric([role], freshness.times.buckets(), freshness.times.seconds)
            for part, seconds in (freshness.last.to_json() if freshness.last is not None else {}).items():
                if seconds is not None:
                    parts.add_metric([role, part], seconds)
        yield from (events, failures, number, behind, parts, total)


def follow_status(followers: Mapping[str, VersionFollower]) -> dict[str, Any]:
    """Return the version, lag and freshness of each following model, by role, for the live page."""
    status = {}
    for role, follower in dict(followers).items():
        counts = follower.counts
        last = follower.current_freshness().last
        status[role] = {
            "address": str(follower.source),
            "number": follower.version_number,
            "behind": counts.versions_behind,
            "problem": counts.problem,
            "applied": counts.applied,
            "loaded": counts.loaded,
            "freshness_s": None if last is None else last.seconds,
            "parts_s": {} if last is None else last.to_json(),
        }
    return status


STEP_S = 1.0
"""Interval between two samples of the timeline in seconds."""
_MAX_SAMPLES = 600
"""Maximum number of samples in the timeline."""
_MAX_DURATIONS = 20_000
"""Maximum number of responses per sample whose durations enter the percentiles."""
_SOURCES = ("none", "device", "host")


class ServingTimeline:
    """Time series of the live page, one sample per second. Not thread-safe; use from one event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._samples: deque[dict[str, Any]] = deque(maxlen=_MAX_SAMPLES)
        self._outcomes: dict[str, int] = {}
        self._times: list[float] = []
        self._before: dict[str, int] = {}
        self._device_s = 0.0

    def observe(self, outcome: str, seconds: float) -> None:
        """Record a response."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        if outcome == "ok" and len(self._times) < _MAX_DURATIONS:
            self._times.append(seconds)

    def sample(self, now_s: float) -> None:
        """Add a sample: counts since the previous sample, and the current state.

        Args:
            now_s: Current time in Unix seconds.
        """
        outcomes, self._outcomes = self._outcomes, {}
        times, self._times = np.array(self._times), []
        states = [engine_status(self._service, role) for role in self._service.deployments]
        ranked = {source: sum(s["counts"].get(f"rank_{source}", 0) for s in states) for source in _SOURCES}
        busy_s = sum(state["device_s"] for state in states)
        quantiles = np.quantile(times, (0.5, 0.99)) * 1e3 if times.size else (None, None)
        exported = [state["exported_at_s"] for state in states if state["exported_at_s"] is not None]
        # A model swap resets the counters, hence the maximum with 0.
        since = {f"from_{s}": max(0, n - self._before.get(s, 0)) for s, n in ranked.items()}
        sample = {
            "at_s": now_s,
            "ok": outcomes.pop("ok", 0),
            "shed": outcomes.pop("shed", 0),
            "failed": sum(outcomes.values()),
            "p50_ms": quantiles[0],
            "p99_ms": quantiles[1],
            **since,
            "queued_ms": 1e3 * sum(state["queued_s"] for state in states),
            "device_busy": min(1.0, max(0.0, busy_s - self._device_s) / STEP_S),
            "device_cache": _share(states, "device_pages_used", "device_pages"),
            "host_cache": _share(states, "host_bytes_used", "host_bytes"),
            "age_s": None if not exported else now_s - min(exported),
            "versions": "+".join(state["version"] for state in states),
        }
        self._samples.append(sample)
        self._before = ranked
        self._device_s = busy_s

    def columns(self) -> dict[str, list[Any]]:
        """Return the values of all samples by name, oldest first."""
        samples = list(self._samples)
        return {name: [sample[name] for sample in samples] for name in (samples[0] if samples else ())}


def _share(states: list[dict[str, Any]], used: str, of: str) -> float:
    return float(sum(state[used] for state in states) / max(1, sum(state[of] for state in states)))


_WINDOW = 4096


class Metrics:
    """Metrics of a server. Not thread-safe; use from the event loop of the HTTP server.

    Args:
        service: Service whose engines are monitored.
        followers: Version followers of models from an address, by role.
    """

    def __init__(self, service: Service, followers: Mapping[str, VersionFollower] | None = None):
        self._service = service
        self._followers = {} if followers is None else followers
        self._responses = _ResponseCollector()
        self._registry = CollectorRegistry()
        self._registry.register(self._responses)
        self._registry.register(EngineCollector(service))
        self.auth_failures: Mapping[str, int] = {}
        """Number of requests that failed authentication, by reason."""
        self._registry.register(AuthFailureCollector(lambda: self.auth_failures))
        self.security: ServerSecurity | None = None
        """Keys and certificates of the server; None until `set_security` sets them."""
        self._registry.register(FilesCollector(lambda: self.security))
        self._registry.register(BackgroundCollector())
        self._registry.register(FollowCollector(lambda: self._followers))
        ProcessCollector(registry=self._registry)
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self.timeline = ServingTimeline(service)
        self.before_collect: Callable[[], Awaitable[None]] | None = None
        """Function that makes all frontend workers report their counters; None without frontend workers."""

    async def collect_from_workers(self) -> "Metrics":
        """Return these metrics after the frontend workers have reported their counters."""
        if self.before_collect is not None:
            await self.before_collect()
        return self

    async def sample(self) -> None:
        """Add a sample to the timeline every `STEP_S` seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            try:
                await self.collect_from_workers()
                self.timeline.sample(time.time())
            except Exception as error:
                FAILURES.add("nestrec-timeline", error)

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._responses.observe(route, status, seconds)
        if route.startswith("/v1"):
            self.timeline.observe(outcome_of(status), seconds)
            if status == 200:
                self._recent.append(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def status(self) -> dict[str, Any]:
        """Return the current status of the server for the live page."""
        recent = np.array(self._recent)
        percentiles = (
            {f"p{q}_ms": float(np.quantile(recent, q / 100) * 1e3) for q in (50, 90, 99)} if recent.size else {}
        )
        router = self._service.router
        reloads = self._service.reloads
        return {
            "reloads": {"requested": reloads.num_requested, "done": reloads.num_done, "failed": reloads.has_failed},
            "latency": {"responses": int(recent.size), **percentiles},
            "models": {role: engine_status(self._service, role) for role in self._service.deployments},
            "follow": follow_status(self._followers),
            "router": {"loads": list(router.loads), "diverted": router.num_diverted, "spilled": router.num_spilled},
        }


class _ResponseCollector(Collector):
    """Prometheus collector of the number and duration of HTTP responses.

    It creates the objects of prometheus_client only when it is scraped, because updating them for each request takes as
    long as parsing the request.
    """

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
        responses = CounterMetricFamily(
            "nestrec_http_requests", "HTTP responses by route and status", labels=["route", "status"]
        )
        for (route, status), count in self._counts.items():
            responses.add_metric([route, str(status)], count)
        yield responses
        durations = HistogramMetricFamily(
            "nestrec_http_request_duration_seconds", "Time from first byte to response", labels=["route", "outcome"]
        )
        for labels, times in self._times.items():
            durations.add_metric(labels, times.buckets(), times.seconds)
        yield durations


def outcome_of(status: int) -> str:
    """Return the outcome of a request, by which durations are reported separately: rejections take almost no time."""
    match status:
        case 429 | 503:
            return "shed"
        case 499:
            return "client_disconnected"
        case _ if status >= 500:
            return "failed"
        case _:
            return "ok" if status < 400 else "rejected"
