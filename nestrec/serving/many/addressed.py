"""What a front reads in a request: whom it is about, how long it may take, and whether only one instance will do."""

from dataclasses import dataclass
from typing import Any

import orjson

from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.prefix.trigger import USUAL_CANDIDATES

SIGNAL_PATH = "/v1/preinfer"


@dataclass(frozen=True, slots=True)
class Addressed:
    user: str
    """as the instance will read it; empty where the request names none, and is refused by any instance"""
    timeout_s: float
    """until its deadline"""
    needs_home: bool
    """it writes or reads events that only the user's own instance keeps"""
    num_events: int | None = None
    """of a signal about as many candidates as usual: of the history that it tells, or tells the length of"""


def addressed(path: str, body: bytes, limits: LimitsConfig, *, are_shared: bool = False) -> Addressed:
    """Of a POST. What is no request at all may go anywhere and is refused there. are_shared: all instances have the
    events that are kept."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        data = {"history": None}
    timeout_ms = data.get("timeout_ms")
    if type(timeout_ms) is not int or not 1 <= timeout_ms <= limits.max_timeout_ms:
        timeout_ms = limits.default_timeout_ms
    is_about_kept = path == "/v1/events" or "history" not in data or data.get("prefer_kept") is True
    num_events = _events_in(data) if path == SIGNAL_PATH else None
    return Addressed(user_in(data), timeout_ms / 1000.0, is_about_kept and not are_shared, num_events)


def _events_in(data: dict[str, Any]) -> int | None:
    history, told, candidates = data.get("history"), data.get("events"), data.get("num_candidates", 1)
    if type(candidates) is not int or not 1 <= candidates <= USUAL_CANDIDATES:
        return None
    if isinstance(history, dict) and data.get("prefer_kept") is not True:
        return len(history["items"]) if isinstance(history.get("items"), list) else None
    return told if type(told) is int and told >= 0 and history is None else None


def user_of(body: bytes) -> str:
    """Whoever a request is about; empty where it names nobody."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    return user_in(data) if isinstance(data, dict) else ""


def user_in(data: dict[str, Any]) -> str:
    """A number and the text of it are one user."""
    user = data.get("user")
    if type(user) is int:
        return str(user)
    return user if isinstance(user, str) else ""
