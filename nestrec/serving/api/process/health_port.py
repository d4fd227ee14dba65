"""Health on a port of its own: whoever watches a server gets an answer whatever its clients do to the other port.

The application is wrapped: while it lives, the routes of health and metrics are answered on a second socket too, with
connections and limits of its own, in the same event loop (one that is stuck is not alive). Admin endpoints can be had
here alone, so that a network need not let clients near them.
"""

import asyncio
import socket
from collections.abc import Collection
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from nestrec.base.errors import UserError
from nestrec.serving.api.process.listening import listen
from nestrec.serving.api.protocol.hosts import HostNames
from nestrec.serving.api.protocol.http import Message, Receive, Scope, Send, problem
from nestrec.serving.api.protocol.limited_protocol import protocol_with
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.safety.access import Access, Guarded
from nestrec.serving.safety.safety import Safety

_ROUTES = ("/health/live", "/health/ready", "/metrics")
_LIMITS = LimitsConfig(max_connections=128, max_connections_an_address=64, head_timeout_s=5.0, answer_timeout_s=5.0)


class WithHealthPort:
    """An ASGI application that also listens for those who watch it, from its start to its end."""

    def __init__(
        self, app: Any, host: str, port: int, hosts: HostNames, *, safety: Safety, endpoints: Collection[Guarded]
    ):
        self._app, self._state, self._certificates = app, ServerState(), safety.certificates
        self._admins = Access(endpoints) if safety.cfg.admin_on_health_port else None
        protocol = protocol_with(_LIMITS, hosts, safety.gate(endpoints, of_health=True))
        self._config = uvicorn.Config(
            self._watched,
            http=protocol,
            ws="none",
            interface="asgi3",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
        )
        self._socket = _bound(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._server: asyncio.Server | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await self._listen()

        async def told(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                await self._close()
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            await self._close()

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_watched = scope["path"] in _ROUTES and scope["method"] in ("GET", "HEAD")
        if is_watched or self._is_for_admins(scope):
            await self._app(scope, receive, send)
        else:
            await problem(404, f"this port has {', '.join(_ROUTES)}").send(send, is_last=True)

    def _is_for_admins(self, scope: Scope) -> bool:
        path, raw_path = scope["path"], scope["raw_path"].decode("latin-1")
        return self._admins is not None and self._admins.audience_of(path, raw_path) == "admins"

    async def _listen(self) -> None:
        self._config.load()
        protocol: Any = self._config.http_protocol_class
        make = lambda: protocol(config=self._config, server_state=self._state, app_state={})  # noqa: E731
        context = None if self._certificates is None else self._certificates.context
        self._server = await listen(make, self._socket, context, _LIMITS.max_connections)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            for connection in list(self._state.connections):
                connection.transport.abort()


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_LIMITS.max_connections)
    except OSError as error:
        remedy = "give another port, or end who listens there"
        raise UserError(f"cannot be listened on: {error}", field="health_port", value=port, remedy=remedy) from error
