"""What a client needs of its transport, and how the same methods run without an event loop.

The methods of a client are coroutines. A transport that blocks never suspends them, so `run_blocking` runs them to
their end in the calling thread. It needs neither an event loop (so it also works within the one of a notebook) nor a
second thread.
"""

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

from nestrec.serving.core.http_client import Request, Response

_T = TypeVar("_T")


class NotSentError(ConnectionError):
    """No connection was made, so the server cannot have received the request."""


@runtime_checkable
class Transport(Protocol):
    """Sends the requests of a client and waits between its attempts."""

    async def send(self, request: Request, *, timeout_s: float) -> Response:
        """Send a request and return its response, whatever its status.

        Raises:
            TimeoutError: The response did not arrive in time.
            NotSentError: The server cannot have received the request.
            OSError: The connection failed; the server may have received the request. An EOFError means the same.
        """
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait between two attempts."""
        ...

    async def close(self) -> None:
        """Close the connections that are kept."""
        ...


def run_blocking(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never suspends and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: _T = finished.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking client waits for an event loop: give it a transport that blocks")
