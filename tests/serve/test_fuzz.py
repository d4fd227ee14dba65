"""Schema-fuzzed requests: whatever JSON comes, the answer is never an error of the server, and nothing leaks."""

import asyncio
import json
import random

import httpx
import pytest

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.api.app import App
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.model.random_model import random_ranking, random_retrieval
from nestrec.serving.service import Service, ServiceConfig

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=32, time_bias=True)
PATHS = ["/v1/rank", "/v1/preinfer", "/v1/recommend", "/v1/events"]
FIELDS = ["user", "history", "user_features", "now_ms", "timeout_ms", "candidates", "candidate_features", "k",
          "exclude_seen", "exclude", "allow", "context", "unknown", "num_candidates", "items",
          "times_ms", "actions", "features", "tab", "nonsense"]  # fmt: skip


def any_value(rng, depth=0):
    leaf = [
        None,
        True,
        False,
        "drop",
        "score",
        "refuse",
        0,
        1,
        -1,
        2**31,
        2**63,
        2**64,
        -(2**63) - 1,
        10**400,
        0.5,
        1e308,
        "",
        "1",
        "home",
        "x" * 300,
        "\u0000",
        "\ud7ff",
        "é" * 9,
        [],
        {},
    ]
    if depth < 3 and rng.random() < 0.35:
        if rng.random() < 0.5:
            return [any_value(rng, depth + 1) for _ in range(rng.randint(0, 6))]
        return {rng.choice(FIELDS): any_value(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    return rng.choice(leaf)


def valid(rng, path):
    count = rng.randint(0, 40)
    body = {
        "user": rng.choice(["a", "b", 7]),
        "history": {
            "items": [rng.choice([1, "2", "none", -5]) for _ in range(count)],
            "times_ms": sorted(rng.randint(0, 10**12) for _ in range(count)),
            "actions": [rng.choice([0, 3, "click", ["click", "like"], []]) for _ in range(count)],
            "features": {"tab": [rng.choice(["home", None, 3]) for _ in range(count)]},
        },
        "now_ms": rng.randint(0, 10**12),
    }
    if path == "/v1/events":
        return {"user": body["user"], "history": body["history"]}
    if path == "/v1/recommend":
        body |= {"exclude": [3, "none"], "allow": [*range(5, 40)]} if rng.random() < 0.5 else {}
    if path == "/v1/rank":
        body["candidates"] = [rng.randint(1, 60) for _ in range(rng.randint(1, 30))]
    if path in ("/v1/rank", "/v1/recommend"):
        body["context"] = {"tab": rng.choice(["home", "nowhere", None])}
    return {**body, "unknown": rng.choice(["last", "score", "drop", "refuse"])} if rng.random() < 0.5 else body


def places(value, path=()):
    """Paths of everything inside a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def fuzzed(rng, path):
    if rng.random() < 0.1:
        return any_value(rng)
    body = valid(rng, path)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        *outer, last = rng.choice([p for p in places(body) if p])
        target = body
        for key in outer:
            target = target[key]
        if rng.random() < 0.2 and isinstance(target, dict):
            del target[last]
            target[rng.choice(FIELDS)] = any_value(rng)
        else:
            target[last] = any_value(rng)
        if not isinstance(body.get("history", {}), dict):
            break
    if isinstance(body.get("history"), dict) and rng.random() < 0.2:  # events of one user, one time after the other
        body["user"], body["history"][rng.choice(["items", "times_ms", "actions", "features"])] = "a", None
    return body


@pytest.mark.parametrize("count", [1_500, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_schema_fuzzed_requests_are_answered_or_refused(count, caplog):
    rng = random.Random(count)
    service = Service(
        {"retrieval": random_retrieval(ENCODER, num_items=50), "ranking": random_ranking(ENCODER, num_items=50)},
        ServiceConfig(preranked=10),
    )
    app = App(service, LimitsConfig(max_history=60, max_candidates=40, default_timeout_ms=10_000))
    statuses = {}

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for _ in range(count):
                path = rng.choice(PATHS)
                content = json.dumps(fuzzed(rng, path)).encode("utf-8", "surrogatepass")
                response = await client.post(path, content=content, headers={"content-type": "application/json"})
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                assert response.status_code in (200, 202, 400, 429, 503), (response.status_code, content)

    asyncio.run(run())
    assert statuses[200] > count // 20
    assert statuses[400] > count // 4
    for fleet in service.fleets.values():
        for engine in fleet.engines:
            assert engine.drain(30.0)
            engine.tiers.device.check()
            assert all(entry.pins == 0 for entry in engine.tiers.device.entries()), "a pin leaked"
            assert engine.counts.get("failed", 0) == 0
    assert service.router.loads == [0]
    service.close()
    assert not caplog.records, "nothing of a request may reach the log"
