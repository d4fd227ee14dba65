"""When a request is sent again: within one deadline, as the server asks, and never where it could count twice."""

import random
from collections.abc import Callable, Mapping
from typing import Any

_COMES_BACK = (429, 503)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class RequestError(Exception):
    """The server does not answer as asked: what is wrong with the request, or with the server."""

    def __init__(self, message: str, *, status: int = 0, field: str = "", remedy: str = ""):
        """status: of the answer, 0 if there was none. field: of the request, if one of them is wrong. remedy: what the
        server proposes."""
        super().__init__((f"{field}: {message}" if field else message) + (f"\n  remedy: {remedy}" if remedy else ""))
        self.message = message
        self.status = status
        self.field = field
        self.remedy = remedy


class ServerBusyError(RequestError):
    """No answer before the deadline: the server refuses for now, or is not reached. Later it may."""

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float | None = None):
        """retry_after_s: when the server asks to come back."""
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s


class RetryState:
    """Of one request. What is sent, and how one waits, is the business of whoever uses it."""

    def __init__(self, deadline_s: float, *, is_repeatable: bool, now_s: Callable[[], float]):
        """is_repeatable: it changes nothing, or may be done twice."""
        self._now_s, self._end_s = now_s, now_s() + deadline_s
        self._is_repeatable = is_repeatable
        self._pause_s = _FIRST_PAUSE_S

    def left_s(self) -> float:
        """Until the deadline; `ServerBusyError` where it has passed."""
        left_s = self._end_s - self._now_s()
        if left_s <= 0:
            raise ServerBusyError("the deadline has passed")
        return left_s

    def answered(self, status: int, headers: Mapping[bytes, bytes], body: Any) -> float | None:
        """Return None if a response is the answer, or the seconds to wait before the next attempt; else raise.

        headers: Headers of the response by their names in lower case."""
        if status < 400:
            return None
        problem = body.get("error", {}) if isinstance(body, dict) else {}
        message = problem.get("message") or f"the server answers with status {status}"
        if status not in _COMES_BACK:
            field, remedy = problem.get("field", ""), problem.get("remedy", "")
            raise RequestError(message, status=status, field=field, remedy=remedy)
        after = headers.get(b"retry-after", b"")
        retry_after_s = float(after) if after.isdigit() else None
        busy = ServerBusyError(message, status=status, retry_after_s=retry_after_s)
        # 429 says that nothing was begun; after 503 nobody may know.
        if not self._is_repeatable and status != 429:
            raise busy
        return self._waited(retry_after_s, busy)

    def failed(self, error: Exception, *, was_sent: bool) -> float:
        """Seconds to wait after an attempt without an answer. was_sent: the server may have got it."""
        busy = ServerBusyError(f"the server is not reached: {error}")
        if was_sent and not self._is_repeatable:
            raise busy from error
        return self._waited(None, busy)

    def _waited(self, asked_s: float | None, busy: ServerBusyError) -> float:
        """As long as the server asks for; else ever longer, and not all clients at one moment."""
        wait_s = asked_s
        if wait_s is None:
            wait_s = self._pause_s * random.uniform(0.5, 1.5)
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        if self._now_s() + wait_s >= self._end_s:
            raise busy
        return wait_s
