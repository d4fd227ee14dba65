"""A connection from a front to an instance: HTTP/1.1 with connections that are kept and never shared at a time."""

import asyncio
import contextlib
from dataclasses import dataclass

_MOST_IDLE = 256


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[bytes, bytes]
    """by their names in lower case"""
    body: bytes


class Upstream:
    """One instance. Used inside one event loop."""

    def __init__(self, port: int, *, timeout_s: float = 30.0):
        self.port, self._timeout_s = port, timeout_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, method: str, target: bytes, body: bytes = b"", *, is_repeatable: bool = True) -> Response:
        """Raises OSError, EOFError or TimeoutError where the instance does not answer.

        A connection that was kept may turn out to be closed, and nobody knows what became of the request: one that must
        not be repeated gets a new connection.
        """
        head = (
            f"{method} ".encode() + target + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n"
        )
        async with asyncio.timeout(self._timeout_s):  # wait_for could swallow a cancellation that meets an error
            return await self._exchange(head + body, is_repeatable)

    async def _exchange(self, data: bytes, is_repeatable: bool) -> Response:
        while self._idle and is_repeatable:
            try:
                return await self._on(*self._idle.pop(), data)
            except (OSError, EOFError):  # the instance has closed it since: not a sign of anything, so try another one
                continue
        return await self._on(*await asyncio.open_connection("127.0.0.1", self.port), data)

    async def _on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> Response:
        is_kept = False
        try:
            writer.write(data)
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            headers = {n.lower(): v.strip() for n, _, v in (line.partition(b":") for line in lines[1:] if line)}
            body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
            is_kept = headers.get(b"connection") != b"close" and len(self._idle) < _MOST_IDLE
            return Response(int(lines[0].split(b" ", 2)[1]), headers, body)
        finally:
            if is_kept:
                self._idle.append((reader, writer))
            else:
                writer.close()

    def drop(self) -> None:
        """Forget connections to an instance that is gone."""
        while self._idle:
            self._idle.pop()[1].close()

    async def close(self) -> None:
        """End the connections that are kept."""
        while self._idle:
            writer = self._idle.pop()[1]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
