"""Files for everybody of models that read features: what the server answers that is told the same of each user."""

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
from featured_runs import Runs, known_to, request_of

import nestrec
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.exporters.export_checks import with_search
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
def everybody(runs) -> dict[str, list[dict]]:
    """What a server is told of all users of the log, by the role of the model that reads it."""
    return {role: bodies_of(runs, runs.trainer(role).session.task.cfg) for role in ROLES}


def bodies_of(log: Runs, task: RetrievalTaskConfig) -> list[dict]:
    dataset = Dataset.open(log.data)
    bodies = []
    for place, user in enumerate(dataset.user_keys(np.arange(dataset.num_samples))):
        history, context, _ = request_of(log, place, int(dataset.lengths[place]))
        told, _ = known_to(task, history, context)
        told["times_ms"] = [int(time) for time in told["times_ms"]]
        of_user = {"user": user, "now_ms": told.pop("now_ms"), "user_features": told.pop("user_features")}
        bodies.append({**of_user, "history": told})
    return bodies


def context_of(runs: Runs, role: str, number: int = 0) -> dict:
    read = runs.trainer(role).session.task.cfg.inputs.context
    return {name: value for name, value in CONTEXTS[number].items() if name in read}


def assert_answers_are_in(path: Path, servable: Servable, bodies: list[dict]) -> None:
    """What a server recommends to each."""

    async def asked(service: Service) -> None:
        transport = httpx.ASGITransport(App(service, LIMITS))
        rows = pq.read_table(path).to_pylist()
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for row, body in zip(rows, bodies, strict=True):
                answer = await client.post("/v1/recommend", json={**body, "k": 7})
                assert answer.status_code == 200, answer.text
                assert (row["user"], row["items"]) == (body["user"], answer.json()["items"])
                np.testing.assert_allclose(row["scores"], answer.json()["scores"]["score"], rtol=1e-5, atol=1e-6)

    with closing(Service({"retrieval": servable}, ServiceConfig())) as service:
        asyncio.run(asked(service))


def write_users(path: Path, bodies: list[dict], *, dotted: bool = False) -> Path:
    """The same as a file."""
    rows = [{**body["history"], **{n: v for n, v in body.items() if n != "history"}} for body in bodies]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for group in [name for name in ("features", "user_features", "context") if dotted and name in columns]:
        told = columns.pop(group)
        columns |= {f"{group}.{name}": [one[name] for one in told] for name in told[0]}
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("role", ROLES)
def test_everybody_gets_what_a_server_answers_that_is_told_the_same_features(runs, everybody, role, tmp_path):
    bodies = everybody[role]
    context = context_of(runs, role)
    batch = nestrec.load(runs.folder(role)).batch(replace(CFG, context=context))
    output = tmp_path / "recs.parquet"
    assert batch.recommend("all", output, data=runs.data) == len(bodies)
    assert_answers_are_in(output, batch.servable, [{**body, "context": context} for body in bodies])
    batch.recommend(write_users(tmp_path / "users.parquet", bodies), tmp_path / "of_file.parquet")
    assert pq.read_table(tmp_path / "of_file.parquet").equals(pq.read_table(output))


@pytest.mark.parametrize("dotted", [False, True])
def test_a_file_tells_the_context_of_each_user(runs, everybody, dotted, tmp_path):
    bodies = [{**one, "context": CONTEXTS[i % 2]} for i, one in enumerate(everybody[EVERY_KIND][:8])]
    output = tmp_path / "recs.parquet"
    users = write_users(tmp_path / "users.parquet", bodies, dotted=dotted)
    batch = nestrec.load(runs.folder(EVERY_KIND)).batch(CFG)
    batch.recommend(users, output)
    assert_answers_are_in(output, batch.servable, bodies)


def test_what_a_file_leaves_out_is_what_the_export_names(runs, everybody, tmp_path):
    servable = Servable.load(runs.folder(EVERY_KIND))
    defaults = InputDefaults(
        history=("i3",),
        times="now",
        features={"device": "tv", "place": "2", "query": "red", "filters": "f2"},
        user_features={"country": "SE", "age": None, "languages": "no", "taste": None},
    )
    servable = replace(servable, spec=replace(servable.spec, defaults=defaults))
    bodies = deepcopy(everybody[EVERY_KIND][:4])
    bodies[0]["history"] |= {"items": ["nobody knows"] * len(bodies[0]["history"]["items"])}
    for body in bodies[:2]:
        body["history"]["features"] |= dict.fromkeys(body["history"]["features"])
    for body in bodies:
        body.pop("user_features")
    batch = BatchRecommender(servable, CFG)
    output = tmp_path / "recs.parquet"
    batch.recommend(write_users(tmp_path / "users.parquet", bodies), output)
    assert_answers_are_in(output, servable, bodies)


def test_users_of_another_dataset_are_told_of_by_the_names_of_what_they_did(runs, tmp_path):
    """There the same categories and items have other ids."""
    other = Runs(tmp_path / "other", seed=1)
    own, others = Dataset.open(runs.data), Dataset.open(other.data)
    assert own.vocabulary("event_device") != others.vocabulary("event_device")
    assert own.items()["item_key"] != others.items()["item_key"]
    batch = nestrec.load(runs.folder(EVERY_KIND)).batch(replace(CFG, context=CONTEXTS[0]))
    batch.recommend("all", tmp_path / "recs.parquet", data=other.data)
    users = write_users(tmp_path / "users.parquet", bodies_of(other, batch.servable.spec.task))
    batch.recommend(users, tmp_path / "of_file.parquet")
    found, expected = (pq.read_table(tmp_path / name) for name in ("recs.parquet", "of_file.parquet"))
    assert found.equals(expected)


def test_a_search_is_measured_on_users_by_their_features(runs):
    pytest.importorskip("faiss")
    cfg = SearchConfig(kind="faiss_hnsw")
    assert with_search(Servable.load(runs.folder(EVERY_KIND)), cfg, runs.data).spec.recall.recall > 0.5


def test_ranks_and_kills_leave_the_same_bytes_where_features_are_read(runs, everybody, tmp_path):
    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    users = write_users(tmp_path / "users.parquet", everybody["retrieval"])
    outputs = []
    cfg = replace(CFG, context=context_of(runs, "retrieval"))
    batch = nestrec.load(runs.folder("retrieval")).batch(cfg)
    for of, data in ((users, None), ("all", runs.data)):
        outputs.append(tmp_path / f"{len(outputs)}.parquet")
        with armed("batch.part_written", kill), pytest.raises(Killed):
            batch.recommend(of, outputs[-1], data=data)
        batch.recommend(of, outputs[-1], data=data)
    outputs.append(tmp_path / "ranks.parquet")
    run_on_ranks(2, recommend_on, runs.folder("retrieval"), "all", outputs[-1], runs.data, cfg)
    assert len({output.read_bytes() for output in outputs}) == 1


def test_vectors_of_users_who_are_told_of_by_features_have_their_scores(runs, tmp_path):
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
    "a value of another kind": ("features", {"place": "far"}, r"features.place = 'user u2 of [\s\S]*must be numbers"),
    "too few values": ("features", {"device": None}, "features.device = 'user u2 of [\\s\\S]*values, one for each"),
    "another width": ("user_features", {"taste": [1.0]}, "user_features.taste = .*must be a list of 5 numbers"),
    "a feature that there is not": ("features", {"devise": "tv"}, "did you mean 'device'"),
    "a context that there is not": ("context", {"devise": "tv"}, "did you mean 'device'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_features_of_a_file_are_named_before_anything_is_computed(runs, everybody, case, tmp_path):
    group, told, match = WRONG[case]
    bodies = [deepcopy(body) | {"context": dict(CONTEXTS[0])} for body in everybody[EVERY_KIND][:4]]
    for body in bodies:  # the columns of a file have one type
        body["history"]["features"]["place"] = [str(v or 0) for v in body["history"]["features"]["place"]]
    events = len(bodies[2]["history"]["items"])
    of_events = {name: [value] * events if value else ["tv"] for name, value in told.items()}
    place = bodies[2]["history"] if group == "features" else bodies[2]
    place[group] |= of_events if group == "features" else told
    with pytest.raises(UserError, match=match):
        nestrec.load(runs.folder(EVERY_KIND)).batch(CFG).recommend(
            write_users(tmp_path / "users.parquet", bodies), tmp_path / "out.parquet"
        )
    assert not list(tmp_path.glob("out*"))


def test_what_nobody_can_know_is_asked_for_by_name(runs, everybody, tmp_path):
    """The context, and features that another dataset or file does not have."""
    served = nestrec.load(runs.folder(EVERY_KIND))
    output = tmp_path / "out.parquet"
    for context, match in (
        ({}, r"context.device=None: is needed[\s\S]*set context.device, or export"),
        ({**CONTEXTS[0], "device": ["tv"]}, r"context.device = .*must be one value"),
        ({**CONTEXTS[0], "device": "radio"}, r"context.device=radio: is no value[\s\S]*phone, tv, web"),
        ({"devise": "tv"}, r"context.devise=tv: is not read[\s\S]*did you mean 'device'"),
    ):
        with pytest.raises(UserError, match=match):
            served.batch(replace(CFG, context=context)).recommend("all", output, data=runs.data)
    users = write_users(tmp_path / "users.parquet", everybody[EVERY_KIND][:3])
    with pytest.raises(UserError, match=r"context.device = 'user u0 of [\s\S]*column context.device, set context"):
        served.batch(CFG).recommend(users, output)
    bodies = [{name: told for name, told in body.items() if name != "user_features"} for body in everybody[EVERY_KIND]]
    batch = served.batch(replace(CFG, context=CONTEXTS[0]))
    with pytest.raises(
        UserError, match=r"user_features.country = 'user u0 of [\s\S]*with defaults.user_features.country"
    ):
        batch.recommend(write_users(tmp_path / "users.parquet", bodies), output)
