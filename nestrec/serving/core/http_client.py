"""HTTP client core: plain requests and responses, an asyncio connection pool, and one blocking call.

The gateway sends requests through a `Pool`; commands and health checks use `send_blocking`; the clients of
`nestrec.client` exchange the same `Request` and `Response` with httpx. Nothing here follows redirects or retries a
request, except that a `Pool` replaces a keep-alive connection that the server has closed.
"""

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

_MAX_IDLE = 256
_WITHOUT_BODY = (204, 304)


class NotHttpError(ConnectionError):
    """The peer sent something that is not a valid HTTP response."""


class Request(NamedTuple):
    """One request to a server."""

    method: str
    url: str
    """Absolute URL without user name and fragment."""
    headers: Mapping[bytes, bytes] = MappingProxyType({})
    """All headers except `host` and `content-length`, which are added."""
    body: bytes = b""


class Response(NamedTuple):
    """The response to a request."""

    status: int
    headers: dict[bytes, bytes]
    """Headers by their names in lower case."""
    body: bytes


class Origin(NamedTuple):
    """Host and port of a server, and whether it uses TLS."""

    host: str
    port: int
    is_tls: bool
    authority: bytes
    """Value of the `host` header."""


@functools.lru_cache(maxsize=1024)
def _origin(scheme: str, authority: str) -> Origin:
    parts = urlsplit(f"{scheme}//{authority}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.netloc != authority:
        raise ValueError(f"{scheme}//{authority} is not a server URL: use http://HOST:PORT or https://HOST:PORT")
    is_tls = parts.scheme == "https"
    port = parts.port  # raises a ValueError if it is not a number
    return Origin(parts.hostname, port or (443 if is_tls else 80), is_tls, authority.encode("latin-1"))


def split_url(url: str) -> tuple[Origin, str]:
    """Return the origin and the target (path and query) of an absolute URL."""
    scheme, separator, rest = url.partition("//")
    if not separator:
        raise ValueError(f"{url} is not a URL: use http://HOST:PORT or https://HOST:PORT")
    authority, _, target = rest.partition("/")
    return _origin(scheme, authority), f"/{target}"


def encode_request(request: Request, origin: Origin, target: str) -> bytes:
    """Encode a request as HTTP/1.1."""
    headers = b"".join([b"%b: %b\r\n" % pair for pair in request.headers.items()])
    start = f"{request.method} {target} HTTP/1.1\r\n".encode("latin-1")
    head = b"%bhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (start, origin.authority, headers, len(request.body))
    num_lines = len(request.headers) + 4
    if head.count(b"\r") != num_lines or head.count(b"\n") != num_lines:  # otherwise a value could inject a request
        raise ValueError("a header or the URL contains a line break")
    return head + request.body


def parse_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Return status and headers of a response; raise ValueError or IndexError if `head` is malformed."""
    lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:] if line)}
    if b"transfer-encoding" in headers:  # nestrec servers never send it; its chunks would be read as the next response
        raise ValueError("the body has no content-length")
    return int(lines[0].split(b" ", 2)[1]), headers


class Connection:
    """Keep-alive connection that carries one request at a time."""

    def __init__(self, origin: Origin, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._origin = origin
        self._reader = reader
        self._writer = writer
        self.is_reusable = False
        """Whether the last response was read to its end and the server keeps the connection open."""

    async def send(self, method: str, data: bytes) -> Response:
        """Send an encoded request and read its response."""
        self.is_reusable = False
        self._writer.write(data)
        try:
            status, headers = parse_head(await self._reader.readuntil(b"\r\n\r\n"))
            # These responses may have the content-length of the GET response, but no body.
            has_body = method != "HEAD" and status not in _WITHOUT_BODY
            num_bytes = int(headers.get(b"content-length", b"0")) if has_body else 0
            body = await self._reader.readexactly(num_bytes)
        except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise NotHttpError(f"the server at port {self._origin.port} did not send a valid HTTP response") from error
        self.is_reusable = headers.get(b"connection") != b"close"
        return Response(status, headers, body)

    def close(self) -> None:
        """Close the connection without waiting until it is closed."""
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Pool:
    """Connection pool: keep-alive connections to any number of servers, for one event loop.

    A connection carries one request at a time. The number of connections in use is unbounded; at most `max_idle` idle
    connections per server stay open.
    """

    def __init__(self, *, max_idle: int = _MAX_IDLE, tls: ssl.SSLContext | None = None):
        """Create an empty pool.

        Args:
            max_idle: Maximum number of idle connections per server.
            tls: Context for https URLs; the default one verifies certificates.
        """
        self._max_idle = max_idle
        self._tls = tls
        self._idle: dict[Origin, list[Connection]] = {}

    async def send(self, request: Request, *, timeout_s: float, is_repeatable: bool = True) -> Response:
        """Send a request and return its response, whatever its status.

        An idle connection may turn out to be closed, and then it is unknown whether the server has read the request.
        A request that is not idempotent therefore gets a new connection.

        Args:
            request: The request.
            timeout_s: Maximum time for connecting, sending and reading together, in seconds.
            is_repeatable: Whether the request is idempotent: the server may receive it twice.

        Raises:
            TimeoutError: The response did not arrive in time.
            ConnectionRefusedError: No process listens at the address, so no server has received the request.
            OSError: The connection failed; a `NotHttpError` if the response is not HTTP.
            EOFError: The server closed the connection before the end of its response.
            ValueError: The request cannot be sent as HTTP.
        """
        origin, target = split_url(request.url)
        data = encode_request(request, origin, target)
        async with asyncio.timeout(timeout_s):  # wait_for could swallow a cancellation that meets an error
            idle = self._idle.setdefault(origin, [])
            while True:
                is_reused = is_repeatable and bool(idle)
                connection = idle.pop() if is_reused else await self._connect(origin)
                try:
                    return await connection.send(request.method, data)
                except (OSError, EOFError):
                    if not is_reused:  # a server may close an idle connection at any time: try the next one
                        raise
                finally:
                    if connection.is_reusable and len(idle) < self._max_idle:
                        idle.append(connection)
                    else:
                        connection.close()

    async def _connect(self, origin: Origin) -> Connection:
        if origin.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if origin.is_tls else None
        return Connection(origin, *await asyncio.open_connection(origin.host, origin.port, ssl=tls))

    def drop_idle(self) -> list[Connection]:
        """Close all connections that are not in use, without waiting, and return them."""
        dropped = [connection for idle in self._idle.values() for connection in idle]
        for idle in self._idle.values():
            idle.clear()
        for connection in dropped:
            connection.close()
        return dropped

    async def close(self) -> None:
        """Close all connections that are not in use and wait until they are closed."""
        for connection in self.drop_idle():
            await connection.wait_closed()


def send_blocking(
    request: Request, *, timeout_s: float, tls: ssl.SSLContext | None = None, uses_proxy: bool = False
) -> Response:
    """Send a request on a new connection and return its response, whatever its status.

    Args:
        request: The request.
        timeout_s: Maximum wait for each step (connecting, sending, each read of the response), in seconds.
        tls: Context for https URLs; the default one verifies certificates.
        uses_proxy: Whether to use the proxies of the environment (`http_proxy`, `https_proxy`, `no_proxy`).

    Raises:
        TimeoutError: A step took too long.
        OSError: The connection failed; a `NotHttpError` if the response is not HTTP.
        EOFError: The server closed the connection before the end of its response.
        ValueError: The URL is not a server URL.
    """
    # Imported here because `nestrec.client` and the gateway do not need them.
    import http.client
    import urllib.error
    import urllib.request

    opener = urllib.request.OpenerDirector()  # without handlers for redirects and for statuses
    for handler in (
        urllib.request.ProxyHandler(None if uses_proxy else {}),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=tls),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    has_body = bool(request.body) or request.method not in ("GET", "HEAD")
    prepared = urllib.request.Request(
        request.url,
        data=request.body if has_body else None,
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.items()},
        method=request.method,
    )
    try:
        with opener.open(prepared, timeout=timeout_s) as response:
            pairs = ((name.lower(), value.strip()) for name, value in response.headers.items())
            headers = {name.encode("latin-1"): value.encode("latin-1") for name, value in pairs}
            return Response(response.status, headers, response.read())
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        raise ValueError(str(error.reason)) from error
    except (http.client.RemoteDisconnected, http.client.IncompleteRead) as error:
        raise EOFError(str(error)) from error
    except http.client.HTTPException as error:
        raise NotHttpError(str(error)) from error
