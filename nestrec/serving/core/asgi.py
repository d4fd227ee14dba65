"""HTTP values of the server: requests, responses, headers, allowed hosts.

Under which names a server may be asked.

A page of any web site can make its own name point to a loopback address, and then ask a server there as if it were its
own. A browser still tells the name that it was given: where nobody but this machine is served, a name is refused unless
it is this machine's.

The ASGI side: bodies within their limits, answers as JSON, and nothing of a request in a log.

A frontend on this machine names its client in the header X-Nestrec-Client. For any other peer the address counts, which
it cannot make up. A request keeps the id of its header X-Request-Id if that is sound, and gets a new one otherwise.
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

_MOST_REMEMBERED = 1024


class AllowedHosts:
    """Names that may stand in the header Host. Addresses may always: nobody can make them point elsewhere."""

    def __init__(self, listens_on: str, names: Sequence[str] = ()):
        """names: of this server, or `*`; none of them: any name, unless it listens on a loopback address."""
        self._names = {name.lower().rstrip(".") for name in (*names, listens_on, "localhost")}
        self._takes_any = "*" in names if names else not is_loopback(listens_on)
        self._known: dict[bytes, bool] = {}

    def __contains__(self, header: bytes) -> bool:
        is_known = self._known.get(header)
        if is_known is None:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            is_known = self._known[header] = self._takes_any or self._is_ours(header.decode("latin-1"))
        return is_known

    def _is_ours(self, header: str) -> bool:
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
"""Longest time after which a client is asked to try again; a rate that is close to 0 would make it infinite."""
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}


class ClientDisconnectedError(Exception):
    """The client has gone; nobody waits for the answer."""


class HttpResponse:
    """Status, body and headers of an answer."""

    __slots__ = ("body", "headers", "is_counted", "status")

    def __init__(self, status: int, body: bytes, content_type: bytes = JSON, *headers: Header):
        self.status = status
        self.body = body
        self.is_counted = False
        """it has been, where it comes from"""
        self.headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]

    def as_http(self, more_headers: Iterable[Header] = (), *, is_last: bool = False) -> bytes:
        """The whole answer as HTTP/1.1. is_last: the connection is closed after it."""
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
    except Exception as error:  # Any other exception is caused by the body too: a client must not fill the log with it.
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
    """What counts of a head."""
    size = len(target)
    for name, value in headers:
        size += len(name) + len(value) + 4
    return size


def too_long_head(limits: LimitsConfig) -> BadRequestError:
    return BadRequestError(f"path and headers must have at most {limits.max_header_bytes} bytes", status=431)


def check_head(scope: Scope, limits: LimitsConfig) -> None:
    """The protocol bounds what is buffered; a longer head that arrives in one piece is found here."""
    if head_bytes(scope["raw_path"] + scope["query_string"], scope["headers"]) > limits.max_header_bytes:
        raise too_long_head(limits)


class Body:
    """The body of a request, declared or chunked, within its limits of size and time."""

    def __init__(self, scope: Scope, receive: Receive, limits: LimitsConfig):
        self._headers = dict(scope["headers"])
        self._receive = receive
        self._limits = limits
        self._is_read = False

    @property
    def is_unread(self) -> bool:
        """Some of it may still come: the connection is of no use for another request."""
        is_sent = b"transfer-encoding" in self._headers or self._headers.get(b"content-length", b"0") != b"0"
        return is_sent and not self._is_read

    async def read(self) -> bytes:
        """All of it."""
        content_type = self._headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != JSON:
            raise BadRequestError("the content type must be application/json", status=415)
        if self._headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise BadRequestError("the body must not be compressed", "content-encoding", status=415)
        declared = self._headers.get(b"content-length", b"0")
        most = self._limits.max_body_bytes
        if declared.isdigit() and int(declared[:20]) > most:
            raise BadRequestError(f"the body must have at most {most} bytes", status=413)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                body = await _read(self._receive, most)
        except TimeoutError:
            raise BadRequestError("the body did not arrive in time", status=408) from None
        self._is_read = True
        return body


async def _read(receive: Receive, most: int) -> bytes:
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise BadRequestError(f"the body must have at most {most} bytes", status=413)
        if not message.get("more_body", False):
            return b"".join(parts)


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of `work`, which is cancelled when the client goes away."""
    task = asyncio.current_task()
    is_gone = False
    assert task is not None

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnectedError from None
        raise
    finally:
        watcher.cancel()


CLIENT_HEADER = b"x-nestrec-client"
_MOST_CHARACTERS = 64


def client_of(address: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client of a request that came from an address."""
    if address == "127.0.0.1" or address.startswith("::"):
        for name, value in headers:
            if name == CLIENT_HEADER:
                return value[:_MOST_CHARACTERS].decode("latin-1")
    return address


REQUEST_ID_HEADER = b"x-request-id"
_SOUND = re.compile(rb"[A-Za-z0-9._:+=-]{1,128}")
"""nothing that could end a line of a log or of a head, or be markup"""


def request_id_of(given: bytes | None) -> str:
    """What is too long or holds other characters is not taken over, and not repeated either."""
    if given is not None and _SOUND.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(8)
