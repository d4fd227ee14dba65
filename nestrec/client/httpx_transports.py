"""Transports of the client over httpx: `AsyncHttpx` for asyncio and `BlockingHttpx` for blocking calls.

The module is imported when a client is created. It is not imported with `nestrec.client`, because programs may import
that without creating a client, and not by the first call, because its deadline would include the time of the import.
"""

import asyncio
import time
from typing import Any

import httpx

from nestrec.client.client_transport import NotSentError
from nestrec.serving.core.http_client import Request, Response


class AsyncHttpx:
    """Transport that sends requests with httpx in the running event loop."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None):
        self._http = httpx.AsyncClient(transport=transport)

    async def send(self, request: Request, *, timeout_s: float) -> Response:
        try:
            return _response(await self._http.request(**_arguments(request, timeout_s)))
        except httpx.TransportError as error:
            raise _builtin_error(error) from error

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._http.aclose()


class BlockingHttpx:
    """Blocking transport that sends requests with httpx in the calling thread. Thread-safe."""

    def __init__(self, transport: httpx.BaseTransport | None = None):
        self._http = httpx.Client(transport=transport)

    async def send(self, request: Request, *, timeout_s: float) -> Response:
        try:
            return _response(self._http.request(**_arguments(request, timeout_s)))
        except httpx.TransportError as error:
            raise _builtin_error(error) from error

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


def _builtin_error(error: httpx.TransportError) -> OSError:
    """Return the built-in exception that corresponds to an error of httpx, as the `Transport` interface requires."""
    match error:
        case httpx.TimeoutException():
            return TimeoutError(str(error))
        case httpx.ConnectError():
            return NotSentError(str(error))
    return ConnectionError(str(error))
