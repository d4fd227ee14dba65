"""HTTP application: responses, limits at and above their maximum, load shedding and model swaps."""

import asyncio
import gzip
import json
import re
import threading
import time
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
from serving_oracle import oracle_scores

from nestrec.base.errors import UserError
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.rejections import OverloadedError
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.reference_runner import InFlightBatch
from nestrec.serving.http.http_app import App
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=16, num_layers=2, num_heads=2, head_dim=8, max_length=64, time_bias=True)
LIMITS = LimitsConfig(
    max_body_bytes=20_000,
    max_history_events=50,
    max_candidates=20,
    max_k=15,
    max_user_id_length=8,
    expose_cache_source=True,
    default_timeout_ms=10_000,
)
CONFIG = ServiceConfig(
    engine=EngineConfig(
        prefix_cache=PrefixCacheConfig(device_bytes=1 << 20, page_tokens=4),
        max_queue_delay_s=1e9,
        preinfer=TriggerConfig(policy="all", burst_s=1e9),
    ),
    history_stride=1,
    num_retrieved=12,
)


@pytest.fixture(scope="module")
def models():
    return {"retrieval": random_retrieval(ENCODER, num_items=100), "ranking": random_ranking(ENCODER, num_items=100)}


@pytest.fixture
def service(models):
    service = Service(models, CONFIG)
    yield service
    service.close()


@pytest.fixture
def app(service):
    return App(service, LIMITS)


def call(app, method, path, body=None, *, content=None, headers=None):
    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, json=body, content=content, headers=headers)

    return asyncio.run(run())


def rank_body(num_events=5, num_candidates=4, **changes):
    events = range(num_events)
    return {
        "user": "ann",
        "history": {
            "items": [1 + e for e in events],
            "times_ms": [1000 * e for e in events],
            "actions": [e % 4 for e in events],
            "features": {"tab": ["home" if e % 2 else "search" for e in events]},
        },
        "candidates": [str(10 + c) for c in range(num_candidates)],
        "candidate_features": {"tab": ["home"] * num_candidates},
        "now_ms": 10_000_000,
        **changes,
    }


def test_http_rank_scores_equal_reference(app, models):
    history = History(
        items=np.arange(1, 6),
        times_ms=1000 * np.arange(5),
        actions=np.arange(5) % 4,
        features={"event_tab": np.array([2, 1, 2, 1, 2])},
    )
    candidates = Candidates(items=np.arange(10, 14), now_ms=10_000_000, features={"event_tab": np.ones(4, np.int64)})
    expected = oracle_scores(models["ranking"], history, candidates, 1)
    for source in ("none", "device"):
        response = call(app, "POST", "/v1/rank", rank_body())
        assert response.status_code == 200
        ranked = response.json()
        found = np.stack([ranked["scores"]["click"], ranked["scores"]["like"]], axis=1)
        assert np.abs(found - expected).max() <= 1e-5
        assert ranked["cache_source"]["from"] == source


def test_preinfer_is_followed_by_prefix_cache_hit(app, service):
    preinfer = {k: v for k, v in rank_body(user="bob").items() if not k.startswith("candidate")}
    response = call(app, "POST", "/v1/preinfer", {**preinfer, "num_candidates": 4})
    assert (response.status_code, response.json()["admitted"]) == (202, True)
    assert service.deployment("ranking").engines[0].wait_until_idle(30.0)
    assert call(app, "POST", "/v1/rank", rank_body(user="bob")).json()["cache_source"] == {
        "from": "device",
        "tokens": 10,
    }


def test_http_delete_cache_drops_cached_prefix(app):
    call(app, "POST", "/v1/rank", rank_body(user="cleo"))
    assert call(app, "DELETE", "/v1/users/cleo/cache").status_code == 204
    assert call(app, "POST", "/v1/rank", rank_body(user="cleo")).json()["cache_source"]["from"] == "none"


def test_http_recommend_without_ranker_searches_catalog(models):
    service = Service({"retrieval": models["retrieval"]}, CONFIG)
    app = App(service, LIMITS)
    history = {"items": [3, 4, 5], "times_ms": [1, 2, 3]}
    response = call(app, "POST", "/v1/recommend", {"user": 7, "history": history, "k": 10, "now_ms": 99}).json()
    candidates = Candidates(items=np.arange(1, 101), now_ms=99)
    past = History(items=np.array([3, 4, 5]), times_ms=np.array([1, 2, 3]), actions=np.zeros(3, np.int64))
    scores = oracle_scores(models["retrieval"], past, candidates, 1)[:, 0]
    scores[[2, 3, 4]] = -np.inf
    assert response["items"] == [str(i + 1) for i in np.argsort(-scores, kind="stable")[:10]]
    assert call(app, "POST", "/v1/rank", {"user": "a", "history": history, "candidates": [1]}).status_code == 200
    service.close()


def test_cascade_ranks_retrieved_items(app, service):
    body = {k: v for k, v in rank_body().items() if not k.startswith("candidate")}
    response = call(app, "POST", "/v1/recommend", {**body, "k": 5, "context": {"tab": "home"}}).json()
    assert len(response["items"]) == 5
    assert response["scores"]["click"] == sorted(response["scores"]["click"], reverse=True)
    assert not set(response["items"]) & {str(i) for i in body["history"]["items"]}
    counts = service.deployment("ranking").engines[0].counts
    assert counts["preinfer_admitted"] == 1, "the prefill for ranking starts before retrieval"


@pytest.mark.parametrize(
    ("at_limit", "above"),
    [
        (rank_body(num_events=50), rank_body(num_events=51)),
        (rank_body(num_candidates=20), rank_body(num_candidates=21)),
        (rank_body(user="x" * 8), rank_body(user="x" * 9)),
        (rank_body(timeout_ms=10_000), rank_body(timeout_ms=10_001)),
        (rank_body(now_ms=7_258_118_400_000), rank_body(now_ms=7_258_118_400_001)),
        (rank_body(num_candidates=1), rank_body(num_candidates=0)),
        (rank_body(user="x"), rank_body(user="")),
    ],
)
def test_http_limits_at_and_above_maximum(app, at_limit, above):
    assert call(app, "POST", "/v1/rank", at_limit).status_code == 200
    response = call(app, "POST", "/v1/rank", above)
    assert response.status_code == 400
    assert response.json()["error"]["field"]


def test_default_deadline_must_be_within_limit():
    assert LimitsConfig(default_timeout_ms=2000, max_timeout_ms=2000).default_timeout_ms == 2000
    with pytest.raises(UserError, match=r"limits\.default_timeout_ms=2001: must not exceed --limits\.max_timeout_ms"):
        LimitsConfig(default_timeout_ms=2001, max_timeout_ms=2000)


def test_http_k_limit_at_and_above_maximum(app):
    body = {k: v for k, v in rank_body().items() if k != "candidates"} | {"candidate_features": {"tab": None}}
    assert len(call(app, "POST", "/v1/recommend", {**body, "k": 15}).json()["items"]) == 15
    assert call(app, "POST", "/v1/recommend", {**body, "k": 16}).status_code == 400


@pytest.mark.parametrize("is_chunked", [False, True])
def test_http_body_limit_at_and_above_maximum(app, is_chunked):
    content = json.dumps(rank_body()).encode()
    for padding, status in ((20_000 - len(content), 200), (20_001 - len(content), 413)):
        padded = content + b" " * padding

        async def chunks(padded=padded):
            for start in range(0, len(padded), 1000):
                yield padded[start : start + 1000]

        body = chunks() if is_chunked else padded
        response = call(app, "POST", "/v1/rank", content=body, headers={"content-type": "application/json"})
        assert response.status_code == status


def test_http_json_nesting_limit_at_and_above_maximum(app):
    for depth, problem in ((1024, "must be text"), (1025, "not valid JSON"), (6000, "not valid JSON")):
        content = b'{"user":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
        response = call(app, "POST", "/v1/rank", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert problem in response.json()["error"]["message"]


def test_preinfer_candidates_limit_at_and_above_maximum(app):
    body = {k: v for k, v in rank_body().items() if not k.startswith("candidate")}
    for count, status in ((20, 202), (21, 400)):
        assert call(app, "POST", "/v1/preinfer", {**body, "num_candidates": count}).status_code == status


@pytest.mark.parametrize(
    "change",
    [
        {"user": None},
        {"user": ["a"]},
        {"user": True},
        {"history": []},
        {"history": {"items": "abc"}},
        {"history": {"items": [1.5]}},
        {"history": {"items": [[1]]}},
        {"history": {"items": [1], "times_ms": [1, 2]}},
        {"history": {"items": [1, 2], "times_ms": [2, 1]}},
        {"history": {"items": [1], "times_ms": [1], "actions": [4]}},
        {"history": {"items": [1], "times_ms": [1], "actions": [-1]}},
        {"history": {"items": [1]}},
        {"history": {"items": [1], "times_ms": [1], "features": {"tab": [1, 2]}}},
        {"history": {"items": [1], "times_ms": [1], "features": {"none": [1]}}},
        {"history": {"items": [1], "times_ms": [10**30]}},
        {"candidates": {}},
        {"candidates": [None]},
        {"candidate_features": {"tab": ["home"]}},
        {"now_ms": "1"},
        {"timeout_ms": 0},
        {"extra": 1},
        {"user_features": {"age": 1}},
        {"user_features": []},
    ],
)
def test_http_invalid_field_is_named(app, change):
    response = call(app, "POST", "/v1/rank", {**rank_body(), **change})
    assert response.status_code == 400
    assert response.json()["error"]["field"].split(".")[0] == next(iter(change))


def test_http_recommend_requires_events(app):
    for history in ({}, {"history": {"items": []}}):
        response = call(app, "POST", "/v1/recommend", {"user": "new", "k": 3, **history})
        assert (response.status_code, response.json()["error"]["field"]) == (400, "history")
    body = {"user": "new", "candidates": [3, 4], "context": {"tab": "home"}}
    assert call(app, "POST", "/v1/rank", body).status_code == 200, "ranking models are also trained on first events"


def test_http_unsupported_routes_are_rejected(app):
    assert call(app, "GET", "/v1/rank").status_code == 405
    assert call(app, "POST", "/metrics").status_code == 405
    assert call(app, "GET", "/v1/users/a/cache").status_code == 405
    assert call(app, "GET", "/admin").status_code == 404
    assert call(app, "POST", "/v1/rank", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    rejected = call(app, "POST", "/v1/rank", content=gzip.compress(json.dumps(rank_body()).encode()), headers=headers)
    assert (rejected.status_code, rejected.json()["error"]["field"]) == (415, "content-encoding")


def test_http_health_metrics_openapi_and_page(app):
    call(app, "POST", "/v1/rank", rank_body(user="secretid"))
    assert call(app, "GET", "/health/live").status_code == 200
    assert call(app, "GET", "/health/ready").status_code == 200
    metrics = call(app, "GET", "/metrics").text
    assert 'nestrec_http_requests_total{route="/v1/rank",status="200"} 1.0' in metrics
    assert "secretid" not in metrics
    assert "secretid" not in call(app, "GET", "/v1/status").text
    assert "/v1/rank" in call(app, "GET", "/openapi.json").json()["paths"]
    assert "nestrec serving" in call(app, "GET", "/").text


def test_http_overload_response_has_retry_after(app, service, monkeypatch):
    def reject(*_, **__):
        raise OverloadedError("busy", 0.3)

    monkeypatch.setattr(service.deployment("ranking").engines[0], "submit_rank", reject)
    response = call(app, "POST", "/v1/rank", rank_body())
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


def test_http_requests_skip_dead_engine(models):
    service = Service({"ranking": models["ranking"]}, replace(CONFIG, engines_per_model=2))
    app = App(service, LIMITS)
    users = [f"u{i}" for i in range(20)]
    before = [call(app, "POST", "/v1/rank", rank_body(user=user)).json()["scores"] for user in users]
    assert all(engine.counts.get("rank_none") for engine in service.deployment("ranking").engines), (
        "both engines are used"
    )
    service.deployment("ranking").engines[0].close()
    after = [call(app, "POST", "/v1/rank", rank_body(user=user)) for user in users]
    assert [response.status_code for response in after] == [200] * 20
    for old, new in zip(before, after, strict=True):
        assert np.abs(np.array(old["click"]) - np.array(new.json()["scores"]["click"])).max() <= 1e-5
    assert call(app, "GET", "/health/ready").status_code == 200
    service.close()


def test_http_model_swap_under_load_is_atomic(models):
    other = random_ranking(ENCODER, num_items=100, seed=9)
    service = Service({"ranking": models["ranking"]}, CONFIG)
    app = App(service, LIMITS)

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            responses = []

            async def rank(number):
                responses.append(await client.post("/v1/rank", json=rank_body(user=f"u{number % 9}")))

            loop = asyncio.get_running_loop()
            for swap_number in range(6):
                batch = [asyncio.create_task(rank(i)) for i in range(30)]
                await asyncio.sleep(0)
                servable = (other, models["ranking"])[swap_number % 2]
                await asyncio.gather(loop.run_in_executor(None, service.swap, servable), *batch)
            return responses

    responses = asyncio.run(run())
    assert [response.status_code for response in responses] == [200] * 180
    scores = {}
    for response in responses:
        scores.setdefault(response.json()["model"], []).append(response.json()["scores"]["click"])
    assert set(scores) == {models["ranking"].version[:12], other.version[:12]}
    for found in scores.values():
        assert np.ptp(np.array(found), axis=0).max() <= 1e-5
    service.close()


def test_http_model_swap_without_memory_keeps_old_model(models, monkeypatch):
    cfg = replace(CONFIG, engines_per_model=2)
    service = Service({"ranking": models["ranking"]}, cfg)
    app = App(service, LIMITS)
    pools = []
    empty = torch.empty
    other = random_ranking(ENCODER, num_items=100, seed=9)

    def fail_second_allocation(shape, **options):
        pools.extend([shape] if isinstance(shape, tuple) and len(shape) == 5 else [])
        if len(pools) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(shape, **options)

    before = call(app, "POST", "/v1/rank", rank_body()).json()
    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fail_second_allocation)
        with pytest.raises(
            UserError, match=r"^service\.engine\.prefix_cache\.device_bytes=\d+: exceeds the available memory\. Set"
        ):
            service.swap(other)
    assert set(threading.enumerate()) <= threads, "the engine with memory was closed again"
    after = call(app, "POST", "/v1/rank", rank_body()).json()
    assert after["model"] == before["model"]
    assert after["scores"] == before["scores"]
    service.close()


def test_http_stored_events_replace_missing_history(app):
    body = rank_body(user="dora")
    history = body.pop("history")
    cut = lambda values, part: values[part] if isinstance(values, list) else {"tab": values["tab"][part]}  # noqa: E731
    parts = [{name: cut(values, part) for name, values in history.items()} for part in (slice(3), slice(3, None))]
    for number, part in enumerate(parts):
        response = call(app, "POST", "/v1/events", {"user": "dora", "history": part})
        assert (response.status_code, response.json()) == (202, {"events": (3, 5)[number]})
    found = call(app, "POST", "/v1/rank", body).json()["scores"]
    assert found == call(app, "POST", "/v1/rank", rank_body(user="dora2")).json()["scores"]
    for part in reversed(parts):
        assert call(app, "POST", "/v1/events", {"user": "dora3", "history": part}).status_code == 202
    late = call(app, "POST", "/v1/rank", {**body, "user": "dora3"}).json()["scores"]
    assert late == found, "late events are sorted by time"
    short = {**body, "history": parts[0], "prefer_stored_history": True}
    assert call(app, "POST", "/v1/rank", short).json()["scores"] == found, "the stored history is preferred"
    alone = call(app, "POST", "/v1/rank", {**short, "user": "dora4"}).json()["scores"]
    assert alone == call(app, "POST", "/v1/rank", {**body, "user": "dora4", "history": parts[0]}).json()["scores"]
    assert call(app, "DELETE", "/v1/users/dora/cache").status_code == 204
    assert call(app, "POST", "/v1/rank", body).json()["scores"] == found, "deleting the cache keeps the events"
    assert call(app, "DELETE", "/v1/users/dora/events").status_code == 204
    assert call(app, "POST", "/v1/rank", body).json()["scores"] != found


def test_http_events_without_times_are_always_rejected(models):
    """A model that does not read times accepts histories without them, but stored events must suit any model."""
    encoder = replace(ENCODER, time_bias=False)
    service = Service({"retrieval": random_retrieval(encoder, num_items=100)}, CONFIG)
    app = App(service, LIMITS)
    for history in ({"items": [1], "times_ms": None}, {"items": [1]}, {"items": None, "times_ms": None}, None):
        for _ in range(2):
            response = call(app, "POST", "/v1/events", {"user": "eve", "history": history})
            assert (response.status_code, response.json()["error"]["field"]) == (400, "history")
    service.close()


def test_http_stored_history_may_exceed_request_limits(models):
    """A client cannot change a stored history, so it is accepted if it exceeds the limit or has unknown actions."""
    service = Service({"ranking": models["ranking"]}, CONFIG)
    app = App(service, LIMITS)
    body = rank_body(num_events=40, user="fay")
    history = body.pop("history")
    for part in (slice(20), slice(20, None)):
        events = {name: values[part] for name, values in history.items() if name != "features"}
        events["features"] = {"tab": history["features"]["tab"][part]}
        assert call(app, "POST", "/v1/events", {"user": "fay", "history": events}).status_code == 202
    shorter = App(service, replace(LIMITS, max_history_events=30), app._store)
    assert call(shorter, "POST", "/v1/rank", body).status_code == 200
    sent = call(shorter, "POST", "/v1/rank", rank_body(num_events=31, user="gil"))
    assert sent.status_code == 400, "the limit applies to histories of requests"
    service.close()
    spec = models["ranking"].spec
    fewer = {name: bit for name, bit in spec.action_bits.items() if bit == 1}
    assert fewer != spec.action_bits
    service = Service({"ranking": replace(models["ranking"], spec=replace(spec, action_bits=fewer))}, CONFIG)
    other = App(service, LIMITS, app._store)
    assert call(other, "POST", "/v1/rank", body).status_code == 200
    sent = call(other, "POST", "/v1/rank", rank_body(user="gil", history={**history, "actions": [3] * 40}))
    assert sent.status_code == 400
    service.close()


def test_http_item_id_limit_at_and_above_maximum(app):
    for length, status in ((256, 200), (257, 400)):
        assert call(app, "POST", "/v1/rank", rank_body(candidates=["x" * length] * 4)).status_code == status
        history = {**rank_body()["history"], "items": ["1", "2", 3, "x" * length, "5"]}
        assert call(app, "POST", "/v1/rank", rank_body(history=history)).status_code == status


def test_http_feature_text_limit_at_and_above_maximum(app):
    """The limit of feature values is that of texts, since a feature may be a text."""
    for length, status in ((4096, 200), (4097, 400)):
        history = {**rank_body()["history"], "features": {"tab": ["home"] * 4 + ["x" * length]}}
        assert call(app, "POST", "/v1/rank", rank_body(history=history)).status_code == status
        body = rank_body(candidate_features={"tab": "x" * length})
        assert call(app, "POST", "/v1/rank", body).status_code == status


def test_http_response_does_not_reveal_cached_history(service):
    """With `expose_cache_source`, a client that guesses a history of a user would learn whether it is cached."""
    app = App(service, replace(LIMITS, expose_cache_source=False))
    known = call(app, "POST", "/v1/rank", rank_body(user="hal")).json()
    guessed = call(app, "POST", "/v1/rank", rank_body(user="hal")).json()
    other = call(app, "POST", "/v1/rank", rank_body(user="hal", history={**rank_body()["history"], "items": [9] * 5}))
    assert known.keys() == guessed.keys() == other.json().keys()
    assert "cache_source" not in known
    assert known["scores"]["click"] == pytest.approx(guessed["scores"]["click"])
    body = {k: v for k, v in rank_body(user="hal").items() if not k.startswith("candidate")}
    assert "cache_source" not in call(app, "POST", "/v1/recommend", {**body, "context": {"tab": "home"}}).json()


def test_http_metrics_separate_outcomes_and_stages(app, service, monkeypatch):
    runner = service.deployment("ranking").engines[0]._runner
    launch = runner.launch

    def launch_slowly(items):
        launched = launch(items)

        def wait():
            time.sleep(0.05)  # the batch must take longer than the rest of the request
            results, seconds = launched.wait()
            return results, seconds + 0.05

        return InFlightBatch(wait)

    monkeypatch.setattr(runner, "launch", launch_slowly)
    call(app, "POST", "/v1/rank", rank_body())
    call(app, "POST", "/v1/rank", rank_body(num_candidates=0))

    def reject(*_, **__):
        raise OverloadedError("busy", 0.3)

    monkeypatch.setattr(service.deployment("ranking").engines[0], "submit_rank", reject)
    for _ in range(3):
        call(app, "POST", "/v1/rank", rank_body())
    metrics = call(app, "GET", "/metrics").text
    for outcome, count in (("ok", 1.0), ("rejected", 1.0), ("shed", 3.0)):
        assert f'nestrec_http_request_duration_seconds_count{{outcome="{outcome}",route="/v1/rank"}} {count}' in metrics
    for stage in ("queue", "compute"):
        assert f'nestrec_engine_{stage}_duration_seconds_count{{model="ranking"}} 1.0' in metrics
        assert f'nestrec_engine_{stage}_duration_seconds_count{{model="retrieval"}} 0.0' in metrics
    total = float(
        re.search(r'nestrec_http_request_duration_seconds_sum{outcome="ok",route="/v1/rank"} (\S+)', metrics)[1]
    )
    stage_seconds = [
        float(re.search(rf'nestrec_engine_{stage}_duration_seconds_sum{{model="ranking"}} (\S+)', metrics)[1])
        for stage in ("queue", "compute")
    ]
    assert min(stage_seconds) > 0
    assert sum(stage_seconds) <= total
