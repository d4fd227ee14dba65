"""Item titles are part of an exported model."""

import asyncio
from dataclasses import replace

import httpx

from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import Feature
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.model.servable import Servable
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_retrieval


def test_titles_are_exported_loaded_and_searched(tmp_path):
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
    model = random_retrieval(encoder, num_items=30)
    write_servable(model, tmp_path / "plain")
    assert Servable.load(tmp_path / "plain").item_titles == ()
    write_servable(replace(model, item_titles=tuple(f"Title {i}" for i in range(1, 31))), tmp_path / "titled")
    loaded = Servable.load(tmp_path / "titled")
    service = Service({"retrieval": loaded}, ServiceConfig())
    keys = loaded.item_keys
    app = App(service, LimitsConfig(default_timeout_ms=10_000))

    async def get_titles(body):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return (await client.post("/v1/titles", json=body)).json()["titles"]

    try:
        assert asyncio.run(get_titles({"items": [keys[4], "no such item"]})) == {keys[4]: "Title 5"}
        assert asyncio.run(get_titles({"items": [], "search": "TITLE 3"})) == {keys[2]: "Title 3", keys[29]: "Title 30"}
    finally:
        service.close()


def test_titles_are_first_text_of_items(dataset_folder, monkeypatch):
    dataset = Dataset.open(dataset_folder)
    assert dataset.item_texts() == [], "synthetic logs have no titles"
    items = dataset.items().append_column("item_title", [[f"Title {i}" for i in range(dataset.num_items - 1)] + [None]])
    monkeypatch.setattr(Dataset, "items", lambda self: items)
    features = (*dataset.card.item_features, Feature(name="title", kind="text"))
    dataset.card = replace(dataset.card, item_features=features)
    assert dataset.item_texts()[:2] == ["Title 0", "Title 1"]
    assert dataset.item_texts()[-1] == "", "an item without a title"
