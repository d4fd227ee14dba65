"""Data of the live page: samples over time, and the last requests of an engine."""

import asyncio

import httpx
import pytest

from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.http.server_metrics import ServingTimeline

EVENTS = {"items": [str(i) for i in range(1, 13)], "times_ms": list(range(12))}


def send_requests(app, *requests):
    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(run())


def test_timeline_sample_covers_time_since_last(service):
    timeline = ServingTimeline(service)
    for seconds in (0.001, 0.002, 0.003):
        timeline.observe("ok", seconds)
    timeline.observe("shed", 0.0)
    timeline.observe("rejected", 0.0)
    timeline.sample(1000.0)
    timeline.sample(1001.0)
    columns = timeline.columns()
    assert columns["at_s"] == [1000.0, 1001.0]
    assert (columns["ok"], columns["shed"], columns["failed"]) == ([3, 0], [1, 0], [1, 0])
    assert columns["p50_ms"] == [pytest.approx(2.0), None]
    assert columns["versions"] == [service.deployment("retrieval").servable.version[:12]] * 2
    for second in range(700):
        timeline.sample(1002.0 + second)
    assert len(timeline.columns()["at_s"]) == 600, "ten minutes of samples must be stored"


def test_timeline_reports_cache_sources_without_users(service):
    app = App(service, LimitsConfig(default_timeout_ms=10_000))
    body = {"user": "someone-secret", "history": EVENTS}
    rank = ("POST", "/v1/rank", {**body, "candidates": ["3", "4"]})
    *_, live = send_requests(app, rank, rank, ("GET", "/v1/live", None))
    first, second = live.json()["relay"]["retrieval"][-2:]
    assert (first["cache_source"], first["cached"]) == ("none", 0)
    assert second["cache_source"] == "device"
    assert second["cached"] > 0
    assert first["arrived_s"] < first["ended_s"] <= second["ended_s"] < 0.0
    assert (first["kind"], first["candidates"], first["preinfer"]) == ("rank", 2, None)
    assert 0.0 < first["computed_s"] <= first["ended_s"] - first["arrived_s"] + 1e-6
    parts = second["parts_ms"]
    assert set(parts) == {"in", "queue", "launch", "compute", "back"}
    assert min(parts.values()) >= 0.0
    inside_ms = sum(parts[name] for name in ("queue", "launch", "compute"))
    assert inside_ms == pytest.approx(1e3 * (second["ended_s"] - second["arrived_s"]), abs=0.01)
    assert "someone-secret" not in live.text
