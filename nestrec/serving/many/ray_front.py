"""The same engine as a Ray Serve application: instances as replicas, a slot router between, HAProxy before it.

HTTP comes in through HAProxy, never through Ray's Python proxy, which costs several milliseconds. Ray's own ports
listen on every interface: run it in a network namespace or behind a firewall.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nestrec.base.devices import chosen_device
from nestrec.base.errors import UserError
from nestrec.serving.api.app import App
from nestrec.serving.api.process.listening import url_of
from nestrec.serving.api.process.signals import Signals
from nestrec.serving.api.protocol.http import Receive, Scope, Send
from nestrec.serving.api.server import ServeConfig
from nestrec.serving.histories.store import make_store
from nestrec.serving.many.addressed import user_of
from nestrec.serving.service import Service

_LOG = logging.getLogger(__name__)
APPLICATION = "nestrec"
_SLOT_ROUTER = "nestrec.serving.many.ray_router:SlotRouter"


class RayInstance:
    """A replica: service and routes of one instance, without a socket."""

    def __init__(self, folders: list[str], cfg: ServeConfig, secret: str):
        import torch
        from ray import serve
        from ray.util.metrics import Counter

        from nestrec.serving.many.ray_router import ring_of

        torch.set_num_threads(cfg.threads)
        device = chosen_device(cfg.device)
        self._app = App(
            Service.load([Path(folder) for folder in folders], cfg.service, device, cfg.tables),
            cfg.limits,
            make_store(cfg.histories),
        )
        self._slot = int(serve.get_replica_context().rank.rank)
        self._keyed, self._ring = ring_of(bytes.fromhex(secret), cfg.instances)
        self._num_slots, self._num_leaked = cfg.instances, 0
        self._leaks = Counter("nestrec_leaked_requests", "Requests that came to another slot than their user's")

    def record_replica_metadata(self) -> dict[str, Any]:
        """Read by the router when this replica is ready."""
        from nestrec.serving.many.ray_router import SLOT

        return {SLOT: self._slot}

    async def answer(self, user: str, scope: Scope, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """One request through the routes; status, headers and body of its answer."""
        from nestrec.serving.many.ray_router import ranked_slots

        if user and ranked_slots(self._keyed, self._ring, user, [True] * self._num_slots)[0] != self._slot:
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


class Gate:
    """The deployment behind HAProxy."""

    def __init__(self, instances: Any):
        self._instances = instances

    def __serve_build_asgi_app__(self) -> "GateApp":
        return GateApp(self._instances)


class GateApp:
    """Finds out whom a request is about and hands it on."""

    def __init__(self, instances: Any):
        self._instances = instances

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        names = ("type", "method", "path", "raw_path", "query_string", "headers")
        plain = {name: scope[name] for name in names}
        status, headers, content = await self._instances.answer.remote(user_of(body), plain, body)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def serve_on_ray(folders: Sequence[Path], cfg: ServeConfig, signals: Signals, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP leaves the models as they are, and says so."""
    start_on_ray(folders, cfg)
    signals.take_over()  # Ray has set its own meanwhile
    announce(url_of(cfg.host, cfg.port))
    signals.when_reloaded(lambda: _LOG.error("the models stay as they are: Ray Serve takes new ones by a new start"))
    signals.wait_for_stop()
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def start_on_ray(folders: Sequence[Path], cfg: ServeConfig) -> Any:
    """Start the application on a Ray of this machine, or the one that RAY_ADDRESS names; its handle."""
    os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")  # read when Ray is imported
    try:
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ModuleNotFoundError as error:
        remedy = "install it with: pip install 'nestrec[ray]'"
        raise UserError("is needed for this front", field="package", value=error.name, remedy=remedy) from error

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
        ray_actor_options=light,
    ).bind([str(folder.resolve()) for folder in folders], cfg, secret)
    gate = serve.deployment(serve.ingress()(Gate), max_ongoing_requests=1000, ray_actor_options=light).bind(instances)
    return serve.run(gate, name=APPLICATION, route_prefix="/")
