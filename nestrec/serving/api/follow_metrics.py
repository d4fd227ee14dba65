"""How models follow their addresses: for Prometheus and for the live page."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nestrec.serving.versions.follower import VersionFollower

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
            counts, freshness = follower.counts, follower.told_freshness()
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
        counts, last = follower.counts, follower.told_freshness().last
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
