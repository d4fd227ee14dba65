"""State and counts of the engines: for Prometheus, by conventional names, and for the live page.

Labels are bounded: roles, versions in service, kinds of events and tables of a model. None is the id of a user or item.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nestrec.base.config import to_plain
from nestrec.serving.background import FAILURES
from nestrec.serving.histogram import Histogram
from nestrec.serving.model.spec import shown_version
from nestrec.serving.safety.safety import Safety
from nestrec.serving.service import Service

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
        "host_s": max(engine.host_s for engine in fleet.engines),
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

    def __init__(self, safety: Callable[[], Safety | None]):
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
