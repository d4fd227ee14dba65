"""A small HTTP/1.1 client that never queues: a request without an idle connection opens one."""

import asyncio
import contextlib

_MOST_IDLE = 512


class HttpClient:
    """Keeps connections alive; used inside one event loop."""

    def __init__(self, host: str, port: int, *, timeout_s: float = 30.0):
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status (0 where the connection failed) and body of the answer."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        try:
            return await asyncio.wait_for(self._exchange(head.encode() + body), self._timeout_s)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
            return 0, b""

    async def _exchange(self, data: bytes) -> tuple[int, bytes]:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        is_kept = False
        try:
            writer.write(data)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
            body = await reader.readexactly(length)
            is_kept = "connection: close" not in head and len(self._idle) < _MOST_IDLE
            return int(head.split(" ", 2)[1]), body
        finally:
            if is_kept:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
