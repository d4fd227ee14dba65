"""Changes of a fleet behind the gateway under load: rolling updates, and instances that start and stop."""

import asyncio
import contextlib
import itertools
import json
from dataclasses import dataclass

import httpx
import pytest
from test_gateway import listening
from typer.testing import CliRunner

from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.fleet.rolling_update import RollingUpdate
from nestrec.serving.http.http_app import App
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec_bench.harness.random_model import random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
LIMITS = LimitsConfig(default_timeout_ms=10_000)
CONFIG = ServiceConfig(engine=EngineConfig(max_queue_delay_s=1e9), session_timeout_s=10.0)
BODY = {"history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3", "4"], "now_ms": 9}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        write_servable(random_retrieval(ENCODER, num_items=20, seed=seed), root / str(seed))
    (root / "bad").mkdir()
    return root


UNUSED_PORT = 1
"""Port on which no server listens."""


@dataclass
class LocalInstance:
    """An instance in this process."""

    service: Service
    reloader: Reloader
    port: int


class LocalInstanceSupervisor:
    """Starts and stops instances in this process."""

    def __init__(self, folder, exit_stack):
        self._folder = folder
        self._exit_stack = exit_stack
        self.slots = []
        self.models = {}

    async def start(self):
        service = Service.load([self._folder], CONFIG)
        reloader = Reloader(service, "cpu", TablesConfig())
        port = await self._exit_stack.enter_async_context(listening(App(service, LIMITS, reloader=reloader)))
        self.slots.append(LocalInstance(service, reloader, port))
        return port

    def set_models(self, slot, folders):
        self.models[slot] = folders

    def add(self):
        return asyncio.run_coroutine_threadsafe(self.start(), self.loop).result()

    def has_failed(self, slot):
        return self.slots[slot].port == UNUSED_PORT

    def remove(self):
        self.close(self.slots.pop())

    def close(self, instance):
        instance.reloader.close()
        instance.service.close()


def behind_gateway(folder, use, count=3):
    """Start a gateway with `count` instances and return the result of `use(client, gateway, supervisor)`."""

    async def run():
        async with contextlib.AsyncExitStack() as exit_stack:
            supervisor = LocalInstanceSupervisor(folder, exit_stack)
            supervisor.loop = asyncio.get_running_loop()
            ports = [await supervisor.start() for _ in range(count)]
            gateway = Gateway(ports, LIMITS, supervisor=supervisor, drain_s=5.0)
            exit_stack.push_async_callback(gateway.close)
            port = await exit_stack.enter_async_context(listening(gateway))
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
            try:
                return await use(await exit_stack.enter_async_context(client), gateway, supervisor)
            finally:
                for instance in supervisor.slots:
                    supervisor.close(instance)

    return asyncio.run(run())


class Load:
    """Load of users that send a pre-infer and a ranking request in turn."""

    def __init__(self, client, count=9):
        self._client = client
        self.responses = []
        self._is_over = False
        self._tasks = [asyncio.create_task(self._run_user(f"u{number}")) for number in range(count)]

    async def _run_user(self, user):
        while not self._is_over:
            preinferred = await self._client.post("/v1/preinfer", json={"user": user, "history": BODY["history"]})
            ranked = await self._client.post("/v1/rank", json={"user": user, **BODY})
            self.responses.append((user, preinferred.status_code, ranked.status_code, ranked.json()))
            # The model is missing if the gateway rejected the pre-infer request because it would not pay off.
            if ranked.status_code == 200 and preinferred.json()["model"]:
                assert preinferred.json()["model"] == ranked.json()["model"], "a session keeps its model"

    async def stop(self):
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.responses


def check(responses, versions):
    """Check that no request failed, each response is of one version, and each user got the versions in this order."""
    assert {(preinferred, ranked) for _, preinferred, ranked, _ in responses} == {(202, 200)}
    scores = {}
    for _, _, _, body in responses:
        scores.setdefault(body["model"], set()).add(json.dumps(body["scores"]))
    assert all(len(found) == 1 for found in scores.values()), "each version has its own scores"
    assert scores.keys() <= set(versions)
    for user in {user for user, *_ in responses}:
        models = [body["model"] for other, *_, body in responses if other == user]
        changes = [models[0], *(now for before, now in itertools.pairwise(models) if before != now)]
        assert changes == versions[len(versions) - len(changes) :], user


def test_rolling_update_and_rollback_under_load(folders):
    one, two = (Servable.load(folders / name).version[:12] for name in ("1", "2"))

    async def use(client, gateway, supervisor):
        load = Load(client)
        while len(load.responses) <= 20:  # by now, all users send requests
            await asyncio.sleep(0.005)
        assert (await client.post("/v1/admin/rollback", json={})).status_code == 409
        swapped = await client.post("/v1/admin/swap", json={"models": [str(folders / "2")]})
        assert [i["models"]["retrieval"]["version"] for i in swapped.json()["instances"]] == [two] * 3
        assert supervisor.models == {key: [str(folders / "2")] for key in range(3)}, (
            "restarted instances load these models"
        )
        assert len(set(gateway.router.versions)) == 1
        rolled_back = await client.post("/v1/admin/rollback", json={})
        assert [i["models"]["retrieval"]["version"] for i in rolled_back.json()["instances"]] == [one] * 3
        check(await load.stop(), [one, two, one])

    behind_gateway(folders / "1", use)


def test_rolling_update_failure_restores_old_models(folders):
    one = Servable.load(folders / "1").version[:12]

    async def use(client, gateway, supervisor):
        def reject(folders):
            raise OSError("out of memory")

        supervisor.slots[2].reloader.swap = reject
        rejected = await client.post("/v1/admin/swap", json={"models": [str(folders / "2")]})
        assert (rejected.status_code, rejected.json()["error"]["message"]) == (
            409,
            "instance 2 rejected the models: out of memory",
        )
        fleet = (await client.get("/v1/admin/fleet")).json()
        assert [i["models"]["retrieval"]["version"] for i in fleet["instances"]] == [one] * 3
        assert (await client.post("/v1/admin/rollback", json={})).status_code == 409, (
            "a failed swap leaves nothing to roll back"
        )
        wrong = await client.post("/v1/admin/swap", json={"models": [str(folders / "bad")]})
        assert wrong.status_code == 409
        assert "remedy" not in wrong.json()["error"]["message"]
        assert wrong.json()["error"]["remedy"]

    behind_gateway(folders / "1", use)


def test_instance_is_drained_and_readmitted(folders):
    async def use(client, gateway, _):
        users = [f"u{number}" for number in range(30)]

        async def slots():
            responses = await asyncio.gather(*(client.post("/v1/rank", json={"user": u, **BODY}) for u in users))
            assert {response.status_code for response in responses} == {200}
            return {response.headers["x-nestrec-slot"] for response in responses}

        assert await slots() == {"0", "1", "2"}
        assert (await client.post("/v1/admin/drain", json={"slot": 1})).json()["draining"] is True
        assert await slots() == {"0", "2"}
        assert (await client.post("/v1/admin/drain", json={"slot": 1, "drain": False})).status_code == 200
        gateway.router._chosen.clear()
        assert await slots() == {"0", "1", "2"}
        assert (await client.post("/v1/admin/drain", json={"slot": 7})).json()["error"]["field"] == "slot"

    behind_gateway(folders / "1", use)


def test_scale_starts_and_stops_instances_under_load(folders):
    async def use(client, gateway, supervisor):
        load = Load(client)
        for count in (3, 1, 2):
            scaled = await client.post("/v1/admin/scale", json={"instances": count})
            assert (scaled.status_code, scaled.json()) == (200, {"instances": count})
            assert len(supervisor.slots) == count
            assert (await client.get("/health/ready")).json() == {"slots": [True] * count}
            assert len((await client.get("/v1/gateway")).json()["alive"]) == count
            assert (await client.get("/metrics")).text.count("\nnestrec_instance_up{") == count
        check(await load.stop(), [Servable.load(folders / "1").version[:12]])

    behind_gateway(folders / "1", use, count=2)


def test_instance_that_fails_to_start_is_abandoned(folders, monkeypatch):
    """Regression test: the command used to wait for an hour and to block every swap."""

    async def use(client, gateway, supervisor):
        async def start_without_listening():
            await LocalInstanceSupervisor.start(supervisor)
            supervisor.slots[-1].port = UNUSED_PORT
            return UNUSED_PORT

        monkeypatch.setattr(supervisor, "start", start_without_listening)
        scaled = await client.post("/v1/admin/scale", json={"instances": 2})
        assert (scaled.status_code, scaled.json()["error"]["message"]) == (409, "instance 1 did not start")
        assert len(supervisor.slots) == 1
        assert (await client.post("/v1/rank", json={**BODY, "user": "ann"})).status_code == 200

    behind_gateway(folders / "1", use, count=1)


class ExternalSupervisor:
    """Supervisor that does not start instances, such as that of Ray."""

    def set_models(self, slot, folders):
        pass


@pytest.mark.parametrize("supervisor", [None, ExternalSupervisor()])
def test_scale_requires_supervised_instances(supervisor):
    response = asyncio.run(RollingUpdate([], None, supervisor, probe=None).scale(3, 0.0))
    assert response.status == 409
    assert b"does not start its instances" in response.body


def test_swap_and_rollback_commands(folders, monkeypatch):
    one, two = (Servable.load(folders / name).version[:12] for name in ("1", "2"))
    monkeypatch.chdir(folders)

    async def use(client, gateway, _):
        def run(command, *arguments):
            return CliRunner().invoke(app, [command, str(client.base_url), *arguments], catch_exceptions=True)

        rejected = await asyncio.to_thread(run, "rollback")
        address = str(client.base_url).rstrip("/")
        assert str(rejected.exception).startswith(f"server={address}: the server rejected the request: no model has")
        assert "Use nestrec swap" in str(rejected.exception)
        swapped = await asyncio.to_thread(run, "swap", "2")
        folder = (folders / "2").resolve()
        assert swapped.output.splitlines() == [f"instance {i}: retrieval {two} ({folder})" for i in range(2)]
        assert two not in (await asyncio.to_thread(run, "rollback")).output
        assert (await asyncio.to_thread(run, "status")).output.count(one) == 2
        assert (await asyncio.to_thread(run, "scale", "1")).output == "1 instance\n"
        rejected = await asyncio.to_thread(run, "swap", "bad")
        assert isinstance(rejected.exception, UserError)
        assert "instance 0 rejected the models" in str(rejected.exception)
        rejected = await asyncio.to_thread(run, "scale", "0")  # an empty fleet could not serve requests
        assert "instances: must be an integer from 1" in str(rejected.exception)
        assert (await asyncio.to_thread(run, "status")).output.count("retrieval") == 1
        requests = [client.post("/v1/admin/" + path, json={}) for path in ("swap", "drain", "scale", "none")]
        assert [response.status_code for response in await asyncio.gather(*requests)] == [400, 400, 400, 404]

    behind_gateway(folders / "1", use, count=2)
