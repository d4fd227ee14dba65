"""Batch inference: what the server answers, for everybody, on any number of ranks and after any number of kills."""

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
    """Key, items and times of the first users of the dataset."""
    dataset = retrieval.trainer.session.dataset
    places = np.arange(70)
    rows = dataset.rows(places)
    keys = dataset.items().column("item_key").to_pylist()
    (items, offsets), (times, _) = rows.lists["item_ids"], rows.lists["timestamps_ms"]
    spans = list(itertools.pairwise(offsets))
    return {
        key: ([keys[i - 1] for i in items[a:b]], times[a:b].tolist())
        for key, (a, b) in zip(dataset.user_keys(places), spans, strict=True)
    }


@pytest.fixture(scope="module")
def listed(histories, tmp_path_factory):
    path = tmp_path_factory.mktemp("users") / "users.txt"
    path.write_text("\n".join(histories) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def whole(retrieval, listed, dataset_folder, tmp_path_factory):
    """The output of one uninterrupted job."""
    output = tmp_path_factory.mktemp("whole") / "recs.parquet"
    assert nestrec.load(retrieval.folder).batch(CFG).recommend(listed, output, data=dataset_folder) == 70
    return output


def test_everybody_gets_what_the_server_answers_item_by_item(retrieval, histories, whole):
    service = Service.load([retrieval.folder], ServiceConfig())

    async def answers():
        transport = httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for user, (items, times) in histories.items():
                body = {"user": user, "history": {"items": items, "times_ms": times}, "now_ms": times[-1], "k": 7}
                yield (await client.post("/v1/recommend", json=body)).json()

    async def compared():
        rows = pq.read_table(whole).to_pylist()
        assert [row["user"] for row in rows] == list(histories)
        async for answer in answers():
            row = rows.pop(0)
            assert row["items"] == answer["items"]
            np.testing.assert_allclose(row["scores"], answer["scores"]["score"], rtol=1e-5)

    try:
        asyncio.run(compared())
    finally:
        service.close()


def test_a_killed_job_goes_on_and_leaves_the_same_bytes(retrieval, listed, whole, dataset_folder, tmp_path):
    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    batch = nestrec.load(retrieval.folder).batch(CFG)
    output = tmp_path / "recs.parquet"
    with armed("batch.part_written", kill, at=2), pytest.raises(Killed):
        batch.recommend(listed, output, data=dataset_folder)
    parts = tmp_path / "recs.parquet.parts"
    before = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*.parquet")}
    assert len(before) == 2
    assert not output.exists()
    other = nestrec.load(retrieval.folder).batch(BatchJobConfig(k=8, part_size=20, batch_tokens=200))
    with pytest.raises(UserError, match=r"parts of another job \(k 7\)"):
        other.recommend(listed, output, data=dataset_folder)
    written = []
    with armed("batch.part_written", lambda: written.append(1)):
        batch.recommend(listed, output, data=dataset_folder)
    assert len(written) == 2  # of four
    assert output.read_bytes() == whole.read_bytes()
    assert not parts.exists()


def test_parts_that_nobody_names_the_job_of_are_of_no_use(retrieval, listed, whole, dataset_folder, tmp_path):
    """A job was killed while it removed its parts; another one begins there."""
    batch = nestrec.load(retrieval.folder).batch(CFG)
    output = tmp_path / "recs.parquet"
    parts = tmp_path / "recs.parquet.parts"
    parts.mkdir()
    (parts / "part-000001.parquet").write_bytes(whole.read_bytes())
    batch.recommend(listed, output, data=dataset_folder)
    assert output.read_bytes() == whole.read_bytes()


def test_ranks_share_the_parts_and_leave_the_same_bytes(retrieval, listed, whole, dataset_folder, tmp_path):
    output = tmp_path / "recs.parquet"
    assert run_on_ranks(2, recommend_on, retrieval.folder, listed, output, dataset_folder) == [70, 70]
    assert output.read_bytes() == whole.read_bytes()


def test_a_file_of_histories_needs_no_dataset(retrieval, histories, whole, tmp_path):
    users = [{"user": user, "items": items, "times_ms": times} for user, (items, times) in histories.items()]
    pq.write_table(pa.Table.from_pylist(users), tmp_path / "users.parquet")
    nestrec.load(retrieval.folder).batch(CFG).recommend(tmp_path / "users.parquet", tmp_path / "recs.parquet")
    assert pq.read_table(tmp_path / "recs.parquet").equals(pq.read_table(whole))


@pytest.mark.parametrize("default", [None, ("12", "7")])
def test_whoever_the_model_knows_nothing_of_gets_what_the_server_would_answer(retrieval, tmp_path, default):
    """That is nothing, or what the history brings that the export names for them."""
    now_ms = 1642271351894
    lists = {"items": [["nobody knows"], []], "times_ms": [[now_ms], []]}
    pq.write_table(pa.table({"user": ["a", "b"], **lists}), tmp_path / "users.parquet")
    servable = Servable.load(retrieval.folder)
    defaults = replace(servable.spec.defaults, history=default, times="now")
    servable = replace(servable, spec=replace(servable.spec, defaults=defaults))
    batch = BatchRecommender(servable, CFG)
    batch.recommend(str(tmp_path / "users.parquet"), tmp_path / "recs.parquet")
    assert batch.num_without == (0 if default else 2)
    found = pq.read_table(tmp_path / "recs.parquet").to_pylist()
    known = {"items": list(default or ()), "times_ms": [now_ms] * len(default or ()), "now_ms": now_ms}
    expected = Recommender(servable, None).recommend(known, k=7, exclude_seen=False).items if default else ()
    assert [row["items"] for row in found] == [list(expected)] * 2


def test_batch_removes_what_killed_jobs_left(retrieval, tmp_path):
    for left in (".items.npy.writing.npy", ".items.npy.12-ab.partial"):  # of earlier versions and of this one
        (tmp_path / left).write_text("")
    other = tmp_path / ".users.npy.12-ab.partial"
    other.write_text("of another job")
    nestrec.load(retrieval.folder).batch(CFG).embed_items(tmp_path / "items.npy")
    assert {path.name for path in tmp_path.iterdir()} == {"items.npy", "items.keys.json", other.name}


def test_products_of_embedded_users_and_items_are_the_scores(retrieval, listed, whole, dataset_folder, tmp_path):
    batch = nestrec.load(retrieval.folder).batch(CFG)
    batch.embed_users(listed, tmp_path / "users.npy", data=dataset_folder)
    batch.embed_items(tmp_path / "items.parquet")
    users = np.load(tmp_path / "users.npy")
    keys = json.loads((tmp_path / "users.keys.json").read_text())
    items = {row["item"]: row["vector"] for row in pq.read_table(tmp_path / "items.parquet").to_pylist()}
    for row, key, user in zip(pq.read_table(whole).to_pylist(), keys, users, strict=True):
        assert row["user"] == key
        np.testing.assert_allclose(np.array([items[i] for i in row["items"]]) @ user, row["scores"], rtol=1e-4)


def test_mistakes_in_batch_jobs_are_named(retrieval, ranking, dataset_folder, tmp_path):
    batch = nestrec.load(retrieval.folder).batch(CFG)
    with pytest.raises(UserError, match="needs a dataset, which this model does not name"):
        batch.recommend("all", tmp_path / "out.parquet")
    with pytest.raises(UserError, match="is no file"):
        batch.recommend("nobody.txt", tmp_path / "out.parquet")
    with pytest.raises(UserError, match="no catalogue"):
        nestrec.load(ranking.folder).batch(CFG)
    with pytest.raises(UserError, match="is no path"):
        batch.recommend(["u1", "u2"], tmp_path / "out.parquet", data=dataset_folder)
    with pytest.raises(UserError, match=r"another kind of file[\s\S]*\.parquet"):
        batch.recommend("all", tmp_path / "out.csv", data=dataset_folder)
    with pytest.raises(UserError, match="is not of type int"):
        nestrec.load(retrieval.folder).batch(BatchJobConfig(k="7"))
    (tmp_path / "users.txt").write_text("no such user\n")
    with pytest.raises(UserError, match="no users of the dataset"):
        batch.recommend(str(tmp_path / "users.txt"), tmp_path / "out.parquet", data=dataset_folder)


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.string())])
def test_a_file_of_nobody_gives_a_file_of_nobody(retrieval, tmp_path, kind):
    """Tables without rows often have columns of no type."""
    pq.write_table(pa.table({n: pa.array([], kind) for n in ("user", "items", "times_ms")}), tmp_path / "u.parquet")
    batch = nestrec.load(retrieval.folder).batch(CFG)
    assert batch.recommend(tmp_path / "u.parquet", tmp_path / "recs.parquet") == 0
    assert pq.read_table(tmp_path / "recs.parquet").column_names == ["user", "items", "scores"]


def test_the_file_of_users_is_not_written_over(retrieval, tmp_path):
    pq.write_table(pa.table({"user": ["a"], "items": [["1"]], "times_ms": [[T]]}), tmp_path / "u.parquet")
    before = (tmp_path / "u.parquet").read_bytes()
    with pytest.raises(UserError, match="is the file of users"):
        nestrec.load(retrieval.folder).batch(CFG).recommend(tmp_path / "u.parquet", tmp_path / "u.parquet")
    assert (tmp_path / "u.parquet").read_bytes() == before


T = 1642271351894
WRONG = {
    "times that go back": ({"items": [["1"], ["1", "2"]], "times_ms": [[T], [T, T - 1]]}, "times_ms.*of user b"),
    "microseconds": ({"items": [["1"], ["2"]], "times_ms": [[T], [1000 * T]]}, "times_ms.*of user b"),
    "no time": ({"items": [["1"], ["1", "2"]], "times_ms": [[T], [T, None]]}, "times_ms"),
    "names of times": ({"items": [["1"], ["2"]], "times_ms": [["noon"], ["now"]]}, "times_ms"),
    "times without lists": ({"items": [["1"], ["2"]], "times_ms": [T, T]}, "times_ms"),
    "no item": ({"items": [["1"], [None]], "times_ms": [[T], [T]]}, "items"),
    "half an item": ({"items": [[1.0], [1.5]], "times_ms": [[T], [T]]}, "items"),
    "items without lists": ({"items": ["1", "2"], "times_ms": [[T], [T]]}, "items"),
    "items as words": ({"items": pa.array(["1", "2"]).dictionary_encode(), "times_ms": [[T], [T]]}, "items"),
    "items that are true": ({"items": [[True], [False]], "times_ms": [[T], [T]]}, "items"),
    "fewer times than items": ({"items": [["1"], ["1", "2"]], "times_ms": [[T], [T]]}, "times_ms.*of user b"),
    "a moment of nobody": ({"items": [["1"], ["2"]], "times_ms": [[T], [T]], "now_ms": [T, None]}, "now_ms"),
    "items of nobody": ({"items": pa.nulls(2), "times_ms": [[T], [T]]}, "items"),
}


@pytest.mark.parametrize(("columns", "match"), WRONG.values(), ids=list(WRONG))
def test_a_file_of_histories_is_looked_through_before_anything_is_computed(retrieval, tmp_path, columns, match):
    pq.write_table(pa.table({"user": ["a", "b"], **columns}), tmp_path / "users.parquet")
    with pytest.raises(UserError, match=match):
        nestrec.load(retrieval.folder).batch(CFG).recommend(str(tmp_path / "users.parquet"), tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out*"))


def test_ids_of_a_file_of_histories_may_be_decimals_as_those_of_data_may(retrieval, tmp_path):
    """Warehouses export whole numbers as decimals."""
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


def test_moments_of_a_file_of_histories_may_have_any_unit(retrieval, tmp_path):
    batch = nestrec.load(retrieval.folder).batch(CFG)
    written = []
    for unit, ticks in (("ms", 1), ("ns", 10**6)):
        moments = pa.array([[T * ticks, (T + 10**7) * ticks]], pa.list_(pa.timestamp(unit)))
        pq.write_table(pa.table({"user": ["a"], "items": [["1", "2"]], "times_ms": moments}), tmp_path / "u.parquet")
        batch.recommend(str(tmp_path / "u.parquet"), tmp_path / "out.parquet")
        written.append(pq.read_table(tmp_path / "out.parquet"))
    assert written[0].equals(written[1])


def test_a_file_may_tell_when_users_are_asked_for_and_the_export_when_events_happened(retrieval, tmp_path):
    servable = Servable.load(retrieval.folder)
    servable = replace(servable, spec=replace(servable.spec, defaults=replace(servable.spec.defaults, times="now")))
    users = {"user": ["a", "b"], "items": [["1", "2"], ["3"]], "now_ms": [T, T + 10**7]}
    found = []
    for told in ({}, {"times_ms": [[T - 10**8, T - 10**6], [T - 10**7]]}):
        pq.write_table(pa.table(users | told), tmp_path / "u.parquet")
        BatchRecommender(servable, CFG).recommend(tmp_path / "u.parquet", tmp_path / "out.parquet")
        found.append(pq.read_table(tmp_path / "out.parquet").to_pylist())
        asked = [{n: v[row] for n, v in (users | told).items() if n != "user"} for row in range(2)]
        expected = Recommender(servable, None).recommend_all(asked, 7)
        assert [row["items"] for row in found[-1]] == [list(one.items) for one in expected]
        for row, one in zip(found[-1], expected, strict=True):
            np.testing.assert_allclose(row["scores"], one.scores["score"], rtol=1e-5)
    assert found[0] != found[1]


@pytest.mark.parametrize(("name", "content"), [("u.parquet", b"PAR1 and no more"), ("u.txt", b"\xe9\n")])
def test_a_file_of_users_that_cannot_be_read_is_named(retrieval, dataset_folder, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        nestrec.load(retrieval.folder).batch(CFG).recommend(
            str(tmp_path / name), tmp_path / "out.parquet", data=dataset_folder
        )
