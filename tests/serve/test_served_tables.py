"""Models with tables in host memory or on disk and a device row cache have the same scores as with device tables."""

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
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import CachedTable, TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig

NUM_ITEMS = 200


def runner_of(folder, store, cache_rows):
    form = make_adapter(Servable.load(folder, tables=TablesConfig(store=store, cache_rows=cache_rows)))
    dtype = form.encoder.position.dtype
    pool = PagePool(form.encoder.cfg, num_pages=1, page_tokens=1, device=torch.device("cpu"), dtype=dtype)
    return ReferenceRunner(form, pool)


def draw_parts(form, *, num_best=0):
    """Draw requests of 20 users, some with items that the model does not know."""
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
        candidates = Candidates(items=items, now_ms=2 * 10**10, num_best=num_best, excluded=np.unique(history.items))
        tokens = form.tokens(history, candidates.now_ms)
        item = BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
        parts.append(item)
    return parts


@pytest.mark.parametrize("kind", ["retrieval", "ranking"])
@pytest.mark.parametrize(("store", "cache_rows"), [("dram", 50), ("disk", 50), ("disk", 3)])
def test_row_cache_scores_are_bitwise_equal_to_device_tables(request, kind, store, cache_rows):
    """Each request contains more unique items than the smallest cache holds."""
    folder = request.getfixturevalue(kind).folder
    runners = [runner_of(folder, *options) for options in (("device", 0), (store, cache_rows))]
    assert isinstance(runners[1].adapter.servable.tables["items"], CachedTable)
    for num_best in (0, 10) if kind == "retrieval" else (0,):
        expected, found = (runner.run(draw_parts(runner.adapter, num_best=num_best)) for runner in runners)
        for reference, cached in zip(expected, found, strict=True):
            assert np.array_equal(reference.items, cached.items)
            assert np.array_equal(reference.scores, cached.scores)
    counts = runners[1].adapter.servable.tables["items"].statistics()
    assert counts["device_rows"] == cache_rows
    assert 0 < counts["misses"] < counts["lookups"]


def test_sharded_index_gives_same_items_and_scores(retrieval):
    unsharded, sharded = (
        plain_runner(Servable.load(retrieval.folder, tables=TablesConfig(index_devices=devices)))
        for devices in ((), ("cpu", "cpu", "cpu"))
    )
    assert len(list(sharded.adapter.servable.index.parts())) == 3
    expected, found = (runner.run(draw_parts(runner.adapter, num_best=10)) for runner in (unsharded, sharded))
    for reference, merged in zip(expected, found, strict=True):
        assert np.array_equal(reference.items, merged.items)
        assert np.array_equal(reference.scores, merged.scores)


def test_row_cache_unknown_items_equal_evaluation(retrieval):
    servable = Servable.load(retrieval.folder, tables=TablesConfig(store="disk", cache_rows=2))
    expected = retrieval.trainer.session.engine.lookup_readonly({"history": np.array([0])})["history"]
    ids = servable.ids_of(["no such item", servable.item_keys[4]])
    assert torch.equal(servable.tables["items"].rows(torch.from_numpy(ids))[:1], expected)


def test_row_cache_is_shared_by_engines_and_counts_misses(retrieval, ranking):
    folders = [retrieval.folder, ranking.folder]
    disk = TablesConfig(store="disk", cache_rows=20)
    body = {
        "user": "a",
        "history": {"items": [1, 2, "none", 4], "times_ms": [1, 2, 3, 4], "actions": [0, 1, "click", 1]},
    }
    body |= {"k": 5, "now_ms": 10}

    async def send_all(service):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000))), base_url="http://test"
        ) as client:
            requests = [client.post("/v1/recommend", json={**body, "user": str(u)}) for u in range(12)]
            found = [response.json() for response in await asyncio.gather(*requests)]
            return [(r["items"], r["scores"]) for r in found], (await client.get("/metrics")).text

    cfg = ServiceConfig(engines_per_model=2, engine=EngineConfig(max_queue_delay_s=1e9))
    services = [Service.load(folders, cfg, tables=tables) for tables in (None, disk)]
    (expected, _), (found, metrics) = (asyncio.run(send_all(service)) for service in services)
    for service in services:
        service.close()
    assert [items for items, _ in found] == [items for items, _ in expected]
    for (_, scores), (_, reference) in zip(found, expected, strict=True):
        assert all(np.allclose(scores[name], reference[name], rtol=1e-5, atol=1e-5) for name in scores)
    line = 'nestrec_table_row_%s_total{model="ranking",table="items"}'
    num_misses, num_lookups = (
        float(next(text for text in metrics.splitlines() if text.startswith(line % event)).split()[-1])
        for event in ("misses", "lookups")
    )
    assert 0 < num_misses < num_lookups
