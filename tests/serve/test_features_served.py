"""Features reach exports and servers: scores are those of the trained model, new items are known by what they are."""

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
from featured_runs import ROLES, known_to, request_of

import nestrec
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX
from nestrec.inference.recommender import Recommender
from nestrec.inference.request_parsing import asked_request
from nestrec.models import HSTUConfig
from nestrec.serving.core.request_limits import NOBODY, BadRequestError, LimitsConfig
from nestrec.serving.engine.reference_runner import user_queries
from nestrec.serving.frontend import wire_format
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.history_store.memory_store import MemoryHistoryStore
from nestrec.serving.http.endpoints.status_endpoints import _model
from nestrec.serving.http.http_app import App
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.inputs.request_schema import RankRequest, reader
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.request_inputs import Candidates, History, number_bits
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec, InputDefaults
from nestrec.serving.service.cold_start_items import NewItem, NewItemInsertion
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval
from support.featured_log import ITEM_FEATURES


@pytest.mark.parametrize("role", ["ranking", "ranking, prefix", "ranking, dlrm", "ranking, every kind"])
def test_served_scores_of_ranking_are_those_of_the_model_that_was_trained(runs, role):
    trainer = runs.trainer(role)
    served = nestrec.load(runs.folder(role))
    task = trainer.session.task
    for user, length in ((3, 4), (8, 5), (7, 0)):
        history, context, item = request_of(runs, user, length)
        history, context = known_to(task.cfg, history, context)
        batch = task._inputs.slices(task._inputs.read(np.array([user])), np.array([0]), np.array([length + 1]), epoch=0)
        offline = task._logits(trainer.session.engine, batch)[-1]
        found = served.rank(history, [item], context=context).scores
        np.testing.assert_allclose([scores[0] for scores in found.values()], offline, rtol=1e-4, atol=1e-5)
        other = served.rank(history, [item], context={**context, "place": 99.0}).scores
        assert abs(other["click"][0] - found["click"][0]) > 1e-6, "the context says something"
        for endless in (1e39, 10**400, "inf"):
            with pytest.raises(UserError, match=r"context.place[\s\S]*must be numbers"):
                served.rank(history, [item], context={**context, "place": endless})


@pytest.mark.parametrize("role", ["retrieval", "retrieval, prefix"])
def test_served_scores_of_retrieval_are_those_of_the_model_that_was_trained(runs, role):
    trainer = runs.trainer(role)
    served = nestrec.load(runs.folder(role))
    dataset = Dataset.open(runs.data)
    task = trainer.session.task
    engine = trainer.session.engine
    queries = RetrievalQueries(
        task._read, task._split, task.cfg.history, "test", use_times=task._use_times, inputs=task._inputs
    )
    everything = np.arange(1, dataset.num_items + 1)
    compared = task.side.scored(task.side.content(engine, everything)).double()
    for query in (0, 7):
        user, length = int(queries.users[query]), int(queries.target_at[query])
        states = task.side.states(engine, queries.assemble(np.array([query])))
        offline = (compared @ states[-1].double()).numpy()
        history, context, _ = request_of(runs, user, length)
        history, context = known_to(task.cfg, history, context)
        keys = dataset.items()["item_key"].to_pylist()
        found = served.rank(history, keys, context=context).scores["score"]
        np.testing.assert_allclose(found, offline, rtol=1e-4, atol=1e-4)
        best = served.recommend(history, 5, exclude_seen=False, context=context)
        assert best.items[0] == keys[int(offline.argmax())]
        if role == "retrieval, prefix":
            asked = RequestResolver(served.servable, LimitsConfig(), RequestNotes()).user(
                asked_request(history, (), context)
            )
            (queried,) = user_queries(served._form, [(asked.history, asked.now_ms)])
            together = (compared @ queried.double()).numpy()
            np.testing.assert_allclose(together, offline, rtol=1e-4, atol=1e-4)


def test_retrieval_asks_nobody_for_a_context_that_it_does_not_read(runs):
    """Ranking candidates by it refused where the context was not told, which recommending them does not read."""
    servable = Servable.load(runs.folder("retrieval"))
    columns = tuple(column for column in servable.spec.columns if not column.name.startswith(CONTEXT_PREFIX))
    tables = {name: table for name, table in servable.tables.items() if not name.startswith(CONTEXT_PREFIX)}
    servable = replace(servable, spec=replace(servable.spec, columns=columns), tables=tables, probe=None)
    history, _, _ = request_of(runs, 3, 4)
    history, _ = known_to(servable.spec.task, history, dict.fromkeys(history["features"]))
    served = Recommender(servable)
    best = served.recommend(history, 5)
    np.testing.assert_allclose(served.rank(history, best.items).scores["score"], best.scores["score"], rtol=1e-5)
    with closing(Service({"retrieval": servable}, SERVICE)) as service:
        told = _model(service.fleet("retrieval"))
    assert "history.features.device" in told["reads"]
    assert "context.device" not in told["reads"]


@pytest.mark.parametrize("role", ["ranking, prefix", "retrieval, prefix"])
def test_what_is_kept_behind_tokens_of_users_is_of_no_use_once_these_have_changed(runs, role):
    """With a batch of four tokens, signals are computed in pieces that end between two events."""
    servable = Servable.load(runs.folder(role))
    oracle = nestrec.load(runs.folder(role))
    engine = replace(SERVICE.engine, max_batch_tokens=4)
    service = Service({servable.serving.role: servable}, replace(SERVICE, engine=engine))
    history, context, _ = request_of(runs, 8, 6)
    history, context = known_to(servable.spec.task, history, context)
    moved = {**history, "user_features": {**history["user_features"], "country": "SE"}}
    assert moved != history
    shorter = {**history, **{name: history[name][:4] for name in ("items", "times_ms", "actions")}}
    shorter["features"] = {name: values[:4] for name, values in history["features"].items()}
    keys = list(servable.item_keys)[:3]
    steps = [("rank", shorter), ("rank", history), ("rank", moved), ("rank", history)]
    if role == "ranking, prefix":  # signals tell no context, which the other model reads
        steps.insert(3, ("preinfer", history))

    async def asked() -> list[dict]:
        transport = httpx.ASGITransport(App(service, LIMITS))
        found = []
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for path, one in steps:
                told = {**one, "times_ms": [int(time) for time in one["times_ms"]]}
                body = {"user": "u", "now_ms": told.pop("now_ms"), "user_features": told.pop("user_features")}
                body["history"] = told
                body |= {"candidates": keys, "context": context} if path == "rank" else {"num_candidates": 3}
                answer = await client.post(f"/v1/{path}", json=body)
                assert answer.status_code in (200, 202), answer.text
                assert service.fleet(servable.serving.role).engines[0].wait_until_idle(60)
                found += [answer.json()] if path == "rank" else []
        return found

    with closing(service):
        answers = asyncio.run(asked())
    *sources, last = (answer["prefix"]["from"] for answer in answers)
    assert sources == ["none", "device", "none"]
    # What was kept of the first tokens may have gone to host memory meanwhile, and is right again: a ranking that
    # nobody signalled brings it back or computes anew; a signal brings it back or has computed it.
    assert last in (("device", "dram") if role == "ranking, prefix" else ("none", "dram"))
    for answer, one in zip(answers, (shorter, history, moved, history), strict=True):
        expected = oracle.rank(one, keys, context=context).scores
        for name, scores in answer["scores"].items():
            np.testing.assert_allclose(scores, expected[name], rtol=1e-5, atol=1e-5)
    before, after = (np.array(list(answer["scores"].values())) for answer in answers[1:3])
    assert np.abs(before - after).max() > 1e-6, "the country says something"


def test_lists_texts_and_vectors_that_a_model_cannot_read_are_refused_by_name(runs):
    servable = Servable.load(runs.folder("ranking, every kind"))
    history, context, item = request_of(runs, 8, 4)

    def read(**changes) -> tuple[History, RequestNotes]:
        told = {**history, "user_features": {**history["user_features"], **changes.pop("user", {})}}
        told["features"] = {**history["features"], **changes.pop("events", {})}
        notes = RequestNotes()
        request = asked_request(told, [item], {**context, **changes})
        reading = RequestResolver(servable, LimitsConfig(), notes)
        reading.candidate_features(request, 1)
        return reading.user(request).history, notes

    for changes, field, said in (
        ({"user": {"languages": ["no"] * 33}}, "user_features.languages", "at most 32 values"),
        ({"user": {"taste": [1.0, 2.0]}}, "user_features.taste", "a list of 5 numbers"),
        ({"user": {"taste": [1.0, 2.0, 3.0, 4.0, "x"]}}, "user_features.taste", "a list of 5 numbers"),
        ({"user": {"taste": [1.0, 2.0, 3.0, 4.0, 10**400]}}, "user_features.taste", "a list of 5 numbers"),
        ({"events": {"place": [1, "inf", 1, 1]}}, "history.features.place", "numbers within 1e"),
        ({"place": float("-inf")}, "context.place", "numbers within 1e"),
        ({"place": 10**400}, "context.place", "must be numbers"),
        ({"query": "\ud800"}, "context.query", "must be text in Unicode"),
        ({"user": {"country": ["NO", "SE"]}}, "user_features.country", "must be one value"),
        ({"query": 7}, "context.query", "must be text"),
        ({"events": {"device": ["tv", ["web"], None, "tv"]}}, "history.features.device", "one value for each"),
        ({"device": ["tv"]}, "context.device", "must be one value"),
        ({"events": {"query": ["red", 3, None, "blue"]}}, "history.features.query", "must be text"),
        ({"events": {"filters": [["f1"]] * 3}}, "history.features.filters", "must have 4 values"),
    ):
        with pytest.raises(BadRequestError, match=said) as refused:
            read(**changes)
        assert refused.value.field == field
    found, notes = read(
        user={"languages": ["en", "klingon", "no"], "taste": None}, events={"filters": ["f1", None, [], ["f2"]]}
    )
    known = servable.column_ids["user_languages"]
    assert [found.asked[f"user_languages/{place}"] for place in range(3)] == [known["en"], known["no"], 0]
    assert notes.said()["unknown"][0]["ids"] == ["klingon"]
    assert [found.asked[f"user_taste/{place}"] for place in range(5)] == [0] * 5
    servable.column_ids["user_languages"]["1"] = 2
    found, _ = read(user={"languages": [True, False]})
    assert found.asked["user_languages/0"] == 2, "Booleans of a log are 1 and 0"
    found, _ = read(events={"filters": ["f1", None, [], ["f2"]]})
    filters = servable.column_ids["event_filters"]
    assert found.features["event_filters/0"].tolist() == [filters["f1"], 0, 0, filters["f2"]]


@dataclass(frozen=True)
class Asking:
    """A server of one model, asked about a user."""

    service: Service
    body: dict

    def __call__(self, *, events: dict | None = None, **changes) -> httpx.Response:
        """The answer where events, or one of the other fields, have other features."""
        body = {**self.body, **{name: {**self.body.get(name, {}), **told} for name, told in changes.items()}}
        features = {**self.body["history"]["features"], **(events or {})}
        body["history"] = {**self.body["history"], "features": features}
        for name in body.get("candidate_features", {}):
            body["context"] = {other: value for other, value in body["context"].items() if other != name}

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(App(self.service, LIMITS))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.post("/v1/rank", json=body)

        return asyncio.run(asked())


@pytest.fixture(scope="module")
def asking(runs):
    servable = Servable.load(runs.folder("ranking, every kind"))
    history, context, item = request_of(runs, 8, 4)
    history["times_ms"] = [int(time) for time in history["times_ms"]]
    body = {"user": "u", "now_ms": history.pop("now_ms"), "user_features": history.pop("user_features")}
    with closing(Service({servable.serving.role: servable}, SERVICE)) as service:
        yield Asking(service, {**body, "history": history, "context": context, "candidates": [item]})


def test_a_long_list_is_the_value_that_it_is_in_a_long_request_too(asking):
    """Bodies from 2 KiB on are looked through for long lists, which are then read as arrays."""
    languages, filters = ["en", "no"] * 8, ["f1", "f2"] * 8
    told = asking(user_features={"languages": languages}, context={"filters": filters})
    long = Asking(asking.service, {**asking.body, "candidates": asking.body["candidates"] * 600})
    found = long(user_features={"languages": languages}, context={"filters": filters})
    assert found.status_code == 200, found.text
    assert not found.json()["unknown"]
    np.testing.assert_allclose(found.json()["scores"]["click"], told.json()["scores"]["click"] * 600, rtol=1e-5)


@pytest.mark.parametrize("name", ["device", "place"])
@pytest.mark.parametrize("value", [["tv"], [1.5], [None], []])
def test_a_list_in_place_of_one_value_is_refused_by_name(asking, name, value):
    for field, told in (
        (f"history.features.{name}", {"events": {name: [None, value, None, None]}}),
        (f"candidate_features.{name}", {"candidate_features": {name: [value]}}),
    ):
        refused = asking(**told)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"] == {"message": "must be one value for each, and no lists", "field": field}


def test_numbers_that_are_too_large_for_the_model_are_refused_by_name(asking):
    for field, told in (
        ("history.features.place", {"events": {"place": [1.0, 1e300, None, -1e300]}}),
        ("context.place", {"context": {"place": "inf"}}),
        ("user_features.age", {"user_features": {"age": -1e38}}),
        ("user_features.taste", {"user_features": {"taste": [0.0, 1e39, 0.0, 0.0, 0.0]}}),
    ):
        refused = asking(**told)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["field"] == field
    assert asking(context={"place": -1e18}).json()["scores"]["click"][0] is not None


def asked_about_kept(asking: Asking, features: dict, limits: LimitsConfig = LIMITS, **changes: list) -> httpx.Response:
    """The answer about the events of a request that the server keeps, with these features and other changes."""
    store = MemoryHistoryStore(HistoryStoreConfig())

    async def asked() -> httpx.Response:
        await store.append("u", {**asking.body["history"], "features": features, **changes})
        transport = httpx.ASGITransport(App(asking.service, limits, store))
        body = {name: value for name, value in asking.body.items() if name != "history"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/rank", json=body)

    return asyncio.run(asked())


def test_kept_values_are_read_once_and_again_only_without_those_that_cannot_be(asking, monkeypatch):
    read = []
    values = RequestResolver.values

    def counted(self, given, count, column, field, *, is_each):
        if field.startswith("history.features.") or not field:
            read.append(column.name)
        return values(self, given, count, column, field, is_each=is_each)

    monkeypatch.setattr(RequestResolver, "values", counted)
    features = asking.body["history"]["features"]
    assert asked_about_kept(asking, features).status_code == 200
    assert sorted(read) == sorted(set(read)), "numbers, lists, texts and vectors as well"
    assert len(read) == len(features)


def test_kept_texts_that_are_longer_than_may_be_told_by_now_are_cut(asking):
    """A value is one that nobody knows, an event of such an item is left out."""
    items, times = asking.body["history"]["items"], asking.body["history"]["times_ms"]
    kept = {"query": ["red shoe", "w" * 50, None, None], "filters": [["f1", "w" * 50], None, ["f2"], None]}
    read = {"query": ["red shoe", None, None, None], "filters": [["f1"], None, ["f2"], None]}
    features = {name: [None] * 4 for name in asking.body["history"]["features"]}
    expected = asking(events={**features, **read})
    history = {"items": [*items, "i" * 50], "times_ms": [*times, times[-1]]}
    history["actions"] = [*asking.body["history"]["actions"], "click"]
    kept = {name: [*values, None] for name, values in {**features, **kept}.items()}
    limits = replace(LIMITS, max_text_characters=49, max_id_characters=49)
    found = asked_about_kept(asking, kept, limits, **history)
    assert expected.status_code == found.status_code == 200, (expected.text, found.text)
    assert found.json()["scores"]["click"] == pytest.approx(expected.json()["scores"]["click"], rel=1e-5)


def test_kept_values_that_only_another_model_could_read_are_values_that_nobody_knows(asking):
    """They came when another model served, whose features of these names were of other kinds."""
    kept = {
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
    expected = asking(events=read)
    found = asked_about_kept(asking, kept)
    assert expected.status_code == found.status_code == 200, (expected.text, found.text)
    assert found.json()["scores"]["click"] == pytest.approx(expected.json()["scores"]["click"], rel=1e-5)


@pytest.mark.parametrize(("length", "is_read"), [(4096, True), (4097, False)])
def test_texts_may_be_longer_than_ids(length, is_read):
    body = {"user": "u", "candidates": ["i0"], "context": {"query": "w" * length}}
    with nullcontext() if is_read else pytest.raises(BadRequestError, match="4096 characters"):
        reader(RankRequest, LimitsConfig())(body)
    with pytest.raises(BadRequestError, match="256 characters"):
        reader(RankRequest, LimitsConfig())({**body, "candidates": ["w" * 300]})


def test_what_a_front_reads_of_every_kind_is_what_the_engine_gets(runs):
    servable = Servable.load(runs.folder("ranking, every kind"))
    history, context, item = request_of(runs, 8, 4)
    reading = RequestResolver(servable, LimitsConfig(), RequestNotes())
    request = asked_request(history, [item], context)
    asked = reading.user(request)
    features = reading.candidate_features(request, 1)
    candidates = Candidates(items=servable.ids_of([item]), now_ms=asked.now_ms, features=features)
    asking = wire_format.RankFrame(
        fleet=1, by="name", user="u", sender=NOBODY, timeout_s=1.0, history=asked.history, candidates=candidates
    )
    again = wire_format.RankFrame.unpacked(asking.packed())
    assert set(again.history.features) == set(servable.given_fields)
    for name, values in asked.history.features.items():
        assert np.array_equal(again.history.features[name], values)
        assert np.array_equal(again.candidates.features[name], features[name])
    assert again.history.asked == asked.history.asked


@pytest.mark.parametrize("make", [random_retrieval, random_ranking])
def test_a_wide_vector_of_a_user_is_not_held_for_each_event(make):
    """1,536 numbers at 2,000 events were 25 MB, copied several times for a request and kept with its prefix."""
    plain = make(HSTUConfig(dim=8, head_dim=4, num_heads=1, num_layers=1, max_length=4096))
    taste = ColumnSpec(name="user_taste", keys=None, num_rows=0, kind="vector", width=1536)
    defaults = InputDefaults(features={"tab": None}, actions=()) if plain.event_features else InputDefaults()
    servable = replace(plain, spec=replace(plain.spec, columns=(*plain.spec.columns, taste), defaults=defaults))
    form = make_form(servable)
    reading = RequestResolver(servable, LimitsConfig(), RequestNotes())
    told, contents = {"items": ["1"] * 2000, "times_ms": [7] * 2000, "now_ms": 8}, []
    for vector in ([0.5] * 1536, [0.5] * 1535 + [0.25]):
        request = asked_request({**told, "user_features": {"taste": vector}}, ["1"] * 500, None)
        tracemalloc.start()
        asked = reading.user(request)
        features = reading.candidate_features(request, 500)
        candidates = Candidates(items=servable.ids_of(request.candidates), now_ms=8, features=features).copied()
        sent = wire_format.RankFrame(
            fleet=1, by="name", user="u", sender=NOBODY, timeout_s=1.0, history=asked.history, candidates=candidates
        ).packed()
        found = wire_format.RankFrame.unpacked(sent)
        contents.append(form.tokens(found.history, asked.now_ms).content(2000))
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
        tracemalloc.stop()
        of_vector = number_bits(np.array(vector, np.float32))
        for told_of in (found.history, *([found.candidates] if found.candidates.features else [])):
            assert np.array_equal([told_of.features[name][-1] for name in taste.fields], of_vector)
            assert {len(told_of.features[name]) for name in taste.fields} == {len(told_of)}
    assert contents[0] != contents[1], "a prefix is kept for one vector"
    assert len(contents[0]) < 1 << 20


def test_features_of_any_width_come_through_a_front():
    """The names of the numbers of a wide vector alone have more than 64 KiB."""
    wide = {f"event_picture/{place}": np.full(2, place) for place in range(6000)}
    nothing = np.zeros(2, np.int64)
    history = History(items=nothing, times_ms=nothing, actions=nothing, features=wide, asked=dict.fromkeys(wide, 3))
    asking = wire_format.RankFrame(
        fleet=1, by="name", user="ü", sender=NOBODY, timeout_s=1.0, history=history,
        candidates=Candidates(items=nothing, now_ms=1, features=wide),
    )  # fmt: skip
    again = wire_format.RankFrame.unpacked(asking.packed())
    assert again.user == "ü"
    assert again.history.asked == history.asked
    for found in (again.history.features, again.candidates.features):
        assert {name: values.tolist() for name, values in found.items()} == {n: [*v] for n, v in wide.items()}


def test_a_new_item_has_its_features_apart_where_a_head_reads_their_products(runs):
    servable = Servable.load(runs.folder("ranking, dlrm"))
    new = [NewItem(key="fresh", features=told_of(runs.log, "n0"))]
    grown = NewItemInsertion(NewItemInsertion(servable, new).roomy(), new)
    grown.apply()
    ids = torch.tensor([servable.spec.num_items + 1, int(servable.ids_of(["n0"])[0]), 0])
    fresh, twin, unknown = grown.after.tables["items"].rows(ids).split(1)
    dim = servable.encoder_config.dim
    assert fresh.shape[1] == dim * (1 + len(ITEM_FEATURES))
    torch.testing.assert_close(fresh[:, dim:], twin[:, dim:])
    assert torch.equal(fresh[:, :dim], unknown[:, :dim])


def told_of(log: Path, name: str) -> dict:
    """The features of an item as its table has them."""
    lines = [line.split(",") for line in (log / "items.csv").read_text().splitlines()]
    row = dict(zip(lines[0], next(line for line in lines if line[0] == name), strict=True))
    place = (log / "ids.txt").read_text().split().index(name)
    return {
        "brand": row["brand"],
        "tags": row["tags"].split("|") if row["tags"] else [],
        "price": float(row["price"]) if row["price"] else None,
        "title_bag": row["title"],
        "picture": np.load(log / "pictures.npy")[place].tolist(),
    }


def test_new_items_are_served_as_an_export_that_had_them(runs):
    log = runs.log
    service = Service({role: Servable.load(runs.folder(role)) for role in ROLES}, ServiceConfig())
    app = App(service, LimitsConfig(default_timeout_ms=10_000))
    history = {"items": ["i0", "i5"], "times_ms": [1_700_000_000_000, 1_700_000_060_000], "actions": ["click", []]}
    history["features"] = {"device": ["phone", "tv"], "place": [3, None]}
    asking = {"user": "u", "history": history, "now_ms": 1_700_000_120_000}
    asking |= {"context": {"device": "tv", "place": 2.5}, "user_features": {"country": "NO", "age": 31}}

    async def post(path: str, body: dict) -> tuple[int, dict]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            answer = await client.post(path, json=body)
            return answer.status_code, answer.json()

    def asked(path: str, body: dict) -> dict:
        status, found = asyncio.run(post(path, body))
        assert status == 200, found
        return found

    try:
        twin = {"id": "fresh", "features": told_of(log, "n0"), "title": "as n0"}
        before = {role: fleet.servable.spec.num_items for role, fleet in service.fleets.items()}
        added = asked("/v1/items", {"items": [twin, {"id": "i0", "features": {}}]})
        assert added["added"] == 1, "i0 is known"
        assert added["items"] == {role: count + 1 for role, count in before.items()}
        found = service.fleet("retrieval").servable
        ids = torch.from_numpy(found.ids_of(["fresh", "n0"]))
        fresh, expected = found.index.rows(ids - 1)
        torch.testing.assert_close(fresh, expected)
        scores = asked("/v1/recommend", {**asking, "k": 40, "exclude_seen": False})
        assert {"fresh", "n0"} <= set(scores["items"])
        engines = service.fleet("retrieval").engines
        asked("/v1/items", {"items": [{"id": "more", "features": {"brand": "b1"}}]})
        assert service.fleet("retrieval").engines is engines, "there was room: nothing was loaded anew"
        ranked = asked("/v1/rank", {**asking, "candidates": ["more", "fresh", "nobody"]})
        assert [said["ids"] for said in ranked["unknown"]] == [["nobody"]]
        picture = told_of(log, "n0")["picture"]
        for features, said in (
            ({"brnd": "b1"}, "did you mean 'brand'"),
            ({"picture": [*picture[1:], "dark"]}, "numbers"),
            ({"picture": [*picture[1:], 1e39]}, "must be within"),
        ):
            status, refused = asyncio.run(post("/v1/items", {"items": [{"id": "x", "features": features}]}))
            assert status == 409
            assert said in str(refused)
            assert refused["error"]["field"].startswith("items.x.features.")
            assert refused["error"]["remedy"]
            assert refused["error"]["remedy"] not in refused["error"]["message"]
    finally:
        service.close()
