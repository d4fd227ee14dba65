"""Model swaps and rollbacks of one instance by its admin endpoints; a user session gets responses of one version."""

import asyncio
import contextlib
import os

import httpx
import pytest
from schema_check import check_schema

from nestrec.cli.fleet_output import format_instances
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service import model_reloader as reloading
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
LIMITS = LimitsConfig(default_timeout_ms=10_000)
NO_SHEDDING = EngineConfig(max_queue_delay_s=1e9)
HISTORY = {"items": ["1", "2"], "times_ms": [1, 2], "actions": [1, 1], "features": {"tab": ["home", "home"]}}
BODY = {"user": "ann", "history": HISTORY}
RANK_BODY = {**BODY, "candidates": ["3"], "context": {"tab": "home"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write two versions of each model; return their parent folder."""
    root = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        write_servable(random_retrieval(ENCODER, num_items=20, seed=seed), root / f"retrieval{seed}")
        write_servable(random_ranking(ENCODER, num_items=20, seed=seed), root / f"ranking{seed}")
    return root


@contextlib.asynccontextmanager
async def serving(*folders, session_s=60.0):
    """Serve these models; yield (client, service)."""
    service = Service.load(list(folders), ServiceConfig(engine=NO_SHEDDING, session_timeout_s=session_s))
    reloader = Reloader(service, "cpu", TablesConfig())
    app = App(service, LIMITS, reloader=reloader)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client, service
    reloader.close()
    service.close()


def version(folder):
    return Servable.load(folder).version[:12]


def test_models_are_swapped_and_rolled_back_together(folders, caplog):
    roles = ("retrieval", "ranking")
    old, new = ({role: version(folders / f"{role}{seed}") for role in roles} for seed in (1, 2))

    async def run():
        async with serving(folders / "retrieval1", folders / "ranking1") as (client, _):
            schema = (await client.get("/openapi.json")).json()
            rejected = await client.post("/v1/admin/rollback", json={})
            error = rejected.json()["error"]
            assert (rejected.status_code, error["message"]) == (
                409,
                "no model has been swapped since the server started",
            )
            assert "nestrec swap" in error["remedy"]
            folder = str(folders / "ranking2")
            for models in ([folder, folder], [str(folders)], [folder, str(folders / "none")]):
                rejected = await client.post("/v1/admin/swap", json={"models": models})
                assert rejected.status_code == 409, models
                assert (await client.get("/health/ready")).json()["models"] == old, "a rejected swap changes no model"
            swapped = await client.post("/v1/admin/swap", json={"models": [folder, str(folders / "retrieval2")]})
            check_schema(swapped.json(), {"$ref": "#/components/schemas/DeploymentResponse"}, schema)
            assert {role: model["version"] for role, model in swapped.json()["models"].items()} == new
            assert {role: model["version"] for role, model in swapped.json()["previous"].items()} == old
            assert (await client.get("/health/ready")).json()["models"] == new
            assert (await client.post("/v1/rank", json=RANK_BODY)).json()["model"] == new["ranking"]
            caplog.clear()
            with caplog.at_level("INFO", "nestrec.serving.service.model_reloader"):
                rolled_back = await client.post("/v1/admin/rollback", json={})
            logged = [message for message in caplog.messages if " replaced " in message]
            assert [message.startswith("rollback: ") for message in logged] == [True, True]
            (line,) = format_instances(rolled_back.json())
            assert all(f"{role} {old[role]} (" in line for role in roles), "the output of the command"
            assert (await client.get("/health/ready")).json()["models"] == old
            assert (await client.get("/v1/admin/fleet")).json()["previous"]["ranking"]["folder"] == folder

    asyncio.run(run())


def test_swap_session_keeps_version(folders):
    old, new = version(folders / "ranking1"), version(folders / "ranking2")

    async def run():
        async with serving(folders / "ranking1") as (client, service):
            assert (await client.post("/v1/preinfer", json=BODY)).status_code == 202
            before = service.deployment("ranking")
            swap = asyncio.create_task(client.post("/v1/admin/swap", json={"models": [str(folders / "ranking2")]}))
            while service.deployment("ranking") is before:
                await asyncio.sleep(0.001)
            models = [
                (await client.post("/v1/rank", json={**RANK_BODY, "user": user})).json()["model"]
                for user in ("bob", "ann", "ann")
            ]
            assert models == [new, old, new], "the session of ann ends with one request to the old model"
            assert (await swap).status_code == 200, "the swap ends after the last session"
            assert not any(engine.is_alive for engine in before.engines), "the engines of the old model are closed"

    asyncio.run(run())


def test_swap_waits_at_most_one_session(folders):
    async def run():
        async with serving(folders / "ranking1", session_s=0.05) as (client, _):
            await client.post("/v1/preinfer", json=BODY)
            assert (
                await client.post("/v1/admin/swap", json={"models": [str(folders / "ranking2")]})
            ).status_code == 200
            assert (await client.post("/v1/rank", json=RANK_BODY)).json()["model"] == version(folders / "ranking2")

    asyncio.run(run())


def test_drained_server_is_live_but_not_ready(folders):
    async def run():
        async with serving(folders / "ranking1") as (client, _):
            for body, status in (({}, 503), ({"drain": False}, 200)):
                drained = await client.post("/v1/admin/drain", json=body)
                assert drained.json()["draining"] is (status == 503)
                assert (await client.get("/health/ready")).status_code == status
                assert (await client.get("/health/live")).status_code == 200
                assert (await client.post("/v1/rank", json=RANK_BODY)).status_code == 200

    asyncio.run(run())


async def writer_of(fifo):
    """Wait until a thread reads from a named pipe; return a descriptor that keeps the thread waiting."""
    while True:
        with contextlib.suppress(OSError):
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        await asyncio.sleep(0.001)  # a real thread


def test_swap_fails_if_an_earlier_one_does_not_end(folders, tmp_path, monkeypatch):
    """A named pipe without a writer simulates a folder on a mount that hangs."""
    monkeypatch.setattr(reloading, "_LOCK_TIMEOUT_S", 0.05)
    hung = tmp_path / "hung"
    hung.mkdir()
    os.mkfifo(hung / "manifest.json")

    async def run():
        async with serving(folders / "retrieval1") as (client, service):
            before = service.deployments
            first = asyncio.create_task(client.post("/v1/admin/swap", json={"models": [str(hung)]}))
            writer = await writer_of(hung / "manifest.json")
            second = await client.post("/v1/admin/rollback", json={})
            assert second.status_code == 409
            assert "an earlier swap or reload has been running" in second.json()["error"]["message"]
            os.close(writer)  # the read ends
            assert (await first).status_code == 409
            assert service.deployments is before

    asyncio.run(run())
