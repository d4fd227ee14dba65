"""Models whose tables lie in DRAM or on disk behind a device cache score as those whose tables lie on the device."""

import asyncio

import httpx
import numpy as np
import pytest
import torch

from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.reference_runner import BatchItem, ReferenceRunner, plain_runner
from nestrec.serving.http.http_app import App
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import CachedTable, TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig

NUM_ITEMS = 200


def runner_of(folder, store, cache_rows):
    form = make_form(Servable.load(folder, tables=TablesConfig(store=store, cache_rows=cache_rows)))
    dtype = form.encoder.position.dtype
    pool = PagePool(form.encoder.cfg, num_pages=1, page_tokens=1, device=torch.device("cpu"), dtype=dtype)
    return ReferenceRunner(form, pool)


def draw_parts(form, *, num_best=0):
    """Requests of 20 users, with items that the model does not know."""
    rng = np.random.default_rng(1)
    parts = []
    for _ in range(20):
        count = int(rng.integers(1, 60))
        history = History(
            items=rng.integers(0, NUM_ITEMS + 1, count),
            times_ms=np.sort(rng.integers(0, 10**10, count)),
            actions=rng.integers(0, 4, count),
        )
        items = np.zeros(0, np.int64) if num_best else rng.integers(0, NUM_ITEMS + 1, 50)
        asked = Candidates(items=items, now_ms=2 * 10**10, num_best=num_best, excluded=np.unique(history.items))
        tokens = form.tokens(history, asked.now_ms)
        parts.append(BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=asked))
    return parts


@pytest.mark.parametrize("kind", ["retrieval", "ranking"])
@pytest.mark.parametrize(("store", "cache_rows"), [("dram", 50), ("disk", 50), ("disk", 3)])
def test_scores_equal_those_of_tables_on_the_device_to_the_bit(request, kind, store, cache_rows):
    """Each request names more distinct items than the smallest cache holds."""
    folder = request.getfixturevalue(kind).folder
    runners = [runner_of(folder, *place) for place in (("device", 0), (store, cache_rows))]
    assert isinstance(runners[1].form.servable.tables["items"], CachedTable)
    for num_best in (0, 10) if kind == "retrieval" else (0,):
        expected, found = (runner.run(draw_parts(runner.form, num_best=num_best)) for runner in runners)
        for one, other in zip(expected, found, strict=True):
            assert np.array_equal(one.items, other.items)
            assert np.array_equal(one.scores, other.scores)
    counts = runners[1].form.servable.tables["items"].statistics()
    assert counts["device_rows"] == cache_rows
    assert 0 < counts["missed"] < counts["asked"]


def test_an_index_that_devices_share_gives_the_same_items_and_scores(retrieval):
    whole, shared = (
        plain_runner(Servable.load(retrieval.folder, tables=TablesConfig(index_devices=devices)))
        for devices in ((), ("cpu", "cpu", "cpu"))
    )
    assert len(list(shared.form.servable.index.parts())) == 3
    expected, found = (runner.run(draw_parts(runner.form, num_best=10)) for runner in (whole, shared))
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one.items, other.items)
        assert np.array_equal(one.scores, other.scores)


def test_unknown_items_have_the_vector_of_evaluation_behind_a_cache_too(retrieval):
    servable = Servable.load(retrieval.folder, tables=TablesConfig(store="disk", cache_rows=2))
    seen = retrieval.trainer.session.engine.lookup_readonly({"history": np.array([0])})["history"]
    ids = servable.ids_of(["no such item", servable.item_keys[4]])
    assert torch.equal(servable.tables["items"].rows(torch.from_numpy(ids))[:1], seen)


def test_instances_share_a_cache_whose_hits_are_counted(retrieval, ranking):
    folders = [retrieval.folder, ranking.folder]
    place = TablesConfig(store="disk", cache_rows=20)
    body = {
        "user": "a",
        "history": {"items": [1, 2, "none", 4], "times_ms": [1, 2, 3, 4], "actions": [0, 1, "click", 1]},
    }
    body |= {"k": 5, "now_ms": 10}

    async def answers(service):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000))), base_url="http://test"
        ) as client:
            asked = [client.post("/v1/recommend", json={**body, "user": str(u)}) for u in range(12)]
            found = [response.json() for response in await asyncio.gather(*asked)]
            return [(a["items"], a["scores"]) for a in found], (await client.get("/metrics")).text

    cfg = ServiceConfig(instances=2, engine=EngineConfig(max_queue_s=1e9))
    services = [Service.load(folders, cfg, tables=tables) for tables in (None, place)]
    (expected, _), (found, metrics) = (asyncio.run(answers(service)) for service in services)
    for service in services:
        service.close()
    assert [items for items, _ in found] == [items for items, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert all(np.allclose(one[name], other[name], rtol=1e-5, atol=1e-5) for name in one)
    line = 'nestrec_table_rows_total{event="%s",model="ranking",table="items"}'
    missed, asked = (
        float(next(text for text in metrics.splitlines() if text.startswith(line % event)).split()[-1])
        for event in ("missed", "asked")
    )
    assert 0 < missed < asked
