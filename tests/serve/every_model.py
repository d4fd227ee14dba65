"""Every combination of task and encoder, trained for two steps and exported, with an HTTP client of returning users."""

import asyncio
import random
from contextlib import closing
from dataclasses import replace

import httpx
import numpy as np
from small_recipes import LENGTH, ranking_recipe

from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import export_run
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.training.recipes import recipe
from nestrec.training.run_config import DataConfig, TrainingConfig
from nestrec.training.trainer import Trainer

SIZES = {"dim": 16, "num_layers": 2, "num_heads": 2}
ENCODERS = {
    "hstu": HSTUConfig(**SIZES, head_dim=8, time_bias=True),
    "hstu_functional": HSTUConfig(**SIZES, head_dim=8, time_bias=True, time_encoding="functional"),
    "fuxi": FuXiConfig(**SIZES, head_dim=8, ffn_dim=24),
    "sasrec": SASRecConfig(**SIZES, ffn_dim=24),
}
TASKS = ("ranking", "retrieval")
TIERS = PrefixCacheConfig(device_bytes=1 << 17, page_tokens=4, offload_threshold=0.0, reload_policy="always")
SERVICE = ServiceConfig(
    engine=EngineConfig(prefix_cache=TIERS, max_queue_delay_s=1e9, preinfer=TriggerConfig(policy="all", burst_s=1e9)),
    history_stride=4,
)
WITHOUT_CACHE = replace(SERVICE, engine=replace(SERVICE.engine, prefix_cache=replace(TIERS, enabled=False)))
LIMITS = LimitsConfig(default_timeout_ms=10_000, expose_cache_source=True)
FIRST_MS = 1_642_271_351_894


def config_of(task, encoder, data):
    if task == "ranking":
        cfg = ranking_recipe(data)
        evaluation = replace(cfg.task.evaluation, baselines=())
        encoder = replace(encoder, max_length=2 * LENGTH)
        return replace(cfg, task=replace(cfg.task, encoder=encoder, evaluation=evaluation))
    cfg = recipe("demo")
    history = replace(cfg.task.history, max_events=LENGTH)
    task_config = replace(cfg.task, encoder=replace(encoder, max_length=LENGTH), history=history)
    return replace(cfg, task=task_config, data=DataConfig(folder=str(data)))


class Exports:
    """Cache of export folders: each model is trained and exported once.

    Args:
        root: Folder of runs and exports.
        data: Folder of the dataset.
    """

    def __init__(self, root, data):
        self._root = root
        self._data = data
        self._found = {}

    def folder(self, task, name, dtype="run"):
        """Return the export folder of a model, which is trained for two steps if that has not happened yet.

        Args:
            task: Name of the task.
            name: Name of the encoder in `ENCODERS`.
            dtype: Data type of the exported weights; `run` is that of the run.
        """
        run = self._root / f"{task}-{name}"
        key = (task, name, dtype)
        if not run.exists():
            training = TrainingConfig(epochs=1, max_steps=2, eval_every_epochs=0)
            cfg = replace(config_of(task, ENCODERS[name], self._data), training=training)
            Trainer(cfg, run, Topology.from_environment("cpu")).train()
        if key not in self._found:
            self._found[key] = self._root / "-".join(key)
            export_run(run, self._found[key], dtype=dtype)
        return self._found[key]


class RandomClient:
    """Client that sends random ranking requests with growing histories, half of them after a pre-infer request.

    Args:
        client: HTTP client of the server.
        item_keys: Item keys of the model.
        seed: Seed of all requests.
    """

    def __init__(self, client, item_keys, seed):
        self._client = client
        self._keys = item_keys
        self._rng = random.Random(seed)

    def _event(self, time_ms):
        return self._rng.choice(self._keys), time_ms, self._rng.choice(["click", "long_view", []])

    async def sequence(self, user):
        """Send four ranking requests; return the scores and the cache source of each response."""
        time_ms = FIRST_MS
        events = []
        scores = []
        sources = []
        for _ in range(4):
            for _ in range(self._rng.randint(1, 12)):
                time_ms += self._rng.randint(1, 10**7)
                events.append(self._event(time_ms))
            items, times, actions = (list(column) for column in zip(*events, strict=True))
            history = {"items": items, "times_ms": times, "actions": actions}
            body = {"user": user, "history": history, "now_ms": time_ms + 1000}
            if self._rng.random() < 0.5:
                await self._post("/v1/preinfer", {**body, "num_candidates": 5})
            answer = await self._post("/v1/rank", {**body, "candidates": self._rng.sample(self._keys, 5)})
            scores.append(np.array(list(answer["scores"].values())))
            sources.append(answer["cache_source"]["from"])
        return np.stack(scores), sources

    async def _post(self, path, body):
        response = await self._client.post(path, json=body)
        assert response.status_code in (200, 202), response.text
        return response.json()


def scores_and_sources(folder, cfg, seeds, device="cpu"):
    """Serve an export and return the scores and cache sources of one request sequence per seed."""
    servable = Servable.load(folder, device)
    role = servable.serving.role

    async def run(service):
        transport = httpx.ASGITransport(App(service, LIMITS))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            keys = list(servable.item_keys)
            return [await RandomClient(client, keys, seed).sequence(f"user {seed % 7}") for seed in seeds]

    with closing(Service({role: servable}, cfg)) as service:
        return asyncio.run(run(service))
