"""Sockets of the server, uvicorn with graceful shutdown, the separate health port, and the limit of open files.

A port is bound before the models are loaded, so that a port in use is reported immediately. The socket does not listen
until the models are ready, so that clients are refused instead of waiting.

`HealthPortMiddleware` serves health checks and metrics on a second port with its own connection limits, so that they
respond even if clients exhaust the main port. It uses the same event loop, because a server whose event loop is blocked
is not alive. Admin endpoints can be restricted to this port, which a firewall can close to clients.

Every connection is an open file; `allow_open_files` raises the limit, which is usually 1,024.
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

_PORT_REMEDY = "stop the process that listens on it, or choose another port (--port 0 selects a free one)"
_MAX_ACCEPT_S = 10.0
"""Maximum time to accept pending connections at shutdown, in seconds; an event loop accepts one per iteration."""
_NUM_READ_ITERATIONS = 10
"""Iterations of the event loop in which it reads the requests of connections that it has just accepted."""
_TLS_HANDSHAKE_S = 10.0
"""Seconds after which a TLS connection without a complete handshake is closed."""
_TLS_SHUTDOWN_S = 10.0
"""Seconds that a client has to read its last response and to confirm the end of a TLS connection."""
_LAST_TLS_SHUTDOWN_S = 0.25
"""Same as `_TLS_SHUTDOWN_S`, but during server shutdown, for clients that have received their last response."""


def bind_sockets(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """Bind one socket per address of a host, all to the same port.

    Args:
        host: Host name or address; empty for all addresses of the machine.
        port: Port; 0 selects a free one.
        is_shared: Whether other sockets can be bound to the same port (SO_REUSEPORT); the kernel then distributes new
            connections over them.

    Raises:
        UserError: The host is not an address of this machine, or the port is in use or not permitted.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        remedy = "use an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of its addresses"
        raise UserError(
            f"cannot be resolved to an address: {error.strerror}", option="host", value=host, remedy=remedy
        ) from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            sockets.append(socket.socket(family, kind, protocol))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            common_port = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            sockets[-1].bind((address[0], common_port, *address[2:]))
    except OSError as error:
        close_all(sockets)
        raise bind_error(error, host, port) from error
    return sockets


def bind_error(error: OSError, host: str, port: int) -> UserError:
    """Return the error to raise if a socket could not be bound."""
    if error.errno == errno.EADDRINUSE:
        return UserError("the port is in use", option="port", value=port, remedy=_PORT_REMEDY)
    if error.errno == errno.EACCES:
        remedy = "choose a port above 1023, or use a reverse proxy for this port"
        return UserError("this user is not permitted to listen on the port", option="port", value=port, remedy=remedy)
    remedy = "use an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of its addresses"
    return UserError(f"cannot listen on this address: {error.strerror}", option="host", value=host, remedy=remedy)


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
    """uvicorn server that reports when it listens, and leaves signals to `SignalHandler`.

    Args:
        config: Configuration of uvicorn.
        announce: Called when the server listens.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]):
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for one in sockets or ():
            one.listen(self.config.backlog)  # uvloop does not report it if this fails
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
        connection: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down gracefully: accept pending connections, answer their requests, and close all connections.

        Pending connections are accepted first, because closing a listening socket resets them; their requests are read
        first, because uvicorn closes connections without a request.
        """
        until_s = time.monotonic() + _MAX_ACCEPT_S
        while _has_pending(sockets or ()) and not self.force_exit and time.monotonic() < until_s:
            await asyncio.sleep(0)
        for _ in range(_NUM_READ_ITERATIONS):
            await asyncio.sleep(0)
        aborting = asyncio.create_task(self._abort_closed_connections())
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await aborting

    async def _abort_closed_connections(self) -> None:
        """Abort TLS connections that only the server has closed, because an idle client never closes its side."""
        before: set[Any] = set()
        while True:
            await asyncio.sleep(_LAST_TLS_SHUTDOWN_S)
            closed = {one for one in self.server_state.connections if one.transport.is_closing()}
            for connection in closed & before:  # a connection that was just closed may still have a response to send
                if _is_delivered(connection.transport):
                    connection.transport.abort()
            before = closed

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self, is_impatient: bool) -> None:
        """Answer accepted requests and return from `run`; return immediately if `is_impatient`."""
        self.should_exit, self.force_exit = True, self.force_exit or is_impatient


def _is_delivered(transport: asyncio.Transport) -> bool:
    """Return whether the client's system has acknowledged all bytes that were sent."""
    descriptor = transport.get_extra_info("socket").fileno()
    return descriptor < 0 or not any(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))


def _has_pending(sockets: Sequence[socket.socket]) -> bool:
    """Return whether connections wait to be accepted."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLIN)
    return bool(poll.poll(0))


def run_server(
    config: uvicorn.Config, sockets: list[socket.socket], signals: SignalHandler, announce: Callable[[], None]
) -> None:
    """Serve on bound sockets until a signal stops the process; `announce` is called when they listen."""
    server = Server(config, announce)
    signals.on_stop(server.end)
    try:
        server.run(sockets)
    except OSError as error:  # another process has bound the port as well, and listened first
        raise bind_error(error, config.host, port_of(sockets)) from error
    finally:
        close_all(sockets)


_ROUTES = ("/health/live", "/health/ready", "/metrics")
_LIMITS = LimitsConfig(max_connections=128, max_connections_per_address=64, header_timeout_s=5.0, write_timeout_s=5.0)


class HealthPortMiddleware:
    """ASGI middleware that also serves health checks, metrics and, if configured, admin endpoints on a separate port.

    It listens from the start of the application to its shutdown.

    Args:
        app: Application that serves the requests.
        host: Address on which to listen.
        port: Port on which to listen; 0 selects a free one.
        hosts: Host names that clients can use.
        security: Authentication and TLS.
        endpoints: Endpoints of the application, with their roles.

    Raises:
        UserError: The port cannot be bound.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        hosts: AllowedHosts,
        *,
        security: ServerSecurity,
        endpoints: Collection[ProtectedRoute],
    ):
        self._app = app
        self._state = ServerState()
        self._certificates = security.certificates
        self._admins = AccessRules(endpoints) if security.cfg.admin_on_health_port else None
        protocol = protocol_with(_LIMITS, hosts, security.make_authorizer(endpoints, of_health=True))
        self._config = uvicorn.Config(
            self._serve_health,
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

        async def close_after_shutdown(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                await self._close()
            await send(message)

        try:
            await self._app(scope, receive, close_after_shutdown)
        finally:
            await self._close()

    async def _serve_health(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_health_check = scope["path"] in _ROUTES and scope["method"] in ("GET", "HEAD")
        if is_health_check or self._is_for_admins(scope):
            await self._app(scope, receive, send)
        else:
            await problem(404, f"this port serves only {', '.join(_ROUTES)}").send(send, is_last=True)

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
        remedy = "choose another port, or stop the process that listens on it"
        raise UserError(
            f"cannot listen on this port: {error}", option="health_port", value=port, remedy=remedy
        ) from error


_LOG = logging.getLogger(__name__)
_SPARE = 512
"""Open files in addition to connections: models, logs, pipes, and connections above the limit, which get 503."""


def allow_open_files(max_connections: int) -> bool:
    """Raise the limit of open files of this process for its connections; return whether it is sufficient."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = max_connections + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= required:
        return True
    limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < required:
        _LOG.warning(
            "the limit of %d open files is too low for --limits.max_connections; raise it with `ulimit -Hn`", limit
        )
    return limit >= required
