"""Request limits, errors of bad requests, and the source and id of the request that an asyncio task serves.

The source identifies the client, because the engine shares device time fairly among clients.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from nestrec.base.config import config
from nestrec.base.config_values import Count, Positive
from nestrec.base.errors import UserError


@config
class LimitsConfig:
    max_body_bytes: Count = 1 << 20
    """Maximum size of a request body in bytes; larger requests are rejected with status 413."""
    max_header_bytes: Count = 1 << 14
    """Maximum size of request line and headers together in bytes; larger requests are rejected with status 431."""
    max_history_events: Count = 20_000
    """Maximum number of history events in a request; longer histories are rejected, not truncated."""
    max_candidates: Count = 2048
    """Maximum number of candidate items in a ranking request."""
    max_k: Count = 1000
    """Maximum number of items that a recommendation request may ask for (`k`)."""
    max_list_items: Count = 20_000
    """Maximum number of items in the exclude list or allow list of a recommendation request."""
    max_user_id_length: Count = 256
    """Maximum number of characters of a user id."""
    max_item_id_length: Count = 256
    """Maximum number of characters of an item id."""
    max_text_length: Count = 4096
    """Maximum number of characters of a feature value: a category name or a text."""
    max_timeout_ms: Count = 10_000
    """Maximum deadline that a request may set, in milliseconds."""
    default_timeout_ms: Count = 1_000
    """Deadline of requests that set none, in milliseconds."""
    expose_cache_source: bool = False
    """Whether responses contain the cache source: whether the history was cached and in which tier. For measurements
    only, because it allows a client to check a guess of another user's history."""
    header_timeout_s: Positive = 10.0
    """Seconds within which request line and headers must arrive."""
    body_timeout_s: Positive = 5.0
    """Seconds within which a request body must arrive."""
    write_timeout_s: Positive = 10.0
    """Seconds after which a connection is closed if the client does not read its responses."""
    max_connections: Count = 2048
    """Maximum number of open connections; new connections replace idle ones."""
    max_connections_per_address: Count = 1024
    """Maximum number of open connections from one address (for IPv6, from one /64 network)."""

    def __post_init__(self) -> None:
        if self.default_timeout_ms > self.max_timeout_ms:
            raise UserError(
                "must not exceed --limits.max_timeout_ms",
                option="limits.default_timeout_ms",
                value=self.default_timeout_ms,
                remedy=f"set --limits.max_timeout_ms {self.default_timeout_ms} as well",
            )


class BadRequestError(Exception):
    """Error of a malformed or unsupported request, reported to the client."""

    def __init__(self, message: str, field: str = "", status: int = 400, *, remedy: str = ""):
        """Create the error.

        Args:
            message: Description of the problem.
            field: Field of the request body that has the problem, or empty.
            status: HTTP status of the response.
            remedy: What the client can do about it, if the message does not include it.
        """
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status
        self.remedy = remedy


class MissingInputError(BadRequestError):
    """The request lacks an input that the model reads, and the exported model defines no default value for it."""

    def __init__(self, field: str):
        super().__init__("is required: the model reads it, and the exported model defines no default value", field)


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Client that sent a request, with the request's size and transit times."""

    client: str = ""
    num_bytes: int = 0
    """Size of the request body in bytes; 0 if unknown."""
    received_s: float = 0.0
    """Time at which the request was completely received, on the `perf_counter` clock that all processes share; 0 if
    unknown."""
    return_transit_s: float = 0.0
    """Transit time from the engine to the frontend of the last response that the frontend received, in seconds."""


UNKNOWN_SOURCE = RequestSource()
current_sender: ContextVar[RequestSource] = ContextVar("nestrec_sender", default=UNKNOWN_SOURCE)
"""Source of the request that the current task serves."""
current_request_id: ContextVar[str] = ContextVar("nestrec_request_id", default="")
"""Id of the request that the current task serves."""
