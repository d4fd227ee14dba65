"""A model loaded in Python answers as the server does, from a run or from its export, one history or many."""

import asyncio
import pickle

import httpx
import numpy as np
import pytest
import torch
from serving_oracle import oracle_scores
from serving_sequences import draw_candidates, draw_history

import nestrec
from nestrec.exporters.servable_writer import export_run
from nestrec.inference.recommender import Recommender
from nestrec.models import FuXiConfig, HSTUConfig
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.models.sequence import whole_forward
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.reference_runner import BatchItem, ReferenceRunner
from nestrec.serving.http.http_app import App
from nestrec.serving.model.item_search import SearchConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

NOW_MS = 1_642_300_000_000
HISTORIES = [
    {"items": ["5", "9", "13"], "times_ms": [NOW_MS - 3_000, NOW_MS - 2_000, NOW_MS - 1_000], "now_ms": NOW_MS},
    {"items": [7, 8], "times_ms": [NOW_MS - 3_600_000, NOW_MS - 1_000], "now_ms": NOW_MS},
]
ACTED = [{**history, "actions": ["click"] * len(history["items"])} for history in HISTORIES]


def asked_of_server(folder, path, body):
    service = Service.load([folder], ServiceConfig(slide_events=1))
    try:

        async def ask():
            transport = httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000)))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return (await (client.get(path) if body is None else client.post(path, json=body))).json()

        return asyncio.run(ask())
    finally:
        service.close()


def test_recommendations_are_those_of_the_server(retrieval):
    of_run, of_export = nestrec.load(retrieval.run), nestrec.load(retrieval.folder)
    history = dict(HISTORIES[0])
    served = asked_of_server(
        retrieval.folder, "/v1/recommend", {"user": "u", "now_ms": history.pop("now_ms"), "history": history, "k": 7}
    )
    for model in (of_run, of_export):
        found = model.recommend(HISTORIES[0], k=7)
        assert list(found.items) == served["items"]
        np.testing.assert_allclose(found.scores["score"], served["scores"]["score"], rtol=1e-5)
        assert not set(found.items) & {"5", "9", "13"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_export_with_a_search_says_its_recall_and_finds_what_it_says(retrieval, tmp_path):
    pytest.importorskip("faiss", reason="the extra `faiss` is not installed")
    export_run(retrieval.run, tmp_path / "model", search=SearchConfig(kind="faiss_hnsw", links=16, width=400))
    said = asked_of_server(tmp_path / "model", "/v1/models", None)["models"]["retrieval"]["search"]
    assert (said["kind"], said["of"]) == ("faiss_hnsw", "users of the dataset")
    assert 0.9 < said["recall"] <= 1.0
    assert asked_of_server(retrieval.folder, "/v1/models", None)["models"]["retrieval"]["search"] == {"kind": "exact"}
    exact, found = (
        nestrec.load(folder).recommend(HISTORIES[0], 5) for folder in (retrieval.folder, tmp_path / "model")
    )
    assert len(set(found.items) & set(exact.items)) >= 4
    assert (np.diff(found.scores["score"]) <= 0).all()


def test_ranks_are_those_of_the_server(ranking):
    model = nestrec.load(ranking.folder)
    candidates = ["5", "6", "no such item", "40"]
    history = dict(ACTED[0])
    served = asked_of_server(
        ranking.folder,
        "/v1/rank",
        {"user": "u", "now_ms": history.pop("now_ms"), "history": history, "candidates": candidates},
    )
    found = model.rank(ACTED[0], candidates)
    assert model.outputs == ("click", "long_view")
    assert (found.items, found.unknown) == (tuple(candidates), ("no such item",))
    for name, scores in found.scores.items():
        np.testing.assert_allclose(scores, served["scores"][name], rtol=1e-4, atol=1e-5)


def test_many_histories_are_computed_together_as_each_alone(retrieval, ranking):
    model = nestrec.load(retrieval.folder)
    for found, history in zip(model.recommend_all(HISTORIES, k=5), HISTORIES, strict=True):
        assert found.items == model.recommend(history, k=5).items
    ranker = nestrec.load(ranking.folder)
    lists = [["5", "6"], ["7"]]
    for found, history, candidates in zip(ranker.rank_all(ACTED, lists), ACTED, lists, strict=True):
        alone = ranker.rank(history, candidates)
        assert found.items == alone.items
        np.testing.assert_allclose(found.scores["click"], alone.scores["click"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["retrieval", "ranking"])
def test_whole_passes_are_the_twin_of_the_cached_forward(request, kind):
    """Backbones without a cached forward are computed so."""
    model = nestrec.load(request.getfixturevalue(kind).folder)
    twin = Recommender(model.servable)
    twin._runner = ReferenceRunner(twin._form, twin._runner.pool, whole_forward)
    for history in ACTED:
        empty = {**history, "items": [], "times_ms": [], "actions": []}
        for asked in [history] if kind == "retrieval" else [history, empty]:
            found, expected = (one.rank(asked, ["3", "4", "90"]) for one in (twin, model))
            for name in model.outputs:
                np.testing.assert_allclose(found.scores[name], expected.scores[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_model", [random_retrieval, random_ranking])
def test_a_model_that_cuts_histories_and_cannot_be_served_scores_as_in_training(make_model):
    reach = AttentionSpanConfig(window=9, prefix=2, keep_last=8, keep_step=6)
    encoder = FuXiConfig(dim=16, num_layers=3, num_heads=2, head_dim=8, ffn_dim=8, max_length=32, attention=reach)
    servable = make_model(encoder, num_items=200)
    model = Recommender(servable)
    rng = np.random.default_rng(1)
    for length in range(5, 15):
        history = draw_history(rng, length)
        candidates = draw_candidates(rng, history)
        tokens = model._form.tokens(history, candidates.now_ms)
        part = BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
        (found,) = model._runner.run([part])
        np.testing.assert_allclose(found.scores, oracle_scores(servable, history, candidates, 1), rtol=1e-4, atol=1e-5)


def test_item_vectors_are_what_scores_are_products_with(retrieval):
    model = nestrec.load(retrieval.folder)
    everything = model.item_vectors()
    assert everything.shape == (len(model.item_ids), model.servable.encoder_config.dim)
    some = model.item_vectors([model.item_ids[4], int(model.item_ids[0])])
    np.testing.assert_array_equal(some, everything[[4, 0]])
    scores = model.rank(HISTORIES[0], model.item_ids).scores["score"]
    vectors = everything.astype(np.float64)
    query, *_ = np.linalg.lstsq(vectors, scores.astype(np.float64), rcond=None)
    np.testing.assert_allclose(vectors @ query, scores, rtol=1e-4, atol=1e-4)
    with pytest.raises(nestrec.UserError, match="knows no such item"):
        model.item_vectors(["no such item"])


def test_lists_of_allowed_and_excluded_items_hold(retrieval):
    model = nestrec.load(retrieval.folder)
    best = model.recommend(HISTORIES[0], k=3).items
    assert best[0] not in model.recommend(HISTORIES[0], k=3, exclude=[best[0]]).items
    assert set(model.recommend(HISTORIES[0], k=3, allow=best[1:]).items) == set(best[1:])
    seen = model.recommend(HISTORIES[0], k=len(model.item_ids), exclude_seen=False).items
    assert {"5", "9", "13"} <= set(seen)


def test_mistakes_are_named(retrieval, ranking):
    model, ranker = nestrec.load(retrieval.folder), nestrec.load(ranking.folder)
    for call, field in (
        (lambda: model.recommend(["5"]), "history.times_ms"),
        (lambda: model.recommend([]), "history"),
        (lambda: model.recommend({"item": ["5"]}), "history.item"),
        (lambda: ranker.recommend(ACTED[0]), "model"),
        (lambda: ranker.rank(HISTORIES[0], ["5"]), "history.actions"),
        (lambda: ranker.rank_all(ACTED, [["5"]]), "candidates"),
    ):
        with pytest.raises(nestrec.UserError) as raised:
            call()
        assert raised.value.option == field


@pytest.fixture(scope="module")
def drawn() -> Recommender:
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8)
    return Recommender(random_retrieval(encoder, num_items=20))


TIMES = [NOW_MS - 2_000, NOW_MS - 1_000]
MISTAKES = {
    "one history of letters": (lambda model: model.recommend("12"), "history.items=12: must be a list"),
    "no list": (lambda model: model.recommend(5), "history.items=5: must be a list"),
    "half an id": (lambda model: model.rank([1.5], ["3"]), r"history.items=\[1.5\]: must be a list"),
    "no id": (lambda model: model.recommend([None]), r"history.items=\[None\]: must be a list"),
    "candidates of letters": (lambda model: model.rank(["1"], "12"), "candidates=12: must be a list"),
    "barred letters": (lambda model: model.recommend(HISTORIES[1], exclude="12"), "exclude=12: must be a list"),
    "times as text": (
        lambda model: model.recommend({"items": ["1"], "times_ms": ["now"]}),
        r"history.times_ms=\['now'\]: must be a list of values, each a whole number",
    ),
    "too few times": (
        lambda model: model.recommend({"items": ["1", "2"], "times_ms": [5]}),
        r"history.times_ms=\[5\]: must have 2 values",
    ),
    "now as text": (
        lambda model: model.recommend({"items": ["1"], "times_ms": [5], "now_ms": "6"}),
        "now_ms=6: must be a whole number",
    ),
    "no context": (lambda model: model.recommend(HISTORIES[1], context="web"), "context=web: must be an object"),
    "part of an item": (lambda model: model.recommend(HISTORIES[1], 2.5), "k=2.5: must be a whole number"),
    "no item": (lambda model: model.recommend(HISTORIES[1], 0), "k=0: must be a whole number"),
    "one history for many": (lambda model: model.recommend_all(HISTORIES[1]), "histories = .*is one history"),
    "no histories": (lambda model: model.recommend_all(None), "histories=None: is no list"),
    "one list for many": (lambda model: model.rank_all([["1"]], "1"), "candidates=1: is one list of candidates"),
    "unknown items of a set": (lambda model: model.item_vectors({"x"}), r"items=\['x'\]: the model knows no such"),
    "options of a batch job": (lambda model: model.batch({"k": 3}), "cfg={'k': 3}: are not the options of a batch"),
    "a copy": (pickle.dumps, "cannot be pickled"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_asked_is_refused_with_its_field_and_value(drawn, name):
    ask, said = MISTAKES[name]
    with pytest.raises(nestrec.UserError, match=rf"(?s){said}"):
        ask(drawn)


def test_histories_may_be_arrays_and_columns_of_any_kind(drawn):
    wanted = drawn.recommend({"items": ["3", "4"], "times_ms": TIMES, "now_ms": NOW_MS})
    for items, times in (
        (np.array(["3", "4"]), np.array(TIMES)),
        (np.array([3, 4]), tuple(TIMES)),
        (np.array([3.0, 4.0]), np.array(TIMES, dtype=float)),
        (iter([3, 4]), torch.tensor(TIMES)),
    ):
        found = drawn.recommend({"items": items, "times_ms": times, "now_ms": float(NOW_MS)}, k=np.int64(10))
        assert found.items == wanted.items
    (ranked,) = drawn.rank_all(iter([["3", "4"]]), iter([["5"]]))
    assert ranked.items == ("5",)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(nestrec.UserError, match=r"(?s)device=gpu: is no device.*cpu"):
        nestrec.load("runs/any", device="gpu")
    with pytest.raises(nestrec.UserError, match="device=None: is no device"):
        nestrec.load("runs/any", device=None)
