class RequestRejectedError(Exception):
    """A request that is not served now; the caller may come back after a while."""

    def __init__(self, reason: str, retry_after_s: float):
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class OverloadedError(RequestRejectedError):
    """More work waits than can be done in time."""


class UnavailableError(RequestRejectedError):
    """The engine is stopping or has failed, or the deadline passed before the work began."""
