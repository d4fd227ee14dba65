"""Counters and latencies for Prometheus and for the live page. No id of a user or an item enters them."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nestrec.serving.api.engine_metrics import (
    BackgroundCollector,
    EngineCollector,
    FilesCollector,
    RefusalCollector,
    engine_status,
)
from nestrec.serving.api.follow_metrics import FollowCollector, follow_status
from nestrec.serving.api.timeline import STEP_S, ServingTimeline
from nestrec.serving.background import FAILURES
from nestrec.serving.histogram import Histogram
from nestrec.serving.safety.safety import Safety
from nestrec.serving.service import Service
from nestrec.serving.versions.follower import VersionFollower

_WINDOW = 4096


class Metrics:
    """Observed by the front, on the thread of its event loop."""

    def __init__(self, service: Service, followers: Mapping[str, VersionFollower] | None = None):
        """followers: of models that come from addresses, by role."""
        self._service, self._followers = service, {} if followers is None else followers
        self._answers = _Answers()
        self._registry = CollectorRegistry()
        self._registry.register(self._answers)
        self._registry.register(EngineCollector(service))
        self.refusals: Mapping[str, int] = {}
        """requests that the gate let not in, by reason"""
        self._registry.register(RefusalCollector(lambda: self.refusals))
        self.safety: Safety | None = None
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
