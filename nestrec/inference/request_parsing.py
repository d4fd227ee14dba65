"""What Python users ask, as the server reads it: the same fields, checked by the same shapes, without its limits."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.inputs.request_schema import HistoryFields, ItemId, Moment, RankRequest, Value, reader

Items = Sequence[str | int]
"""source ids"""
History = Items | Mapping[str, Any]
"""ids of a user's items, oldest first, or a mapping with the fields of the server's requests"""
_OF_HISTORY = ("items", "times_ms", "actions", "features")
_FIELDS = (*_OF_HISTORY, "user_features", "now_ms")
_WHOLE = ("items", "times_ms", "now_ms", "candidates")
_SHOWN = 8
"""values of a list that an error shows"""
NO_LIMITS = LimitsConfig(max_history=1 << 40, max_id_characters=1 << 20, max_text_characters=1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A request without what only a server needs."""

    history: HistoryFields
    candidates: list[ItemId]
    context: Mapping[str, Value] | None = None
    user_features: Mapping[str, Value] | None = None
    now_ms: Moment | None = None


def asked_request(history: History, candidates: Items, context: Mapping[str, Any] | None) -> RankRequest:
    """The request of a history, or an error that names what is wrong with it."""
    given = dict(history) if isinstance(history, Mapping) else {"items": history}
    if unknown := [name for name in given if name not in _FIELDS]:
        raise UserError(
            "a history has no such field",
            option=f"history.{unknown[0]}",
            value=given[unknown[0]],
            remedy=f"known: {', '.join(_FIELDS)}",
        )
    given["items"] = plain_ids(given.get("items", ()), "history.items")
    of_history = {name: value for name, value in given.items() if name in _OF_HISTORY}
    of_user = {name: value for name, value in given.items() if name not in _OF_HISTORY}
    listed = plain_ids(candidates, "candidates")
    plain = _plain({"history": of_history, "candidates": listed, "context": context, **of_user})
    try:
        read: _Given = _reader()(plain)
    except BadRequestError as error:
        raise explained(error, plain) from None
    return RankRequest(
        user="-",
        candidates=read.candidates,
        history=read.history,
        context=read.context,
        user_features=read.user_features,
        now_ms=read.now_ms,
    )


def plain_ids(items: Items, field: str) -> list[str | int]:
    """Ids as JSON would have them."""
    plain = _plain({"items": items})["items"]
    if not isinstance(plain, list) or any(type(key) not in (str, int) for key in plain):
        raise UserError(
            "must be a list of item ids (text or whole numbers)",
            option=field,
            value=_shown(plain),
            remedy='such as ["12", "7"]',
        )
    return plain


def plain_values(values: Any, field: str) -> dict[str, Any]:
    """Named values as JSON would have them."""
    plain = _plain(values)
    if not isinstance(plain, Mapping):
        raise UserError("are no named values", option=field, value=values, remedy='such as {"device": "web"}')
    return dict(plain)


def explained(error: BadRequestError, given: Mapping[str, Any]) -> UserError:
    """The error for Python users: with the value that was given, and what may be done."""
    field = error.field or "history"
    value = given
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None  # type: ignore[assignment]
    return UserError(error.message, option=field, value=_shown(value), remedy=_remedy(field))


def _remedy(field: str) -> str:
    if field.startswith(("context", "candidate_features")):
        return f"give context={{{field.partition('.')[2] or 'name'!r}: value}}, the value now"
    like = '{"items": ["12"], "times_ms": [1642271351894], "features": {"device": ["web"]}}'
    return f"a history may be a mapping with {', '.join(_FIELDS)}, such as {like}"


def _shown(value: Any) -> Any:
    return [*value[:_SHOWN], "..."] if isinstance(value, list) and len(value) > _SHOWN else value


def _plain(value: Any, name: str = "") -> Any:
    """Values as JSON would have them: arrays, tuples and columns of tables as lists, whole numbers of ids as such."""
    if hasattr(value, "tolist"):  # numpy, torch, pandas
        value = value.tolist()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_plain(inner, name) for inner in value]
    is_whole = name in _WHOLE and isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


@functools.cache
def _reader() -> Callable[[Mapping[str, Any]], Any]:
    return reader(_Given, NO_LIMITS)
