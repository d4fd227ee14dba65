"""Counters and latencies for Prometheus and for the live page. No id of a user or an item enters them."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nestrec.serving.histogram import Histogram
from nestrec.serving.service import Service

_WINDOW = 4096


class Metrics:
    """Observed by the front, on the thread of its event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._answers = _Answers()
        self._registry = CollectorRegistry()
        self._registry.register(self._answers)
        self._registry.register(_EngineCollector(service))
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._answers.observe(route, status, seconds)
        if status == 200 and route.startswith("/v1"):
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
            "router": {"loads": list(router.loads), "diverted": router.num_diverted, "leaked": router.num_leaked},
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
        "version": fleet.servable.version[:12],
        "counts": counts,
        "queued_s": sum(engine.queued_s for engine in fleet.engines),
        "device_pages_used": sum(t.device.num_pages - t.device.num_free_pages for t in tiers),
        "device_pages": sum(t.device.num_pages for t in tiers),
        "dram_bytes_used": sum(t.dram.num_bytes for t in tiers),
        "dram_bytes": sum(t.dram.max_bytes for t in tiers),
        "break_even_tokens": tiers[0].break_even_tokens(),
        "tables": {name: table.statistics() for name, table in fleet.servable.tables.items()},
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
        seconds = HistogramMetricFamily("nestrec_request_seconds", "Time to answer", labels=["route", "outcome"])
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


class _EngineCollector(Collector):
    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterable[Metric]:
        events = CounterMetricFamily("nestrec_engine_events", "Events of the engines", labels=["model", "event"])
        gauges = GaugeMetricFamily("nestrec_engine_state", "State of the engines", labels=["model", "what"])
        rows = CounterMetricFamily(
            "nestrec_table_rows",
            "Rows of cached tables asked for and not on the device",
            labels=["model", "table", "event"],
        )
        for role in self._service.fleets:
            status = engine_status(self._service, role)
            for name, count in status["counts"].items():
                events.add_metric([role, name], count)
            for name in ("queued_s", "device_pages_used", "device_pages", "dram_bytes_used", "dram_bytes"):
                gauges.add_metric([role, name], status[name])
            for name, counts in status["tables"].items():
                for event in ("asked", "missed"):
                    rows.add_metric([role, name, event], counts[event])
        yield rows
        yield events
        yield gauges
        yield from self._times()
        router = CounterMetricFamily("nestrec_router_events", "Routes off a user's own instance", labels=["event"])
        router.add_metric(["diverted"], self._service.router.num_diverted)
        router.add_metric(["leaked"], self._service.router.num_leaked)
        yield router

    def _times(self) -> Iterable[Metric]:
        """Of ranking requests that were answered."""
        queued = HistogramMetricFamily("nestrec_queue_seconds", "Time in the queue of an engine", labels=["model"])
        computed = HistogramMetricFamily("nestrec_compute_seconds", "Time of the batches", labels=["model"])
        for role, fleet in self._service.fleets.items():
            for family, times in (
                (queued, Histogram.sum_of(engine.queue_times for engine in fleet.engines)),
                (computed, Histogram.sum_of(engine.compute_times for engine in fleet.engines)),
            ):
                family.add_metric([role], times.buckets(), times.seconds)
        yield queued
        yield computed
