"""Transports of the clients over httpx, for programs with an event loop and for those without.

They are imported when a client is made: not with `nestrec.client`, which programs import that never make one, and not
with the first call, whose deadline would include the import.
"""

import asyncio
import time
from typing import Any

import httpx

from nestrec.client.client_transport import NotSentError
from nestrec.serving.core.http_client import Request, Response


class AsyncHttpx:
    """Sends requests by httpx in the running event loop."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None):
        self._http = httpx.AsyncClient(transport=transport)

    async def send(self, request: Request, *, timeout_s: float) -> Response:
        try:
            return _response(await self._http.request(**_arguments(request, timeout_s)))
        except httpx.TransportError as error:
            raise _plain(error) from error

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._http.aclose()


class BlockingHttpx:
    """Sends requests by httpx in the calling thread; several threads may do so at the same time."""

    def __init__(self, transport: httpx.BaseTransport | None = None):
        self._http = httpx.Client(transport=transport)

    async def send(self, request: Request, *, timeout_s: float) -> Response:
        try:
            return _response(self._http.request(**_arguments(request, timeout_s)))
        except httpx.TransportError as error:
            raise _plain(error) from error

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        self._http.close()


def _arguments(request: Request, timeout_s: float) -> dict[str, Any]:
    return {
        "method": request.method,
        "url": request.url,
        "headers": dict(request.headers),
        "content": request.body or None,
        "timeout": timeout_s,
    }


def _response(response: httpx.Response) -> Response:
    headers = {name.lower(): value for name, value in response.headers.raw}
    return Response(response.status_code, headers, response.content)


def _plain(error: httpx.TransportError) -> OSError:
    """Return the same error as one that needs no httpx to be understood."""
    match error:
        case httpx.TimeoutException():
            return TimeoutError(str(error))
        case httpx.ConnectError():
            return NotSentError(str(error))
    return ConnectionError(str(error))
