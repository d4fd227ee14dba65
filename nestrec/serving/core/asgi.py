"""ASGI helpers of the server: request bodies, JSON responses, headers and allowed hosts.

Allowed hosts protect against DNS rebinding: a web page can resolve its own domain to a loopback address and then send
requests to a local server. The browser still sends the page's domain in the Host header, so a server that listens on
loopback only rejects any Host that is not a name of this machine.

Request bodies are read within limits of size and time. Nothing from a request is written to a log.

A frontend on the same machine forwards the client's address in the header X-Nestrec-Client. For all other peers the
address of the connection is used, which they cannot forge. The request id is taken from the header X-Request-Id if it
is well formed, and generated otherwise.
"""

import asyncio
import http
import ipaddress
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

import orjson

from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig

_MAX_CACHED_HOSTS = 1024


class AllowedHosts:
    """Host names accepted in the Host header. IP addresses are always accepted: they cannot be rebound by DNS."""

    def __init__(self, listens_on: str, names: Sequence[str] = ()):
        """Collect the accepted names.

        Args:
            listens_on: Host name or address that the server listens on.
            names: Host names of this server; `*` accepts any name. If empty, any name is accepted unless the server
                listens on a loopback address.
        """
        self._names = {name.lower().rstrip(".") for name in (*names, listens_on, "localhost")}
        self._accepts_any = "*" in names if names else not is_loopback(listens_on)
        self._known: dict[bytes, bool] = {}

    def __contains__(self, header: bytes) -> bool:
        is_known = self._known.get(header)
        if is_known is None:
            if len(self._known) >= _MAX_CACHED_HOSTS:
                self._known.clear()
            is_known = self._known[header] = self._accepts_any or self._is_own_name(header.decode("latin-1"))
        return is_known

    def _is_own_name(self, header: str) -> bool:
        name = _without_port(header.strip()).lower().rstrip(".")
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    name, _, port = header.rpartition(":")
    return name if name and ":" not in name and port.isdigit() else header


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")
Header = tuple[bytes, bytes]
JSON = b"application/json"
_LONGEST_RETRY_S = 86_400.0
"""Upper bound of the Retry-After header, in seconds; a rate limit close to 0 would make it infinite."""
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}


class ClientDisconnectedError(Exception):
    """The client closed the connection before it received the response."""


class HttpResponse:
    """Status, body and headers of a response."""

    __slots__ = ("body", "headers", "is_counted", "status")

    def __init__(self, status: int, body: bytes, content_type: bytes = JSON, *headers: Header):
        self.status = status
        self.body = body
        self.is_counted = False
        """Whether the process that produced the response has already counted it in its metrics."""
        self.headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]

    def as_http(self, more_headers: Iterable[Header] = (), *, is_last: bool = False) -> bytes:
        """Encode the response as HTTP/1.1.

        Args:
            more_headers: Headers sent before those of the response.
            is_last: Whether the server closes the connection after this response.
        """
        parts = [_STATUS_LINES[self.status]]
        for name, value in (*more_headers, *self.headers):
            parts += (name, b": ", value, b"\r\n")
        parts += (b"connection: close\r\n\r\n" if is_last else b"\r\n", self.body)
        return b"".join(parts)

    async def send(self, send: Send, *, is_last: bool = False) -> None:
        headers = [*self.headers, (b"connection", b"close")] if is_last else self.headers
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def parse_json(body: bytes, loads: Callable[[bytes], Any] = orjson.loads) -> dict[str, Any]:
    try:
        data = loads(body)
    except Exception as error:  # Every exception is caused by the body: a client must not fill the log with tracebacks.
        raise BadRequestError("the body is not valid JSON") from error
    if not isinstance(data, dict):
        raise BadRequestError("the body must be a JSON object")
    return data


def as_json(value: Any, status: int = 200, *headers: Header) -> HttpResponse:
    return HttpResponse(status, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), JSON, *headers)


def problem(status: int, message: str, field: str = "", *headers: Header, remedy: str = "") -> HttpResponse:
    error = {"message": message, **({"field": field} if field else {}), **({"remedy": remedy} if remedy else {})}
    return as_json({"error": error}, status, *headers)


def problem_of(error: BadRequestError) -> HttpResponse:
    return problem(error.status, error.message, error.field, remedy=error.remedy)


def retry_after(seconds: float) -> Header:
    return b"retry-after", str(math.ceil(min(max(1.0, seconds), _LONGEST_RETRY_S))).encode()


def head_bytes(target: bytes, headers: Iterable[Header]) -> int:
    """Return the number of bytes of path and headers that count toward `limits.max_header_bytes`."""
    size = len(target)
    for name, value in headers:
        size += len(name) + len(value) + 4
    return size


def too_long_head(limits: LimitsConfig) -> BadRequestError:
    return BadRequestError(f"path and headers must have at most {limits.max_header_bytes} bytes", status=431)


def check_head(scope: Scope, limits: LimitsConfig) -> None:
    """Reject a request whose path and headers are too long.

    The HTTP parser bounds only what it buffers, so a longer head that arrives in one read passes it.
    """
    if head_bytes(scope["raw_path"] + scope["query_string"], scope["headers"]) > limits.max_header_bytes:
        raise too_long_head(limits)


class Body:
    """Body of a request, with a content length or chunked, read within limits of size and time."""

    def __init__(self, scope: Scope, receive: Receive, limits: LimitsConfig):
        self._headers = dict(scope["headers"])
        self._receive = receive
        self._limits = limits
        self._is_read = False

    @property
    def is_unread(self) -> bool:
        """Whether unread bytes may still arrive, so that the connection cannot carry another request."""
        is_sent = b"transfer-encoding" in self._headers or self._headers.get(b"content-length", b"0") != b"0"
        return is_sent and not self._is_read

    async def read(self) -> bytes:
        """Read and return the complete body.

        Raises:
            BadRequestError: The content type is not JSON, the body is compressed or too long, or it arrived too late.
            ClientDisconnectedError: The client closed the connection.
        """
        content_type = self._headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != JSON:
            raise BadRequestError("the content type must be application/json", status=415)
        if self._headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise BadRequestError("the body must not be compressed", "content-encoding", status=415)
        declared = self._headers.get(b"content-length", b"0")
        max_bytes = self._limits.max_body_bytes
        if declared.isdigit() and int(declared[:20]) > max_bytes:
            raise BadRequestError(f"the body must have at most {max_bytes} bytes", status=413)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                body = await _read(self._receive, max_bytes)
        except TimeoutError:
            raise BadRequestError("the body did not arrive in time", status=408) from None
        self._is_read = True
        return body


async def _read(receive: Receive, max_bytes: int) -> bytes:
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise BadRequestError(f"the body must have at most {max_bytes} bytes", status=413)
        if not message.get("more_body", False):
            return b"".join(parts)


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Return the result of `work`; cancel it and raise `ClientDisconnectedError` if the client disconnects first."""
    task = asyncio.current_task()
    is_disconnected = False
    assert task is not None

    async def watch() -> None:
        nonlocal is_disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_disconnected and task.uncancel() == 0:
            raise ClientDisconnectedError from None
        raise
    finally:
        watcher.cancel()


CLIENT_HEADER = b"x-nestrec-client"
_MAX_CLIENT_CHARACTERS = 64


def client_of(address: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client of a request: the forwarded header if `address` is loopback, otherwise the address."""
    if address == "127.0.0.1" or address.startswith("::"):
        for name, value in headers:
            if name == CLIENT_HEADER:
                return value[:_MAX_CLIENT_CHARACTERS].decode("latin-1")
    return address


REQUEST_ID_HEADER = b"x-request-id"
_VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+=-]{1,128}")
"""Valid request ids: no characters that could end a log line or a header, or act as markup."""


def request_id_of(header: bytes | None) -> str:
    """Return the request id of the X-Request-Id header, or a new random one if it is missing or malformed."""
    if header is not None and _VALID_REQUEST_ID.fullmatch(header):
        return header.decode("ascii")
    return secrets.token_hex(8)
