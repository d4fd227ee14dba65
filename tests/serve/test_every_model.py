"""Every model that is trained is served: trained, exported and asked over HTTP, with scores that do not depend on what
is cached."""

import asyncio
import random
from contextlib import closing
from dataclasses import replace

import httpx
import numpy as np
import pytest
from conftest import LENGTH, ranking_recipe

from nestrec.distributed import Topology
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig, backbones
from nestrec.models.backbones import BACKBONES
from nestrec.serving.api.app import App
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.engine.engine import EngineConfig
from nestrec.serving.model.export import export_run
from nestrec.serving.model.servable import Servable
from nestrec.serving.prefix.tiers import TiersConfig
from nestrec.serving.prefix.trigger import TriggerConfig
from nestrec.serving.service import Service, ServiceConfig
from nestrec.training.config import DataConfig, TrainingConfig
from nestrec.training.recipes import recipe
from nestrec.training.trainer import Trainer

SIZES = {"dim": 16, "num_layers": 2, "num_heads": 2}
ENCODERS = {
    "hstu": HSTUConfig(**SIZES, head_dim=8, time_bias=True),
    "hstu_functional": HSTUConfig(**SIZES, head_dim=8, time_bias=True, time_encoding="functional"),
    "fuxi": FuXiConfig(**SIZES, head_dim=8, ffn_dim=24),
    "sasrec": SASRecConfig(**SIZES, ffn_dim=24),
}
TASKS = ("ranking", "retrieval")
TIERS = TiersConfig(cache_bytes=1 << 17, page_tokens=4, spill_above=0.0, reload="always")
SERVICE = ServiceConfig(
    engine=EngineConfig(tiers=TIERS, max_queue_s=1e9, trigger=TriggerConfig(policy="all", burst_s=1e9)), slide_events=4
)
FULL = replace(SERVICE, engine=replace(SERVICE.engine, tiers=replace(TIERS, keeps_prefix=False)))
LIMITS = LimitsConfig(tells_prefix=True)
FIRST_MS = 1_642_271_351_894


def config_of(task, encoder, data):
    if task == "ranking":
        cfg = ranking_recipe(data)
        return replace(cfg, task=replace(cfg.task, encoder=replace(encoder, max_length=2 * LENGTH), baselines=()))
    cfg = recipe("demo")
    history = replace(cfg.task.history, max_length=LENGTH)
    own = replace(cfg.task, encoder=replace(encoder, max_length=LENGTH), history=history)
    return replace(cfg, task=own, data=DataConfig(folder=str(data)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, dataset_folder):
    """The folder of a task's model with an encoder, trained for two steps; each once."""
    found = {}

    def make(task, name):
        if (task, name) not in found:
            root = tmp_path_factory.mktemp(f"{task}-{name}")
            training = TrainingConfig(epochs=1, max_steps=2, evaluate_every_epochs=0)
            cfg = replace(config_of(task, ENCODERS[name], dataset_folder), training=training)
            Trainer(cfg, root / "run", Topology.from_environment("cpu")).train()
            export_run(root / "run", root / "model")
            found[task, name] = root / "model"
        return found[task, name]

    return make


class Asker:
    """Random users of one server: they come back with more events, after signals, and with other candidates."""

    def __init__(self, client, item_keys, seed):
        self._client, self._keys, self._rng = client, item_keys, random.Random(seed)
        self.requests = []

    def _event(self, time_ms):
        return self._rng.choice(self._keys), time_ms, self._rng.choice(["click", "long_view", []])

    async def sequence(self, user):
        """Scores of every answer, and where prefixes came from."""
        time_ms, events, scores, sources = FIRST_MS, [], [], []
        for _ in range(4):
            for _ in range(self._rng.randint(1, 12)):
                time_ms += self._rng.randint(1, 10**7)
                events.append(self._event(time_ms))
            items, times, actions = (list(column) for column in zip(*events, strict=True))
            history = {"items": items, "times_ms": times, "actions": actions}
            body = {"user": user, "history": history, "now_ms": time_ms + 1000}
            if self._rng.random() < 0.5:
                await self._ask("/v1/preinfer", {**body, "num_candidates": 5})
            answer = await self._ask("/v1/rank", {**body, "candidates": self._rng.sample(self._keys, 5)})
            scores.append(np.array(list(answer["scores"].values())))
            sources.append(answer["prefix"]["from"])
        return np.stack(scores), sources

    async def _ask(self, path, body):
        answer = await self._client.post(path, json=body)
        assert answer.status_code in (200, 202), answer.text
        return answer.json()


def answers_of(folder, cfg, seeds):
    servable = Servable.load(folder)
    role = servable.serving.role

    async def run(service):
        transport = httpx.ASGITransport(App(service, LIMITS))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            keys = list(servable.item_keys)
            return [await Asker(client, keys, seed).sequence(f"user {seed % 7}") for seed in seeds]

    with closing(Service({role: servable}, cfg)) as service:
        return asyncio.run(run(service))


SHARDS = [pytest.param(250 * s, 250, id=f"shard{s}", marks=pytest.mark.slow) for s in range(5)]
"""With four models and two tasks, 10,000 sequences."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("first", "count"), [pytest.param(0, 6, id="some"), *SHARDS])
def test_what_was_trained_is_served_over_http_with_the_same_scores_cached_or_not(exported, task, name, first, count):
    folder, seeds = exported(task, name), range(first, first + count)
    cached, full = (answers_of(folder, cfg, seeds) for cfg in (SERVICE, FULL))
    assert "device" in {source for _, sources in cached for source in sources}
    assert {source for _, sources in full for source in sources} == {"none"}
    scale = max(np.abs(scores).max() for scores, _ in full)
    worst = max(np.abs(a - b).max() for (a, _), (b, _) in zip(cached, full, strict=True))
    assert worst <= 1e-5 * max(1.0, scale)


def test_a_model_whose_backbone_keeps_nothing_is_served_by_the_same_front_without_prefixes(exported, monkeypatch):
    folder = exported("ranking", "sasrec")
    expected = answers_of(folder, FULL, range(3))
    monkeypatch.setattr(backbones, "backbone_of", lambda cfg: replace(BACKBONES.find(cfg.kind), cached=None))
    found = answers_of(folder, SERVICE, range(3))
    assert {source for _, sources in found for source in sources} == {"none"}
    assert max(np.abs(a - b).max() for (a, _), (b, _) in zip(found, expected, strict=True)) <= 1e-5
