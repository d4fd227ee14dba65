"""Answers say what was done with what they were asked: unknown ids, inputs that are missing, lists of items."""

import asyncio
from dataclasses import replace
from typing import ClassVar

import httpx
import numpy as np
import pytest

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.model.servable_spec import InputDefaults
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval
from nestrec_bench.load_test.load_test import LoadTestConfig, made_up_request, reads_from

ENCODER = HSTUConfig(dim=16, num_layers=1, num_heads=2, head_dim=8, max_length=64, time_bias=True)
NUM_ITEMS = 60
RETRIEVAL = random_retrieval(ENCODER, num_items=NUM_ITEMS)
RANKING = random_ranking(ENCODER, num_items=NUM_ITEMS)
PATIENT = EngineConfig(max_queue_s=1e9)
LIMITS = LimitsConfig(max_listed=50, default_timeout_ms=10_000)
HISTORY = {
    "items": [1, 2, 3],
    "times_ms": [1000, 2000, 3000],
    "actions": [1, 2, 3],
    "features": {"tab": ["home", "search", "home"]},
}
BODY = {"user": "ann", "history": HISTORY, "now_ms": 9000, "context": {"tab": "home"}}
PLAIN = {"user": "ann", "history": {"items": [1, 2, 3], "times_ms": [1000, 2000, 3000]}, "now_ms": 9000}
DEFAULTS = InputDefaults(
    history=("4", "5"), times="now", actions=("like",), features={"tab": "search"}, user_features={}
)


def with_defaults(servable, defaults=DEFAULTS):
    return replace(servable, spec=replace(servable.spec, defaults=defaults))


@pytest.fixture(scope="module")
def fronts():
    """cascade, retrieval alone, and both once more as exports that name defaults."""
    models = {
        "cascade": {"retrieval": RETRIEVAL, "ranking": RANKING},
        "retrieval": {"retrieval": RETRIEVAL},
        "lenient": {"ranking": with_defaults(RANKING)},
        "lenient_retrieval": {"retrieval": with_defaults(RETRIEVAL)},
    }
    services = {
        name: Service(servables, ServiceConfig(engine=PATIENT, preranked=20)) for name, servables in models.items()
    }
    yield {name: App(service, LIMITS) for name, service in services.items()}
    for service in services.values():
        service.close()


def post(app, path, body):
    """(status, answer)"""

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(path, json=body)

    response = asyncio.run(run())
    return response.status_code, response.json()


def models_of(app):
    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/v1/models")

    return asyncio.run(run()).json()["models"]


def answered(app, path, body):
    status, answer = post(app, path, body)
    assert status in (200, 202), answer
    return answer


def refused_field(app, path, body):
    status, answer = post(app, path, body)
    assert status == 400, answer
    return answer["error"]["field"]


def click(answer):
    return np.array(answer["scores"]["click"])


class TestUnknownCandidates:
    BODY: ClassVar = {**BODY, "candidates": ["10", "nope", 11, "nor this", 12]}

    def test_they_get_the_last_place_and_are_listed(self, fronts):
        answer = answered(fronts["cascade"], "/v1/rank", self.BODY)
        known = answered(fronts["cascade"], "/v1/rank", {**BODY, "candidates": [10, 11, 12]})
        for name, scores in answer["scores"].items():
            assert [scores[i] for i in (0, 2, 4)] == pytest.approx(known["scores"][name], abs=1e-5)
            assert max(scores[1], scores[3]) < min(known["scores"][name])
        assert answer["unknown"] == [{"field": "candidates", "ids": ["nope", "nor this"], "done": "placed_last"}]
        assert known["unknown"] == []

    def test_a_retrieval_model_does_not_let_them_win_either(self, fronts):
        answer = answered(fronts["retrieval"], "/v1/rank", {**PLAIN, "candidates": [*range(10, 20), "nope"]})
        assert np.argmin(answer["scores"]["score"]) == 10

    def test_none_known_at_all(self, fronts):
        answer = answered(fronts["cascade"], "/v1/rank", {**BODY, "candidates": ["x", "y"]})
        assert len(set(answer["scores"]["click"])) == 1
        assert answer["unknown"][0]["ids"] == ["x", "y"]

    def test_they_are_scored_where_the_request_wants_it(self, fronts):
        answer = answered(fronts["cascade"], "/v1/rank", {**self.BODY, "unknown": "score"})
        assert abs(click(answer)).max() < 100
        assert answer["unknown"][0]["done"] == "scored"

    def test_they_are_left_out_where_the_request_wants_it(self, fronts):
        answer = answered(fronts["cascade"], "/v1/rank", {**self.BODY, "unknown": "drop"})
        assert answer["items"] == ["10", 11, 12]
        known = answered(fronts["cascade"], "/v1/rank", {**BODY, "candidates": [10, 11, 12]})
        assert np.abs(click(answer) - click(known)).max() <= 1e-5
        assert answer["unknown"][0]["done"] == "dropped"
        none = answered(fronts["cascade"], "/v1/rank", {**BODY, "candidates": ["x"], "unknown": "drop"})
        assert (none["items"], none["scores"]["click"]) == ([], [])

    def test_features_stay_with_their_candidates(self, fronts):
        body = {k: v for k, v in BODY.items() if k != "context"}
        tabs, items = ["home", "search", "search"], [10, 11, 12]
        known = {**body, "candidates": items, "candidate_features": {"tab": tabs}}
        mixed = {**known, "candidates": ["x", *items], "candidate_features": {"tab": ["home", *tabs]}}
        expected, found = (click(answered(fronts["cascade"], "/v1/rank", asked)) for asked in (known, mixed))
        assert np.abs(found[1:] - expected).max() <= 1e-5

    def test_they_are_refused_where_the_request_wants_it(self, fronts):
        status, answer = post(fronts["cascade"], "/v1/rank", {**self.BODY, "unknown": "refuse"})
        assert (status, answer["error"]["field"]) == (400, "candidates")
        assert "'nope', 'nor this'" in answer["error"]["message"]
        assert refused_field(fronts["cascade"], "/v1/rank", {**self.BODY, "unknown": "maybe"}) == "unknown"


class TestUnknownEvents:
    MIXED: ClassVar = {
        "items": [1, "gone", 2, 3],
        "times_ms": [1000, 1500, 2000, 3000],
        "actions": [1, 3, 2, 3],
        "features": {"tab": ["home", "no such tab", "search", "home"]},
    }
    UNKNOWN: ClassVar = {
        "items": ["x", "y"],
        "times_ms": [1, 2],
        "actions": [1, 1],
        "features": {"tab": ["home", "home"]},
    }
    CANDIDATES: ClassVar = {"candidates": [10, 11, 12]}

    @pytest.mark.parametrize("policy", ["last", "drop"])
    def test_they_are_left_out_with_all_that_is_told_of_them(self, fronts, policy):
        app = fronts["cascade"]
        mixed = {**BODY, **self.CANDIDATES, "history": self.MIXED, "unknown": policy}
        answer, expected = (answered(app, "/v1/rank", body) for body in (mixed, {**BODY, **self.CANDIDATES}))
        assert np.abs(click(answer) - click(expected)).max() <= 1e-5
        assert answer["unknown"] == [{"field": "history.items", "ids": ["gone"], "done": "dropped"}]

    def test_they_are_read_where_the_request_wants_it(self, fronts):
        mixed = {**BODY, **self.CANDIDATES, "history": self.MIXED}
        answers = [answered(fronts["cascade"], "/v1/rank", {**mixed, "unknown": p}) for p in ("score", "drop")]
        assert np.abs(click(answers[0]) - click(answers[1])).max() > 1e-4
        assert [(ids["field"], ids["done"]) for ids in answers[0]["unknown"]] == [
            ("history.items", "scored"),
            ("history.features.tab", "scored"),
        ]

    def test_they_are_refused_where_the_request_wants_it(self, fronts):
        mixed = {**BODY, **self.CANDIDATES, "history": self.MIXED, "unknown": "refuse"}
        assert refused_field(fronts["cascade"], "/v1/rank", mixed) == "history.items"

    @pytest.mark.parametrize("change", [{"times_ms": [1]}, {"actions": [1] * 5}, {"features": {"tab": ["home"]}}])
    def test_lists_beside_them_must_have_a_value_an_event(self, fronts, change):
        body = {**BODY, **self.CANDIDATES, "history": {**self.MIXED, **change}}
        assert refused_field(fronts["cascade"], "/v1/rank", body).startswith(f"history.{next(iter(change))}")

    @pytest.mark.parametrize("policy", ["last", "score", "drop"])
    def test_a_history_without_a_known_event_is_none(self, fronts, policy):
        app = fronts["cascade"]
        unknown = {**BODY, **self.CANDIDATES, "history": self.UNKNOWN, "unknown": policy}
        answer = answered(app, "/v1/rank", unknown)
        assert np.abs(click(answer) - click(answered(app, "/v1/rank", {**unknown, "history": {}}))).max() <= 1e-5
        assert answer["unknown"] == [{"field": "history.items", "ids": ["x", "y"], "done": "dropped"}]
        assert {"field": "history", "value": {"items": []}} in answer["defaults"]
        assert refused_field(app, "/v1/recommend", {**BODY, "history": self.UNKNOWN, "unknown": policy}) == "history"

    def test_a_signal_lists_them_too(self, fronts):
        answer = answered(fronts["cascade"], "/v1/preinfer", {"user": "a", "history": self.MIXED, "now_ms": 9000})
        assert answer["unknown"][0]["ids"] == ["gone"]

    def test_categories_that_a_model_does_not_know_are_listed(self, fronts):
        body = {**BODY, **self.CANDIDATES, "context": {"tab": "nowhere"}}
        answer = answered(fronts["cascade"], "/v1/rank", body)
        assert answer["unknown"] == [{"field": "context.tab", "ids": ["nowhere"], "done": "scored"}]
        assert refused_field(fronts["cascade"], "/v1/rank", {**body, "unknown": "refuse"}) == "context.tab"


class TestWhatAModelReads:
    BODY: ClassVar = {**BODY, "candidates": [10, 11]}

    @pytest.mark.parametrize("name", ["times_ms", "actions", "features"])
    def test_it_must_be_told_of_events(self, fronts, name):
        history = {field: value for field, value in HISTORY.items() if field != name}
        field = f"history.{name}" + (".tab" if name == "features" else "")
        for path, body in (
            ("/v1/rank", self.BODY),
            ("/v1/recommend", BODY),
            ("/v1/preinfer", {"user": "a"}),
            ("/v1/events", {"user": "a"}),
        ):
            if (path, name) != ("/v1/events", "times_ms"):
                assert refused_field(fronts["cascade"], path, {**body, "history": history}) == field

    def test_it_must_be_told_of_candidates(self, fronts):
        for path, body in (("/v1/rank", self.BODY), ("/v1/recommend", BODY)):
            without = {name: value for name, value in body.items() if name != "context"}
            assert refused_field(fronts["cascade"], path, without) == "candidate_features.tab"

    def test_an_action_of_each_event_must_be_told(self, fronts):
        history = {**HISTORY, "actions": [1, None, 2]}
        assert refused_field(fronts["cascade"], "/v1/rank", {**self.BODY, "history": history}) == "history.actions"

    @pytest.mark.parametrize("history", [{}, {"history": None}, {"history": {"items": []}}])
    def test_a_retrieval_model_must_be_told_an_event(self, fronts, history):
        body = {"user": "nobody", "candidates": [10, 11], "now_ms": 9000, **history}
        assert refused_field(fronts["retrieval"], "/v1/rank", body) == "history"

    def test_a_retrieval_model_needs_no_actions_or_features(self, fronts):
        assert answered(fronts["retrieval"], "/v1/rank", {**PLAIN, "candidates": [10]})["defaults"] == []

    def test_a_default_that_the_export_names_is_taken_and_said(self, fronts):
        app = fronts["lenient"]
        bare = {"user": "ann", "candidates": [10, 11, 12], "now_ms": 9000}
        answer = answered(app, "/v1/rank", {**bare, "history": {"items": [1, 2, 3]}})
        assert answer["defaults"] == [
            {"field": "history.times_ms", "value": 9000},
            {"field": "history.actions", "value": ["like"]},
            {"field": "history.features.tab", "value": "search"},
            {"field": "candidate_features.tab", "value": "search"},
        ]
        told = {"items": [1, 2, 3], "times_ms": [9000] * 3, "actions": [2] * 3, "features": {"tab": ["search"] * 3}}
        same = answered(app, "/v1/rank", {**bare, "history": told, "context": {"tab": "search"}})
        assert same["defaults"] == []
        assert np.abs(click(answer) - click(same)).max() <= 1e-5

    def test_a_history_that_the_export_names_stands_for_none(self, fronts):
        app = fronts["lenient_retrieval"]
        asked = {"user": "new", "now_ms": 9000, "k": NUM_ITEMS}
        answer = answered(app, "/v1/recommend", asked)
        assert answer["defaults"][0] == {"field": "history", "value": {"items": ["4", "5"]}}
        assert {"4", "5"} <= set(answer["items"]), "nobody has seen them"
        told = {**asked, "history": {"items": [4, 5], "times_ms": [9000, 9000]}}
        assert answer["items"] == answered(app, "/v1/recommend", {**told, "exclude_seen": False})["items"]

    def test_the_time_of_the_server_is_said_where_the_model_reads_it(self, fronts):
        body = {name: value for name, value in self.BODY.items() if name != "now_ms"}
        assert answered(fronts["cascade"], "/v1/rank", body)["defaults"][0]["field"] == "now_ms"

    def test_the_models_tell_what_they_read(self, fronts):
        model = models_of(fronts["lenient"])["ranking"]
        assert model["actions"] == {"click": 1, "like": 2}
        fields = ["history.items", "history.times_ms", "history.actions", "history.features.tab", "context.tab"]
        assert model["reads"] == fields
        assert model["defaults"]["features"] == {"tab": "search"}


@pytest.mark.parametrize("name", ["cascade", "retrieval"])
def test_a_made_up_load_tells_what_the_model_reads(fronts, name):
    cfg = LoadTestConfig(candidates=5)
    reads = reads_from(models_of(fronts[name]))
    signal, request = made_up_request(3, 7, cfg, np.random.default_rng(0), reads, items=range(1, NUM_ITEMS + 1))
    for path, body in (("/v1/preinfer", signal), ("/v1/rank", request)):
        answer = answered(fronts[name], path, body)
        assert (answer["unknown"], answer["defaults"]) == ([], [])


class TestFeaturesOfCandidates:
    BODY: ClassVar = {name: value for name, value in BODY.items() if name != "context"}

    def test_one_value_for_all_is_a_list_of_it(self, fronts):
        body = {**self.BODY, "candidates": [10, 11, 12]}
        ways = [
            {"candidate_features": {"tab": ["search"] * 3}},
            {"candidate_features": {"tab": "search"}},
            {"context": {"tab": "search"}},
        ]
        first, *others = (click(answered(fronts["cascade"], "/v1/rank", {**body, **way})) for way in ways)
        for other in others:
            assert np.abs(other - first).max() <= 1e-5

    def test_a_cascade_takes_them_for_candidates_that_nobody_knows_yet(self, fronts):
        answers = [
            answered(fronts["cascade"], "/v1/recommend", {**self.BODY, way: {"tab": "search"}, "k": 20})
            for way in ("context", "candidate_features")
        ]
        assert answers[0]["items"] == answers[1]["items"]
        ranked = {**self.BODY, "candidates": answers[0]["items"], "context": {"tab": "search"}}
        assert np.abs(click(answers[0]) - click(answered(fronts["cascade"], "/v1/rank", ranked))).max() <= 1e-5

    @pytest.mark.parametrize(
        ("path", "change", "field"),
        [
            ("/v1/recommend", {"candidate_features": {"tab": ["home"] * 256}}, "candidate_features.tab"),
            ("/v1/rank", {"candidate_features": {"tab": ["home"]}}, "candidate_features.tab"),
            ("/v1/rank", {"candidate_features": {"tab": 0.5}}, "candidate_features.tab"),
            ("/v1/rank", {"context": {"tab": ["home"]}}, "context.tab"),
            ("/v1/rank", {"context": {"tab": "home"}, "candidate_features": {"tab": "home"}}, "candidate_features.tab"),
            ("/v1/rank", {"context": {"event_tab": "home"}}, "context.event_tab"),
            ("/v1/rank", {"history": {**HISTORY, "features": {"tab": ["home"]}}}, "history.features.tab"),
        ],
    )
    def test_errors_use_the_names_of_the_request(self, fronts, path, change, field):
        body = {**self.BODY, **({"candidates": [10, 11]} if path == "/v1/rank" else {}), **change}
        status, answer = post(fronts["cascade"], path, body)
        assert (status, answer["error"]["field"]) == (400, field)
        assert "event_" not in answer["error"]["message"]


class TestActions:
    @pytest.mark.parametrize("actions", [["click", "like", ["click", "like"]], [1, "like", 3], [["click"], [2], 3]])
    def test_they_are_names_or_sums_of_bits(self, fronts, actions):
        body = {**BODY, "candidates": [10, 11, 12]}
        named = {**body, "history": {**HISTORY, "actions": actions}}
        if [2] in actions:
            assert refused_field(fronts["cascade"], "/v1/rank", named) == "history.actions"
            return
        expected, found = (click(answered(fronts["cascade"], "/v1/rank", asked)) for asked in (body, named))
        assert np.abs(found - expected).max() <= 1e-5

    @pytest.mark.parametrize("action", ["buy", ["buy"], 4, -1, 2**63])
    def test_others_are_refused_with_those_that_there_are(self, fronts, action):
        body = {**BODY, "candidates": [10], "history": {**HISTORY, "actions": [1, action, 2]}}
        status, answer = post(fronts["cascade"], "/v1/rank", body)
        assert (status, answer["error"]["field"]) == (400, "history.actions")
        assert "click (1), like (2)" in answer["error"]["message"]

    def test_names_are_kept_with_events(self, fronts):
        events = {**HISTORY, "actions": ["click", "like", ["click", "like"]]}
        answered(fronts["cascade"], "/v1/events", {"user": "eve", "history": events})
        kept = {**BODY, "user": "eve", "candidates": [10, 11]}
        told = click(answered(fronts["cascade"], "/v1/rank", kept))
        del kept["history"]
        assert np.abs(click(answered(fronts["cascade"], "/v1/rank", kept)) - told).max() <= 1e-5


class TestListsOfItems:
    def test_excluded_items_are_not_recommended(self, fronts):
        for name, body in (("retrieval", PLAIN), ("cascade", BODY)):
            first = answered(fronts[name], "/v1/recommend", {**body, "k": 5})["items"]
            excluded = {**body, "k": 5, "exclude": [first[0], int(first[1]), "nope"]}
            answer = answered(fronts[name], "/v1/recommend", excluded)
            assert not set(answer["items"]) & set(first[:2])
            assert answer["unknown"] == [{"field": "exclude", "ids": ["nope"], "done": "dropped"}]
        whole = answered(fronts["retrieval"], "/v1/recommend", {**PLAIN, "k": 50})["items"]
        answer = answered(fronts["retrieval"], "/v1/recommend", {**PLAIN, "k": 47, "exclude": whole[::20]})
        assert answer["items"] == [key for key in whole if key not in whole[::20]]

    def test_only_allowed_items_are_recommended(self, fronts):
        whole = answered(fronts["retrieval"], "/v1/recommend", {**PLAIN, "k": 57})["items"]
        allowed = ["nope", 1, *whole[::-3]]
        answer = answered(fronts["retrieval"], "/v1/recommend", {**PLAIN, "k": 10, "allow": allowed})
        assert answer["items"] == [key for key in whole if key in allowed][:10], "1 has been seen"
        assert answer["unknown"][0] == {"field": "allow", "ids": ["nope"], "done": "dropped"}
        seen = answered(fronts["retrieval"], "/v1/recommend", {**PLAIN, "allow": [1], "exclude_seen": False})
        assert seen["items"] == ["1"]
        both = {**PLAIN, "allow": [10, 11, 12], "exclude": [11]}
        assert set(answered(fronts["retrieval"], "/v1/recommend", both)["items"]) == {"10", "12"}
        cascade = answered(fronts["cascade"], "/v1/recommend", {**BODY, "allow": [10, 11, 12, 13], "k": 3})
        assert len(cascade["items"]) == 3
        assert set(cascade["items"]) < {"10", "11", "12", "13"}

    @pytest.mark.parametrize("allowed", [[], ["nope"], [1]])
    def test_where_nothing_is_allowed_nothing_is_recommended(self, fronts, allowed):
        for name, body in (("retrieval", PLAIN), ("cascade", BODY)):
            assert answered(fronts[name], "/v1/recommend", {**body, "allow": allowed})["items"] == []

    @pytest.mark.parametrize("field", ["exclude", "allow"])
    def test_each_at_its_limit_and_one_above(self, fronts, field):
        answered(fronts["retrieval"], "/v1/recommend", {**PLAIN, field: [*range(1, 51)]})
        for wrong in ([*range(1, 52)], 3, [None], [[1]], {"a": 1}):
            assert refused_field(fronts["retrieval"], "/v1/recommend", {**PLAIN, field: wrong}) == field


def test_an_item_that_only_retrieval_knows_comes_last(fronts):
    ranking = random_ranking(ENCODER, num_items=20)
    service = Service({"retrieval": RETRIEVAL, "ranking": ranking}, ServiceConfig(engine=PATIENT, preranked=40))
    app = App(service, LIMITS)
    allow = [*range(10, 31)]
    answer = answered(app, "/v1/recommend", {**BODY, "allow": allow, "k": 21})
    assert {int(key) for key in answer["items"][:11]} == set(range(10, 21))
    (unknown,) = answer["unknown"]
    assert (unknown["field"], unknown["done"], len(unknown["ids"])) == ("items", "placed_last", 10)
    dropped = answered(app, "/v1/recommend", {**BODY, "allow": allow, "k": 21, "unknown": "drop"})
    assert dropped["items"] == answer["items"][:11]
    refusing = {**BODY, "allow": allow, "k": 21, "unknown": "refuse"}
    assert answered(app, "/v1/recommend", refusing)["items"] == answer["items"], "the request names no unknown id"
    service.close()
