"""Counts and times of answers as Prometheus reads them."""

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from nestrec.serving.core.cost_model import BOUNDS_S
from nestrec.serving.http.server_metrics import _Answers, outcome_of


def samples(registry):
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if not line.startswith("#") and "_created" not in line}


def test_answers_are_counted_as_by_the_objects_of_the_library():
    ours = CollectorRegistry()
    theirs = CollectorRegistry()
    answers = _Answers()
    ours.register(answers)
    count = Counter("nestrec_requests", "Answers by route and status", ["route", "status"], registry=theirs)
    times = Histogram(
        "nestrec_request_duration_seconds", "Time", ["route", "outcome"], buckets=BOUNDS_S, registry=theirs
    )
    rng = random.Random(1)
    for _ in range(500):
        route, status = rng.choice(["/v1/rank", "other"]), rng.choice([200, 202, 400, 429, 499, 500, 503])
        seconds = rng.choice([*BOUNDS_S, 0.0, 9.0, 0.25])
        answers.observe(route, status, seconds)
        count.labels(route, str(status)).inc()
        times.labels(route, outcome_of(status)).observe(seconds)
    assert samples(ours) == samples(theirs)
