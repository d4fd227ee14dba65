"""The ASGI side: bodies within their limits, answers as JSON, and nothing of a request in a log."""

import asyncio
import http
import math
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import orjson

from nestrec.serving.api.schema import BadRequestError, LimitsConfig

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")
JSON = b"application/json"


class DisconnectedError(Exception):
    """The client has gone; nobody waits for the answer."""


class Answered:
    """Status, body and headers of an answer."""

    def __init__(self, status: int, body: bytes, content_type: bytes = JSON, *headers: tuple[bytes, bytes]):
        self.status, self.body = status, body
        self.headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]

    def as_http(self) -> bytes:
        """The whole answer as HTTP/1.1, on a connection that stays open."""
        status = http.HTTPStatus(self.status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        lines += [name + b": " + value for name, value in self.headers]
        return b"\r\n".join([*lines, b"", self.body])

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def as_json(value: Any, status: int = 200, *headers: tuple[bytes, bytes]) -> Answered:
    return Answered(status, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), JSON, *headers)


def problem(status: int, message: str, field: str = "", *headers: tuple[bytes, bytes]) -> Answered:
    error = {"message": message, **({"field": field} if field else {})}
    return as_json({"error": error}, status, *headers)


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    return b"retry-after", str(max(1, math.ceil(seconds))).encode()


def check_head(scope: Scope, limits: LimitsConfig) -> None:
    """The parser bounds what it buffers; a longer head that arrives in one piece is found here."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > limits.max_header_bytes:
        raise BadRequestError(f"path and headers must have at most {limits.max_header_bytes} bytes", status=431)


async def read_body(scope: Scope, receive: Receive, limits: LimitsConfig) -> bytes:
    """The whole body, declared or chunked, within its limits of size and time."""
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", JSON).split(b";")[0].strip().lower()
    if content_type != JSON:
        raise BadRequestError("the content type must be application/json", status=415)
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > limits.max_body_bytes:
        raise BadRequestError(f"the body must have at most {limits.max_body_bytes} bytes", status=413)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read(receive, limits.max_body_bytes)
    except TimeoutError:
        raise BadRequestError("the body did not arrive in time", status=408) from None


async def _read(receive: Receive, most: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise BadRequestError(f"the body must have at most {most} bytes", status=413)
        if not message.get("more_body", False):
            return b"".join(parts)


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of `work`, which is cancelled when the client goes away."""
    task, is_gone = asyncio.current_task(), False
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
            raise DisconnectedError from None
        raise
    finally:
        watcher.cancel()
