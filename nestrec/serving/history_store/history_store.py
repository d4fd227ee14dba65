"""Where histories come from when a request brings none, and how much of them is kept."""

import os
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from nestrec.base.config import config
from nestrec.base.config_values import Count, Positive
from nestrec.base.errors import UserError
from nestrec.serving.core.rejections import UnavailableError

RawHistory = Mapping[str, Any]
"""`items`, `times_ms`, `actions` and `features` as in the `history` of a request."""
_SCHEMES = ("redis", "rediss", "unix")
_FROM_ENVIRONMENT = "env:"


class HistoryStoreUnavailableError(UnavailableError):
    """The store does not answer, or not in time, or takes no more: whatever needs it must come back later."""

    def __init__(self, reason: str, retry_after_s: float = 1.0):
        super().__init__(reason, retry_after_s)


@config
class HistoryStoreConfig:
    url: str = ""
    """redis://HOST:PORT/NUMBER (or rediss://, unix://) of a Redis or Valkey that all instances share, or env:NAME of a
    variable that holds it, which keeps a password out of the list of processes; empty: the memory of this process"""
    prefix: str = "nestrec"
    """what keys in a shared store begin with: servers that are not to share histories have different ones"""
    timeout_ms: Positive = 100.0
    """that a shared store may take; a request that needs it is refused after that"""
    max_connections: Count = 8
    """to a shared store, from each process"""
    ttl_s: Positive | None = None
    """a user's events are forgotten so long after the last of them came; none: never"""
    max_users: Count = 100_000
    """in the memory of this process; the least recently used are forgotten beyond it"""
    max_events: Count = 20_000
    """newest events kept of a user"""
    max_user_bytes: Count = 1 << 20
    """of the newest events of a user"""
    max_bytes: Count = 1 << 28
    """of all users in the memory of this process; the least recently used are forgotten beyond it"""

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(_FROM_ENVIRONMENT) and urlsplit(self.url).scheme not in _SCHEMES:
            remedy = "give redis://HOST:PORT/NUMBER, rediss://, unix://PATH, or env:NAME"
            shown = urlsplit(self.url).scheme or self.url
            raise UserError("is no address of a store", option="histories.url", value=shown, remedy=remedy)

    @property
    def is_shared(self) -> bool:
        """Any instance reads what any other has written."""
        return bool(self.url)

    def address(self) -> str:
        """The url itself, from the environment where that has it."""
        if not self.url.startswith(_FROM_ENVIRONMENT):
            return self.url
        name = self.url.removeprefix(_FROM_ENVIRONMENT)
        found = os.environ.get(name, "")
        if urlsplit(found).scheme not in _SCHEMES:
            remedy = f"set {name} to redis://HOST:PORT/NUMBER"
            raise UserError("names no address of a store", option="histories.url", value=self.url, remedy=remedy)
        return found


class HistoryStore(Protocol):
    """Used inside one event loop, which it never blocks. Each method raises `HistoryStoreUnavailableError` after
    `timeout_s`, and sooner where nothing can be expected."""

    async def get(self, user: str, timeout_s: float) -> RawHistory | None:
        """The events of a user, oldest first; none where nothing is known."""
        ...

    async def append(self, user: str, events: RawHistory, timeout_s: float) -> int | None:
        """Add events, late ones in their place, and return how many the user has now; none where nobody counts."""
        ...

    async def forget(self, user: str, timeout_s: float) -> None: ...

    async def close(self) -> None: ...
