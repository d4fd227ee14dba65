"""Items that no training has met are served by their features, as if the export had had them."""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from nestrec.base.config import with_overrides
from nestrec.distributed import Topology
from nestrec.serving.api.app import App
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.model.export import export_run
from nestrec.serving.model.servable import Servable
from nestrec.serving.service import Service, ServiceConfig
from nestrec.testing.featured_log import ITEM_FEATURES, write_featured_log
from nestrec.training.recipes import recipe
from nestrec.training.trainer import Trainer

SMALL = {
    "task.encoder.dim": "8",
    "task.encoder.head_dim": "4",
    "training.device": "cpu",
    "training.max_steps": "2",
    "training.evaluate_every_epochs": "0",
    "task.inputs.item_features": ",".join(ITEM_FEATURES),
    "tables.tags.dim": "4",
}
OF_RECIPE = {
    "demo": {
        "data.synthetic": "none",
        "task.history.max_length": "12",
        "task.encoder.max_length": "12",
        "task.num_negatives": "4",
        "task.inputs.context": "device",
    },
    "ranking": {"task.encoder.max_length": "16", "task.inputs.max_events": "8"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """The log, and an export of each role."""
    folder = tmp_path_factory.mktemp("new_items")
    data, found = write_featured_log(folder / "log"), {}
    for name, role in (("demo", "retrieval"), ("ranking", "ranking")):
        cfg = with_overrides(recipe(name), {**SMALL, **OF_RECIPE[name], "data.folder": str(data)})
        Trainer(cfg, folder / "runs" / name, Topology.single()).train()
        export_run(folder / "runs" / name, folder / role, best=False)
        found[role] = folder / role
    return folder / "log", found


def told_of(log: Path, name: str) -> dict:
    """The features of an item as its table has them."""
    lines = [line.split(",") for line in (log / "items.csv").read_text().splitlines()]
    row = dict(zip(lines[0], next(line for line in lines if line[0] == name), strict=True))
    place = (log / "ids.txt").read_text().split().index(name)
    return {
        "brand": row["brand"],
        "tags": row["tags"].split("|") if row["tags"] else [],
        "price": float(row["price"]) if row["price"] else None,
        "title_bag": row["title"],
        "picture": np.load(log / "pictures.npy")[place].tolist(),
    }


def test_new_items_are_served_as_an_export_that_had_them(models):
    log, folders = models
    service = Service({role: Servable.load(folder) for role, folder in folders.items()}, ServiceConfig())
    app = App(service, LimitsConfig(default_timeout_ms=60_000))
    history = {"items": ["i0", "i5"], "times_ms": [1_700_000_000_000, 1_700_000_060_000], "actions": ["click", []]}
    history["features"] = {"device": ["phone", "tv"]}
    asking = {"user": "u", "history": history, "context": {"device": "tv"}, "now_ms": 1_700_000_120_000}

    async def post(path: str, body: dict) -> tuple[int, dict]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            answer = await client.post(path, json=body)
            return answer.status_code, answer.json()

    def asked(path: str, body: dict) -> dict:
        status, found = asyncio.run(post(path, body))
        assert status == 200, found
        return found

    try:
        twin = {"id": "fresh", "features": told_of(log, "n0"), "title": "as n0"}
        before = {role: fleet.servable.spec.num_items for role, fleet in service.fleets.items()}
        added = asked("/v1/items", {"items": [twin, {"id": "i0", "features": {}}]})
        assert added["added"] == 1, "i0 is known"
        assert added["items"] == {role: count + 1 for role, count in before.items()}
        found = service.fleet("retrieval").servable
        ids = torch.from_numpy(found.ids_of(["fresh", "n0"]))
        fresh, expected = found.index.rows(ids - 1)
        torch.testing.assert_close(fresh, expected)
        scores = asked("/v1/recommend", {**asking, "k": 40, "exclude_seen": False})
        assert {"fresh", "n0"} <= set(scores["items"])
        engines = service.fleet("retrieval").engines
        asked("/v1/items", {"items": [{"id": "more", "features": {"brand": "b1"}}]})
        assert service.fleet("retrieval").engines is engines, "there was room: nothing was loaded anew"
        plain = {"user": "u", "history": {**history, "features": {}}, "now_ms": asking["now_ms"]}
        ranked = asked("/v1/rank", {**plain, "candidates": ["more", "fresh", "nobody"]})
        assert [said["ids"] for said in ranked["unknown"]] == [["nobody"]]
        status, refused = asyncio.run(post("/v1/items", {"items": [{"id": "x", "features": {"brnd": "b1"}}]}))
        assert status == 409
        assert "did you mean 'brand'" in str(refused)
    finally:
        service.close()
