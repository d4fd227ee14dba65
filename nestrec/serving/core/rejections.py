class RequestRejectedError(Exception):
    """A request was rejected by admission control; the client may retry after `retry_after_s` seconds."""

    def __init__(self, reason: str, retry_after_s: float):
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class OverloadedError(RequestRejectedError):
    """The queued work cannot be finished in time (load shedding)."""


class UnavailableError(RequestRejectedError):
    """The engine is stopping or has failed, or the deadline passed before the request was scheduled."""
