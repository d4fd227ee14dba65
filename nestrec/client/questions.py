"""What is asked: method, path, body and headers of each request. Names of fields are those of the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypedDict, cast
from urllib.parse import quote

Id = str | int
Category = str | int | float | bool | None
Value = Category | Sequence[Category]
"""what the log has of a feature: a category, a number, a text, a list of categories, or the numbers of a vector"""
Action = int | str | Sequence[str] | None
"""a name, several names, the sum of their bits, or nothing that is known"""
Unknown = Literal["last", "score", "drop", "refuse"]
_LONGEST_MS = 10_000
"""deadline that a server takes by default"""


class UserHistory(TypedDict, total=False):
    """Events of a user, oldest first."""

    items: Sequence[Id]
    """source ids"""
    times_ms: Sequence[int]
    """Unix milliseconds of each event"""
    actions: Sequence[Action]
    """what the user did at each event"""
    features: Mapping[str, Sequence[Value]]
    """by name of a feature, a value an event"""


@dataclass(frozen=True, slots=True)
class ServerQuestion:
    """One request."""

    method: str
    path: str
    user: Id | None = None
    """whom it is about"""
    body: Mapping[str, Any] | None = None
    is_repeatable: bool = True
    has_deadline: bool = False
    """the server is told how long it may take"""

    def content(self, left_s: float) -> dict[str, Any] | None:
        """The body, with what is left until the deadline."""
        if self.body is None:
            return None
        told = {name: value for name, value in self.body.items() if value is not None}
        if self.has_deadline:
            told["timeout_ms"] = max(1, min(_LONGEST_MS, int(1000 * left_s)))
        return told

    def headers(self) -> dict[str, str]:
        """A front sends all requests of a user to one instance by this; nobody can read the id from it."""
        if self.user is None:
            return {}
        return {"x-nestrec-user": blake2b(str(self.user).encode(), digest_size=12).hexdigest()}


def history_of(
    history: UserHistory | None,
    items: Sequence[Id] | None,
    times_ms: Sequence[int] | None,
    actions: Sequence[Action] | None,
    features: Mapping[str, Sequence[Value]] | None,
) -> UserHistory | None:
    """Return the history that a caller gives, as one mapping or as its columns."""
    given = {"items": items, "times_ms": times_ms, "actions": actions, "features": features}
    columns = {name: values for name, values in given.items() if values is not None}
    if not columns:
        return history
    if history is not None:
        raise TypeError(f"give either history or {', '.join(columns)}, not both")
    return cast(UserHistory, columns)


def asked(path: str, user: Id, **fields: Any) -> ServerQuestion:
    """Something that the server computes."""
    return ServerQuestion("POST", path, user, {"user": user, **fields}, has_deadline=True)


def told(user: Id, history: UserHistory | None, *, at_least_once: bool) -> ServerQuestion:
    """Events to be kept."""
    if history is None:
        raise TypeError("give the events, such as items=['12', '7'], times_ms=[1642271351894, 1642271387634]")
    return ServerQuestion("POST", "/v1/events", user, {"user": user, "history": history}, is_repeatable=at_least_once)


def forgotten(user: Id, what: str) -> ServerQuestion:
    """Events or prefixes of a user."""
    return ServerQuestion("DELETE", f"/v1/users/{quote(str(user), safe='')}/{what}", user)
