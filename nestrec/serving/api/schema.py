"""Requests as JSON, checked field by field: what is not named here is refused."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nestrec.base.bounds import Count, Positive
from nestrec.base.config import config
from nestrec.serving.model.inputs import Candidates, History
from nestrec.serving.model.servable import Servable

_EVENT, _USER = "event_", "user_"
_LATEST_MS = 7_258_118_400_000


@config
class LimitsConfig:
    max_body_bytes: Count = 1 << 20
    """declared or sent"""
    max_header_bytes: Count = 1 << 14
    """of a request"""
    max_history: Count = 20_000
    """events"""
    max_candidates: Count = 2048
    """items of a ranking request"""
    max_k: Count = 1000
    """items of a recommendation"""
    max_user_characters: Count = 256
    """of a user's id"""
    max_timeout_ms: Count = 10_000
    """longest deadline a request may ask for"""
    default_timeout_ms: Count = 1_000
    """deadline of a request that names none"""
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


class BadRequestError(Exception):
    """What is wrong with a request, for the one who sent it."""

    def __init__(self, message: str, field: str = "", status: int = 400):
        super().__init__(message)
        self.message, self.field, self.status = message, field, status


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request in the ids of a model."""

    user: str
    history: History
    now_ms: int
    timeout_s: float
    fields: Mapping[str, Any]
    """all fields, checked to be known ones"""


_HISTORY_FIELDS = {"items", "times_ms", "actions", "features"}
_COMMON = {"user", "history", "user_features", "now_ms", "timeout_ms"}
FIELDS = {
    "rank": _COMMON | {"candidates", "candidate_features"},
    "preinfer": _COMMON | {"num_candidates"},
    "recommend": _COMMON | {"k", "exclude_seen", "candidate_features"},
    "events": {"user", "history"},
}


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError("the body is not valid JSON") from error
    if not isinstance(data, dict):
        raise BadRequestError("the body must be a JSON object")
    return data


def parse_request(kind: str, data: dict[str, Any], servable: Servable, limits: LimitsConfig) -> Asked:
    """The fields that all requests share."""
    if not data.keys() <= FIELDS[kind]:
        unknown = sorted(data.keys() - FIELDS[kind])
        raise BadRequestError(f"unknown field; known: {', '.join(sorted(FIELDS[kind]))}", unknown[0][:64])
    now_ms = integer(data, "now_ms", default=int(time.time() * 1000), low=0, high=_LATEST_MS)
    timeout_ms = integer(data, "timeout_ms", default=limits.default_timeout_ms, low=1, high=limits.max_timeout_ms)
    user = parse_user(data.get("user"), limits)
    history = _history(data, servable, limits)
    return Asked(user=user, history=history, now_ms=now_ms, timeout_s=timeout_ms / 1000.0, fields=data)


def parse_candidates(asked: Asked, servable: Servable, limits: LimitsConfig) -> Candidates:
    keys = _list(asked.fields.get("candidates"), "candidates", limits.max_candidates)
    if not keys:
        raise BadRequestError("must name at least one item", "candidates")
    return candidates_of(asked, item_ids(keys, "candidates", servable), servable)


def candidates_of(asked: Asked, items: NDArray[np.int64], servable: Servable) -> Candidates:
    """Items to be scored with the features that the request gives for candidates."""
    given = _mapping(asked.fields.get("candidate_features"), "candidate_features")
    features = _features(
        given, _mapping(asked.fields.get("user_features"), "user_features"), len(items), "candidate_features", servable
    )
    return Candidates(items=items, now_ms=asked.now_ms, features=features)


def integer(data: Mapping[str, Any], name: str, *, default: int, low: int, high: int) -> int:
    value = data.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise BadRequestError(f"must be a whole number from {low} to {high}", name)
    return value


def item_ids(keys: list[Any], field: str, servable: Servable) -> NDArray[np.int64]:
    try:
        return servable.ids_of(keys)
    except TypeError:
        raise BadRequestError("must be a list of item ids (text or whole numbers)", field) from None


def parse_user(value: Any, limits: LimitsConfig) -> str:
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= limits.max_user_characters:
        raise BadRequestError(f"must be text of 1 to {limits.max_user_characters} characters", "user")
    return value


def _history(data: Mapping[str, Any], servable: Servable, limits: LimitsConfig) -> History:
    given = _mapping(data.get("history"), "history")
    if not given.keys() <= _HISTORY_FIELDS:
        unknown = sorted(given.keys() - _HISTORY_FIELDS)
        raise BadRequestError("unknown field", f"history.{unknown[0][:64]}")
    items = item_ids(_list(given.get("items"), "history.items", limits.max_history), "history.items", servable)
    times = _ints(given.get("times_ms"), "history.times_ms", len(items), 0, _LATEST_MS)
    if len(items) and given.get("times_ms") is None and servable.reads_times:
        raise BadRequestError("must tell when each event happened: the model reads it", "history.times_ms")
    if len(times) > 1 and (times[1:] < times[:-1]).any():
        raise BadRequestError("must not go back in time; oldest event first", "history.times_ms")
    highest = sum(servable.spec.action_bits.values())
    actions = _ints(given.get("actions"), "history.actions", len(items), 0, highest)
    features = _features(
        _mapping(given.get("features"), "history.features"), _mapping(data.get("user_features"), "user_features"),
        len(items), "history.features", servable,
    )  # fmt: skip
    return History(items=items, times_ms=times, actions=actions, features=features)


def _features(
    events: Mapping[str, Any], user: Mapping[str, Any], count: int, where: str, servable: Servable
) -> dict[str, NDArray[np.int64]]:
    """The categories that the model asks for; those that are not given, and unknown keys, count as unknown (0)."""
    found: dict[str, NDArray[np.int64]] = {}
    columns = servable.columns
    if not (columns or events or user):
        return found
    for prefix, given, field in ((_EVENT, events, where), (_USER, user, "user_features")):
        for name in given:
            if prefix + name not in columns:
                raise BadRequestError("the model has no such feature", f"{field}.{name[:64]}")
    for name, column in columns.items():
        if name.startswith(_EVENT):
            value = events.get(name.removeprefix(_EVENT))
            values = [None] * count if value is None else _list(value, f"{where}.{name}", count)
            if len(values) != count:
                raise BadRequestError(f"must have {count} values", f"{where}.{name}")
        elif name.startswith(_USER):
            values = [user.get(name.removeprefix(_USER))] * count
        else:
            continue
        found[name] = _categories(values, servable.column_ids.get(name), column.num_rows, f"{where}.{name}")
    return found


def _categories(values: list[Any], ids: dict[str, int] | None, num_rows: int, field: str) -> NDArray[np.int64]:
    if not set(map(type, values)) <= {str, int, type(None)}:
        raise BadRequestError("must be text or whole numbers", field)
    if ids is not None:
        return np.fromiter((0 if v is None else ids.get(str(v), 0) for v in values), np.int64, len(values))
    numbers = [v if isinstance(v, int) and 0 <= v < num_rows else 0 for v in values]
    return np.array(numbers, np.int64)


def _mapping(value: Any, field: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError("must be an object", field)
    return value


def _list(value: Any, field: str, most: int) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequestError("must be a list", field)
    if len(value) > most:
        raise BadRequestError(f"must have at most {most} values", field)
    return value


def _ints(value: Any, field: str, count: int, low: int, high: int) -> NDArray[np.int64]:
    if value is None:
        return np.zeros(count, np.int64)
    if not isinstance(value, list) or len(value) != count:
        raise BadRequestError(f"must be a list of {count} whole numbers", field)
    if not set(map(type, value)) <= {int}:
        raise BadRequestError("must be whole numbers", field)
    if value and not (low <= min(value) and max(value) <= high):
        raise BadRequestError(f"must lie between {low} and {high}", field)
    return np.array(value, np.int64)
