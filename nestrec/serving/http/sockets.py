"""A serving process: its sockets, signals, log and open files.

Sockets of a server, and uvicorn over them.

A port is taken before the models are loaded, so that one in use is told at once, but nobody can connect until there is
something to answer: a socket that is bound and does not listen refuses.

Health on a port of its own: whoever watches a server gets an answer whatever its clients do to the other port.

The application is wrapped: while it lives, the routes of health and metrics are answered on a second socket too, with
connections and limits of its own, in the same event loop (one that is stuck is not alive). Admin endpoints can be had
here alone, so that a network need not let clients near them.

Room for the connections that a server may have open: each is a file, and the usual limit of a shell is 1,024.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import resource
import select
import socket
import ssl
import sys
import termios
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import uvicorn

from nestrec.base.compat import STARTUP_FAILURE, ServerState
from nestrec.base.errors import UserError
from nestrec.serving.core.asgi import AllowedHosts, Message, Receive, Scope, Send, problem
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.limited_http import protocol_with
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.security.auth import AccessRules, ProtectedRoute
from nestrec.serving.security.server_security import ServerSecurity

_PORT_REMEDY = "stop what listens there, or name another port (--port 0 takes a free one)"
_MOST_ACCEPTING_S = 10.0
"""where more connect than are accepted: event loops accept one at a turn"""
_TURNS_TO_READ = 10
"""of the event loop, in which it reads what has come on a connection that it has just accepted"""
_TLS_HANDSHAKE_S = 10.0
"""Seconds after which a TLS connection without a complete handshake is closed."""
_TLS_SHUTDOWN_S = 10.0
"""Seconds that a client has to read its last response and to confirm the end of a TLS connection."""
_LAST_TLS_SHUTDOWN_S = 0.25
"""The same while the server shuts down, for clients that have received their last response."""


def bound_sockets(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """One for each address of the host, all on one port; 0 takes a free one. is_shared: others of this kind may listen
    there too, and the system deals connections out to them."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        remedy = "name an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        raise UserError(f"is no address: {error.strerror}", option="host", value=host, remedy=remedy) from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(socket.socket(family, kind, protocol))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            taken = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            sockets[-1].bind((address[0], taken, *address[2:]))
    except OSError as error:
        close_all(sockets)
        raise not_bound(error, host, port) from error
    return sockets


def not_bound(error: OSError, host: str, port: int) -> UserError:
    """What it means that an address could not be taken."""
    if error.errno == errno.EADDRINUSE:
        return UserError("is in use", option="port", value=port, remedy=_PORT_REMEDY)
    if error.errno == errno.EACCES:
        remedy = "name a port above 1023, or put a proxy before it"
        return UserError("is not permitted to this user", option="port", value=port, remedy=remedy)
    remedy = "name an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
    return UserError(f"cannot be listened on: {error.strerror}", option="host", value=host, remedy=remedy)


def close_all(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


def port_of(sockets: Sequence[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host or '0.0.0.0'}:{port}"


async def listen(
    make: Callable[[], asyncio.Protocol], one: socket.socket, context: ssl.SSLContext | None, backlog: int
) -> asyncio.Server:
    """Accept connections on a bound socket, with time limits for the parts of TLS that wait for the client."""
    limits: dict[str, Any] = {}
    if context is not None:
        limits = {"ssl_handshake_timeout": _TLS_HANDSHAKE_S, "ssl_shutdown_timeout": _TLS_SHUTDOWN_S}
    loop = asyncio.get_running_loop()
    return await loop.create_server(make, sock=one, ssl=context, backlog=backlog, **limits)


class Server(uvicorn.Server):
    """Says when it listens, and leaves signals to `SignalHandler`."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]):
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for one in sockets or ():
            one.listen(self.config.backlog)  # uvloop does not tell where this fails
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        # uvicorn's own startup sets no time limits for TLS.
        self.servers = [await listen(self._connection, s, self.config.ssl, self.config.backlog) for s in sockets or ()]
        self.started = True
        if not self.should_exit:
            self._announce()

    def _connection(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Who has connected is accepted first, and what they have sent is read: a socket that is closed resets all who
        wait in its queue, and a connection that has read nothing is closed."""
        until_s = time.monotonic() + _MOST_ACCEPTING_S
        while _does_any_wait(sockets or ()) and not self.force_exit and time.monotonic() < until_s:
            await asyncio.sleep(0)
        for _ in range(_TURNS_TO_READ):
            await asyncio.sleep(0)
        aborting = asyncio.create_task(self._abort_closed_connections())
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await aborting

    async def _abort_closed_connections(self) -> None:
        """End TLS connections that are closed here but not yet by the client, which an idle one never does."""
        before: set[Any] = set()
        while True:
            await asyncio.sleep(_LAST_TLS_SHUTDOWN_S)
            closed = {one for one in self.server_state.connections if one.transport.is_closing()}
            for connection in closed & before:  # a response may still wait to be sent if it was closed just now
                if _is_delivered(connection.transport):
                    connection.transport.abort()
            before = closed

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self, is_impatient: bool) -> None:
        """Answer what was accepted, then return from `run`; at once where nobody waits for it any longer."""
        self.should_exit, self.force_exit = True, self.force_exit or is_impatient


def _is_delivered(transport: asyncio.Transport) -> bool:
    """The client's system has confirmed all bytes that were sent to it."""
    descriptor = transport.get_extra_info("socket").fileno()
    return descriptor < 0 or not any(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))


def _does_any_wait(sockets: Sequence[socket.socket]) -> bool:
    """For being accepted."""
    waiting = select.poll()
    for one in sockets:
        waiting.register(one, select.POLLIN)
    return bool(waiting.poll(0))


def run_server(
    config: uvicorn.Config, sockets: list[socket.socket], signals: SignalHandler, announce: Callable[[], None]
) -> None:
    """Serve on bound sockets until a signal; `announce` is called when they listen."""
    server = Server(config, announce)
    signals.when_stopped(server.end)
    try:
        server.run(sockets)
    except OSError as error:  # another process has bound the port as well, and listened first
        raise not_bound(error, config.host, port_of(sockets)) from error
    finally:
        close_all(sockets)


_ROUTES = ("/health/live", "/health/ready", "/metrics")
_LIMITS = LimitsConfig(max_connections=128, max_connections_an_address=64, head_timeout_s=5.0, answer_timeout_s=5.0)


class HealthPortMiddleware:
    """An ASGI application that also listens for those who watch it, from its start to its end."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        hosts: AllowedHosts,
        *,
        safety: ServerSecurity,
        endpoints: Collection[ProtectedRoute],
    ):
        self._app = app
        self._state = ServerState()
        self._certificates = safety.certificates
        self._admins = AccessRules(endpoints) if safety.cfg.admin_on_health_port else None
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
        raise UserError(f"cannot be listened on: {error}", option="health_port", value=port, remedy=remedy) from error


_LOG = logging.getLogger(__name__)
_SPARE = 512
"""files beside connections: models, logs, pipes, those who are told to come back"""


def allow_open_files(max_connections: int) -> bool:
    """Raise this process's limit to what its connections need; whether it is enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return True
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < wanted:
        _LOG.warning("only %d files may be open, too few for limits.max_connections: raise `ulimit -Hn`", reachable)
    return reachable >= wanted
