"""Batch inference: its results equal the server's responses, on any number of ranks and after any number of kills."""

import asyncio
import itertools
import json
from dataclasses import replace

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_jobs import CFG, recommend_on

import nestrec
from nestrec.base.errors import UserError
from nestrec.inference.batch_inference import BatchJobConfig, BatchRecommender
from nestrec.inference.recommender import Recommender
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.model.servable import Servable
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.local_ranks import run_on_ranks
from support.fail_points import armed


@pytest.fixture(scope="module")
def histories(retrieval):
    """Return the items and times of the first 70 users of the dataset, by user key."""
    dataset = retrieval.trainer.session.dataset
    users = np.arange(70)
    rows = dataset.rows(users)
    keys = dataset.items().column("item_key").to_pylist()
    (items, offsets), (times, _) = rows.lists["item_ids"], rows.lists["timestamps_ms"]
    spans = list(itertools.pairwise(offsets))
    return {
        key: ([keys[i - 1] for i in items[a:b]], times[a:b].tolist())
        for key, (a, b) in zip(dataset.user_keys(users), spans, strict=True)
    }


@pytest.fixture(scope="module")
def users_file(histories, tmp_path_factory):
    path = tmp_path_factory.mktemp("users") / "users.txt"
    path.write_text("\n".join(histories) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def uninterrupted(retrieval, users_file, dataset_folder, tmp_path_factory):
    """Return the output file of an uninterrupted job."""
    output = tmp_path_factory.mktemp("uninterrupted") / "recs.parquet"
    assert nestrec.load(retrieval.folder).batch(CFG).recommend(users_file, output, data=dataset_folder) == 70
    return output


def test_batch_inference_results_equal_server(retrieval, histories, uninterrupted):
    service = Service.load([retrieval.folder], ServiceConfig())

    async def responses():
        transport = httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for user, (items, times) in histories.items():
                body = {"user": user, "history": {"items": items, "times_ms": times}, "now_ms": times[-1], "k": 7}
                yield (await client.post("/v1/recommend", json=body)).json()

    async def compare():
        rows = pq.read_table(uninterrupted).to_pylist()
        assert [row["user"] for row in rows] == list(histories)
        async for response in responses():
            row = rows.pop(0)
            assert row["items"] == response["items"]
            np.testing.assert_allclose(row["scores"], response["scores"]["score"], rtol=1e-5)

    try:
        asyncio.run(compare())
    finally:
        service.close()


def test_batch_inference_killed_job_resumes_exactly(retrieval, users_file, uninterrupted, dataset_folder, tmp_path):
    class KillSignal(BaseException):
        pass

    def kill():
        raise KillSignal

    batch = nestrec.load(retrieval.folder).batch(CFG)
    output = tmp_path / "recs.parquet"
    with armed("batch.part_written", kill, at=2), pytest.raises(KillSignal):
        batch.recommend(users_file, output, data=dataset_folder)
    parts = tmp_path / "recs.parquet.parts"
    before = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*.parquet")}
    assert len(before) == 2
    assert not output.exists()
    other = nestrec.load(retrieval.folder).batch(BatchJobConfig(k=8, part_users=20, max_batch_tokens=200))
    with pytest.raises(UserError, match=r"parts of another job \(k 7\)"):
        other.recommend(users_file, output, data=dataset_folder)
    written = []
    with armed("batch.part_written", lambda: written.append(1)):
        batch.recommend(users_file, output, data=dataset_folder)
    assert len(written) == 2, "two of the four parts were left"
    assert output.read_bytes() == uninterrupted.read_bytes()
    assert not parts.exists()


def test_batch_inference_ignores_parts_without_job(retrieval, users_file, uninterrupted, dataset_folder, tmp_path):
    """A job that is killed while it removes its parts leaves some without their job description."""
    batch = nestrec.load(retrieval.folder).batch(CFG)
    output = tmp_path / "recs.parquet"
    parts = tmp_path / "recs.parquet.parts"
    parts.mkdir()
    (parts / "part-000001.parquet").write_bytes(uninterrupted.read_bytes())
    batch.recommend(users_file, output, data=dataset_folder)
    assert output.read_bytes() == uninterrupted.read_bytes()


def test_batch_inference_ranks_write_identical_bytes(retrieval, users_file, uninterrupted, dataset_folder, tmp_path):
    output = tmp_path / "recs.parquet"
    assert run_on_ranks(2, recommend_on, retrieval.folder, users_file, output, dataset_folder) == [70, 70]
    assert output.read_bytes() == uninterrupted.read_bytes()


def test_batch_inference_of_histories_needs_no_dataset(retrieval, histories, uninterrupted, tmp_path):
    users = [{"user": user, "items": items, "times_ms": times} for user, (items, times) in histories.items()]
    pq.write_table(pa.Table.from_pylist(users), tmp_path / "users.parquet")
    nestrec.load(retrieval.folder).batch(CFG).recommend(tmp_path / "users.parquet", tmp_path / "recs.parquet")
    assert pq.read_table(tmp_path / "recs.parquet").equals(pq.read_table(uninterrupted))


@pytest.mark.parametrize("default", [None, ("12", "7")])
def test_batch_inference_unknown_users_equal_server(retrieval, tmp_path, default):
    """Users without known items get no recommendations, or those of the default history of the export."""
    now_ms = 1642271351894
    lists = {"items": [["unknown item"], []], "times_ms": [[now_ms], []]}
    pq.write_table(pa.table({"user": ["a", "b"], **lists}), tmp_path / "users.parquet")
    servable = Servable.load(retrieval.folder)
    defaults = replace(servable.spec.defaults, history=default, times="now")
    servable = replace(servable, spec=replace(servable.spec, defaults=defaults))
    batch = BatchRecommender(servable, CFG)
    batch.recommend(str(tmp_path / "users.parquet"), tmp_path / "recs.parquet")
    assert batch.num_unknown_users == (0 if default else 2)
    found = pq.read_table(tmp_path / "recs.parquet").to_pylist()
    known = {"items": list(default or ()), "times_ms": [now_ms] * len(default or ()), "now_ms": now_ms}
    expected = Recommender(servable, None).recommend(known, k=7, exclude_seen=False).items if default else ()
    assert [row["items"] for row in found] == [list(expected)] * 2


def test_batch_inference_removes_files_of_killed_jobs(retrieval, tmp_path):
    for name in (".items.npy.writing.npy", ".items.npy.12-ab.partial"):  # names of an earlier and of this version
        (tmp_path / name).write_text("")
    other = tmp_path / ".users.npy.12-ab.partial"
    other.write_text("of another job")
    nestrec.load(retrieval.folder).batch(CFG).embed_items(tmp_path / "items.npy")
    assert {path.name for path in tmp_path.iterdir()} == {"items.npy", "items.keys.json", other.name}


def test_batch_embeddings_reproduce_scores(retrieval, users_file, uninterrupted, dataset_folder, tmp_path):
    batch = nestrec.load(retrieval.folder).batch(CFG)
    batch.embed_users(users_file, tmp_path / "users.npy", data=dataset_folder)
    batch.embed_items(tmp_path / "items.parquet")
    users = np.load(tmp_path / "users.npy")
    keys = json.loads((tmp_path / "users.keys.json").read_text())
    items = {row["item"]: row["vector"] for row in pq.read_table(tmp_path / "items.parquet").to_pylist()}
    for row, key, user in zip(pq.read_table(uninterrupted).to_pylist(), keys, users, strict=True):
        assert row["user"] == key
        np.testing.assert_allclose(np.array([items[i] for i in row["items"]]) @ user, row["scores"], rtol=1e-4)


def test_batch_inference_reports_invalid_jobs(retrieval, ranking, dataset_folder, tmp_path):
    batch = nestrec.load(retrieval.folder).batch(CFG)
    with pytest.raises(UserError, match=r"the dataset of the users is not known\. Set --data to the dataset"):
        batch.recommend("all", tmp_path / "out.parquet")
    with pytest.raises(UserError, match="the file does not exist"):
        batch.recommend("missing.txt", tmp_path / "out.parquet")
    with pytest.raises(UserError, match="cannot search the catalog"):
        nestrec.load(ranking.folder).batch(CFG)
    with pytest.raises(UserError, match="must be a path"):
        batch.recommend(["u1", "u2"], tmp_path / "out.parquet", data=dataset_folder)
    with pytest.raises(UserError, match=r"unsupported file type[\s\S]*\.parquet"):
        batch.recommend("all", tmp_path / "out.csv", data=dataset_folder)
    with pytest.raises(UserError, match="must be of type int"):
        nestrec.load(retrieval.folder).batch(BatchJobConfig(k="7"))
    (tmp_path / "users.txt").write_text("no such user\n")
    with pytest.raises(UserError, match="the dataset does not have these users"):
        batch.recommend(str(tmp_path / "users.txt"), tmp_path / "out.parquet", data=dataset_folder)


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.string())])
def test_batch_inference_of_no_users_is_empty(retrieval, tmp_path, kind):
    """Columns of tables without rows often have the type null."""
    pq.write_table(pa.table({n: pa.array([], kind) for n in ("user", "items", "times_ms")}), tmp_path / "u.parquet")
    batch = nestrec.load(retrieval.folder).batch(CFG)
    assert batch.recommend(tmp_path / "u.parquet", tmp_path / "recs.parquet") == 0
    assert pq.read_table(tmp_path / "recs.parquet").column_names == ["user", "items", "scores"]


def test_batch_inference_never_overwrites_input(retrieval, tmp_path):
    pq.write_table(pa.table({"user": ["a"], "items": [["1"]], "times_ms": [[T]]}), tmp_path / "u.parquet")
    before = (tmp_path / "u.parquet").read_bytes()
    with pytest.raises(UserError, match="would overwrite the users file"):
        nestrec.load(retrieval.folder).batch(CFG).recommend(tmp_path / "u.parquet", tmp_path / "u.parquet")
    assert (tmp_path / "u.parquet").read_bytes() == before


T = 1642271351894
WRONG = {
    "decreasing times": ({"items": [["1"], ["1", "2"]], "times_ms": [[T], [T, T - 1]]}, "times_ms.*of user b"),
    "microseconds": ({"items": [["1"], ["2"]], "times_ms": [[T], [1000 * T]]}, "times_ms.*of user b"),
    "missing time": ({"items": [["1"], ["1", "2"]], "times_ms": [[T], [T, None]]}, "times_ms"),
    "times as text": ({"items": [["1"], ["2"]], "times_ms": [["noon"], ["now"]]}, "times_ms"),
    "times without lists": ({"items": [["1"], ["2"]], "times_ms": [T, T]}, "times_ms"),
    "missing item": ({"items": [["1"], [None]], "times_ms": [[T], [T]]}, "items"),
    "fractional item id": ({"items": [[1.0], [1.5]], "times_ms": [[T], [T]]}, "items"),
    "items without lists": ({"items": ["1", "2"], "times_ms": [[T], [T]]}, "items"),
    "items as dictionary column": (
        {"items": pa.array(["1", "2"]).dictionary_encode(), "times_ms": [[T], [T]]},
        "items",
    ),
    "boolean items": ({"items": [[True], [False]], "times_ms": [[T], [T]]}, "items"),
    "fewer times than items": ({"items": [["1"], ["1", "2"]], "times_ms": [[T], [T]]}, "times_ms.*of user b"),
    "missing now_ms": ({"items": [["1"], ["2"]], "times_ms": [[T], [T]], "now_ms": [T, None]}, "now_ms"),
    "null items column": ({"items": pa.nulls(2), "times_ms": [[T], [T]]}, "items"),
}


@pytest.mark.parametrize(("columns", "match"), WRONG.values(), ids=list(WRONG))
def test_batch_inference_validates_histories_first(retrieval, tmp_path, columns, match):
    pq.write_table(pa.table({"user": ["a", "b"], **columns}), tmp_path / "users.parquet")
    with pytest.raises(UserError, match=match):
        nestrec.load(retrieval.folder).batch(CFG).recommend(str(tmp_path / "users.parquet"), tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out*"))


def test_batch_inference_accepts_decimal_ids(retrieval, tmp_path):
    """Data warehouses export integers as decimals."""
    decimal = pa.decimal128(38, 2)
    batch = nestrec.load(retrieval.folder).batch(CFG)
    written = []
    for user, items in (("7", ["1", "2"]), (pa.array([7]).cast(decimal), pa.array([[1, 2]]).cast(pa.list_(decimal)))):
        columns = {"user": [user] if isinstance(user, str) else user, "times_ms": [[T, T + 1]]}
        columns["items"] = [items] if isinstance(items, list) else items
        pq.write_table(pa.table(columns), tmp_path / "u.parquet")
        batch.recommend(str(tmp_path / "u.parquet"), tmp_path / "out.parquet")
        written.append(pq.read_table(tmp_path / "out.parquet"))
    assert written[0].equals(written[1])


def test_batch_inference_accepts_any_timestamp_unit(retrieval, tmp_path):
    batch = nestrec.load(retrieval.folder).batch(CFG)
    written = []
    for unit, ticks in (("ms", 1), ("ns", 10**6)):
        timestamps = pa.array([[T * ticks, (T + 10**7) * ticks]], pa.list_(pa.timestamp(unit)))
        pq.write_table(pa.table({"user": ["a"], "items": [["1", "2"]], "times_ms": timestamps}), tmp_path / "u.parquet")
        batch.recommend(str(tmp_path / "u.parquet"), tmp_path / "out.parquet")
        written.append(pq.read_table(tmp_path / "out.parquet"))
    assert written[0].equals(written[1])


def test_batch_inference_request_times_and_default_times(retrieval, tmp_path):
    servable = Servable.load(retrieval.folder)
    servable = replace(servable, spec=replace(servable.spec, defaults=replace(servable.spec.defaults, times="now")))
    users = {"user": ["a", "b"], "items": [["1", "2"], ["3"]], "now_ms": [T, T + 10**7]}
    found = []
    for times in ({}, {"times_ms": [[T - 10**8, T - 10**6], [T - 10**7]]}):
        pq.write_table(pa.table(users | times), tmp_path / "u.parquet")
        BatchRecommender(servable, CFG).recommend(tmp_path / "u.parquet", tmp_path / "out.parquet")
        found.append(pq.read_table(tmp_path / "out.parquet").to_pylist())
        requests = [{n: v[row] for n, v in (users | times).items() if n != "user"} for row in range(2)]
        expected = Recommender(servable, None).recommend_batch(requests, 7)
        assert [row["items"] for row in found[-1]] == [list(one.items) for one in expected]
        for row, one in zip(found[-1], expected, strict=True):
            np.testing.assert_allclose(row["scores"], one.scores["score"], rtol=1e-5)
    assert found[0] != found[1]


@pytest.mark.parametrize(("name", "content"), [("u.parquet", b"PAR1 truncated"), ("u.txt", b"\xe9\n")])
def test_batch_inference_names_unreadable_users_file(retrieval, dataset_folder, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        nestrec.load(retrieval.folder).batch(CFG).recommend(
            str(tmp_path / name), tmp_path / "out.parquet", data=dataset_folder
        )
