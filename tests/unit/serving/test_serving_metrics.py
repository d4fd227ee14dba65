"""Counts and durations of responses in the Prometheus format."""

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from nestrec.serving.core.cost_model import BOUNDS_S
from nestrec.serving.http.server_metrics import _ResponseCollector, outcome_of


def samples(registry):
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if not line.startswith("#") and "_created" not in line}


def test_response_metrics_equal_prometheus_client():
    found = CollectorRegistry()
    expected = CollectorRegistry()
    collector = _ResponseCollector()
    found.register(collector)
    count = Counter("nestrec_http_requests", "Responses by route and status", ["route", "status"], registry=expected)
    times = Histogram(
        "nestrec_http_request_duration_seconds", "Time", ["route", "outcome"], buckets=BOUNDS_S, registry=expected
    )
    rng = random.Random(1)
    for _ in range(500):
        route, status = rng.choice(["/v1/rank", "other"]), rng.choice([200, 202, 400, 429, 499, 500, 503])
        seconds = rng.choice([*BOUNDS_S, 0.0, 9.0, 0.25])
        collector.observe(route, status, seconds)
        count.labels(route, str(status)).inc()
        times.labels(route, outcome_of(status)).observe(seconds)
    assert samples(found) == samples(expected)
