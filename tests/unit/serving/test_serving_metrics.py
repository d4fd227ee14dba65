"""Counts and times of answers as Prometheus reads them."""

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from nestrec.serving.api.metrics import _BOUNDS_S, _Answers


def samples(registry):
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if not line.startswith("#") and "_created" not in line}


def test_answers_are_counted_as_by_the_objects_of_the_library():
    ours, theirs, answers = CollectorRegistry(), CollectorRegistry(), _Answers()
    ours.register(answers)
    count = Counter("nestrec_requests", "Answers by route and status", ["route", "status"], registry=theirs)
    times = Histogram("nestrec_request_seconds", "Time", ["route"], buckets=_BOUNDS_S, registry=theirs)
    rng = random.Random(1)
    for _ in range(500):
        route, status = rng.choice(["/v1/rank", "other"]), rng.choice([200, 400, 429])
        seconds = rng.choice([*_BOUNDS_S, 0.0, 9.0, 0.25])
        answers.observe(route, status, seconds)
        count.labels(route, str(status)).inc()
        times.labels(route).observe(seconds)
    assert samples(ours) == samples(theirs)
