"""Retry policy of the client: exponential backoff with jitter within one deadline per request.

The client waits as long as the server's Retry-After header requests. Requests that are not idempotent are retried only
if the server cannot have processed the previous attempt.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

from nestrec.base.errors import as_sentence, with_period

_RETRYABLE_STATUS = (429, 503)
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.02, 0.5


class RequestError(Exception):
    """The server rejected a request or failed to process it."""

    def __init__(self, message: str, *, status: int = 0, field: str = "", remedy: str = ""):
        """Create the error.

        Args:
            message: Problem that the server reports.
            status: HTTP status of the response; 0 if there was no response.
            field: Field of the request that is invalid; empty if the error does not concern a single field.
            remedy: Fix that the server suggests.
        """
        problem = with_period(f"{field}: {message}" if field else message)
        super().__init__(f"{problem} {as_sentence(remedy)}" if remedy else problem)
        self.message = message
        self.status = status
        self.field = field
        self.remedy = remedy


class ServerBusyError(RequestError):
    """The request did not succeed before the deadline: the server is overloaded or unreachable, for now."""

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float | None = None):
        """Create the error.

        Args:
            message: Problem that the server reports, or the error of the connection.
            status: HTTP status of the last response; 0 if there was no response.
            retry_after_s: Seconds after which the server suggests to retry (Retry-After); None if it suggests nothing.
        """
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s


class RetryState:
    """Retry state of one request: decides whether and when to retry. The caller sends the attempts and waits."""

    def __init__(self, deadline_s: float, *, is_repeatable: bool, now_s: Callable[[], float]):
        """Start the deadline.

        Args:
            deadline_s: Seconds until the deadline of all attempts together.
            is_repeatable: Whether the request is idempotent, so that processing it twice is harmless.
            now_s: Monotonic clock in seconds.
        """
        self._now_s, self._end_s = now_s, now_s() + deadline_s
        self._is_repeatable = is_repeatable
        self._backoff_s = _MIN_BACKOFF_S

    def remaining_s(self) -> float:
        """Return the seconds until the deadline; raise `ServerBusyError` if it has passed."""
        remaining_s = self._end_s - self._now_s()
        if remaining_s <= 0:
            raise ServerBusyError("the deadline has passed")
        return remaining_s

    def handle_response(self, status: int, headers: Mapping[bytes, bytes], body: Any) -> float | None:
        """Return None if the request succeeded, or the seconds to wait before the next attempt.

        Args:
            status: HTTP status of the response.
            headers: Response headers by lower-case name.
            body: Decoded JSON body of the response.

        Raises:
            RequestError: The server rejected the request, and a retry cannot succeed.
            ServerBusyError: A retry is not allowed or would exceed the deadline.
        """
        if status < 400:
            return None
        problem = body.get("error", {}) if isinstance(body, dict) else {}
        message = problem.get("message") or f"the server responded with status {status}"
        if status not in _RETRYABLE_STATUS:
            field, remedy = problem.get("field", ""), problem.get("remedy", "")
            raise RequestError(message, status=status, field=field, remedy=remedy)
        header = headers.get(b"retry-after", b"")
        retry_after_s = float(header) if header.isdigit() else None
        busy = ServerBusyError(message, status=status, retry_after_s=retry_after_s)
        # 429 means that the server did not start the request; after 503 it may have been processed.
        if not self._is_repeatable and status != 429:
            raise busy
        return self._retry_delay_s(retry_after_s, busy)

    def handle_error(self, error: Exception, *, was_sent: bool) -> float:
        """Return the seconds to wait after an attempt without a response.

        Args:
            error: Error of the connection.
            was_sent: Whether the server may have received the request.

        Raises:
            ServerBusyError: A retry is not allowed or would exceed the deadline.
        """
        busy = ServerBusyError(f"the server is not reachable: {error}")
        if was_sent and not self._is_repeatable:
            raise busy from error
        return self._retry_delay_s(None, busy)

    def _retry_delay_s(self, retry_after_s: float | None, busy: ServerBusyError) -> float:
        """Return the server's Retry-After, or an exponential backoff with jitter, which desynchronizes clients."""
        wait_s = retry_after_s
        if wait_s is None:
            wait_s = self._backoff_s * random.uniform(0.5, 1.5)
            self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s)
        if self._now_s() + wait_s >= self._end_s:
            raise busy
        return wait_s
