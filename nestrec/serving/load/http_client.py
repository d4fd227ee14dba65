"""A small HTTP/1.1 client that never queues: a request without an idle connection opens one.

Plain protocols and not streams: a load generator shares the machine with the server that it measures.
"""

import asyncio
import contextlib
import http.client
import ssl
from dataclasses import dataclass

_MOST_OPEN = 900


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back; status 0 where the connection failed."""

    status: int
    head: bytes = b""
    """status line and headers in lower case"""
    body: bytes = b""

    def header(self, name: bytes) -> bytes:
        """Value of a header, empty where it is not there."""
        return self.head.partition(b"\r\n" + name + b":")[2].partition(b"\r\n")[0].strip()


class HttpClient:
    """Keeps connections alive; used inside one event loop. More than 900 requests under way at a time fail."""

    def __init__(
        self, host: str, port: int, *, key: str = "", timeout_s: float = 30.0, context: ssl.SSLContext | None = None
    ):
        """key: of a server that asks for one. context: of a server with TLS."""
        self._context = context
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._credential = f"authorization: Bearer {key}\r\n" if key else ""
        self._idle: list[_Connection] = []
        self._num_open = 0

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a request on a connection of its own."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"{self._credential}content-length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(head.encode() + body)
        except (OSError, EOFError, TimeoutError, ValueError):
            return Reply(0)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    async def _exchange(self, data: bytes) -> Reply:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                break
            self._num_open -= 1
        else:
            connection = await self._opened()
        is_kept = False
        try:
            reply = await connection.send(data)
            is_kept = reply.header(b"connection") != b"close"
            return reply
        finally:
            if is_kept:
                self._idle.append(connection)
            else:
                self._num_open -= 1
                connection.transport.close()

    async def _opened(self) -> "_Connection":
        if self._num_open >= _MOST_OPEN:
            raise OSError("too many requests are under way")
        self._num_open += 1
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._context)
        except BaseException:
            self._num_open -= 1
            raise
        return connection


def remedy_without_answer(reason: object) -> str:
    """Return what to do about a server that does not answer, by the error that was raised."""
    match reason:
        case ssl.SSLCertVerificationError():
            return "set SSL_CERT_FILE to the certificate of whoever has signed the server's, and ask by a name in that"
        case ssl.SSLError():
            return "see that a nestrec server with TLS listens there; one without is asked by http://"
        case http.client.HTTPException():  # also if the connection was closed without an answer
            return "see that a nestrec server listens there; one with TLS is asked by https://"
    return "see that a nestrec server listens there"


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._reply: asyncio.Future[Reply] | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self.is_lost = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._closed.set_result(None)
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(exc or EOFError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or self._reply is None or self._reply.done():
            return
        head = Reply(0, bytes(self._received[: end + 2]).lower())
        length = int(head.header(b"content-length") or 0)
        if len(self._received) >= end + 4 + length:
            status = int(head.head.split(b" ", 2)[1])
            body = bytes(self._received[end + 4 : end + 4 + length])
            del self._received[: end + 4 + length]
            self._reply.set_result(Reply(status, head.head, body))

    async def send(self, data: bytes) -> Reply:
        self._reply = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self._reply

    async def close(self) -> None:
        self.transport.close()
        with contextlib.suppress(OSError):
            await self._closed
