"""Transport interface of the client, and `run_blocking`, which runs its coroutines without an event loop.

The methods of a client are coroutines. A blocking transport never suspends them, so `run_blocking` runs them to
completion in the calling thread. This needs neither an event loop nor a second thread, so it also works inside the
running event loop of a notebook.
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
        """Close the connection pool."""
        ...


def run_blocking(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never suspends and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: _T = finished.value
        return result
    coroutine.close()
    raise RuntimeError("the transport of a blocking client suspended: pass a blocking transport, or use AsyncClient")
