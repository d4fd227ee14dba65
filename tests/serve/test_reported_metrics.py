"""The reported metrics of a run equal those recomputed from responses of the Python API and over HTTP."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_recipes import ExportedRun, ranking_recipe, train_and_export

import nestrec
from nestrec.data.dataset import Dataset
from nestrec.data.formats.criteo import CATEGORY_NAMES, DENSE_NAMES
from nestrec.data.samples.split import split_dataset
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.inference.batch_inference import BatchJobConfig
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.tasks.metrics import auc, ranking_metrics
from nestrec.training.recipes import recipe
from nestrec.training.run_config import DataConfig, RunConfig
from support.tiny_runs import config_of, make_datasets

LENGTH = 16
"""Maximum number of events of a history; many histories are longer, so that they slide."""


@dataclass(frozen=True)
class HeldOutQuery:
    """Request for a held-out event, with all earlier events of the user."""

    history: dict[str, Any]
    item: str
    now_ms: int


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "data"
    generate(replace(preset("tiny"), num_users=50, num_items=60), folder)
    return folder


def queries_of(folder: Path, task: Any, users: np.ndarray, positions: np.ndarray) -> list[HeldOutQuery]:
    dataset = Dataset.open(folder)
    keys = np.array(dataset.items().column("item_key").to_pylist())
    lists = dataset.rows(np.arange(dataset.num_samples)).lists
    (items, offsets), (times, _), (actions, _) = (lists[n] for n in ("item_ids", "timestamps_ms", "actions"))
    queries = []
    for user, position in zip(users.tolist(), positions.tolist(), strict=True):
        start = int(offsets[user])
        at = start + position
        history = {"items": keys[items[start:at] - 1].tolist(), "times_ms": times[start:at].tolist()}
        if task.kind == "ranking":
            bits = dataset.card.action_bits
            history["actions"] = [[n for n, bit in bits.items() if mask & bit] for mask in actions[start:at].tolist()]
        queries.append(HeldOutQuery(history, keys[items[at] - 1], int(times[at])))
    return queries


def responses_over_http(folder: Path, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """Returns the responses of a server with default options."""
    service = Service.load([folder], ServiceConfig())
    try:

        async def send_all() -> list[Any]:
            transport = httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000)))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return [(await client.post(path, json=body)).json() for body in bodies]

        return asyncio.run(send_all())
    finally:
        service.close()


def ranking_run(log: Path, root: Path, **changes: Any) -> tuple[ExportedRun, RunConfig]:
    cfg = ranking_recipe(log)
    history = replace(cfg.task.history, max_events=LENGTH)
    evaluation = replace(cfg.task.evaluation, listwise_events=0)
    encoder = replace(cfg.task.encoder, max_length=2 * LENGTH, **changes)
    split = replace(cfg.task.split, valid_from=None, test_from=None)
    cfg = replace(cfg, task=replace(cfg.task, history=history, encoder=encoder, split=split, evaluation=evaluation))
    return train_and_export(cfg, root), cfg


ATTENTION_SPANS = {"full": AttentionSpanConfig(), "truncated": AttentionSpanConfig(truncate_to=12, truncate_step=6)}


@pytest.mark.parametrize("span", ATTENTION_SPANS)
def test_ranking_metrics_equal_those_of_responses(log, tmp_path, span):
    exported, cfg = ranking_run(log, tmp_path, attention=ATTENTION_SPANS[span])
    evaluation = exported.trainer.evaluate("test")
    first, end = split_dataset(cfg.task.split, Dataset.open(log)).held_out("test")
    users = np.repeat(np.arange(len(first)), end - first)
    positions = np.concatenate([np.arange(a, b) for a, b in zip(first, end, strict=True)])
    queries = queries_of(log, cfg.task, users, positions)
    assert (positions >= LENGTH).mean() > 0.3, "many histories slide"
    model = nestrec.load(exported.run)
    rankings = model.rank_batch([{**q.history, "now_ms": q.now_ms} for q in queries], [[q.item] for q in queries])
    bodies = [
        {"user": f"u{n}", "history": q.history, "now_ms": q.now_ms, "candidates": [q.item]}
        for n, q in enumerate(queries)
    ]
    served = responses_over_http(exported.folder, "/v1/rank", bodies)
    for k, label in enumerate(cfg.task.inputs.labels):
        truth = evaluation.details["label"][:, k]
        reported = evaluation.metrics["model"][f"auc/{label}"].mean
        by_api = np.array([scored.scores[label][0] for scored in rankings])
        by_http = np.array([response["scores"][label][0] for response in served])
        np.testing.assert_allclose(by_api, evaluation.details["logit"][:, k], atol=1e-4)
        np.testing.assert_allclose(by_http, evaluation.details["logit"][:, k], atol=1e-4)
        assert auc(truth, by_api) == pytest.approx(reported, abs=1e-3)
        assert auc(truth, by_http) == pytest.approx(reported, abs=1e-3)


@pytest.mark.parametrize("slide_events", [None, 1])
def test_retrieval_metrics_equal_those_of_responses(log, tmp_path, slide_events):
    cfg = recipe("demo")
    task = replace(
        cfg.task,
        encoder=replace(cfg.task.encoder, max_length=LENGTH),
        history=replace(cfg.task.history, max_events=LENGTH, slide_events=slide_events),
        negatives=replace(cfg.task.negatives, num_negatives=16),
    )
    task = replace(task, evaluation=replace(task.evaluation, filter_seen="history", baselines=("popularity",)))
    cfg = replace(cfg, task=task, data=DataConfig(folder=str(log)))
    exported = train_and_export(cfg, tmp_path)
    evaluation = exported.trainer.evaluate("test")
    lengths = Dataset.open(log).lengths.astype(np.int64)
    queries = queries_of(log, cfg.task, np.arange(len(lengths)), lengths - 1)
    model = nestrec.load(exported.run)
    num_best = max(cfg.task.evaluation.ks)
    histories = [{**q.history, "now_ms": q.now_ms} for q in queries]
    by_api = [found.items for found in model.recommend_batch(histories, num_best)]
    bodies = [{"user": f"u{n}", "history": q.history, "now_ms": q.now_ms, "k": num_best} for n, q in enumerate(queries)]
    by_http = [response["items"] for response in responses_over_http(exported.folder, "/v1/recommend", bodies)]
    users = [{"user": f"u{n}", **history} for n, history in enumerate(histories)]
    pq.write_table(pa.Table.from_pylist(users), tmp_path / "users.parquet")
    batch = model.batch(BatchJobConfig(k=num_best))
    batch.recommend(tmp_path / "users.parquet", tmp_path / "recommended.parquet")
    by_batch = [tuple(row["items"]) for row in pq.read_table(tmp_path / "recommended.parquet").to_pylist()]
    for found in (by_api, by_http, by_batch):
        ranks = [
            list(items).index(q.item) + 1 if q.item in items else 0 for q, items in zip(queries, found, strict=True)
        ]
        assert ranks == evaluation.details["rank/model"].tolist()
        for name, values in ranking_metrics(np.array(ranks), cfg.task.evaluation.ks).items():
            assert values.mean() == pytest.approx(evaluation.metrics["model"][name].mean)


def test_rows_metrics_equal_those_of_responses(tmp_path):
    make_datasets(tmp_path)
    exported = train_and_export(config_of("rows", tmp_path), tmp_path / "exported")
    evaluation = exported.trainer.evaluate("test")
    rows = evaluation.details["users"]
    lines = (tmp_path / "rows.txt").read_text().splitlines()
    names = (*DENSE_NAMES, *CATEGORY_NAMES)
    features = [dict(zip(names, lines[row].split("\t")[1:], strict=True)) for row in rows]
    contexts = [{n: int(c) if c and n in DENSE_NAMES else c or None for n, c in row.items()} for row in features]
    model = nestrec.load(exported.run)
    by_api = np.array([model.rank([], ["ad"], context=context).scores["label"][0] for context in contexts])
    bodies = [{"user": "u", "candidates": ["ad"], "context": context} for context in contexts]
    served = responses_over_http(exported.folder, "/v1/rank", bodies)
    by_http = np.array([response["scores"]["label"][0] for response in served])
    for found in (by_api, by_http):
        np.testing.assert_allclose(found, evaluation.details["logit"], atol=1e-5)
        reported = evaluation.metrics["model"]["auc"].mean
        assert auc(evaluation.details["label"], found) == pytest.approx(reported, abs=1e-3)
