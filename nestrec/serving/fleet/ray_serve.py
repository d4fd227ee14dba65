"""Ray Serve deployment: instances run as replicas behind a slot router and HAProxy.

HTTP enters through HAProxy, never through Ray's Python proxy, which adds several milliseconds. Ray's own ports listen
on every interface: run it in a network namespace or behind a firewall.
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
from nestrec.base.cuda import resolve_device
from nestrec.base.lazy import import_extra
from nestrec.serving.core.asgi import HttpResponse, Receive, Scope, Send, is_loopback, problem, problem_of, retry_after
from nestrec.serving.core.http_client import Response
from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.core.slot_router import KeyedHash, Ring, Router
from nestrec.serving.fleet.gateway import user_of
from nestrec.serving.fleet.rolling_update import FleetVersionFollower, Operations, RollingUpdate, resolve_model_path
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
    """Ray Serve replica: the service and the HTTP routes of one instance, without a socket."""

    def __init__(self, folders: list[str], cfg: ServeConfig, secret: str):
        import torch
        from ray import serve
        from ray.util.metrics import Counter

        from nestrec.serving.fleet.ray_router import ring_of

        torch.set_num_threads(cfg.num_threads)
        device = resolve_device(cfg.device)
        folders = current_folders() or folders  # a replacement replica serves the swapped models
        loss = EngineLoss(lambda: None)  # Ray replaces a replica whose process has ended
        service = Service.load(folders, cfg.service, device, cfg.tables, on_engine_lost=loss)
        reloader = Reloader(service, device, cfg.tables, cfg.follow)
        self._app = App(service, cfg.limits, make_store(cfg.history_store), reloader=reloader)
        self._slot = int(serve.get_replica_context().rank.rank)
        self._keyed, self._ring = ring_of(bytes.fromhex(secret), cfg.num_instances)
        self._num_slots = cfg.num_instances
        self._num_misrouted = 0
        self._misrouted = Counter(
            "nestrec_ray_misrouted_requests", "Requests received by a slot other than their user's"
        )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata that the router reads when this replica is ready: its slot."""

        from nestrec.serving.fleet.ray_router import SLOT

        return {SLOT: self._slot}

    async def handle_request(
        self, user: str, scope: Scope, body: bytes
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Process one request and return the status, headers and body of the response."""

        from nestrec.serving.fleet.ray_router import ranked_slots

        if (
            user
            and not user.startswith("\0")
            and ranked_slots(self._keyed, self._ring, user, [True] * self._num_slots)[0] != self._slot
        ):
            self._num_misrouted += 1
            self._misrouted.inc()
        sent: list[dict[str, Any]] = []

        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            while not unread:  # the application waits for a disconnect until it has responded
                await asyncio.sleep(3600.0)
            return unread.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        slot_headers = (
            (b"x-nestrec-slot", str(self._slot).encode()),
            (b"x-nestrec-misrouted", str(self._num_misrouted).encode()),
        )
        return sent[0]["status"], [*sent[0]["headers"], *slot_headers], sent[1]["body"]


class RayIngress:
    """Ray Serve ingress deployment behind HAProxy."""

    def __init__(self, instances: Any, cfg: ServeConfig):
        self._app = RayIngressApp(instances, cfg)

    def __serve_build_asgi_app__(self) -> "RayIngressApp":
        return self._app

    async def swap(self, folders: list[str]) -> int:
        """Swap the models like POST /v1/admin/swap and return the HTTP status."""
        return (await self._app.rollout.swap(folders)).status

    async def follow(self, addresses: list[str]) -> int:
        """Update to newer versions, unless the replicas are pinned to a version; return the HTTP status."""
        return (await self._app.rollout.follow(addresses)).status

    async def models_to_follow(self, models: list[str]) -> list[str]:
        """Return the models whose newer versions must be followed now."""
        return self._app.rollout.models_to_follow(models)


class RayIngressApp:
    """ASGI application of the ingress: passes each request to the replica of its user.

    Operations on all replicas are sent to them sequentially.
    """

    def __init__(self, instances: Any, cfg: ServeConfig):
        self._instances = instances
        self._allows_admin = is_loopback(cfg.host)
        self._replicas = [RayUpstream(instances, slot) for slot in range(cfg.num_instances)]
        replicas: Any = self._replicas
        keyed = KeyedHash()
        router = Router(Ring.make(cfg.num_instances, keyed), keyed, RealClock())  # unused: Ray routes
        self.rollout = RollingUpdate(replicas, router, RaySupervisor(), lambda _: _is_ready())
        self._operations = Operations(self.rollout, cfg.limits, cfg.service.drain_timeout_s)

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
            await (await self._run_operation(scope["method"], scope["path"], body)).send(send)
            return
        if scope["method"] == "DELETE" and scope["path"].startswith("/v1/users/"):
            await (await self._broadcast_delete(scope["raw_path"])).send(send)
            return
        names = ("type", "method", "path", "raw_path", "query_string", "headers")
        plain = {name: scope[name] for name in names}
        user = user_of(body).lstrip("\0")
        status, headers, content = await self._instances.handle_request.remote(user, plain, body)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _broadcast_delete(self, target: bytes) -> HttpResponse:
        """Delete a user's data on all replicas: any of them may have served the user, so all must confirm."""
        try:  # sequentially: Ray treats concurrent calls of one request as one call
            responses = [await replica.send("DELETE", target, timeout_s=5.0) for replica in self._replicas]
        except OSError:
            return problem(503, "not all replicas have confirmed the deletion; send it again", "", retry_after(1.0))
        worst = max(responses, key=lambda response: response.status)
        return HttpResponse(worst.status, worst.body)

    async def _run_operation(self, method: str, path: str, body: bytes) -> HttpResponse:
        if not self._allows_admin:  # API keys are not checked here
            return problem(403, "admin endpoints are disabled on this address; send SIGHUP to the server to reload")
        try:
            return await self._operations.handle(method, path, body)
        except BadRequestError as error:
            return problem_of(error)


class RayUpstream:
    """Adapter that sends requests to one replica with the interface of `Upstream`."""

    def __init__(self, instances: Any, slot: int):
        self._instances = instances
        self._slot = slot

    async def send(
        self, method: str, target: bytes, body: bytes = b"", *, is_repeatable: bool = True, timeout_s: float = 30.0
    ) -> Response:
        """Send a request to the replica.

        Raises:
            OSError: The replica does not exist, was lost, or did not respond in time.
        """

        from nestrec.serving.fleet.ray_router import slot_address

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": method, "path": target.decode(), "raw_path": target}
        try:
            async with asyncio.timeout(timeout_s):
                status, headers_sent, content = await self._instances.handle_request.remote(
                    slot_address(self._slot), {**scope, "query_string": b"", "headers": headers}, body
                )
        except Exception as error:  # Ray raises many types; each means that there is no response
            raise ConnectionError(f"replica {self._slot}: {type(error).__name__}") from error
        return Response(status, dict(headers_sent), content)


class RaySupervisor:
    """Supervisor for Ray Serve, which restarts and counts replicas itself; stores the swapped models for new ones."""

    def set_models(self, slot: int, folders: list[str]) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(_FOLDERS, json.dumps(folders).encode())


def current_folders() -> list[str]:
    """Return the model folders of the last swap; an empty list if there was none."""
    from ray.experimental.internal_kv import _internal_kv_get

    encoded = _internal_kv_get(_FOLDERS)
    return list(json.loads(encoded)) if encoded else []


async def _is_ready() -> bool:
    return True


def serve_on_ray(
    folders: Sequence[str], cfg: ServeConfig, signals: SignalHandler, announce: Callable[[str], None]
) -> None:
    """Serve with Ray until SIGTERM or SIGINT; SIGHUP reloads the models, one replica at a time.

    Args:
        folders: Folders or addresses of the models.
        cfg: Configuration of the server.
        signals: Signal handler of the process.
        announce: Called with the URL when the server accepts connections.
    """
    gate = start_on_ray(folders, cfg)
    signals.take_over()  # Ray has installed its own handlers
    announce(url_of(cfg.host, cfg.port))

    def update_all() -> None:
        _request_update(lambda: gate.swap.remote(list(folders)))

    updates = CoalescingWorker("nestrec-rolling-update", update_all)
    signals.on_reload(updates.request_run)
    follower = FleetVersionFollower(
        folders,
        cfg.follow.poll_interval_s,
        lambda models: _request_update(lambda: gate.follow.remote(models)),
        lambda models: list(gate.models_to_follow.remote(list(models)).result()),
    )
    if cfg.follow.enabled and cfg.follow.mode == "coordinated":
        follower.start()
    signals.wait_for_stop()
    follower.close()
    updates.close()
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def num_gpus(cfg: ServeConfig) -> float:
    """Return the number of GPUs that each replica requests from Ray."""
    if cfg.gpus_per_instance is not None:
        return cfg.gpus_per_instance
    return 1.0 if resolve_device(cfg.device).startswith("cuda") else 0.0


def _request_update(call: Callable[[], Any]) -> bool:
    try:
        status = call().result()
    except Exception as error:  # the replicas keep serving after any error of Ray
        _LOG.error("the models were not updated: %s", type(error).__name__)
        return False
    if status != 200:
        _LOG.error("the models were not updated: a replica rejected the new ones")
    else:
        _LOG.info("all replicas have reloaded their models")
    return bool(status == 200)


def start_on_ray(folders: Sequence[str | Path], cfg: ServeConfig) -> Any:
    """Deploy the application on a local Ray cluster, or on the one in RAY_ADDRESS, and return its handle."""
    os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")  # read when Ray is imported
    import_extra("ray.serve", "ray", "is required for --load_balancer ray")
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    ray.init(include_dashboard=False, _node_ip_address=cfg.host, log_to_driver=False)
    serve.start(http_options={"host": cfg.host, "port": cfg.port})
    secret = secrets.token_hex(32)
    router = RequestRouterConfig(
        request_router_class=_SLOT_ROUTER, request_router_kwargs={"secret": secret, "num_slots": cfg.num_instances}
    )
    light = {"num_cpus": 0.1}  # several instances may share a core
    instances = serve.deployment(
        RayInstance,
        num_replicas=cfg.num_instances,
        request_router_config=router,
        max_ongoing_requests=1000,
        ray_actor_options={**light, "num_gpus": num_gpus(cfg)},
    ).bind([resolve_model_path(str(folder)) for folder in folders], cfg, secret)
    gate = serve.deployment(serve.ingress()(RayIngress), max_ongoing_requests=1000, ray_actor_options=light).bind(
        instances, cfg
    )
    return serve.run(gate, name=APPLICATION, route_prefix="/")
