"""The metrics that a run reports are those of its responses: recomputed through the Python API and over HTTP."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_recipes import Exported, ranking_recipe, train_and_export

import nestrec
from nestrec.data.dataset import Dataset
from nestrec.data.formats.criteo import CATEGORY_NAMES, DENSE_NAMES
from nestrec.data.samples.split import split_of
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
"""events; many histories are longer, so that they slide"""


@dataclass(frozen=True)
class Question:
    """A held-out event as a client asks for it: with everything that the user did before."""

    history: dict[str, Any]
    item: str
    now_ms: int


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "data"
    generate(replace(preset("tiny"), num_users=50, num_items=60), folder)
    return folder


def questions_of(folder: Path, task: Any, users: np.ndarray, positions: np.ndarray) -> list[Question]:
    dataset = Dataset.open(folder)
    keys = np.array(dataset.items().column("item_key").to_pylist())
    lists = dataset.rows(np.arange(dataset.num_samples)).lists
    (items, offsets), (times, _), (actions, _) = (lists[n] for n in ("item_ids", "timestamps_ms", "actions"))
    found = []
    for user, position in zip(users.tolist(), positions.tolist(), strict=True):
        start, at = int(offsets[user]), int(offsets[user]) + position
        history = {"items": keys[items[start:at] - 1].tolist(), "times_ms": times[start:at].tolist()}
        if task.kind == "ranking":
            bits = dataset.card.action_bits
            history["actions"] = [[n for n, bit in bits.items() if mask & bit] for mask in actions[start:at].tolist()]
        found.append(Question(history, keys[items[at] - 1], int(times[at])))
    return found


def answers_over_http(folder: Path, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """Returns the responses of a server with default options."""
    service = Service.load([folder], ServiceConfig())
    try:

        async def ask() -> list[Any]:
            transport = httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000)))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return [(await client.post(path, json=body)).json() for body in bodies]

        return asyncio.run(ask())
    finally:
        service.close()


def ranking_run(log: Path, root: Path, **changes: Any) -> tuple[Exported, RunConfig]:
    cfg = ranking_recipe(log)
    inputs = replace(cfg.task.inputs, max_events=LENGTH)
    encoder = replace(cfg.task.encoder, max_length=2 * LENGTH, **changes)
    split = replace(cfg.task.split, valid_from=None, test_from=None)
    cfg = replace(cfg, task=replace(cfg.task, inputs=inputs, encoder=encoder, split=split, at_once=0))
    return train_and_export(cfg, root), cfg


REACHES = {"full": AttentionSpanConfig(), "cut": AttentionSpanConfig(keep_last=12, keep_step=6)}


@pytest.mark.parametrize("reach", REACHES)
def test_ranking_metrics_equal_those_of_responses(log, tmp_path, reach):
    exported, cfg = ranking_run(log, tmp_path, attention=REACHES[reach])
    evaluation = exported.trainer.evaluate("test")
    first, end = split_of(cfg.task.split, Dataset.open(log)).held_out("test")
    users = np.repeat(np.arange(len(first)), end - first)
    positions = np.concatenate([np.arange(a, b) for a, b in zip(first, end, strict=True)])
    asked = questions_of(log, cfg.task, users, positions)
    assert (positions >= LENGTH).mean() > 0.3, "many histories slide"
    model = nestrec.load(exported.run)
    rankings = model.rank_all([{**q.history, "now_ms": q.now_ms} for q in asked], [[q.item] for q in asked])
    bodies = [
        {"user": f"u{n}", "history": q.history, "now_ms": q.now_ms, "candidates": [q.item]} for n, q in enumerate(asked)
    ]
    served = answers_over_http(exported.folder, "/v1/rank", bodies)
    for k, label in enumerate(cfg.task.inputs.labels):
        truth = evaluation.details["label"][:, k]
        reported = evaluation.metrics["model"][f"auc/{label}"].mean
        by_api = np.array([one.scores[label][0] for one in rankings])
        by_http = np.array([one["scores"][label][0] for one in served])
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
        history=replace(cfg.task.history, max_length=LENGTH, slide_events=slide_events),
        num_negatives=16,
    )
    task = replace(task, evaluation=replace(task.evaluation, filter_seen="history", baselines=("popularity",)))
    cfg = replace(cfg, task=task, data=DataConfig(folder=str(log)))
    exported = train_and_export(cfg, tmp_path)
    evaluation = exported.trainer.evaluate("test")
    lengths = Dataset.open(log).lengths.astype(np.int64)
    asked = questions_of(log, cfg.task, np.arange(len(lengths)), lengths - 1)
    model = nestrec.load(exported.run)
    num_best = max(cfg.task.evaluation.ks)
    histories = [{**q.history, "now_ms": q.now_ms} for q in asked]
    by_api = [found.items for found in model.recommend_all(histories, num_best)]
    bodies = [{"user": f"u{n}", "history": q.history, "now_ms": q.now_ms, "k": num_best} for n, q in enumerate(asked)]
    by_http = [answer["items"] for answer in answers_over_http(exported.folder, "/v1/recommend", bodies)]
    users = [{"user": f"u{n}", **history} for n, history in enumerate(histories)]
    pq.write_table(pa.Table.from_pylist(users), tmp_path / "users.parquet")
    batch = model.batch(BatchJobConfig(k=num_best))
    batch.recommend(tmp_path / "users.parquet", tmp_path / "found.parquet")
    by_batch = [tuple(row["items"]) for row in pq.read_table(tmp_path / "found.parquet").to_pylist()]
    for found in (by_api, by_http, by_batch):
        ranks = [list(items).index(q.item) + 1 if q.item in items else 0 for q, items in zip(asked, found, strict=True)]
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
    told = [dict(zip(names, lines[row].split("\t")[1:], strict=True)) for row in rows]
    contexts = [{n: int(c) if c and n in DENSE_NAMES else c or None for n, c in row.items()} for row in told]
    model = nestrec.load(exported.run)
    by_api = np.array([model.rank([], ["ad"], context=context).scores["label"][0] for context in contexts])
    bodies = [{"user": "u", "candidates": ["ad"], "context": context} for context in contexts]
    served = answers_over_http(exported.folder, "/v1/rank", bodies)
    by_http = np.array([answer["scores"]["label"][0] for answer in served])
    for found in (by_api, by_http):
        np.testing.assert_allclose(found, evaluation.details["logit"], atol=1e-5)
        reported = evaluation.metrics["model"]["auc"].mean
        assert auc(evaluation.details["label"], found) == pytest.approx(reported, abs=1e-3)
