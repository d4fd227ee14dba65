"""The same engine as a Ray Serve application: instances as replicas, a slot router between, HAProxy before it.

HTTP comes in through HAProxy, never through Ray's Python proxy, which costs several milliseconds. Ray's own ports
listen on every interface: run it in a network namespace or behind a firewall.
"""

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nestrec.base.clock import RealClock
from nestrec.base.cuda import chosen_device
from nestrec.base.lazy import import_extra
from nestrec.serving.core.asgi import HttpResponse, Receive, Scope, Send, is_loopback, problem, problem_of, retry_after
from nestrec.serving.core.http_client import Response
from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.core.slot_router import KeyedHash, Ring, Router
from nestrec.serving.fleet.gateway import user_of
from nestrec.serving.fleet.rolling_update import FleetVersionFollower, Operations, RollingUpdate, whole_name
from nestrec.serving.history_store.memory_store import make_store
from nestrec.serving.http.http_app import App
from nestrec.serving.http.serve_config import ServeConfig
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import url_of
from nestrec.serving.server import EngineLoss
from nestrec.serving.service.inference_service import Service
from nestrec.serving.service.model_reloader import CoalescingWorker, Reloader

_LOG = logging.getLogger(__name__)
APPLICATION = "nestrec"
_FOLDERS = b"nestrec:folders"
_SLOT_ROUTER = "nestrec.serving.fleet.ray_router:SlotRouter"


class RayInstance:
    """A replica: service and routes of one instance, without a socket."""

    def __init__(self, folders: list[str], cfg: ServeConfig, secret: str):
        import torch
        from ray import serve
        from ray.util.metrics import Counter

        from nestrec.serving.fleet.ray_router import ring_of

        torch.set_num_threads(cfg.threads)
        device = chosen_device(cfg.device)
        folders = current_folders() or folders  # those of a swap, where this replica replaces another
        loss = EngineLoss(lambda: None)  # Ray replaces a replica whose process has ended
        service = Service.load(folders, cfg.service, device, cfg.tables, on_engine_lost=loss)
        reloader = Reloader(service, device, cfg.tables, cfg.follow)
        self._app = App(service, cfg.limits, make_store(cfg.histories), reloader=reloader)
        self._slot = int(serve.get_replica_context().rank.rank)
        self._keyed, self._ring = ring_of(bytes.fromhex(secret), cfg.instances)
        self._num_slots = cfg.instances
        self._num_leaked = 0
        self._leaks = Counter("nestrec_leaked_requests", "Requests that came to another slot than their user's")

    def record_replica_metadata(self) -> dict[str, Any]:
        """Read by the router when this replica is ready."""

        from nestrec.serving.fleet.ray_router import SLOT

        return {SLOT: self._slot}

    async def answer(self, user: str, scope: Scope, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """One request through the routes; status, headers and body of its answer."""

        from nestrec.serving.fleet.ray_router import ranked_slots

        if (
            user
            and not user.startswith("\0")
            and ranked_slots(self._keyed, self._ring, user, [True] * self._num_slots)[0] != self._slot
        ):
            self._num_leaked += 1
            self._leaks.inc()
        sent: list[dict[str, Any]] = []

        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            while not unread:  # the application waits for a disconnection, which ends with its answer
                await asyncio.sleep(3600.0)
            return unread.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        shown = (b"x-nestrec-slot", str(self._slot).encode()), (b"x-nestrec-leaked", str(self._num_leaked).encode())
        return sent[0]["status"], [*sent[0]["headers"], *shown], sent[1]["body"]


class RayIngress:
    """The deployment behind HAProxy."""

    def __init__(self, instances: Any, cfg: ServeConfig):
        self._app = RayIngressApp(instances, cfg)

    def __serve_build_asgi_app__(self) -> "RayIngressApp":
        return self._app

    async def swap(self, folders: list[str]) -> int:
        """As POST /v1/admin/swap; the status."""
        return (await self._app.rollout.swap(folders)).status

    async def follow(self, addresses: list[str]) -> int:
        """To newer versions, unless the replicas were told to stay; the status."""
        return (await self._app.rollout.follow(addresses)).status

    async def followed(self, models: list[str]) -> list[str]:
        """What is to be followed by now."""
        return self._app.rollout.followed(models)


class RayIngressApp:
    """Finds out whom a request is about and hands it on. What concerns all replicas is asked of one after the other."""

    def __init__(self, instances: Any, cfg: ServeConfig):
        self._instances = instances
        self._takes_admin = is_loopback(cfg.host)
        self._replicas = [RayUpstream(instances, slot) for slot in range(cfg.instances)]
        replicas: Any = self._replicas
        keyed = KeyedHash()
        router = Router(Ring.make(cfg.instances, keyed), keyed, RealClock())  # Ray has its own: this one is not asked
        self.rollout = RollingUpdate(replicas, router, RaySupervisor(), lambda _: _is_ready())
        self._operations = Operations(self.rollout, cfg.limits, cfg.service.drain_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts = []
        more = True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        if scope["path"].startswith("/v1/admin/"):
            await (await self._operated(scope["method"], scope["path"], body)).send(send)
            return
        if scope["method"] == "DELETE" and scope["path"].startswith("/v1/users/"):
            await (await self._everywhere(scope["raw_path"])).send(send)
            return
        names = ("type", "method", "path", "raw_path", "query_string", "headers")
        plain = {name: scope[name] for name in names}
        user = user_of(body).lstrip("\0")
        status, headers, content = await self._instances.answer.remote(user, plain, body)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _everywhere(self, target: bytes) -> HttpResponse:
        """The user may have been served by any of them: all must say that it is done."""
        try:  # one after the other: calls that one request makes at a time are one call to Ray
            heard = [await replica.send("DELETE", target, timeout_s=5.0) for replica in self._replicas]
        except OSError:
            return problem(503, "not every replica has answered; send it again", "", retry_after(1.0))
        worst = max(heard, key=lambda response: response.status)
        return HttpResponse(worst.status, worst.body)

    async def _operated(self, method: str, path: str, body: bytes) -> HttpResponse:
        if not self._takes_admin:  # no keys are known here
            return problem(403, "admin endpoints are not answered here; send SIGHUP to the front")
        try:
            return await self._operations.answer(method, path, body)
        except BadRequestError as error:
            return problem_of(error)


class RayUpstream:
    """One replica, as a front asks an instance."""

    def __init__(self, instances: Any, slot: int):
        self._instances = instances
        self._slot = slot

    async def send(
        self, method: str, target: bytes, body: bytes = b"", *, is_repeatable: bool = True, timeout_s: float = 30.0
    ) -> Response:
        """Raises OSError where there is no replica, or it is lost."""

        from nestrec.serving.fleet.ray_router import slot_address

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": method, "path": target.decode(), "raw_path": target}
        try:
            async with asyncio.timeout(timeout_s):
                status, found, content = await self._instances.answer.remote(
                    slot_address(self._slot), {**scope, "query_string": b"", "headers": headers}, body
                )
        except Exception as error:  # Ray has many, and each means that nobody has answered
            raise ConnectionError(f"replica {self._slot}: {type(error).__name__}") from error
        return Response(status, dict(found), content)


class RaySupervisor:
    """Ray starts replicas again, and says how many; the models of a swap are remembered for them."""

    def set_models(self, slot: int, folders: list[str]) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(_FOLDERS, json.dumps(folders).encode())


def current_folders() -> list[str]:
    """Of the models that a swap has brought; none where there was none."""
    from ray.experimental.internal_kv import _internal_kv_get

    found = _internal_kv_get(_FOLDERS)
    return list(json.loads(found)) if found else []


async def _is_ready() -> bool:
    return True


def serve_on_ray(
    folders: Sequence[str], cfg: ServeConfig, signals: SignalHandler, announce: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP lets every replica load its models anew, one after the other."""
    gate = start_on_ray(folders, cfg)
    signals.take_over()  # Ray has set its own meanwhile
    announce(url_of(cfg.host, cfg.port))

    def roll_all() -> None:
        _roll(lambda: gate.swap.remote(list(folders)))

    rolls = CoalescingWorker("nestrec-roll", roll_all)
    signals.when_reloaded(rolls.ask)
    follower = FleetVersionFollower(
        folders,
        cfg.follow.poll_s,
        lambda models: _roll(lambda: gate.follow.remote(models)),
        lambda models: list(gate.followed.remote(list(models)).result()),
    )
    if cfg.follow.on and cfg.follow.moves == "together":
        follower.start()
    signals.wait_for_stop()
    follower.close()
    rolls.close()
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def num_gpus(cfg: ServeConfig) -> float:
    """That each replica asks Ray for."""
    if cfg.ray_gpus is not None:
        return cfg.ray_gpus
    return 1.0 if chosen_device(cfg.device).startswith("cuda") else 0.0


def _roll(ask: Callable[[], Any]) -> bool:
    try:
        status = ask().result()
    except Exception as error:  # whatever Ray says, the replicas serve on
        _LOG.error("the models stay as they are: %s", type(error).__name__)
        return False
    if status != 200:
        _LOG.error("the models stay as they are: a replica has not taken the new ones")
    else:
        _LOG.info("all replicas have loaded their models anew")
    return bool(status == 200)


def start_on_ray(folders: Sequence[str | Path], cfg: ServeConfig) -> Any:
    """Start the application on a Ray of this machine, or the one that RAY_ADDRESS names; its handle."""
    os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")  # read when Ray is imported
    import_extra("ray.serve", "ray", "is needed for this front")
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    ray.init(include_dashboard=False, _node_ip_address=cfg.host, log_to_driver=False)
    serve.start(http_options={"host": cfg.host, "port": cfg.port})
    secret = secrets.token_hex(32)
    router = RequestRouterConfig(
        request_router_class=_SLOT_ROUTER, request_router_kwargs={"secret": secret, "num_slots": cfg.instances}
    )
    light = {"num_cpus": 0.1}  # several instances may share a core
    instances = serve.deployment(
        RayInstance,
        num_replicas=cfg.instances,
        request_router_config=router,
        max_ongoing_requests=1000,
        ray_actor_options={**light, "num_gpus": num_gpus(cfg)},
    ).bind([whole_name(str(folder)) for folder in folders], cfg, secret)
    gate = serve.deployment(serve.ingress()(RayIngress), max_ongoing_requests=1000, ray_actor_options=light).bind(
        instances, cfg
    )
    return serve.run(gate, name=APPLICATION, route_prefix="/")
