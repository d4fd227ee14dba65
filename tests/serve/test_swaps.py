"""Other models while one instance serves: by its endpoints, with what belongs together answered by one version."""

import asyncio
import contextlib
import os

import httpx
import pytest
from schema_check import check_schema

from nestrec.cli.fleet_output import served
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
PATIENT = EngineConfig(max_queue_s=1e9)
HISTORY = {"items": ["1", "2"], "times_ms": [1, 2], "actions": [1, 1], "features": {"tab": ["home", "home"]}}
BODY = {"user": "ann", "history": HISTORY}
ASKED = {**BODY, "candidates": ["3"], "context": {"tab": "home"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two versions of each model."""
    root = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        write_servable(random_retrieval(ENCODER, num_items=20, seed=seed), root / f"retrieval{seed}")
        write_servable(random_ranking(ENCODER, num_items=20, seed=seed), root / f"ranking{seed}")
    return root


@contextlib.asynccontextmanager
async def serving(*folders, session_s=60.0):
    """(client, service) of a server of these models."""
    service = Service.load(list(folders), ServiceConfig(engine=PATIENT, session_s=session_s))
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
            described = (await client.get("/openapi.json")).json()
            nothing = await client.post("/v1/admin/rollback", json={})
            assert (nothing.status_code, nothing.json()["error"]["message"][:6]) == (409, "server")
            folder = str(folders / "ranking2")
            for models in ([folder, folder], [str(folders)], [folder, str(folders / "none")]):
                refused = await client.post("/v1/admin/swap", json={"models": models})
                assert refused.status_code == 409, models
                assert (await client.get("/health/ready")).json()["models"] == old, "all or nothing"
            swapped = await client.post("/v1/admin/swap", json={"models": [folder, str(folders / "retrieval2")]})
            check_schema(swapped.json(), {"$ref": "#/components/schemas/DeploymentResponse"}, described)
            assert {role: model["version"] for role, model in swapped.json()["models"].items()} == new
            assert {role: model["version"] for role, model in swapped.json()["previous"].items()} == old
            assert (await client.get("/health/ready")).json()["models"] == new
            assert (await client.post("/v1/rank", json=ASKED)).json()["model"] == new["ranking"]
            caplog.clear()
            with caplog.at_level("INFO", "nestrec.serving.service.model_reloader"):
                back = await client.post("/v1/admin/rollback", json={})
            logged = [message for message in caplog.messages if "has taken over" in message]
            assert [message.startswith("rollback: ") for message in logged] == [True, True]
            (line,) = served(back.json())
            assert all(f"{role} {old[role]} (" in line for role in roles), "as the command says it"
            assert (await client.get("/health/ready")).json()["models"] == old
            assert (await client.get("/v1/admin/fleet")).json()["previous"]["ranking"]["folder"] == folder

    asyncio.run(run())


def test_a_request_that_was_announced_is_answered_by_the_version_that_was_told(folders):
    old, new = version(folders / "ranking1"), version(folders / "ranking2")

    async def run():
        async with serving(folders / "ranking1") as (client, service):
            assert (await client.post("/v1/preinfer", json=BODY)).status_code == 202
            before = service.fleet("ranking")
            swap = asyncio.create_task(client.post("/v1/admin/swap", json={"models": [str(folders / "ranking2")]}))
            while service.fleet("ranking") is before:
                await asyncio.sleep(0.001)
            asked = [
                (await client.post("/v1/rank", json={**ASKED, "user": user})).json()["model"]
                for user in ("bob", "ann", "ann")
            ]
            assert asked == [new, old, new], "ann's was announced to the old one, and she is then with the new one"
            assert (await swap).status_code == 200, "it waits for nobody any more"
            assert not any(engine.is_alive for engine in before.engines), "and what it kept is let go"

    asyncio.run(run())


def test_who_was_announced_and_does_not_come_holds_a_swap_up_for_no_longer_than_a_session(folders):
    async def run():
        async with serving(folders / "ranking1", session_s=0.05) as (client, _):
            await client.post("/v1/preinfer", json=BODY)
            assert (
                await client.post("/v1/admin/swap", json={"models": [str(folders / "ranking2")]})
            ).status_code == 200
            assert (await client.post("/v1/rank", json=ASKED)).json()["model"] == version(folders / "ranking2")

    asyncio.run(run())


def test_a_drained_server_is_alive_and_answers_and_is_not_ready(folders):
    async def run():
        async with serving(folders / "ranking1") as (client, _):
            for body, status in (({}, 503), ({"drain": False}, 200)):
                drained = await client.post("/v1/admin/drain", json=body)
                assert drained.json()["draining"] is (status == 503)
                assert (await client.get("/health/ready")).status_code == status
                assert (await client.get("/health/live")).status_code == 200
                assert (await client.post("/v1/rank", json=ASKED)).status_code == 200

    asyncio.run(run())


async def writer_of(fifo):
    """Wait until a thread reads from a pipe, and return a descriptor that keeps it waiting."""
    while True:
        with contextlib.suppress(OSError):
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        await asyncio.sleep(0.001)  # a real thread


def test_swap_fails_if_an_earlier_one_does_not_end(folders, tmp_path, monkeypatch):
    """A pipe that nothing is written to stands for a folder on a mount that hangs."""
    monkeypatch.setattr(reloading, "_TURN_S", 0.05)
    hung = tmp_path / "hung"
    hung.mkdir()
    os.mkfifo(hung / "manifest.json")

    async def run():
        async with serving(folders / "retrieval1") as (client, service):
            before = service.fleets
            first = asyncio.create_task(client.post("/v1/admin/swap", json={"models": [str(hung)]}))
            writer = await writer_of(hung / "manifest.json")
            second = await client.post("/v1/admin/rollback", json={})
            assert second.status_code == 409
            assert "an earlier change has been under way" in second.json()["error"]["message"]
            os.close(writer)  # the read ends
            assert (await first).status_code == 409
            assert service.fleets is before

    asyncio.run(run())
