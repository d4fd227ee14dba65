"""Models loaded with `nestrec.load`, from a run or an export: their results equal the server's responses."""

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
from nestrec.models.sequence import uncached_forward
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
HISTORIES_WITH_ACTIONS = [{**history, "actions": ["click"] * len(history["items"])} for history in HISTORIES]


def server_response(folder, path, body):
    """Serve an export, send one request (GET without a body) and return the parsed response."""
    service = Service.load([folder], ServiceConfig(history_stride=1))
    try:

        async def send():
            transport = httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000)))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return (await (client.get(path) if body is None else client.post(path, json=body))).json()

        return asyncio.run(send())
    finally:
        service.close()


def test_load_recommendations_equal_server(retrieval):
    run_model = nestrec.load(retrieval.run)
    export_model = nestrec.load(retrieval.folder)
    history = dict(HISTORIES[0])
    served = server_response(
        retrieval.folder, "/v1/recommend", {"user": "u", "now_ms": history.pop("now_ms"), "history": history, "k": 7}
    )
    for model in (run_model, export_model):
        found = model.recommend(HISTORIES[0], k=7)
        assert list(found.items) == served["items"]
        np.testing.assert_allclose(found.scores["score"], served["scores"]["score"], rtol=1e-5)
        assert not set(found.items) & {"5", "9", "13"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_load_search_recall_is_reported(retrieval, tmp_path):
    pytest.importorskip("faiss", reason="the extra `faiss` is not installed")
    export_run(retrieval.run, tmp_path / "model", search=SearchConfig(kind="faiss_hnsw", hnsw_m=16, hnsw_ef_search=400))
    search = server_response(tmp_path / "model", "/v1/models", None)["models"]["retrieval"]["search"]
    assert (search["kind"], search["of"]) == ("faiss_hnsw", "users of the dataset")
    assert 0.9 < search["recall"] <= 1.0
    assert server_response(retrieval.folder, "/v1/models", None)["models"]["retrieval"]["search"] == {"kind": "exact"}
    exact, found = (
        nestrec.load(folder).recommend(HISTORIES[0], 5) for folder in (retrieval.folder, tmp_path / "model")
    )
    assert len(set(found.items) & set(exact.items)) >= 4
    assert (np.diff(found.scores["score"]) <= 0).all()


def test_load_rank_scores_equal_server(ranking):
    model = nestrec.load(ranking.folder)
    candidates = ["5", "6", "no such item", "40"]
    history = dict(HISTORIES_WITH_ACTIONS[0])
    served = server_response(
        ranking.folder,
        "/v1/rank",
        {"user": "u", "now_ms": history.pop("now_ms"), "history": history, "candidates": candidates},
    )
    found = model.rank(HISTORIES_WITH_ACTIONS[0], candidates)
    assert model.outputs == ("click", "long_view")
    assert (found.items, found.unknown_ids) == (tuple(candidates), ("no such item",))
    for name, scores in found.scores.items():
        np.testing.assert_allclose(scores, served["scores"][name], rtol=1e-4, atol=1e-5)


def test_load_batch_results_equal_single_requests(retrieval, ranking):
    model = nestrec.load(retrieval.folder)
    for found, history in zip(model.recommend_batch(HISTORIES, k=5), HISTORIES, strict=True):
        assert found.items == model.recommend(history, k=5).items
    ranker = nestrec.load(ranking.folder)
    lists = [["5", "6"], ["7"]]
    for found, history, candidates in zip(
        ranker.rank_batch(HISTORIES_WITH_ACTIONS, lists), HISTORIES_WITH_ACTIONS, lists, strict=True
    ):
        single = ranker.rank(history, candidates)
        assert found.items == single.items
        np.testing.assert_allclose(found.scores["click"], single.scores["click"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["retrieval", "ranking"])
def test_load_uncached_forward_equals_cached_forward(request, kind):
    """The uncached forward pass is the reference, and is used for backbones without a cached forward pass."""
    model = nestrec.load(request.getfixturevalue(kind).folder)
    reference = Recommender(model.servable)
    reference._runner = ReferenceRunner(reference._adapter, reference._runner.pool, uncached_forward)
    for history in HISTORIES_WITH_ACTIONS:
        empty = {**history, "items": [], "times_ms": [], "actions": []}
        for ranked_history in [history] if kind == "retrieval" else [history, empty]:
            found, expected = (one.rank(ranked_history, ["3", "4", "90"]) for one in (model, reference))
            for name in model.outputs:
                np.testing.assert_allclose(found.scores[name], expected.scores[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_model", [random_retrieval, random_ranking])
def test_load_truncating_model_scores_equal_training(make_model):
    span = AttentionSpanConfig(window=9, num_prefix_tokens=2, truncate_to=8, truncate_step=6)
    encoder = FuXiConfig(dim=16, num_layers=3, num_heads=2, head_dim=8, ffn_dim=8, max_length=32, attention=span)
    servable = make_model(encoder, num_items=200)
    model = Recommender(servable)
    rng = np.random.default_rng(1)
    for length in range(5, 15):
        history = draw_history(rng, length)
        candidates = draw_candidates(rng, history)
        tokens = model._adapter.tokens(history, candidates.now_ms)
        item = BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
        (found,) = model._runner.run([item])
        np.testing.assert_allclose(found.scores, oracle_scores(servable, history, candidates, 1), rtol=1e-4, atol=1e-5)


def test_load_item_vectors_reproduce_scores(retrieval):
    model = nestrec.load(retrieval.folder)
    all_vectors = model.item_vectors()
    assert all_vectors.shape == (len(model.item_ids), model.servable.encoder_config.dim)
    some = model.item_vectors([model.item_ids[4], int(model.item_ids[0])])
    np.testing.assert_array_equal(some, all_vectors[[4, 0]])
    scores = model.rank(HISTORIES[0], model.item_ids).scores["score"]
    vectors = all_vectors.astype(np.float64)
    query, *_ = np.linalg.lstsq(vectors, scores.astype(np.float64), rcond=None)
    np.testing.assert_allclose(vectors @ query, scores, rtol=1e-4, atol=1e-4)
    with pytest.raises(nestrec.UserError, match="does not know these items"):
        model.item_vectors(["no such item"])


def test_load_recommend_respects_allow_and_exclude(retrieval):
    model = nestrec.load(retrieval.folder)
    best = model.recommend(HISTORIES[0], k=3).items
    assert best[0] not in model.recommend(HISTORIES[0], k=3, exclude=[best[0]]).items
    assert set(model.recommend(HISTORIES[0], k=3, allow=best[1:]).items) == set(best[1:])
    seen = model.recommend(HISTORIES[0], k=len(model.item_ids), exclude_seen=False).items
    assert {"5", "9", "13"} <= set(seen)


def test_load_invalid_calls_name_field(retrieval, ranking):
    model = nestrec.load(retrieval.folder)
    ranker = nestrec.load(ranking.folder)
    for call, field in (
        (lambda: model.recommend(["5"]), "history.times_ms"),
        (lambda: model.recommend([]), "history"),
        (lambda: model.recommend({"item": ["5"]}), "history.item"),
        (lambda: ranker.recommend(HISTORIES_WITH_ACTIONS[0]), "model"),
        (lambda: ranker.rank(HISTORIES[0], ["5"]), "history.actions"),
        (lambda: ranker.rank_batch(HISTORIES_WITH_ACTIONS, [["5"]]), "candidates"),
    ):
        with pytest.raises(nestrec.UserError) as raised:
            call()
        assert raised.value.option == field


@pytest.fixture(scope="module")
def random_model() -> Recommender:
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8)
    return Recommender(random_retrieval(encoder, num_items=20))


TIMES = [NOW_MS - 2_000, NOW_MS - 1_000]
INVALID_CALLS = {
    "text as history": (lambda model: model.recommend("12"), "history.items=12: must be a list"),
    "integer as history": (lambda model: model.recommend(5), "history.items=5: must be a list"),
    "fractional id": (lambda model: model.rank([1.5], ["3"]), r"history.items=\[1.5\]: must be a list"),
    "missing id": (lambda model: model.recommend([None]), r"history.items=\[None\]: must be a list"),
    "text as candidates": (lambda model: model.rank(["1"], "12"), "candidates=12: must be a list"),
    "text as exclude": (lambda model: model.recommend(HISTORIES[1], exclude="12"), "exclude=12: must be a list"),
    "times as text": (
        lambda model: model.recommend({"items": ["1"], "times_ms": ["now"]}),
        r"history.times_ms=\['now'\]: must be a list of values, each an integer",
    ),
    "too few times": (
        lambda model: model.recommend({"items": ["1", "2"], "times_ms": [5]}),
        r"history.times_ms=\[5\]: must have 2 values",
    ),
    "now as text": (
        lambda model: model.recommend({"items": ["1"], "times_ms": [5], "now_ms": "6"}),
        "now_ms=6: must be an integer",
    ),
    "text as context": (lambda model: model.recommend(HISTORIES[1], context="web"), "context=web: must be an object"),
    "fractional k": (lambda model: model.recommend(HISTORIES[1], 2.5), "k=2.5: must be an integer"),
    "zero k": (lambda model: model.recommend(HISTORIES[1], 0), "k=0: must be an integer"),
    "single history for a batch": (
        lambda model: model.recommend_batch(HISTORIES[1]),
        "histories=.*must be a list, got one history",
    ),
    "missing histories": (lambda model: model.recommend_batch(None), "histories=None: must be a list"),
    "single candidate list for a batch": (
        lambda model: model.rank_batch([["1"]], "1"),
        "candidates=1: must be a list, got one list",
    ),
    "unknown items in a set": (lambda model: model.item_vectors({"x"}), r"items=\['x'\]: the model does not know"),
    "dict as batch config": (lambda model: model.batch({"k": 3}), "cfg={'k': 3}: must be a BatchJobConfig"),
    "pickling": (pickle.dumps, "cannot be pickled"),
}


@pytest.mark.parametrize("name", INVALID_CALLS)
def test_load_invalid_requests_name_field_and_value(random_model, name):
    call, message = INVALID_CALLS[name]
    with pytest.raises(nestrec.UserError, match=rf"(?s){message}"):
        call(random_model)


def test_load_accepts_arrays_tensors_and_iterators(random_model):
    expected = random_model.recommend({"items": ["3", "4"], "times_ms": TIMES, "now_ms": NOW_MS})
    for items, times in (
        (np.array(["3", "4"]), np.array(TIMES)),
        (np.array([3, 4]), tuple(TIMES)),
        (np.array([3.0, 4.0]), np.array(TIMES, dtype=float)),
        (iter([3, 4]), torch.tensor(TIMES)),
    ):
        found = random_model.recommend({"items": items, "times_ms": times, "now_ms": float(NOW_MS)}, k=np.int64(10))
        assert found.items == expected.items
    (ranked,) = random_model.rank_batch(iter([["3", "4"]]), iter([["5"]]))
    assert ranked.items == ("5",)


def test_load_rejects_missing_device():
    with pytest.raises(nestrec.UserError, match=r"(?s)device=gpu: not a torch device.*cpu"):
        nestrec.load("runs/any", device="gpu")
    with pytest.raises(nestrec.UserError, match="device=None: not a torch device"):
        nestrec.load("runs/any", device=None)
