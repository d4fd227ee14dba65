"""Interface and options of the history store, which holds the events of users between requests.

The server reads the history of a user from the store if a request does not contain one. The options select the backend
(the memory of the process, or a Redis or Valkey server shared by all instances) and bound how many events it retains.
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from nestrec.base.config import config
from nestrec.base.config_values import Count, Positive
from nestrec.base.errors import UserError
from nestrec.serving.core.rejections import UnavailableError

RawHistory = Mapping[str, Any]
"""The columns `items`, `times_ms`, `actions` and `features`, as in the `history` field of a request."""
_SCHEMES = ("redis", "rediss", "unix")
_FROM_ENVIRONMENT = "env:"


class HistoryStoreUnavailableError(UnavailableError):
    """The store is unreachable, timed out, or rejects writes; the client should retry after `retry_after_s` seconds."""

    def __init__(self, reason: str, retry_after_s: float = 1.0):
        super().__init__(reason, retry_after_s)


@config
class HistoryStoreConfig:
    """Options of the history store."""

    url: str = ""
    """URL of a Redis or Valkey server shared by all instances: redis://HOST:PORT/NUMBER, rediss:// or unix://; env:NAME
    reads the URL from an environment variable, which keeps a password out of the process list. Empty stores histories
    in the memory of this process."""
    key_prefix: str = "nestrec"
    """Prefix of all keys in a shared store; servers that must not share histories need different prefixes."""
    timeout_ms: Positive = 100.0
    """Timeout of a request to a shared store, in milliseconds; a client request that needs the store is rejected after
    it."""
    max_connections: Count = 8
    """Maximum number of connections of each process to a shared store."""
    ttl_s: Positive | None = None
    """Time after which the events of a user are deleted, in seconds since the last append; none disables expiry."""
    max_users: Count = 100_000
    """Maximum number of users in the memory of this process; the least recently used are evicted."""
    max_events: Count = 20_000
    """Maximum number of events retained per user; the oldest are deleted."""
    max_user_bytes: Count = 1 << 20
    """Maximum size of the events of one user, in bytes; the oldest are deleted."""
    max_bytes: Count = 1 << 28
    """Maximum size of all histories in the memory of this process, in bytes; the least recently used users are
    evicted."""

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(_FROM_ENVIRONMENT) and urlsplit(self.url).scheme not in _SCHEMES:
            remedy = "use redis://HOST:PORT/NUMBER, rediss://, unix://PATH, or env:NAME"
            shown = urlsplit(self.url).scheme if "@" in self.url else self.url  # without a password
            raise UserError(
                "unsupported URL of a history store", option="history_store.url", value=shown, remedy=remedy
            )

    @property
    def is_shared(self) -> bool:
        """Whether all instances read and write the same histories."""
        return bool(self.url)

    def address(self) -> str:
        """Return the URL, resolved from the environment variable if `url` is env:NAME."""
        if not self.url.startswith(_FROM_ENVIRONMENT):
            return self.url
        name = self.url.removeprefix(_FROM_ENVIRONMENT)
        url = os.environ.get(name, "")
        if urlsplit(url).scheme not in _SCHEMES:
            remedy = f"set {name} to redis://HOST:PORT/NUMBER"
            raise UserError(
                "the environment variable does not contain the URL of a history store",
                option="history_store.url",
                value=self.url,
                remedy=remedy,
            )
        return url


class HistoryStore(Protocol):
    """Backend that stores the events of users.

    Use a store from one event loop, which it never blocks. Each method raises `HistoryStoreUnavailableError` after
    `timeout_s` seconds at most, and immediately while the backend is known to be unavailable.
    """

    async def get(self, user: str, timeout_s: float) -> RawHistory | None:
        """Return the events of a user, oldest first, or None if the store has none."""
        ...

    async def append(self, user: str, events: RawHistory, timeout_s: float) -> int | None:
        """Add events of a user; late events are sorted in by time.

        Returns:
            Number of events that the user has now, or None if the store does not count them.
        """
        ...

    async def forget(self, user: str, timeout_s: float) -> None:
        """Delete all events of a user."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
