"""The front: answers, limits at their value and one above, shedding, swaps."""

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
    max_history=50,
    max_candidates=20,
    max_k=15,
    max_user_characters=8,
    tells_prefix=True,
    default_timeout_ms=10_000,
)
CONFIG = ServiceConfig(
    engine=EngineConfig(
        tiers=PrefixCacheConfig(cache_bytes=1 << 20, page_tokens=4),
        max_queue_s=1e9,
        trigger=TriggerConfig(policy="all", burst_s=1e9),
    ),
    slide_events=1,
    preranked=12,
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
def front(service):
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


def test_rank_gives_the_scores_of_the_model(front, models):
    history = History(
        items=np.arange(1, 6),
        times_ms=1000 * np.arange(5),
        actions=np.arange(5) % 4,
        features={"event_tab": np.array([2, 1, 2, 1, 2])},
    )
    candidates = Candidates(items=np.arange(10, 14), now_ms=10_000_000, features={"event_tab": np.ones(4, np.int64)})
    expected = oracle_scores(models["ranking"], history, candidates, 1)
    for source in ("none", "device"):
        response = call(front, "POST", "/v1/rank", rank_body())
        assert response.status_code == 200
        answer = response.json()
        found = np.stack([answer["scores"]["click"], answer["scores"]["like"]], axis=1)
        assert np.abs(found - expected).max() <= 1e-5
        assert answer["prefix"]["from"] == source


def test_a_signal_is_followed_by_a_hit(front, service):
    signal = {k: v for k, v in rank_body(user="bob").items() if not k.startswith("candidate")}
    response = call(front, "POST", "/v1/preinfer", {**signal, "num_candidates": 4})
    assert (response.status_code, response.json()["admitted"]) == (202, True)
    assert service.fleet("ranking").engines[0].wait_until_idle(30.0)
    assert call(front, "POST", "/v1/rank", rank_body(user="bob")).json()["prefix"] == {"from": "device", "tokens": 10}


def test_forgetting_a_user_empties_the_cache(front):
    call(front, "POST", "/v1/rank", rank_body(user="cleo"))
    assert call(front, "DELETE", "/v1/users/cleo/cache").status_code == 204
    assert call(front, "POST", "/v1/rank", rank_body(user="cleo")).json()["prefix"]["from"] == "none"


def test_recommend_without_a_ranker_is_the_best_of_the_catalogue(models):
    service = Service({"retrieval": models["retrieval"]}, CONFIG)
    front = App(service, LIMITS)
    history = {"items": [3, 4, 5], "times_ms": [1, 2, 3]}
    answer = call(front, "POST", "/v1/recommend", {"user": 7, "history": history, "k": 10, "now_ms": 99}).json()
    asked = Candidates(items=np.arange(1, 101), now_ms=99)
    past = History(items=np.array([3, 4, 5]), times_ms=np.array([1, 2, 3]), actions=np.zeros(3, np.int64))
    scores = oracle_scores(models["retrieval"], past, asked, 1)[:, 0]
    scores[[2, 3, 4]] = -np.inf
    assert answer["items"] == [str(i + 1) for i in np.argsort(-scores, kind="stable")[:10]]
    assert call(front, "POST", "/v1/rank", {"user": "a", "history": history, "candidates": [1]}).status_code == 200
    service.close()


def test_the_cascade_orders_what_retrieval_found_by_the_ranker(front, service):
    body = {k: v for k, v in rank_body().items() if not k.startswith("candidate")}
    answer = call(front, "POST", "/v1/recommend", {**body, "k": 5, "context": {"tab": "home"}}).json()
    assert len(answer["items"]) == 5
    assert answer["scores"]["click"] == sorted(answer["scores"]["click"], reverse=True)
    assert not set(answer["items"]) & {str(i) for i in body["history"]["items"]}
    assert service.fleet("ranking").engines[0].counts["signal_admitted"] == 1, "it went out before retrieval"


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
def test_each_limit_at_its_value_and_one_above(front, at_limit, above):
    assert call(front, "POST", "/v1/rank", at_limit).status_code == 200
    response = call(front, "POST", "/v1/rank", above)
    assert response.status_code == 400
    assert response.json()["error"]["field"]


def test_a_deadline_that_nobody_could_ask_for_is_not_the_default():
    assert LimitsConfig(default_timeout_ms=2000, max_timeout_ms=2000).default_timeout_ms == 2000
    with pytest.raises(UserError, match=r"limits\.default_timeout_ms=2001: is longer than a request may ask for"):
        LimitsConfig(default_timeout_ms=2001, max_timeout_ms=2000)


def test_k_at_its_limit_and_one_above(front):
    body = {k: v for k, v in rank_body().items() if k != "candidates"} | {"candidate_features": {"tab": None}}
    assert len(call(front, "POST", "/v1/recommend", {**body, "k": 15}).json()["items"]) == 15
    assert call(front, "POST", "/v1/recommend", {**body, "k": 16}).status_code == 400


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_body_at_its_limit_and_one_byte_above(front, is_chunked):
    content = json.dumps(rank_body()).encode()
    for padding, status in ((20_000 - len(content), 200), (20_001 - len(content), 413)):
        padded = content + b" " * padding

        async def chunks(padded=padded):
            for start in range(0, len(padded), 1000):
                yield padded[start : start + 1000]

        body = chunks() if is_chunked else padded
        response = call(front, "POST", "/v1/rank", content=body, headers={"content-type": "application/json"})
        assert response.status_code == status


def test_nesting_at_its_limit_and_one_level_above(front):
    for depth, problem in ((1024, "must be text"), (1025, "not valid JSON"), (6000, "not valid JSON")):
        content = b'{"user":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
        response = call(front, "POST", "/v1/rank", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert problem in response.json()["error"]["message"]


def test_the_candidates_of_a_signal_at_their_limit_and_one_above(front):
    body = {k: v for k, v in rank_body().items() if not k.startswith("candidate")}
    for count, status in ((20, 202), (21, 400)):
        assert call(front, "POST", "/v1/preinfer", {**body, "num_candidates": count}).status_code == status


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
def test_a_wrong_field_is_named(front, change):
    response = call(front, "POST", "/v1/rank", {**rank_body(), **change})
    assert response.status_code == 400
    assert response.json()["error"]["field"].split(".")[0] == next(iter(change))


def test_nothing_is_recommended_to_a_user_without_events(front):
    for history in ({}, {"history": {"items": []}}):
        response = call(front, "POST", "/v1/recommend", {"user": "new", "k": 3, **history})
        assert (response.status_code, response.json()["error"]["field"]) == (400, "history")
    asked = {"user": "new", "candidates": [3, 4], "context": {"tab": "home"}}
    assert call(front, "POST", "/v1/rank", asked).status_code == 200, "a ranking model has learned from first events"


def test_what_is_not_offered_is_refused(front):
    assert call(front, "GET", "/v1/rank").status_code == 405
    assert call(front, "POST", "/metrics").status_code == 405
    assert call(front, "GET", "/v1/users/a/cache").status_code == 405
    assert call(front, "GET", "/admin").status_code == 404
    assert call(front, "POST", "/v1/rank", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    refused = call(front, "POST", "/v1/rank", content=gzip.compress(json.dumps(rank_body()).encode()), headers=packed)
    assert (refused.status_code, refused.json()["error"]["field"]) == (415, "content-encoding")


def test_health_metrics_openapi_and_page(front):
    call(front, "POST", "/v1/rank", rank_body(user="secretid"))
    assert call(front, "GET", "/health/live").status_code == 200
    assert call(front, "GET", "/health/ready").status_code == 200
    metrics = call(front, "GET", "/metrics").text
    assert 'nestrec_requests_total{route="/v1/rank",status="200"} 1.0' in metrics
    assert "secretid" not in metrics
    assert "secretid" not in call(front, "GET", "/v1/status").text
    assert "/v1/rank" in call(front, "GET", "/openapi.json").json()["paths"]
    assert "nestrec serving" in call(front, "GET", "/").text


def test_refusals_say_when_to_come_back(front, service, monkeypatch):
    def refuse(*_, **__):
        raise OverloadedError("busy", 0.3)

    monkeypatch.setattr(service.fleet("ranking").engines[0], "rank", refuse)
    response = call(front, "POST", "/v1/rank", rank_body())
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


def test_a_dead_instance_is_left_and_its_users_are_served(models):
    service = Service({"ranking": models["ranking"]}, replace(CONFIG, instances=2))
    front = App(service, LIMITS)
    users = [f"u{i}" for i in range(20)]
    before = [call(front, "POST", "/v1/rank", rank_body(user=user)).json()["scores"] for user in users]
    assert all(engine.counts.get("rank_none") for engine in service.fleet("ranking").engines), "both are used"
    service.fleet("ranking").engines[0].close()
    after = [call(front, "POST", "/v1/rank", rank_body(user=user)) for user in users]
    assert [response.status_code for response in after] == [200] * 20
    for old, new in zip(before, after, strict=True):
        assert np.abs(np.array(old["click"]) - np.array(new.json()["scores"]["click"])).max() <= 1e-5
    assert call(front, "GET", "/health/ready").status_code == 200
    service.close()


def test_a_swap_under_load_fails_nothing_and_mixes_nothing(models):
    other = random_ranking(ENCODER, num_items=100, seed=9)
    service = Service({"ranking": models["ranking"]}, CONFIG)
    front = App(service, LIMITS)

    async def run():
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = []

            async def ask(number):
                answers.append(await client.post("/v1/rank", json=rank_body(user=f"u{number % 9}")))

            loop = asyncio.get_running_loop()
            for turn in range(6):
                batch = [asyncio.create_task(ask(i)) for i in range(30)]
                await asyncio.sleep(0)
                servable = (other, models["ranking"])[turn % 2]
                await asyncio.gather(loop.run_in_executor(None, service.swap, servable), *batch)
            return answers

    answers = asyncio.run(run())
    assert [a.status_code for a in answers] == [200] * 180
    scores = {}
    for answer in answers:
        scores.setdefault(answer.json()["model"], []).append(answer.json()["scores"]["click"])
    assert set(scores) == {models["ranking"].version[:12], other.version[:12]}
    for found in scores.values():
        assert np.ptp(np.array(found), axis=0).max() <= 1e-5
    service.close()


def test_a_swap_without_memory_for_both_caches_leaves_the_old_model_in_service(models, monkeypatch):
    cfg = replace(CONFIG, instances=2)
    service = Service({"ranking": models["ranking"]}, cfg)
    front = App(service, LIMITS)
    pools = []
    empty = torch.empty
    other = random_ranking(ENCODER, num_items=100, seed=9)

    def second_does_not_fit(shape, **options):
        pools.extend([shape] if isinstance(shape, tuple) and len(shape) == 5 else [])
        if len(pools) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(shape, **options)

    before = call(front, "POST", "/v1/rank", rank_body()).json()
    threads = set(threading.enumerate())
    with monkeypatch.context() as full:
        full.setattr(torch, "empty", second_does_not_fit)
        with pytest.raises(
            UserError, match=r"tiers\.cache_bytes=\d+: is more memory than can be had\. Give"
        ):
            service.swap(other)
    assert set(threading.enumerate()) <= threads, "the engine that did fit has been closed"
    after = call(front, "POST", "/v1/rank", rank_body()).json()
    assert after["model"] == before["model"]
    assert after["scores"] == before["scores"]
    service.close()


def test_kept_events_stand_in_for_a_history(front):
    body = rank_body(user="dora")
    history = body.pop("history")
    cut = lambda values, part: values[part] if isinstance(values, list) else {"tab": values["tab"][part]}  # noqa: E731
    parts = [{name: cut(values, part) for name, values in history.items()} for part in (slice(3), slice(3, None))]
    for number, part in enumerate(parts):
        response = call(front, "POST", "/v1/events", {"user": "dora", "history": part})
        assert (response.status_code, response.json()) == (202, {"events": (3, 5)[number]})
    found = call(front, "POST", "/v1/rank", body).json()["scores"]
    assert found == call(front, "POST", "/v1/rank", rank_body(user="dora2")).json()["scores"]
    for part in reversed(parts):
        assert call(front, "POST", "/v1/events", {"user": "dora3", "history": part}).status_code == 202
    late = call(front, "POST", "/v1/rank", {**body, "user": "dora3"}).json()["scores"]
    assert late == found, "events that come late are read in their place"
    short = {**body, "history": parts[0], "prefer_kept": True}
    assert call(front, "POST", "/v1/rank", short).json()["scores"] == found, "those that are kept were preferred"
    alone = call(front, "POST", "/v1/rank", {**short, "user": "dora4"}).json()["scores"]
    assert alone == call(front, "POST", "/v1/rank", {**body, "user": "dora4", "history": parts[0]}).json()["scores"]
    assert call(front, "DELETE", "/v1/users/dora/cache").status_code == 204
    assert call(front, "POST", "/v1/rank", body).json()["scores"] == found, "events outlive the cache"
    assert call(front, "DELETE", "/v1/users/dora/events").status_code == 204
    assert call(front, "POST", "/v1/rank", body).json()["scores"] != found


def test_events_without_times_are_refused_as_often_as_they_come(models):
    """A model that reads no times takes histories without them; what is kept is for any model."""
    encoder = replace(ENCODER, time_bias=False)
    service = Service({"retrieval": random_retrieval(encoder, num_items=100)}, CONFIG)
    front = App(service, LIMITS)
    for history in ({"items": [1], "times_ms": None}, {"items": [1]}, {"items": None, "times_ms": None}, None):
        for _ in range(2):
            response = call(front, "POST", "/v1/events", {"user": "eve", "history": history})
            assert (response.status_code, response.json()["error"]["field"]) == (400, "history")
    service.close()


def test_kept_events_are_cut_to_what_a_request_may_hold_and_the_model_knows(models):
    """Nobody who asks can change them: more than a request may hold, and a model with fewer actions."""
    service = Service({"ranking": models["ranking"]}, CONFIG)
    front = App(service, LIMITS)
    body = rank_body(num_events=40, user="fay")
    history = body.pop("history")
    for part in (slice(20), slice(20, None)):
        kept = {name: values[part] for name, values in history.items() if name != "features"}
        kept["features"] = {"tab": history["features"]["tab"][part]}
        assert call(front, "POST", "/v1/events", {"user": "fay", "history": kept}).status_code == 202
    shorter = App(service, replace(LIMITS, max_history=30), front._store)
    assert call(shorter, "POST", "/v1/rank", body).status_code == 200
    assert call(shorter, "POST", "/v1/rank", rank_body(num_events=31, user="gil")).status_code == 400, "if it is sent"
    service.close()
    spec = models["ranking"].spec
    fewer = {name: bit for name, bit in spec.action_bits.items() if bit == 1}
    assert fewer != spec.action_bits
    service = Service({"ranking": replace(models["ranking"], spec=replace(spec, action_bits=fewer))}, CONFIG)
    other = App(service, LIMITS, front._store)
    assert call(other, "POST", "/v1/rank", body).status_code == 200
    sent = call(other, "POST", "/v1/rank", rank_body(user="gil", history={**history, "actions": [3] * 40}))
    assert sent.status_code == 400
    service.close()


def test_an_id_at_its_limit_and_one_character_above(front):
    for length, status in ((256, 200), (257, 400)):
        assert call(front, "POST", "/v1/rank", rank_body(candidates=["x" * length] * 4)).status_code == status
        history = {**rank_body()["history"], "items": ["1", "2", 3, "x" * length, "5"]}
        assert call(front, "POST", "/v1/rank", rank_body(history=history)).status_code == status


def test_a_value_of_a_feature_at_its_limit_and_one_character_above(front):
    """It may be a text."""
    for length, status in ((4096, 200), (4097, 400)):
        history = {**rank_body()["history"], "features": {"tab": ["home"] * 4 + ["x" * length]}}
        assert call(front, "POST", "/v1/rank", rank_body(history=history)).status_code == status
        body = rank_body(candidate_features={"tab": "x" * length})
        assert call(front, "POST", "/v1/rank", body).status_code == status


def test_answers_do_not_tell_whether_a_guess_of_a_history_is_right(service):
    """Unless they are told to: whoever asks for a user with a made-up history would learn whether it is known."""
    front = App(service, replace(LIMITS, tells_prefix=False))
    known = call(front, "POST", "/v1/rank", rank_body(user="hal")).json()
    guessed = call(front, "POST", "/v1/rank", rank_body(user="hal")).json()
    other = call(front, "POST", "/v1/rank", rank_body(user="hal", history={**rank_body()["history"], "items": [9] * 5}))
    assert known.keys() == guessed.keys() == other.json().keys()
    assert "prefix" not in known
    assert known["scores"]["click"] == pytest.approx(guessed["scores"]["click"])
    body = {k: v for k, v in rank_body(user="hal").items() if not k.startswith("candidate")}
    assert "prefix" not in call(front, "POST", "/v1/recommend", {**body, "context": {"tab": "home"}}).json()


def test_times_of_answers_are_apart_from_refusals_and_queue_from_compute(front, service, monkeypatch):
    runner = service.fleet("ranking").engines[0]._runner
    launch = runner.launch

    def launch_slowly(parts):
        launched = launch(parts)

        def wait():
            time.sleep(0.05)  # so that a batch takes longer than all around it
            results, seconds = launched.wait()
            return results, seconds + 0.05

        return InFlightBatch(wait)

    monkeypatch.setattr(runner, "launch", launch_slowly)
    call(front, "POST", "/v1/rank", rank_body())
    call(front, "POST", "/v1/rank", rank_body(num_candidates=0))

    def refuse(*_, **__):
        raise OverloadedError("busy", 0.3)

    monkeypatch.setattr(service.fleet("ranking").engines[0], "rank", refuse)
    for _ in range(3):
        call(front, "POST", "/v1/rank", rank_body())
    metrics = call(front, "GET", "/metrics").text
    for outcome, count in (("answered", 1.0), ("rejected", 1.0), ("refused", 3.0)):
        assert f'nestrec_request_duration_seconds_count{{outcome="{outcome}",route="/v1/rank"}} {count}' in metrics
    for what in ("queue", "compute"):
        assert f'nestrec_{what}_duration_seconds_count{{model="ranking"}} 1.0' in metrics
        assert f'nestrec_{what}_duration_seconds_count{{model="retrieval"}} 0.0' in metrics
    total = float(
        re.search(r'nestrec_request_duration_seconds_sum{outcome="answered",route="/v1/rank"} (\S+)', metrics)[1]
    )
    parts = [
        float(re.search(rf'nestrec_{what}_duration_seconds_sum{{model="ranking"}} (\S+)', metrics)[1])
        for what in ("queue", "compute")
    ]
    assert min(parts) > 0
    assert sum(parts) <= total
