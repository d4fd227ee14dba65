"""Parses histories of the Python API with the request schema of the server, but without its size limits."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.inputs.request_schema import HistoryFields, ItemId, Moment, RankRequest, Value, reader

Items = Sequence[str | int]
"""Item ids of the source data."""
History = Items | Mapping[str, Any]
"""Item ids of a user, oldest first, or a mapping with the fields of a server request."""
_HISTORY_FIELDS = ("items", "times_ms", "actions", "features")
_FIELDS = (*_HISTORY_FIELDS, "user_features", "now_ms")
_INTEGER_FIELDS = ("items", "times_ms", "now_ms", "candidates")
_SHOWN = 8
"""Maximum number of list values in an error message."""
NO_LIMITS = LimitsConfig(max_history_events=1 << 40, max_item_id_length=1 << 20, max_text_length=1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParsedRequest:
    """A request without the fields that only a server needs."""

    history: HistoryFields
    candidates: list[ItemId]
    context: Mapping[str, Value] | None = None
    user_features: Mapping[str, Value] | None = None
    now_ms: Moment | None = None


def parse_request(history: History, candidates: Items, context: Mapping[str, Any] | None) -> RankRequest:
    """Parse a history and candidates into a ranking request.

    Args:
        history: Item ids, oldest first, or a mapping with the fields of a server request.
        candidates: Item ids to rank.
        context: Values of context features by name.

    Raises:
        UserError: A field is unknown or has an invalid value.
    """
    fields = dict(history) if isinstance(history, Mapping) else {"items": history}
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise UserError(
            "a history has no such field",
            option=f"history.{unknown[0]}",
            value=fields[unknown[0]],
            remedy=f"use one of {', '.join(_FIELDS)}",
        )
    fields["items"] = plain_ids(fields.get("items", ()), "history.items")
    event_fields = {name: value for name, value in fields.items() if name in _HISTORY_FIELDS}
    user_fields = {name: value for name, value in fields.items() if name not in _HISTORY_FIELDS}
    candidate_ids = plain_ids(candidates, "candidates")
    plain = _to_plain({"history": event_fields, "candidates": candidate_ids, "context": context, **user_fields})
    try:
        parsed: _ParsedRequest = _history_reader()(plain)
    except BadRequestError as error:
        raise to_user_error(error, plain) from None
    return RankRequest(
        user="-",
        candidates=parsed.candidates,
        history=parsed.history,
        context=parsed.context,
        user_features=parsed.user_features,
        now_ms=parsed.now_ms,
    )


def plain_ids(items: Items, field: str) -> list[str | int]:
    """Return item ids as JSON values: a list of strings and integers.

    Raises:
        UserError: The value is not a list of item ids.
    """
    plain = _to_plain({"items": items})["items"]
    if not isinstance(plain, list) or any(type(key) not in (str, int) for key in plain):
        raise UserError(
            "must be a list of item ids (strings or integers)",
            option=field,
            value=_shown(plain),
            remedy='pass, for example, ["12", "7"]',
        )
    return plain


def plain_values(values: Any, field: str) -> dict[str, Any]:
    """Return a mapping of named values as JSON values.

    Raises:
        UserError: The value is not a mapping.
    """
    plain = _to_plain(values)
    if not isinstance(plain, Mapping):
        raise UserError("must be a mapping", option=field, value=values, remedy='pass, for example, {"device": "web"}')
    return dict(plain)


def to_user_error(error: BadRequestError, fields: Mapping[str, Any]) -> UserError:
    """Convert an error of the request schema to a `UserError` that contains the invalid value and a remedy."""
    field = error.field or "history"
    value = fields
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None  # type: ignore[assignment]
    return UserError(error.message, option=field, value=_shown(value), remedy=_remedy(field))


def _remedy(field: str) -> str:
    if field.startswith(("context", "candidate_features")):
        return f"pass context={{{field.partition('.')[2] or 'name'!r}: value}}, the value for the event to predict"
    example = '{"items": ["12"], "times_ms": [1642271351894], "features": {"device": ["web"]}}'
    return f"pass a history as a mapping with {', '.join(_FIELDS)}, for example {example}"


def _shown(value: Any) -> Any:
    return [*value[:_SHOWN], "..."] if isinstance(value, list) and len(value) > _SHOWN else value


def _to_plain(value: Any, name: str = "") -> Any:
    """Convert arrays, tuples and table columns to lists, and floats of integer fields to integers."""
    if hasattr(value, "tolist"):  # numpy, torch, pandas
        value = value.tolist()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_to_plain(inner, name) for inner in value]
    is_integer = name in _INTEGER_FIELDS and isinstance(value, float) and value.is_integer()
    return int(value) if is_integer else value


@functools.cache
def _history_reader() -> Callable[[Mapping[str, Any]], Any]:
    return reader(_ParsedRequest, NO_LIMITS)
