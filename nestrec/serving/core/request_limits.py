"""Limits and errors of requests, and the sender and id of the request that a task serves.

The device's time is shared among the senders of requests.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from nestrec.base.config import config
from nestrec.base.config_values import Count, Positive
from nestrec.base.errors import UserError


@config
class LimitsConfig:
    max_body_bytes: Count = 1 << 20
    """largest body of a request, declared or sent; a larger one is refused"""
    max_header_bytes: Count = 1 << 14
    """largest request line and headers together; more is refused"""
    max_history: Count = 20_000
    """most events that a request may bring; a longer history is refused, not cut"""
    max_candidates: Count = 2048
    """most items that a ranking request may ask about"""
    max_k: Count = 1000
    """most items that a recommendation may ask for"""
    max_listed: Count = 20_000
    """items that a recommendation excludes, or is bound to"""
    max_user_characters: Count = 256
    """longest user id"""
    max_id_characters: Count = 256
    """longest item id"""
    max_text_characters: Count = 4096
    """longest value of a feature: a category's name, or a text"""
    max_timeout_ms: Count = 10_000
    """longest deadline a request may ask for"""
    default_timeout_ms: Count = 1_000
    """deadline of a request that names none"""
    tells_prefix: bool = False
    """answers tell whether the history was known, and where it was kept: for measurements, since whoever asks can so
    find out whether a guess of a user's history is right"""
    head_timeout_s: Positive = 10.0
    """request line and headers must have arrived by then"""
    body_timeout_s: Positive = 5.0
    """a body must have arrived by then"""
    answer_timeout_s: Positive = 10.0
    """a client must go on reading its answers by then"""
    max_connections: Count = 2048
    """open at a time; those that ask nothing give way to new ones"""
    max_connections_an_address: Count = 1024
    """open at a time from one address (for IPv6, from one network of 64 bits)"""

    def __post_init__(self) -> None:
        if self.default_timeout_ms > self.max_timeout_ms:
            raise UserError(
                "is longer than a request may ask for",
                option="limits.default_timeout_ms",
                value=self.default_timeout_ms,
                remedy=f"give --limits.max_timeout_ms {self.default_timeout_ms} as well",
            )


class BadRequestError(Exception):
    """What is wrong with a request, for the one who sent it."""

    def __init__(self, message: str, field: str = "", status: int = 400, *, remedy: str = ""):
        """remedy: what the sender can do, if that is not part of the message."""
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status
        self.remedy = remedy


class MissingInputError(BadRequestError):
    """The model reads something that nobody told, and its export names no default."""

    def __init__(self, field: str):
        super().__init__("is needed: the model reads it, and its export names no default", field)


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Of one request."""

    client: str = ""
    num_bytes: int = 0
    """of its body; 0 where nobody knows"""
    began_s: float = 0.0
    """`perf_counter` when all of it had come, which all processes share; 0 where nobody knows"""
    back_s: float = 0.0
    """for which the last answer that its front has got was on its way back from an engine"""


NOBODY = RequestSource()
current_sender: ContextVar[RequestSource] = ContextVar("nestrec_sender", default=NOBODY)
"""of the request that this task serves"""
current_request_id: ContextVar[str] = ContextVar("nestrec_request_id", default="")
"""of the request that this task serves"""
