"""Batch inference of models with features: its results equal the server's responses to the same features."""

import asyncio
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_jobs import CFG, recommend_on
from every_model import LIMITS
from featured_runs import Runs, request_for, select_features

import nestrec
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.exporters.export_checks import add_search_index
from nestrec.inference.batch_inference import BatchRecommender
from nestrec.serving.http.http_app import App
from nestrec.serving.model.item_search import SearchConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import InputDefaults
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.tasks.retrieval_task import RetrievalTaskConfig
from nestrec_bench.harness.local_ranks import run_on_ranks
from support.fail_points import armed

EVERY_KIND = "retrieval, prefix"
ROLES = ("retrieval", EVERY_KIND)
CONTEXTS = (
    {"device": "tv", "place": 3.5, "query": "blue shoe", "filters": ["f1", "f3"]},
    {"device": "web", "place": None, "query": "", "filters": []},
)


@pytest.fixture(scope="module")
def bodies_by_role(runs) -> dict[str, list[dict]]:
    """Return one request body per user of the log, by the role of the model."""
    return {role: bodies_of(runs, runs.trainer(role).session.task.cfg) for role in ROLES}


def bodies_of(log: Runs, task: RetrievalTaskConfig) -> list[dict]:
    dataset = Dataset.open(log.data)
    bodies = []
    for index, user in enumerate(dataset.user_keys(np.arange(dataset.num_samples))):
        history, context, _ = request_for(log, index, int(dataset.lengths[index]))
        history, _ = select_features(task, history, context)
        history["times_ms"] = [int(time) for time in history["times_ms"]]
        user_fields = {"user": user, "now_ms": history.pop("now_ms"), "user_features": history.pop("user_features")}
        bodies.append({**user_fields, "history": history})
    return bodies


def context_of(runs: Runs, role: str, number: int = 0) -> dict:
    read = runs.trainer(role).session.task.cfg.inputs.context_features
    return {name: value for name, value in CONTEXTS[number].items() if name in read}


def assert_results_equal_server(path: Path, servable: Servable, bodies: list[dict]) -> None:
    """Check that a result file contains the server's recommendations for the bodies."""

    async def compare(service: Service) -> None:
        transport = httpx.ASGITransport(App(service, LIMITS))
        rows = pq.read_table(path).to_pylist()
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for row, body in zip(rows, bodies, strict=True):
                response = await client.post("/v1/recommend", json={**body, "k": 7})
                assert response.status_code == 200, response.text
                assert (row["user"], row["items"]) == (body["user"], response.json()["items"])
                np.testing.assert_allclose(row["scores"], response.json()["scores"]["score"], rtol=1e-5, atol=1e-6)

    with closing(Service({"retrieval": servable}, ServiceConfig())) as service:
        asyncio.run(compare(service))


def write_users(path: Path, bodies: list[dict], *, dotted: bool = False) -> Path:
    """Write request bodies as a users file.

    Args:
        path: Output file.
        bodies: Request bodies.
        dotted: Whether each feature has its own column, such as `context.device`, instead of one struct per group.

    Returns:
        `path`.
    """
    rows = [{**body["history"], **{n: v for n, v in body.items() if n != "history"}} for body in bodies]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for group in [name for name in ("features", "user_features", "context") if dotted and name in columns]:
        structs = columns.pop(group)
        columns |= {f"{group}.{name}": [struct[name] for struct in structs] for name in structs[0]}
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("role", ROLES)
def test_batch_inference_with_features_equals_server(runs, bodies_by_role, role, tmp_path):
    bodies = bodies_by_role[role]
    context = context_of(runs, role)
    batch = nestrec.load(runs.folder(role)).batch(replace(CFG, context=context))
    output = tmp_path / "recs.parquet"
    assert batch.recommend("all", output, data=runs.data) == len(bodies)
    assert_results_equal_server(output, batch.servable, [{**body, "context": context} for body in bodies])
    batch.recommend(write_users(tmp_path / "users.parquet", bodies), tmp_path / "from_file.parquet")
    assert pq.read_table(tmp_path / "from_file.parquet").equals(pq.read_table(output))


@pytest.mark.parametrize("dotted", [False, True])
def test_batch_inference_reads_context_per_user(runs, bodies_by_role, dotted, tmp_path):
    bodies = [{**one, "context": CONTEXTS[i % 2]} for i, one in enumerate(bodies_by_role[EVERY_KIND][:8])]
    output = tmp_path / "recs.parquet"
    users = write_users(tmp_path / "users.parquet", bodies, dotted=dotted)
    batch = nestrec.load(runs.folder(EVERY_KIND)).batch(CFG)
    batch.recommend(users, output)
    assert_results_equal_server(output, batch.servable, bodies)


def test_batch_inference_uses_defaults_of_export(runs, bodies_by_role, tmp_path):
    servable = Servable.load(runs.folder(EVERY_KIND))
    defaults = InputDefaults(
        history=("i3",),
        times="now",
        features={"device": "tv", "place": "2", "query": "red", "filters": "f2"},
        user_features={"country": "SE", "age": None, "languages": "no", "taste": None},
    )
    servable = replace(servable, spec=replace(servable.spec, defaults=defaults))
    bodies = deepcopy(bodies_by_role[EVERY_KIND][:4])
    bodies[0]["history"] |= {"items": ["unknown item"] * len(bodies[0]["history"]["items"])}
    for body in bodies[:2]:
        body["history"]["features"] |= dict.fromkeys(body["history"]["features"])
    for body in bodies:
        body.pop("user_features")
    batch = BatchRecommender(servable, CFG)
    output = tmp_path / "recs.parquet"
    batch.recommend(write_users(tmp_path / "users.parquet", bodies), output)
    assert_results_equal_server(output, servable, bodies)


def test_batch_inference_maps_other_dataset_by_name(runs, tmp_path):
    """Categories and items have other ids in the other dataset."""
    other = Runs(tmp_path / "other", seed=1)
    dataset = Dataset.open(runs.data)
    other_dataset = Dataset.open(other.data)
    assert dataset.vocabulary("event_device") != other_dataset.vocabulary("event_device")
    assert dataset.items()["item_key"] != other_dataset.items()["item_key"]
    batch = nestrec.load(runs.folder(EVERY_KIND)).batch(replace(CFG, context=CONTEXTS[0]))
    batch.recommend("all", tmp_path / "recs.parquet", data=other.data)
    users = write_users(tmp_path / "users.parquet", bodies_of(other, batch.servable.spec.task))
    batch.recommend(users, tmp_path / "from_file.parquet")
    found, expected = (pq.read_table(tmp_path / name) for name in ("recs.parquet", "from_file.parquet"))
    assert found.equals(expected)


def test_search_index_recall_is_measured_with_features(runs):
    pytest.importorskip("faiss")
    cfg = SearchConfig(kind="faiss_hnsw")
    assert add_search_index(Servable.load(runs.folder(EVERY_KIND)), cfg, runs.data).spec.recall.recall > 0.5


def test_batch_inference_with_features_survives_kills(runs, bodies_by_role, tmp_path):
    class KillSignal(BaseException):
        pass

    def kill():
        raise KillSignal

    users = write_users(tmp_path / "users.parquet", bodies_by_role["retrieval"])
    outputs = []
    cfg = replace(CFG, context=context_of(runs, "retrieval"))
    batch = nestrec.load(runs.folder("retrieval")).batch(cfg)
    for source, data in ((users, None), ("all", runs.data)):
        outputs.append(tmp_path / f"{len(outputs)}.parquet")
        with armed("batch.part_written", kill), pytest.raises(KillSignal):
            batch.recommend(source, outputs[-1], data=data)
        batch.recommend(source, outputs[-1], data=data)
    outputs.append(tmp_path / "ranks.parquet")
    run_on_ranks(2, recommend_on, runs.folder("retrieval"), "all", outputs[-1], runs.data, cfg)
    assert len({output.read_bytes() for output in outputs}) == 1


def test_embed_users_with_features_matches_scores(runs, tmp_path):
    batch = nestrec.load(runs.folder(EVERY_KIND)).batch(replace(CFG, context=CONTEXTS[0], exclude_seen=False))
    batch.recommend("all", tmp_path / "recs.parquet", data=runs.data)
    batch.embed_users("all", tmp_path / "users.parquet", data=runs.data)
    batch.embed_items(tmp_path / "items.parquet")
    items = {row["item"]: row["vector"] for row in pq.read_table(tmp_path / "items.parquet").to_pylist()}
    users = pq.read_table(tmp_path / "users.parquet").to_pylist()
    for row, user in zip(pq.read_table(tmp_path / "recs.parquet").to_pylist(), users, strict=True):
        scores = np.array([items[item] for item in row["items"]]) @ user["vector"]
        np.testing.assert_allclose(scores, row["scores"], rtol=1e-4, atol=1e-6)


WRONG = {
    "value of another kind": ("features", {"place": "far"}, r"features.place=user u2 of [\s\S]*must be numbers"),
    "too few values": ("features", {"device": None}, "features.device=user u2 of [\\s\\S]*values, one per event"),
    "vector of another width": ("user_features", {"taste": [1.0]}, "user_features.taste=.*must be a list of 5 numbers"),
    "unknown feature": ("features", {"devise": "tv"}, "Did you mean 'device'"),
    "unknown context feature": ("context", {"devise": "tv"}, "Did you mean 'device'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_batch_inference_validates_features_first(runs, bodies_by_role, case, tmp_path):
    group, features, match = WRONG[case]
    bodies = [deepcopy(body) | {"context": dict(CONTEXTS[0])} for body in bodies_by_role[EVERY_KIND][:4]]
    for body in bodies:  # a column of a file has one type
        body["history"]["features"]["place"] = [str(v or 0) for v in body["history"]["features"]["place"]]
    if group == "features":
        num_events = len(bodies[2]["history"]["items"])
        event_features = {name: [value] * num_events if value else ["tv"] for name, value in features.items()}
        bodies[2]["history"]["features"] |= event_features
    else:
        bodies[2][group] |= features
    with pytest.raises(UserError, match=match):
        nestrec.load(runs.folder(EVERY_KIND)).batch(CFG).recommend(
            write_users(tmp_path / "users.parquet", bodies), tmp_path / "out.parquet"
        )
    assert not list(tmp_path.glob("out*"))


def test_batch_inference_names_missing_context(runs, bodies_by_role, tmp_path):
    """The error also names features that another dataset or file does not contain."""
    served = nestrec.load(runs.folder(EVERY_KIND))
    output = tmp_path / "out.parquet"
    for context, match in (
        ({}, r"context.device=None: is required[\s\S]*Set --context.device, or export"),
        ({**CONTEXTS[0], "device": ["tv"]}, r"context.device=.*must be one value"),
        ({**CONTEXTS[0], "device": "radio"}, r"context.device=radio: the model does not know[\s\S]*phone, tv, web"),
        ({"devise": "tv"}, r"context.devise=tv: the model does not read[\s\S]*Did you mean 'device'"),
    ):
        with pytest.raises(UserError, match=match):
            served.batch(replace(CFG, context=context)).recommend("all", output, data=runs.data)
    users = write_users(tmp_path / "users.parquet", bodies_by_role[EVERY_KIND][:3])
    with pytest.raises(UserError, match=r"context.device=user u0 of [\s\S]*column context.device, set context"):
        served.batch(CFG).recommend(users, output)
    bodies = [
        {name: value for name, value in body.items() if name != "user_features"} for body in bodies_by_role[EVERY_KIND]
    ]
    batch = served.batch(replace(CFG, context=CONTEXTS[0]))
    with pytest.raises(
        UserError, match=r"user_features.country=user u0 of [\s\S]*with --defaults.user_features.country"
    ):
        batch.recommend(write_users(tmp_path / "users.parquet", bodies), output)
