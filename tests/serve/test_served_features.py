"""Features in exports and servers: scores equal those of the trained model, and new items are embedded by features."""

import asyncio
import tracemalloc
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from every_model import LIMITS, SERVICE
from featured_runs import ROLES, request_for, select_features

import nestrec
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX
from nestrec.inference.recommender import Recommender
from nestrec.inference.request_parsing import parse_request
from nestrec.models import HSTUConfig
from nestrec.serving.core.request_limits import UNKNOWN_SOURCE, BadRequestError, LimitsConfig
from nestrec.serving.engine.reference_runner import user_queries
from nestrec.serving.frontend import wire_format
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.history_store.memory_store import MemoryHistoryStore
from nestrec.serving.http.endpoints.status_endpoints import _model
from nestrec.serving.http.http_app import App
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.inputs.request_schema import RankRequest, reader
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History, number_bits
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec, InputDefaults
from nestrec.serving.service.cold_start_items import NewItem, NewItemInsertion
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval
from support.featured_log import ITEM_FEATURES


@pytest.mark.parametrize("role", ["ranking", "ranking, prefix", "ranking, dlrm", "ranking, every kind"])
def test_features_ranking_scores_equal_training(runs, role):
    trainer = runs.trainer(role)
    served = nestrec.load(runs.folder(role))
    task = trainer.session.task
    for user, length in ((3, 4), (8, 5), (7, 0)):
        history, context, item = request_for(runs, user, length)
        history, context = select_features(task.cfg, history, context)
        batch = task._inputs.collate_chunks(
            task._inputs.read(np.array([user])), np.array([0]), np.array([length + 1]), epoch=0
        )
        offline = task._logits(trainer.session.engine, batch)[-1]
        found = served.rank(history, [item], context=context).scores
        np.testing.assert_allclose([scores[0] for scores in found.values()], offline, rtol=1e-4, atol=1e-5)
        other = served.rank(history, [item], context={**context, "place": 99.0}).scores
        assert abs(other["click"][0] - found["click"][0]) > 1e-6, "the context changes the score"
        for too_large in (1e39, 10**400, "inf"):
            with pytest.raises(UserError, match=r"context.place[\s\S]*must be numbers"):
                served.rank(history, [item], context={**context, "place": too_large})


@pytest.mark.parametrize("role", ["retrieval", "retrieval, prefix"])
def test_features_retrieval_scores_equal_training(runs, role):
    trainer = runs.trainer(role)
    served = nestrec.load(runs.folder(role))
    dataset = Dataset.open(runs.data)
    task = trainer.session.task
    engine = trainer.session.engine
    queries = RetrievalQueries(
        task._read, task._split, task.cfg.history, "test", use_times=task._use_times, inputs=task._inputs
    )
    all_items = np.arange(1, dataset.num_items + 1)
    item_vectors = task.item_tower.candidate_vectors(task.item_tower.item_inputs(engine, all_items)).double()
    for query in (0, 7):
        user = int(queries.users[query])
        length = int(queries.target_at[query])
        states = task.item_tower.states(engine, queries.collate(np.array([query])))
        offline = (item_vectors @ states[-1].double()).numpy()
        history, context, _ = request_for(runs, user, length)
        history, context = select_features(task.cfg, history, context)
        keys = dataset.items()["item_key"].to_pylist()
        found = served.rank(history, keys, context=context).scores["score"]
        np.testing.assert_allclose(found, offline, rtol=1e-4, atol=1e-4)
        best = served.recommend(history, 5, exclude_seen=False, context=context)
        assert best.items[0] == keys[int(offline.argmax())]
        if role == "retrieval, prefix":
            resolver = RequestResolver(served.servable, LimitsConfig(), RequestNotes())
            user_input = resolver.user(parse_request(history, (), context))
            (query_vector,) = user_queries(served._adapter, [(user_input.history, user_input.now_ms)])
            batched = (item_vectors @ query_vector.double()).numpy()
            np.testing.assert_allclose(batched, offline, rtol=1e-4, atol=1e-4)


def test_features_retrieval_requires_no_unread_context(runs):
    """Regression: `rank` required the context although the retrieval model does not read it."""
    servable = Servable.load(runs.folder("retrieval"))
    columns = tuple(column for column in servable.spec.columns if not column.name.startswith(CONTEXT_PREFIX))
    tables = {name: table for name, table in servable.tables.items() if not name.startswith(CONTEXT_PREFIX)}
    servable = replace(servable, spec=replace(servable.spec, columns=columns), tables=tables, golden_request=None)
    history, _, _ = request_for(runs, 3, 4)
    history, _ = select_features(servable.spec.task, history, dict.fromkeys(history["features"]))
    served = Recommender(servable)
    best = served.recommend(history, 5)
    np.testing.assert_allclose(served.rank(history, best.items).scores["score"], best.scores["score"], rtol=1e-5)
    with closing(Service({"retrieval": servable}, SERVICE)) as service:
        description = _model(service.deployment("retrieval"))
    assert "history.features.device" in description["required_fields"]
    assert "context.device" not in description["required_fields"]


@pytest.mark.parametrize("role", ["ranking, prefix", "retrieval, prefix"])
def test_prefix_cache_is_invalidated_by_user_features(runs, role):
    """With batches of four tokens, the prefill of a pre-infer request has chunks that end between two events."""
    servable = Servable.load(runs.folder(role))
    reference = nestrec.load(runs.folder(role))
    engine = replace(SERVICE.engine, max_batch_tokens=4)
    service = Service({servable.serving.role: servable}, replace(SERVICE, engine=engine))
    history, context, _ = request_for(runs, 8, 6)
    history, context = select_features(servable.spec.task, history, context)
    moved = {**history, "user_features": {**history["user_features"], "country": "SE"}}
    assert moved != history
    shorter = {**history, **{name: history[name][:4] for name in ("items", "times_ms", "actions")}}
    shorter["features"] = {name: values[:4] for name, values in history["features"].items()}
    keys = list(servable.item_keys)[:3]
    steps = [("rank", shorter), ("rank", history), ("rank", moved), ("rank", history)]
    if role == "ranking, prefix":  # a pre-infer request has no context, which the retrieval model reads
        steps.insert(3, ("preinfer", history))

    async def send_all() -> list[dict]:
        transport = httpx.ASGITransport(App(service, LIMITS))
        ranked = []
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for path, step_history in steps:
                fields = {**step_history, "times_ms": [int(time) for time in step_history["times_ms"]]}
                body = {"user": "u", "now_ms": fields.pop("now_ms"), "user_features": fields.pop("user_features")}
                body["history"] = fields
                body |= {"candidates": keys, "context": context} if path == "rank" else {"num_candidates": 3}
                response = await client.post(f"/v1/{path}", json=body)
                assert response.status_code in (200, 202), response.text
                assert service.deployment(servable.serving.role).engines[0].wait_until_idle(60)
                ranked += [response.json()] if path == "rank" else []
        return ranked

    with closing(service):
        responses = asyncio.run(send_all())
    *sources, last = (response["cache_source"]["from"] for response in responses)
    assert sources == ["none", "device", "none"]
    # The first prefix may have been offloaded to host memory meanwhile, and is valid again. Without a pre-infer
    # request, the ranking request reloads or recomputes it; with one, it was reloaded or recomputed before.
    assert last in (("device", "host") if role == "ranking, prefix" else ("none", "host"))
    for response, step_history in zip(responses, (shorter, history, moved, history), strict=True):
        expected = reference.rank(step_history, keys, context=context).scores
        for name, scores in response["scores"].items():
            np.testing.assert_allclose(scores, expected[name], rtol=1e-5, atol=1e-5)
    before, after = (np.array(list(response["scores"].values())) for response in responses[1:3])
    assert np.abs(before - after).max() > 1e-6, "the country changes the scores"


def test_features_invalid_lists_texts_vectors_are_named(runs):
    servable = Servable.load(runs.folder("ranking, every kind"))
    history, context, item = request_for(runs, 8, 4)

    def read(**changes) -> tuple[History, RequestNotes]:
        changed = {**history, "user_features": {**history["user_features"], **changes.pop("user", {})}}
        changed["features"] = {**history["features"], **changes.pop("events", {})}
        notes = RequestNotes()
        request = parse_request(changed, [item], {**context, **changes})
        resolver = RequestResolver(servable, LimitsConfig(), notes)
        resolver.candidate_features(request, 1)
        return resolver.user(request).history, notes

    for changes, field, message in (
        ({"user": {"languages": ["no"] * 33}}, "user_features.languages", "at most 32 values"),
        ({"user": {"taste": [1.0, 2.0]}}, "user_features.taste", "a list of 5 numbers"),
        ({"user": {"taste": [1.0, 2.0, 3.0, 4.0, "x"]}}, "user_features.taste", "a list of 5 numbers"),
        ({"user": {"taste": [1.0, 2.0, 3.0, 4.0, 10**400]}}, "user_features.taste", "a list of 5 numbers"),
        ({"events": {"place": [1, "inf", 1, 1]}}, "history.features.place", "numbers from -1e"),
        ({"place": float("-inf")}, "context.place", "numbers from -1e"),
        ({"place": 10**400}, "context.place", "must be numbers"),
        ({"query": "\ud800"}, "context.query", "must be valid Unicode text"),
        ({"user": {"country": ["NO", "SE"]}}, "user_features.country", "must be one value"),
        ({"query": 7}, "context.query", "must be text"),
        ({"events": {"device": ["tv", ["web"], None, "tv"]}}, "history.features.device", "one value per event"),
        ({"device": ["tv"]}, "context.device", "must be one value"),
        ({"events": {"query": ["red", 3, None, "blue"]}}, "history.features.query", "must be text"),
        ({"events": {"filters": [["f1"]] * 3}}, "history.features.filters", "must have 4 values"),
    ):
        with pytest.raises(BadRequestError, match=message) as error:
            read(**changes)
        assert error.value.field == field
    found, notes = read(
        user={"languages": ["en", "klingon", "no"], "taste": None}, events={"filters": ["f1", None, [], ["f2"]]}
    )
    known = servable.column_ids["user_languages"]
    assert [found.query_features[f"user_languages/{index}"] for index in range(3)] == [known["en"], known["no"], 0]
    assert notes.to_response()["unknown_ids"][0]["ids"] == ["klingon"]
    assert [found.query_features[f"user_taste/{index}"] for index in range(5)] == [0] * 5
    servable.column_ids["user_languages"]["1"] = 2
    found, _ = read(user={"languages": [True, False]})
    assert found.query_features["user_languages/0"] == 2, "booleans of a log are 1 and 0"
    found, _ = read(events={"filters": ["f1", None, [], ["f2"]]})
    filters = servable.column_ids["event_filters"]
    assert found.features["event_filters/0"].tolist() == [filters["f1"], 0, 0, filters["f2"]]


@dataclass(frozen=True)
class RankClient:
    """Client of a server with one model, with a ranking request that tests change."""

    service: Service
    body: dict

    def rank(self, *, events: dict | None = None, **changes) -> httpx.Response:
        """Send the request with changed features.

        Args:
            events: Event features to replace in the history.
            changes: Features to replace in other fields, such as `context` or `user_features`.
        """
        body = {**self.body, **{name: {**self.body.get(name, {}), **new} for name, new in changes.items()}}
        features = {**self.body["history"]["features"], **(events or {})}
        body["history"] = {**self.body["history"], "features": features}
        for name in body.get("candidate_features", {}):
            body["context"] = {other: value for other, value in body["context"].items() if other != name}

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(App(self.service, LIMITS))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.post("/v1/rank", json=body)

        return asyncio.run(send())


@pytest.fixture(scope="module")
def rank_client(runs):
    servable = Servable.load(runs.folder("ranking, every kind"))
    history, context, item = request_for(runs, 8, 4)
    history["times_ms"] = [int(time) for time in history["times_ms"]]
    body = {"user": "u", "now_ms": history.pop("now_ms"), "user_features": history.pop("user_features")}
    with closing(Service({servable.serving.role: servable}, SERVICE)) as service:
        yield RankClient(service, {**body, "history": history, "context": context, "candidates": [item]})


def test_features_long_list_in_long_request(rank_client):
    """Bodies of at least 2 KiB are searched for long lists, which are parsed as arrays."""
    languages = ["en", "no"] * 8
    filters = ["f1", "f2"] * 8
    short = rank_client.rank(user_features={"languages": languages}, context={"filters": filters})
    long_client = RankClient(
        rank_client.service, {**rank_client.body, "candidates": rank_client.body["candidates"] * 600}
    )
    found = long_client.rank(user_features={"languages": languages}, context={"filters": filters})
    assert found.status_code == 200, found.text
    assert not found.json()["unknown_ids"]
    np.testing.assert_allclose(found.json()["scores"]["click"], short.json()["scores"]["click"] * 600, rtol=1e-5)


@pytest.mark.parametrize("name", ["device", "place"])
@pytest.mark.parametrize("value", [["tv"], [1.5], [None], []])
def test_features_list_instead_of_value_is_rejected(rank_client, name, value):
    for field, changes in (
        (f"history.features.{name}", {"events": {name: [None, value, None, None]}}),
        (f"candidate_features.{name}", {"candidate_features": {name: [value]}}),
    ):
        response = rank_client.rank(**changes)
        assert response.status_code == 400, response.text
        assert response.json()["error"] == {
            "message": "must be one value per event or candidate, not a list",
            "field": field,
        }


def test_features_too_large_numbers_are_rejected(rank_client):
    for field, changes in (
        ("history.features.place", {"events": {"place": [1.0, 1e300, None, -1e300]}}),
        ("context.place", {"context": {"place": "inf"}}),
        ("user_features.age", {"user_features": {"age": -1e38}}),
        ("user_features.taste", {"user_features": {"taste": [0.0, 1e39, 0.0, 0.0, 0.0]}}),
    ):
        response = rank_client.rank(**changes)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["field"] == field
    assert rank_client.rank(context={"place": -1e18}).json()["scores"]["click"][0] is not None


def rank_stored(
    rank_client: RankClient, features: dict, limits: LimitsConfig = LIMITS, **changes: list
) -> httpx.Response:
    """Store the history of the request with other features and columns, and send the request without its history."""
    store = MemoryHistoryStore(HistoryStoreConfig())

    async def send() -> httpx.Response:
        await store.append("u", {**rank_client.body["history"], "features": features, **changes})
        transport = httpx.ASGITransport(App(rank_client.service, limits, store))
        body = {name: value for name, value in rank_client.body.items() if name != "history"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/rank", json=body)

    return asyncio.run(send())


def test_stored_features_are_resolved_once(rank_client, monkeypatch):
    """Each feature is resolved once, including numbers, lists, texts and vectors."""
    resolved = []
    values = RequestResolver.values

    def record_column(self, raw_values, count, column, field, *, is_each):
        if field.startswith("history.features.") or not field:
            resolved.append(column.name)
        return values(self, raw_values, count, column, field, is_each=is_each)

    monkeypatch.setattr(RequestResolver, "values", record_column)
    features = rank_client.body["history"]["features"]
    assert rank_stored(rank_client, features).status_code == 200
    assert sorted(resolved) == sorted(set(resolved))
    assert len(resolved) == len(features)


def test_stored_values_above_length_limits_are_dropped(rank_client):
    """A text above the limit is an unknown value, and an event with such an item id is dropped."""
    items = rank_client.body["history"]["items"]
    times = rank_client.body["history"]["times_ms"]
    stored = {"query": ["red shoe", "w" * 50, None, None], "filters": [["f1", "w" * 50], None, ["f2"], None]}
    read = {"query": ["red shoe", None, None, None], "filters": [["f1"], None, ["f2"], None]}
    features = {name: [None] * 4 for name in rank_client.body["history"]["features"]}
    expected = rank_client.rank(events={**features, **read})
    history = {"items": [*items, "i" * 50], "times_ms": [*times, times[-1]]}
    history["actions"] = [*rank_client.body["history"]["actions"], "click"]
    stored = {name: [*values, None] for name, values in {**features, **stored}.items()}
    limits = replace(LIMITS, max_text_length=49, max_item_id_length=49)
    found = rank_stored(rank_client, stored, limits, **history)
    assert expected.status_code == found.status_code == 200, (expected.text, found.text)
    assert found.json()["scores"]["click"] == pytest.approx(expected.json()["scores"]["click"], rel=1e-5)


def test_stored_features_of_other_model_are_unknown(rank_client):
    """The events were stored while another model was served, whose features of these names had other kinds."""
    stored = {
        "device": [["tv"], 1.5, "tv", None],
        "place": [["x"], "far", "3", 1e300],
        "query": [7, ["red"], "red shoe", None],
        "filters": [["f1", 2.5], 1.5, ["f2"] * 40, "f3"],
    }
    read = {
        "device": [None, None, "tv", None],
        "place": [None, None, "3", None],
        "query": [None, None, "red shoe", None],
        "filters": [["f1"], None, ["f2"] * 32, "f3"],
    }
    expected = rank_client.rank(events=read)
    found = rank_stored(rank_client, stored)
    assert expected.status_code == found.status_code == 200, (expected.text, found.text)
    assert found.json()["scores"]["click"] == pytest.approx(expected.json()["scores"]["click"], rel=1e-5)


@pytest.mark.parametrize(("length", "is_read"), [(4096, True), (4097, False)])
def test_feature_text_limit_exceeds_item_id_limit(length, is_read):
    body = {"user": "u", "candidates": ["i0"], "context": {"query": "w" * length}}
    with nullcontext() if is_read else pytest.raises(BadRequestError, match="4096 characters"):
        reader(RankRequest, LimitsConfig())(body)
    with pytest.raises(BadRequestError, match="256 characters"):
        reader(RankRequest, LimitsConfig())({**body, "candidates": ["w" * 300]})


def test_rank_frame_encodes_features_of_every_kind(runs):
    servable = Servable.load(runs.folder("ranking, every kind"))
    history, context, item = request_for(runs, 8, 4)
    resolver = RequestResolver(servable, LimitsConfig(), RequestNotes())
    request = parse_request(history, [item], context)
    user_input = resolver.user(request)
    features = resolver.candidate_features(request, 1)
    candidates = Candidates(items=servable.ids_of([item]), now_ms=user_input.now_ms, features=features)
    frame = wire_format.RankFrame(
        deployment=1,
        resolved_by="name",
        user="u",
        sender=UNKNOWN_SOURCE,
        timeout_s=1.0,
        history=user_input.history,
        candidates=candidates,
    )
    decoded = wire_format.RankFrame.decode(frame.encode())
    assert set(decoded.history.features) == set(servable.request_fields)
    for name, values in user_input.history.features.items():
        assert np.array_equal(decoded.history.features[name], values)
        assert np.array_equal(decoded.candidates.features[name], features[name])
    assert decoded.history.query_features == user_input.history.query_features


@pytest.mark.parametrize("make", [random_retrieval, random_ranking])
def test_features_wide_user_vector_is_stored_once(make):
    """Repeated at each of 2,000 events, 1,536 numbers took 25 MB, which were copied several times and cached."""
    plain = make(HSTUConfig(dim=8, head_dim=4, num_heads=1, num_layers=1, max_length=4096))
    taste = ColumnSpec(name="user_taste", keys=None, num_rows=0, kind="vector", width=1536)
    defaults = InputDefaults(features={"tab": None}, actions=()) if plain.event_features else InputDefaults()
    servable = replace(plain, spec=replace(plain.spec, columns=(*plain.spec.columns, taste), defaults=defaults))
    adapter = make_adapter(servable)
    resolver = RequestResolver(servable, LimitsConfig(), RequestNotes())
    history = {"items": ["1"] * 2000, "times_ms": [7] * 2000, "now_ms": 8}
    contents = []
    for vector in ([0.5] * 1536, [0.5] * 1535 + [0.25]):
        request = parse_request({**history, "user_features": {"taste": vector}}, ["1"] * 500, None)
        tracemalloc.start()
        user_input = resolver.user(request)
        features = resolver.candidate_features(request, 500)
        candidates = Candidates(items=servable.ids_of(request.candidates), now_ms=8, features=features).copied()
        encoded = wire_format.RankFrame(
            deployment=1,
            resolved_by="name",
            user="u",
            sender=UNKNOWN_SOURCE,
            timeout_s=1.0,
            history=user_input.history,
            candidates=candidates,
        ).encode()
        found = wire_format.RankFrame.decode(encoded)
        contents.append(adapter.tokens(found.history, user_input.now_ms).content(2000))
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
        tracemalloc.stop()
        vector_bits = number_bits(np.array(vector, np.float32))
        for inputs in (found.history, *([found.candidates] if found.candidates.features else [])):
            assert np.array_equal([inputs.features[name][-1] for name in taste.fields], vector_bits)
            assert {len(inputs.features[name]) for name in taste.fields} == {len(inputs)}
    assert contents[0] != contents[1], "a cached prefix is valid for one vector only"
    assert len(contents[0]) < 1 << 20


def test_rank_frame_encodes_vectors_of_any_width():
    """The field names of a wide vector alone take more than 64 KiB."""
    wide = {f"event_picture/{index}": np.full(2, index) for index in range(6000)}
    zeros = np.zeros(2, np.int64)
    history = History(items=zeros, times_ms=zeros, actions=zeros, features=wide, query_features=dict.fromkeys(wide, 3))
    frame = wire_format.RankFrame(
        deployment=1, resolved_by="name", user="\u00fc", sender=UNKNOWN_SOURCE, timeout_s=1.0, history=history,
        candidates=Candidates(items=zeros, now_ms=1, features=wide),
    )  # fmt: skip
    decoded = wire_format.RankFrame.decode(frame.encode())
    assert decoded.user == "\u00fc"
    assert decoded.history.query_features == history.query_features
    for found in (decoded.history.features, decoded.candidates.features):
        assert {name: values.tolist() for name, values in found.items()} == {n: [*v] for n, v in wide.items()}


def test_cold_start_item_features_with_interactions(runs):
    servable = Servable.load(runs.folder("ranking, dlrm"))
    new = [NewItem(key="fresh", features=item_features(runs.log, "n0"))]
    grown = NewItemInsertion(NewItemInsertion(servable, new).with_capacity(), new)
    grown.apply()
    ids = torch.tensor([servable.spec.num_items + 1, int(servable.ids_of(["n0"])[0]), 0])
    fresh, twin, unknown = grown.after.tables["items"].rows(ids).split(1)
    dim = servable.encoder_config.dim
    assert fresh.shape[1] == dim * (1 + len(ITEM_FEATURES))
    torch.testing.assert_close(fresh[:, dim:], twin[:, dim:])
    assert torch.equal(fresh[:, :dim], unknown[:, :dim])


def item_features(log: Path, name: str) -> dict:
    """Return the features of an item in the log's item table."""
    lines = [line.split(",") for line in (log / "items.csv").read_text().splitlines()]
    row = dict(zip(lines[0], next(line for line in lines if line[0] == name), strict=True))
    index = (log / "ids.txt").read_text().split().index(name)
    return {
        "brand": row["brand"],
        "tags": row["tags"].split("|") if row["tags"] else [],
        "price": float(row["price"]) if row["price"] else None,
        "title_bag": row["title"],
        "picture": np.load(log / "pictures.npy")[index].tolist(),
    }


def test_cold_start_item_scores_equal_exported_item(runs):
    log = runs.log
    service = Service({role: Servable.load(runs.folder(role)) for role in ROLES}, ServiceConfig())
    app = App(service, LimitsConfig(default_timeout_ms=10_000))
    history = {"items": ["i0", "i5"], "times_ms": [1_700_000_000_000, 1_700_000_060_000], "actions": ["click", []]}
    history["features"] = {"device": ["phone", "tv"], "place": [3, None]}
    user_fields = {"user": "u", "history": history, "now_ms": 1_700_000_120_000}
    user_fields |= {"context": {"device": "tv", "place": 2.5}, "user_features": {"country": "NO", "age": 31}}

    async def post(path: str, body: dict) -> tuple[int, dict]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            response = await client.post(path, json=body)
            return response.status_code, response.json()

    def post_ok(path: str, body: dict) -> dict:
        status, found = asyncio.run(post(path, body))
        assert status == 200, found
        return found

    try:
        twin = {"id": "fresh", "features": item_features(log, "n0"), "title": "as n0"}
        before = {role: deployment.servable.spec.num_items for role, deployment in service.deployments.items()}
        added = post_ok("/v1/items", {"items": [twin, {"id": "i0", "features": {}}]})
        assert added["added"] == 1, "i0 is not new"
        assert added["items"] == {role: count + 1 for role, count in before.items()}
        found = service.deployment("retrieval").servable
        ids = torch.from_numpy(found.ids_of(["fresh", "n0"]))
        fresh, expected = found.index.rows(ids - 1)
        torch.testing.assert_close(fresh, expected)
        scores = post_ok("/v1/recommend", {**user_fields, "k": 40, "exclude_seen": False})
        assert {"fresh", "n0"} <= set(scores["items"])
        engines = service.deployment("retrieval").engines
        post_ok("/v1/items", {"items": [{"id": "more", "features": {"brand": "b1"}}]})
        assert service.deployment("retrieval").engines is engines, "the spare capacity sufficed: no engine was rebuilt"
        ranked = post_ok("/v1/rank", {**user_fields, "candidates": ["more", "fresh", "missing"]})
        assert [unknown["ids"] for unknown in ranked["unknown_ids"]] == [["missing"]]
        picture = item_features(log, "n0")["picture"]
        for features, message in (
            ({"brnd": "b1"}, "did you mean 'brand'"),
            ({"picture": [*picture[1:], "dark"]}, "numbers"),
            ({"picture": [*picture[1:], 1e39]}, "must be between"),
        ):
            status, rejected = asyncio.run(post("/v1/items", {"items": [{"id": "x", "features": features}]}))
            assert status == 409
            assert message in str(rejected)
            assert rejected["error"]["field"].startswith("items.x.features.")
            assert rejected["error"]["remedy"]
            assert rejected["error"]["remedy"] not in rejected["error"]["message"]
    finally:
        service.close()
