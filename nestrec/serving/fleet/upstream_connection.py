"""A connection from a front to an instance: HTTP/1.1 with connections that are kept and never shared at a time."""

import asyncio
import contextlib
from dataclasses import dataclass

from nestrec.serving.core import tracing
from nestrec.serving.core.asgi import CLIENT_HEADER, REQUEST_ID_HEADER
from nestrec.serving.core.request_limits import current_request_id
from nestrec.serving.security import security_config

_MOST_IDLE = 256
_LONGEST_S = 30.0
_WITHOUT_BODY = (204, 304)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[bytes, bytes]
    """by their names in lower case"""
    body: bytes


def _named(client: str) -> bytes:
    """Headers that tell an instance whose request it is, and by which name."""
    id_of_request = current_request_id.get()
    named = b"%s: %s\r\n" % (CLIENT_HEADER, client.encode("latin-1")) if client else b""
    return named + (b"%s: %s\r\n" % (REQUEST_ID_HEADER, id_of_request.encode()) if id_of_request else b"")


class Upstream:
    """One instance. Used inside one event loop."""

    def __init__(self, port: int):
        self.port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(
        self,
        method: str,
        target: bytes,
        body: bytes = b"",
        *,
        client: str = "",
        is_repeatable: bool = True,
        timeout_s: float = _LONGEST_S,
    ) -> Response:
        """client: whom the request comes from, by address.

        Raises OSError or EOFError where the instance does not answer, or not in HTTP, TimeoutError where not in time.

        A connection that was kept may turn out to be closed, and nobody knows what became of the request: one that must
        not be repeated gets a new connection.
        """
        with tracing.sending(self.port) as trace:
            head = (
                f"{method} ".encode()
                + target
                + f" HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n".encode()
                + _named(client)
                + trace
                + b"%s: %s\r\n" % (security_config.HEADER, security_config.front_secret().encode())
                + b"content-type: application/json\r\ncontent-length: "
                + str(len(body)).encode()
                + b"\r\n\r\n"
            )
            async with asyncio.timeout(timeout_s):  # wait_for could swallow a cancellation that meets an error
                return await self._exchange(method, head + body, is_repeatable)

    async def _exchange(self, method: str, data: bytes, is_repeatable: bool) -> Response:
        while self._idle and is_repeatable:
            try:
                return await self._on(*self._idle.pop(), method, data)
            except (OSError, EOFError):  # the instance has closed it since: not a sign of anything, so try another one
                continue
        return await self._on(*await asyncio.open_connection("127.0.0.1", self.port), method, data)

    async def _on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, data: bytes
    ) -> Response:
        is_kept = False
        try:
            writer.write(data)
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            headers = {n.lower(): v.strip() for n, _, v in (line.partition(b":") for line in lines[1:] if line)}
            status = int(lines[0].split(b" ", 2)[1])
            has_body = method != "HEAD" and status not in _WITHOUT_BODY  # else the length is of what is not sent
            body = await reader.readexactly(int(headers.get(b"content-length", b"0"))) if has_body else b""
            is_kept = headers.get(b"connection") != b"close" and len(self._idle) < _MOST_IDLE
            return Response(status, headers, body)
        except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise ConnectionError(f"port {self.port} does not answer in HTTP") from error
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
