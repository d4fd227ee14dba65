"""Changes of a fleet behind the gateway while users ask: models that roll, instances that come and go."""

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
CONFIG = ServiceConfig(engine=EngineConfig(max_queue_s=1e9), session_s=10.0)
BODY = {"history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3", "4"], "now_ms": 9}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        write_servable(random_retrieval(ENCODER, num_items=20, seed=seed), root / str(seed))
    (root / "bad").mkdir()
    return root


NO_PORT = 1
"""where nobody listens"""


@dataclass
class Process:
    """An instance in this process."""

    service: Service
    reloader: Reloader
    port: int


class Supervised:
    """Starts and stops instances in this process."""

    def __init__(self, folder, made):
        self._folder = folder
        self._made = made
        self.slots = []
        self.models = {}

    async def started(self):
        service = Service.load([self._folder], CONFIG)
        reloader = Reloader(service, "cpu", TablesConfig())
        port = await self._made.enter_async_context(listening(App(service, LIMITS, reloader=reloader)))
        self.slots.append(Process(service, reloader, port))
        return port

    def set_models(self, slot, folders):
        self.models[slot] = folders

    def add(self):
        return asyncio.run_coroutine_threadsafe(self.started(), self.loop).result()

    def has_failed(self, slot):
        return self.slots[slot].port == NO_PORT

    def remove(self):
        self.closed(self.slots.pop())

    def closed(self, process):
        process.reloader.close()
        process.service.close()


def behind_gateway(folder, use, count=3):
    """What `use(client, gateway, supervisor)` gives."""

    async def run():
        async with contextlib.AsyncExitStack() as made:
            supervisor = Supervised(folder, made)
            supervisor.loop = asyncio.get_running_loop()
            ports = [await supervisor.started() for _ in range(count)]
            gateway = Gateway(ports, LIMITS, supervisor=supervisor, drain_s=5.0)
            made.push_async_callback(gateway.close)
            port = await made.enter_async_context(listening(gateway))
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
            try:
                return await use(await made.enter_async_context(client), gateway, supervisor)
            finally:
                for process in supervisor.slots:
                    supervisor.closed(process)

    return asyncio.run(run())


class Load:
    """Users who announce and ask, one request after the other, until the end."""

    def __init__(self, client, count=9):
        self._client = client
        self.answers = []
        self._is_over = False
        self._tasks = [asyncio.create_task(self._ask(f"u{number}")) for number in range(count)]

    async def _ask(self, user):
        while not self._is_over:
            told = await self._client.post("/v1/preinfer", json={"user": user, "history": BODY["history"]})
            ranked = await self._client.post("/v1/rank", json={"user": user, **BODY})
            self.answers.append((user, told.status_code, ranked.status_code, ranked.json()))
            if ranked.status_code == 200 and told.json()["model"]:  # none: the front saw that no signal was of use
                assert told.json()["model"] == ranked.json()["model"], "what was announced is kept"

    async def over(self):
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.answers


def check(answers, versions):
    """All were answered, each by one version, and each user met the versions in their order."""
    assert {(told, ranked) for _, told, ranked, _ in answers} == {(202, 200)}
    scores = {}
    for _, _, _, answer in answers:
        scores.setdefault(answer["model"], set()).add(json.dumps(answer["scores"]))
    assert all(len(found) == 1 for found in scores.values()), "each version has its own scores"
    assert scores.keys() <= set(versions)
    for user in {user for user, *_ in answers}:
        met = [answer["model"] for who, *_, answer in answers if who == user]
        changes = [met[0], *(now for before, now in itertools.pairwise(met) if before != now)]
        assert changes == versions[len(versions) - len(changes) :], user


def test_models_roll_and_are_rolled_back_while_users_ask(folders):
    one, two = (Servable.load(folders / name).version[:12] for name in ("1", "2"))

    async def use(client, gateway, supervisor):
        load = Load(client)
        while len(load.answers) <= 20:  # everybody asks by now, and goes on with it
            await asyncio.sleep(0.005)
        assert (await client.post("/v1/admin/rollback", json={})).status_code == 409
        swapped = await client.post("/v1/admin/swap", json={"models": [str(folders / "2")]})
        assert [i["models"]["retrieval"]["version"] for i in swapped.json()["instances"]] == [two] * 3
        assert supervisor.models == {key: [str(folders / "2")] for key in range(3)}, "for those that are started again"
        assert len(set(gateway.router.versions)) == 1
        back = await client.post("/v1/admin/rollback", json={})
        assert [i["models"]["retrieval"]["version"] for i in back.json()["instances"]] == [one] * 3
        check(await load.over(), [one, two, one])

    behind_gateway(folders / "1", use)


def test_where_one_instance_refuses_all_have_the_old_models_again(folders):
    one = Servable.load(folders / "1").version[:12]

    async def use(client, gateway, supervisor):
        def refuse(folders):
            raise OSError("no room for them")

        supervisor.slots[2].reloader.swap = refuse
        refused = await client.post("/v1/admin/swap", json={"models": [str(folders / "2")]})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            409,
            "instance 2 does not take the models: no room for them",
        )
        told = (await client.get("/v1/admin/fleet")).json()
        assert [i["models"]["retrieval"]["version"] for i in told["instances"]] == [one] * 3
        assert (await client.post("/v1/admin/rollback", json={})).status_code == 409, "nothing has changed"
        wrong = await client.post("/v1/admin/swap", json={"models": [str(folders / "bad")]})
        assert wrong.status_code == 409
        assert "remedy" not in wrong.json()["error"]["message"]
        assert wrong.json()["error"]["remedy"]

    behind_gateway(folders / "1", use)


def test_an_instance_is_set_aside_and_taken_in_again(folders):
    async def use(client, gateway, _):
        users = [f"u{number}" for number in range(30)]

        async def slots():
            answers = await asyncio.gather(*(client.post("/v1/rank", json={"user": u, **BODY}) for u in users))
            assert {answer.status_code for answer in answers} == {200}
            return {answer.headers["x-nestrec-slot"] for answer in answers}

        assert await slots() == {"0", "1", "2"}
        assert (await client.post("/v1/admin/drain", json={"slot": 1})).json()["draining"] is True
        assert await slots() == {"0", "2"}
        assert (await client.post("/v1/admin/drain", json={"slot": 1, "drain": False})).status_code == 200
        gateway.router._chosen.clear()
        assert await slots() == {"0", "1", "2"}
        assert (await client.post("/v1/admin/drain", json={"slot": 7})).json()["error"]["field"] == "slot"

    behind_gateway(folders / "1", use)


def test_instances_come_and_go_while_users_ask(folders):
    async def use(client, gateway, supervisor):
        load = Load(client)
        for count in (3, 1, 2):
            scaled = await client.post("/v1/admin/scale", json={"instances": count})
            assert (scaled.status_code, scaled.json()) == (200, {"instances": count})
            assert len(supervisor.slots) == count
            assert (await client.get("/health/ready")).json() == {"slots": [True] * count}
            assert len((await client.get("/v1/gateway")).json()["alive"]) == count
            assert (await client.get("/metrics")).text.count("\nnestrec_slot_alive{") == count
        check(await load.over(), [Servable.load(folders / "1").version[:12]])

    behind_gateway(folders / "1", use, count=2)


def test_an_instance_that_fails_to_start_is_given_up_and_the_others_serve_on(folders, monkeypatch):
    """The command waited for an hour, and with it every swap."""

    async def use(client, gateway, supervisor):
        async def failing():
            await Supervised.started(supervisor)
            supervisor.slots[-1].port = NO_PORT
            return NO_PORT

        monkeypatch.setattr(supervisor, "started", failing)
        scaled = await client.post("/v1/admin/scale", json={"instances": 2})
        assert (scaled.status_code, scaled.json()["error"]["message"]) == (409, "instance 1 did not start")
        assert len(supervisor.slots) == 1
        assert (await client.post("/v1/rank", json={**BODY, "user": "ann"})).status_code == 200

    behind_gateway(folders / "1", use, count=1)


class Remembers:
    """Starts nothing, as Ray's replicas are started by Ray."""

    def set_models(self, slot, folders):
        pass


@pytest.mark.parametrize("supervisor", [None, Remembers()])
def test_a_front_that_does_not_start_its_instances_does_not_scale_them(supervisor):
    answer = asyncio.run(RollingUpdate([], None, supervisor, probe=None).scale(3, 0.0))
    assert answer.status == 409
    assert b"does not start its instances" in answer.body


def test_one_command_swaps_and_one_rolls_back(folders, monkeypatch):
    one, two = (Servable.load(folders / name).version[:12] for name in ("1", "2"))
    monkeypatch.chdir(folders)

    async def use(client, gateway, _):
        def said(*words):
            return CliRunner().invoke(app, [words[0], str(client.base_url), *words[1:]], catch_exceptions=True)

        swapped = await asyncio.to_thread(said, "swap", "2")
        folder = (folders / "2").resolve()
        assert swapped.output.splitlines() == [f"instance {i}: retrieval {two} ({folder})" for i in range(2)]
        assert two not in (await asyncio.to_thread(said, "rollback")).output
        assert (await asyncio.to_thread(said, "fleet")).output.count(one) == 2
        assert (await asyncio.to_thread(said, "scale", "1")).output == "1 instance\n"
        refused = await asyncio.to_thread(said, "swap", "bad")
        assert isinstance(refused.exception, UserError)
        assert "instance 0 does not take the models" in str(refused.exception)
        refused = await asyncio.to_thread(said, "scale", "0")  # a fleet of none would serve nobody
        assert "instances: must be a whole number from 1" in str(refused.exception)
        assert (await asyncio.to_thread(said, "fleet")).output.count("retrieval") == 1
        answers = [client.post("/v1/admin/" + path, json={}) for path in ("swap", "drain", "scale", "none")]
        assert [answer.status_code for answer in await asyncio.gather(*answers)] == [400, 400, 400, 404]

    behind_gateway(folders / "1", use, count=2)
