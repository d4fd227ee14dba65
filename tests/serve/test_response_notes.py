"""Responses report how the server handled unknown ids, missing inputs and item lists."""

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
from nestrec_bench.load_test.load_test import LoadTestConfig, required_inputs_of, synthetic_request

ENCODER = HSTUConfig(dim=16, num_layers=1, num_heads=2, head_dim=8, max_length=64, time_bias=True)
NUM_ITEMS = 60
RETRIEVAL = random_retrieval(ENCODER, num_items=NUM_ITEMS)
RANKING = random_ranking(ENCODER, num_items=NUM_ITEMS)
NO_SHEDDING = EngineConfig(max_queue_delay_s=1e9)
LIMITS = LimitsConfig(max_list_items=50, default_timeout_ms=10_000)
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
def apps():
    """Return applications by name: a cascade, retrieval alone, and both kinds of model with default values."""
    models = {
        "cascade": {"retrieval": RETRIEVAL, "ranking": RANKING},
        "retrieval": {"retrieval": RETRIEVAL},
        "ranking_with_defaults": {"ranking": with_defaults(RANKING)},
        "retrieval_with_defaults": {"retrieval": with_defaults(RETRIEVAL)},
    }
    services = {
        name: Service(servables, ServiceConfig(engine=NO_SHEDDING, num_retrieved=20))
        for name, servables in models.items()
    }
    yield {name: App(service, LIMITS) for name, service in services.items()}
    for service in services.values():
        service.close()


def post(app, path, body):
    """Return the status and the parsed response."""

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


def post_ok(app, path, body):
    status, response = post(app, path, body)
    assert status in (200, 202), response
    return response


def invalid_field(app, path, body):
    """Return the field that the error response names."""
    status, response = post(app, path, body)
    assert status == 400, response
    return response["error"]["field"]


def click_scores(response):
    return np.array(response["scores"]["click"])


class TestUnknownCandidates:
    BODY: ClassVar = {**BODY, "candidates": ["10", "nope", 11, "nor this", 12]}

    def test_unknown_candidates_are_ranked_last_and_listed(self, apps):
        response = post_ok(apps["cascade"], "/v1/rank", self.BODY)
        known = post_ok(apps["cascade"], "/v1/rank", {**BODY, "candidates": [10, 11, 12]})
        for name, scores in response["scores"].items():
            assert [scores[i] for i in (0, 2, 4)] == pytest.approx(known["scores"][name], abs=1e-5)
            assert max(scores[1], scores[3]) < min(known["scores"][name])
        assert response["unknown_ids"] == [
            {"field": "candidates", "ids": ["nope", "nor this"], "action": "placed_last"}
        ]
        assert known["unknown_ids"] == []

    def test_unknown_candidate_scores_lowest_in_retrieval(self, apps):
        response = post_ok(apps["retrieval"], "/v1/rank", {**PLAIN, "candidates": [*range(10, 20), "nope"]})
        assert np.argmin(response["scores"]["score"]) == 10

    def test_unknown_candidates_only_have_equal_scores(self, apps):
        response = post_ok(apps["cascade"], "/v1/rank", {**BODY, "candidates": ["x", "y"]})
        assert len(set(response["scores"]["click"])) == 1
        assert response["unknown_ids"][0]["ids"] == ["x", "y"]

    def test_unknown_candidates_are_scored_on_request(self, apps):
        response = post_ok(apps["cascade"], "/v1/rank", {**self.BODY, "on_unknown": "score"})
        assert abs(click_scores(response)).max() < 100
        assert response["unknown_ids"][0]["action"] == "scored"

    def test_unknown_candidates_are_dropped_on_request(self, apps):
        response = post_ok(apps["cascade"], "/v1/rank", {**self.BODY, "on_unknown": "drop"})
        assert response["items"] == ["10", 11, 12]
        known = post_ok(apps["cascade"], "/v1/rank", {**BODY, "candidates": [10, 11, 12]})
        assert np.abs(click_scores(response) - click_scores(known)).max() <= 1e-5
        assert response["unknown_ids"][0]["action"] == "dropped"
        none = post_ok(apps["cascade"], "/v1/rank", {**BODY, "candidates": ["x"], "on_unknown": "drop"})
        assert (none["items"], none["scores"]["click"]) == ([], [])

    def test_unknown_candidates_keep_features_aligned(self, apps):
        body = {k: v for k, v in BODY.items() if k != "context"}
        tabs = ["home", "search", "search"]
        items = [10, 11, 12]
        known = {**body, "candidates": items, "candidate_features": {"tab": tabs}}
        mixed = {**known, "candidates": ["x", *items], "candidate_features": {"tab": ["home", *tabs]}}
        expected, found = (click_scores(post_ok(apps["cascade"], "/v1/rank", body)) for body in (known, mixed))
        assert np.abs(found[1:] - expected).max() <= 1e-5

    def test_unknown_events_are_rejected_on_request(self, apps):
        status, response = post(apps["cascade"], "/v1/rank", {**self.BODY, "on_unknown": "reject"})
        assert (status, response["error"]["field"]) == (400, "candidates")
        assert "'nope', 'nor this'" in response["error"]["message"]
        assert invalid_field(apps["cascade"], "/v1/rank", {**self.BODY, "on_unknown": "maybe"}) == "on_unknown"


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
    def test_unknown_events_are_dropped_with_features(self, apps, policy):
        app = apps["cascade"]
        mixed = {**BODY, **self.CANDIDATES, "history": self.MIXED, "on_unknown": policy}
        response, expected = (post_ok(app, "/v1/rank", body) for body in (mixed, {**BODY, **self.CANDIDATES}))
        assert np.abs(click_scores(response) - click_scores(expected)).max() <= 1e-5
        assert response["unknown_ids"] == [{"field": "history.items", "ids": ["gone"], "action": "dropped"}]

    def test_unknown_events_are_scored_on_request(self, apps):
        mixed = {**BODY, **self.CANDIDATES, "history": self.MIXED}
        responses = [post_ok(apps["cascade"], "/v1/rank", {**mixed, "on_unknown": p}) for p in ("score", "drop")]
        assert np.abs(click_scores(responses[0]) - click_scores(responses[1])).max() > 1e-4
        assert [(ids["field"], ids["action"]) for ids in responses[0]["unknown_ids"]] == [
            ("history.items", "scored"),
            ("history.features.tab", "scored"),
        ]

    def test_unknown_events_are_rejected_on_request(self, apps):
        mixed = {**BODY, **self.CANDIDATES, "history": self.MIXED, "on_unknown": "reject"}
        assert invalid_field(apps["cascade"], "/v1/rank", mixed) == "history.items"

    @pytest.mark.parametrize("change", [{"times_ms": [1]}, {"actions": [1] * 5}, {"features": {"tab": ["home"]}}])
    def test_unknown_events_need_lists_of_equal_length(self, apps, change):
        body = {**BODY, **self.CANDIDATES, "history": {**self.MIXED, **change}}
        assert invalid_field(apps["cascade"], "/v1/rank", body).startswith(f"history.{next(iter(change))}")

    @pytest.mark.parametrize("policy", ["last", "score", "drop"])
    def test_unknown_events_only_equal_an_empty_history(self, apps, policy):
        app = apps["cascade"]
        unknown = {**BODY, **self.CANDIDATES, "history": self.UNKNOWN, "on_unknown": policy}
        response = post_ok(app, "/v1/rank", unknown)
        assert (
            np.abs(click_scores(response) - click_scores(post_ok(app, "/v1/rank", {**unknown, "history": {}}))).max()
            <= 1e-5
        )
        assert response["unknown_ids"] == [{"field": "history.items", "ids": ["x", "y"], "action": "dropped"}]
        assert {"field": "history", "value": {"items": []}} in response["defaults_used"]
        assert invalid_field(app, "/v1/recommend", {**BODY, "history": self.UNKNOWN, "on_unknown": policy}) == "history"

    def test_unknown_events_are_listed_by_preinfer(self, apps):
        response = post_ok(apps["cascade"], "/v1/preinfer", {"user": "a", "history": self.MIXED, "now_ms": 9000})
        assert response["unknown_ids"][0]["ids"] == ["gone"]

    def test_unknown_categories_are_listed(self, apps):
        body = {**BODY, **self.CANDIDATES, "context": {"tab": "nowhere"}}
        response = post_ok(apps["cascade"], "/v1/rank", body)
        assert response["unknown_ids"] == [{"field": "context.tab", "ids": ["nowhere"], "action": "scored"}]
        assert invalid_field(apps["cascade"], "/v1/rank", {**body, "on_unknown": "reject"}) == "context.tab"


class TestRequiredFields:
    BODY: ClassVar = {**BODY, "candidates": [10, 11]}

    @pytest.mark.parametrize("name", ["times_ms", "actions", "features"])
    def test_event_features_are_required(self, apps, name):
        history = {field: value for field, value in HISTORY.items() if field != name}
        field = f"history.{name}" + (".tab" if name == "features" else "")
        for path, body in (
            ("/v1/rank", self.BODY),
            ("/v1/recommend", BODY),
            ("/v1/preinfer", {"user": "a"}),
            ("/v1/events", {"user": "a"}),
        ):
            if (path, name) != ("/v1/events", "times_ms"):
                assert invalid_field(apps["cascade"], path, {**body, "history": history}) == field

    def test_candidate_features_are_required(self, apps):
        for path, body in (("/v1/rank", self.BODY), ("/v1/recommend", BODY)):
            without = {name: value for name, value in body.items() if name != "context"}
            assert invalid_field(apps["cascade"], path, without) == "candidate_features.tab"

    def test_event_actions_are_required(self, apps):
        history = {**HISTORY, "actions": [1, None, 2]}
        assert invalid_field(apps["cascade"], "/v1/rank", {**self.BODY, "history": history}) == "history.actions"

    @pytest.mark.parametrize("history", [{}, {"history": None}, {"history": {"items": []}}])
    def test_retrieval_requires_an_event(self, apps, history):
        body = {"user": "new", "candidates": [10, 11], "now_ms": 9000, **history}
        assert invalid_field(apps["retrieval"], "/v1/rank", body) == "history"

    def test_retrieval_requires_no_actions_or_features(self, apps):
        assert post_ok(apps["retrieval"], "/v1/rank", {**PLAIN, "candidates": [10]})["defaults_used"] == []

    def test_default_of_export_is_used_and_reported(self, apps):
        app = apps["ranking_with_defaults"]
        bare = {"user": "ann", "candidates": [10, 11, 12], "now_ms": 9000}
        response = post_ok(app, "/v1/rank", {**bare, "history": {"items": [1, 2, 3]}})
        assert response["defaults_used"] == [
            {"field": "history.times_ms", "value": 9000},
            {"field": "history.actions", "value": ["like"]},
            {"field": "history.features.tab", "value": "search"},
            {"field": "candidate_features.tab", "value": "search"},
        ]
        full = {"items": [1, 2, 3], "times_ms": [9000] * 3, "actions": [2] * 3, "features": {"tab": ["search"] * 3}}
        expected = post_ok(app, "/v1/rank", {**bare, "history": full, "context": {"tab": "search"}})
        assert expected["defaults_used"] == []
        assert np.abs(click_scores(response) - click_scores(expected)).max() <= 1e-5

    def test_default_history_of_export_is_used(self, apps):
        app = apps["retrieval_with_defaults"]
        body = {"user": "new", "now_ms": 9000, "k": NUM_ITEMS}
        response = post_ok(app, "/v1/recommend", body)
        assert response["defaults_used"][0] == {"field": "history", "value": {"items": ["4", "5"]}}
        assert {"4", "5"} <= set(response["items"]), "the user has not seen the items of the default history"
        explicit = {**body, "history": {"items": [4, 5], "times_ms": [9000, 9000]}, "exclude_seen": False}
        assert response["items"] == post_ok(app, "/v1/recommend", explicit)["items"]

    def test_server_time_is_reported_if_the_model_reads_it(self, apps):
        body = {name: value for name, value in self.BODY.items() if name != "now_ms"}
        assert post_ok(apps["cascade"], "/v1/rank", body)["defaults_used"][0]["field"] == "now_ms"

    def test_models_endpoint_lists_required_fields(self, apps):
        model = models_of(apps["ranking_with_defaults"])["ranking"]
        assert model["actions"] == {"click": 1, "like": 2}
        fields = ["history.items", "history.times_ms", "history.actions", "history.features.tab", "context.tab"]
        assert model["required_fields"] == fields
        assert model["defaults"]["features"] == {"tab": "search"}


@pytest.mark.parametrize("name", ["cascade", "retrieval"])
def test_load_test_sends_required_fields(apps, name):
    cfg = LoadTestConfig(num_candidates=5)
    reads = required_inputs_of(models_of(apps[name]))
    signal, request = synthetic_request(3, 7, cfg, np.random.default_rng(0), reads, items=range(1, NUM_ITEMS + 1))
    for path, body in (("/v1/preinfer", signal), ("/v1/rank", request)):
        response = post_ok(apps[name], path, body)
        assert (response["unknown_ids"], response["defaults_used"]) == ([], [])


class TestCandidateFeatures:
    BODY: ClassVar = {name: value for name, value in BODY.items() if name != "context"}

    def test_single_feature_value_equals_list(self, apps):
        body = {**self.BODY, "candidates": [10, 11, 12]}
        variants = [
            {"candidate_features": {"tab": ["search"] * 3}},
            {"candidate_features": {"tab": "search"}},
            {"context": {"tab": "search"}},
        ]
        first, *others = (click_scores(post_ok(apps["cascade"], "/v1/rank", {**body, **v})) for v in variants)
        for other in others:
            assert np.abs(other - first).max() <= 1e-5

    def test_cascade_reads_context_or_candidate_features(self, apps):
        responses = [
            post_ok(apps["cascade"], "/v1/recommend", {**self.BODY, field: {"tab": "search"}, "k": 20})
            for field in ("context", "candidate_features")
        ]
        assert responses[0]["items"] == responses[1]["items"]
        ranked = {**self.BODY, "candidates": responses[0]["items"], "context": {"tab": "search"}}
        assert (
            np.abs(click_scores(responses[0]) - click_scores(post_ok(apps["cascade"], "/v1/rank", ranked))).max()
            <= 1e-5
        )

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
    def test_feature_errors_use_request_field_names(self, apps, path, change, field):
        body = {**self.BODY, **({"candidates": [10, 11]} if path == "/v1/rank" else {}), **change}
        status, response = post(apps["cascade"], path, body)
        assert (status, response["error"]["field"]) == (400, field)
        assert "event_" not in response["error"]["message"]


class TestActions:
    @pytest.mark.parametrize("actions", [["click", "like", ["click", "like"]], [1, "like", 3], [["click"], [2], 3]])
    def test_actions_may_be_names_or_bit_sums(self, apps, actions):
        body = {**BODY, "candidates": [10, 11, 12]}
        named = {**body, "history": {**HISTORY, "actions": actions}}
        if [2] in actions:
            assert invalid_field(apps["cascade"], "/v1/rank", named) == "history.actions"
            return
        expected, found = (click_scores(post_ok(apps["cascade"], "/v1/rank", one)) for one in (body, named))
        assert np.abs(found - expected).max() <= 1e-5

    @pytest.mark.parametrize("action", ["buy", ["buy"], 4, -1, 2**63])
    def test_unknown_actions_are_rejected_with_known_names(self, apps, action):
        body = {**BODY, "candidates": [10], "history": {**HISTORY, "actions": [1, action, 2]}}
        status, response = post(apps["cascade"], "/v1/rank", body)
        assert (status, response["error"]["field"]) == (400, "history.actions")
        assert "click (1), like (2)" in response["error"]["message"]

    def test_action_names_are_stored_with_events(self, apps):
        events = {**HISTORY, "actions": ["click", "like", ["click", "like"]]}
        post_ok(apps["cascade"], "/v1/events", {"user": "eve", "history": events})
        body = {**BODY, "user": "eve", "candidates": [10, 11]}
        expected = click_scores(post_ok(apps["cascade"], "/v1/rank", body))
        del body["history"]
        assert np.abs(click_scores(post_ok(apps["cascade"], "/v1/rank", body)) - expected).max() <= 1e-5


class TestItemLists:
    def test_excluded_items_are_not_recommended(self, apps):
        for name, body in (("retrieval", PLAIN), ("cascade", BODY)):
            first = post_ok(apps[name], "/v1/recommend", {**body, "k": 5})["items"]
            excluded = {**body, "k": 5, "exclude": [first[0], int(first[1]), "nope"]}
            response = post_ok(apps[name], "/v1/recommend", excluded)
            assert not set(response["items"]) & set(first[:2])
            assert response["unknown_ids"] == [{"field": "exclude", "ids": ["nope"], "action": "dropped"}]
        all_items = post_ok(apps["retrieval"], "/v1/recommend", {**PLAIN, "k": 50})["items"]
        response = post_ok(apps["retrieval"], "/v1/recommend", {**PLAIN, "k": 47, "exclude": all_items[::20]})
        assert response["items"] == [key for key in all_items if key not in all_items[::20]]

    def test_only_allowed_items_are_recommended(self, apps):
        all_items = post_ok(apps["retrieval"], "/v1/recommend", {**PLAIN, "k": 57})["items"]
        allowed = ["nope", 1, *all_items[::-3]]
        response = post_ok(apps["retrieval"], "/v1/recommend", {**PLAIN, "k": 10, "allow": allowed})
        assert response["items"] == [key for key in all_items if key in allowed][:10], "item 1 is in the history"
        assert response["unknown_ids"][0] == {"field": "allow", "ids": ["nope"], "action": "dropped"}
        seen = post_ok(apps["retrieval"], "/v1/recommend", {**PLAIN, "allow": [1], "exclude_seen": False})
        assert seen["items"] == ["1"]
        both = {**PLAIN, "allow": [10, 11, 12], "exclude": [11]}
        assert set(post_ok(apps["retrieval"], "/v1/recommend", both)["items"]) == {"10", "12"}
        cascade = post_ok(apps["cascade"], "/v1/recommend", {**BODY, "allow": [10, 11, 12, 13], "k": 3})
        assert len(cascade["items"]) == 3
        assert set(cascade["items"]) < {"10", "11", "12", "13"}

    @pytest.mark.parametrize("allowed", [[], ["nope"], [1]])
    def test_recommend_with_empty_allow_list_is_empty(self, apps, allowed):
        for name, body in (("retrieval", PLAIN), ("cascade", BODY)):
            assert post_ok(apps[name], "/v1/recommend", {**body, "allow": allowed})["items"] == []

    @pytest.mark.parametrize("field", ["exclude", "allow"])
    def test_list_limits_at_and_above_maximum(self, apps, field):
        post_ok(apps["retrieval"], "/v1/recommend", {**PLAIN, field: [*range(1, 51)]})
        for wrong in ([*range(1, 52)], 3, [None], [[1]], {"a": 1}):
            assert invalid_field(apps["retrieval"], "/v1/recommend", {**PLAIN, field: wrong}) == field


def test_cascade_ranks_items_unknown_to_ranker_last(apps):
    ranking = random_ranking(ENCODER, num_items=20)
    service = Service({"retrieval": RETRIEVAL, "ranking": ranking}, ServiceConfig(engine=NO_SHEDDING, num_retrieved=40))
    app = App(service, LIMITS)
    allow = [*range(10, 31)]
    response = post_ok(app, "/v1/recommend", {**BODY, "allow": allow, "k": 21})
    assert {int(key) for key in response["items"][:11]} == set(range(10, 21))
    (unknown,) = response["unknown_ids"]
    assert (unknown["field"], unknown["action"], len(unknown["ids"])) == ("items", "placed_last", 10)
    dropped = post_ok(app, "/v1/recommend", {**BODY, "allow": allow, "k": 21, "on_unknown": "drop"})
    assert dropped["items"] == response["items"][:11]
    rejecting = {**BODY, "allow": allow, "k": 21, "on_unknown": "reject"}
    found = post_ok(app, "/v1/recommend", rejecting)
    assert found["items"] == response["items"], "the request itself contains only known ids"
    service.close()
