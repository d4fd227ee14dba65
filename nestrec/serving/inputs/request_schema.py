"""Request schemas: the bodies that clients can send, their validation, and their JSON Schema for OpenAPI.

Requests are dataclasses, responses are typed dictionaries (`responses`). Each field type has one entry, `_Type`: its
description in error messages, its JSON Schema, and the functions that validate its values. Therefore validation, error
messages and OpenAPI cannot differ. docs/decisions/request-schemas.md explains why msgspec is not used.

A field is text, a number, a boolean, one of several choices, a list, a mapping by name, or another such class;
`X | None` can be omitted or null. Limits that an operator can set are referenced by name: `AtMost("max_candidates")` is
that field of `LimitsConfig`.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin

from nestrec.base.config_overrides import field_docs
from nestrec.base.config_values import NumberRange
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.core.typed_list import TypedList, types_of

Read = Callable[[Any, str], Any]
"""Function (value, field name) that validates a JSON value and converts objects to dataclasses, or raises
`BadRequestError`."""
Schema = dict[str, Any]
Number = int | float
_RENAMED_FIELDS = {"prefer_kept": "prefer_stored_history", "unknown": "on_unknown", "events": "num_events"}
"""Present names of renamed request fields, for the errors about unknown fields; former names are not accepted."""
_NO_CONTROLS = re.compile("^[^\\x00-\\x1f\\x7f]*$")


@dataclass(frozen=True, slots=True)
class AtMost:
    """Maximum length of a list or text, or maximum number, as the name of a field of `LimitsConfig`."""

    limit: str


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Minimum length of a list or text, or minimum number."""

    value: int


@dataclass(frozen=True, slots=True)
class NoControls:
    """Text without control characters: the file system rejects NUL, and a line break would end a line of a log."""


def reader(shape: type, limits: LimitsConfig) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that validates the fields of a request and creates its dataclass `shape`."""
    read = _Types(limits, None).object(shape)
    return lambda data: read(data, "")


def json_schema(shape: Any, limits: LimitsConfig, named: dict[str, Schema]) -> Schema:
    """Return the JSON Schema of a type for OpenAPI 3.1; schemas of classes are added to `named` and referenced."""
    return _Types(limits, named).of(shape).schema


@dataclass(frozen=True, slots=True)
class _Type:
    """Description and validation of one field type."""

    words: str
    """Description of a valid value in error messages."""
    schema: Schema
    reads: Mapping[type, Read | None]
    """Validation function by Python type of a JSON value; None if every value of the type is valid."""
    each: frozenset[type] = frozenset()
    """Python types for which every element of a list must be validated; for other types, validating the smallest and
    the largest element suffices."""

    def read(self, value: Any, field: str) -> Any:
        try:
            inner = self.reads[type(value)]
        except KeyError:
            raise BadRequestError(f"must be {self.words}", field) from None
        return value if inner is None else inner(value, field)


_PLAIN: Mapping[Any, _Type] = {
    Any: _Type("anything", {}, dict.fromkeys((str, int, float, bool, list, dict, type(None)))),
    bool: _Type("true or false", {"type": "boolean"}, {bool: None}),
    type(None): _Type("", {"type": "null"}, {type(None): None}),
}


class _Types:
    """Creates the `_Type` of type hints for the limits of one server.

    Args:
        limits: Limits of the server.
        named: Collects the JSON Schemas of classes; None creates no schemas, which does not require source code.
    """

    def __init__(self, limits: LimitsConfig, named: dict[str, Schema] | None):
        self._limits = limits
        self._named = named

    def of(self, hint: Any) -> _Type:
        """Return the entry of a type hint."""
        hint, notes = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
        origin = get_origin(hint)
        arguments = get_args(hint)
        minimum, maximum = self._bounds(notes)
        if hint is str:
            entry = _text(minimum, maximum, is_printable=NoControls() in notes)
        elif hint is int:
            entry = _number("an integer", "integer", (int,), minimum, maximum)
        elif hint is float:
            entry = _number("a number", "number", (float, int), minimum, maximum)
        elif typing.is_typeddict(hint) or (dataclasses.is_dataclass(hint) and isinstance(hint, type)):
            reference = {"$ref": f"#/components/schemas/{hint.__name__}"}
            entry = _Type("an object", reference, {dict: self.object(hint)}, frozenset({dict}))
        elif origin is None:
            entry = _PLAIN[hint]
        elif origin is Literal:
            entry = _choice(arguments)
        elif origin in (Union, types.UnionType):
            entry = _union([self.of(argument) for argument in arguments])
        elif origin is list:
            entry = _list(self.of(arguments[0]), minimum, maximum)
        else:
            entry = _mapping(self.of(arguments[1]))
        for note in notes:
            if isinstance(note, str):
                entry = replace(entry, schema={"description": note, **entry.schema})
        return entry

    def object(self, shape: Any) -> Read:
        """Return the function that validates a class, and add the JSON Schema of the class."""
        required = _required(shape)
        fields = self._fields(shape, required)
        if self._named is not None and shape.__name__ not in self._named:
            docs = _docs(shape)
            properties = {
                name: {"description": docs[name], **field.schema} if name in docs else field.schema
                for name, field in fields.items()
            }
            described: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
            self._named[shape.__name__] = {**described, "required": required} if required else described
        reads = {name: field.read for name, field in fields.items()}
        known = ", ".join(fields)

        def read(value: Mapping[str, Any], field: str) -> Any:
            prefix = f"{field}." if field else ""
            arguments = {}
            for name, inner in value.items():
                if name not in reads:
                    renamed = _RENAMED_FIELDS.get(name)
                    suggestion = f"did you mean {renamed}? Known" if renamed in reads else "known"
                    raise BadRequestError(f"unknown field; {suggestion} fields: {known}", prefix + name[:64])
                arguments[name] = reads[name](inner, prefix + name)
            for name in required:
                if name not in arguments:
                    raise BadRequestError("is required", prefix + name)
            return shape(**arguments)

        return read

    def _fields(self, shape: Any, required: list[str]) -> dict[str, _Type]:
        """Return the types of all fields, required ones first, because a subclass declares its own fields last."""
        hints = typing.get_type_hints(shape, include_extras=True)
        names = sorted(hints, key=lambda name: name not in required)
        return {name: self.of(_field_hint(hints[name])) for name in names}

    def _bounds(self, notes: tuple[Any, ...]) -> tuple[Number | None, Number | None]:
        minimum: Number | None = None
        maximum: Number | None = None
        for note in notes:
            match note:
                case AtLeast(value):
                    minimum = value
                case AtMost(limit):
                    maximum = getattr(self._limits, limit)
                case NumberRange(low, high):
                    minimum, maximum = _integral(low), _integral(high) if high < math.inf else None
        return minimum, maximum


def _text(minimum: Number | None, maximum: Number | None, *, is_printable: bool) -> _Type:
    words = "text"
    if maximum is not None:
        words += f" of {minimum or 0} to {maximum} characters"
    elif minimum is not None:
        words += f" of at least {minimum} character{'s' if minimum > 1 else ''}"
    if is_printable:
        words += " without control characters"
    pattern = _NO_CONTROLS.pattern if is_printable else None
    schema = _schema("string", minLength=minimum, maxLength=maximum, pattern=pattern)
    if words == "text":
        return _Type(words, schema, {str: None})
    low, high = _range(minimum, maximum)

    def read(value: str, field: str) -> str:
        if not low <= len(value) <= high or (is_printable and not _NO_CONTROLS.fullmatch(value)):
            raise BadRequestError(f"must be {words}", field)
        return value

    return _Type(words, schema, {str: read}, frozenset({str}) if is_printable else frozenset())


def _number(noun: str, name: str, kinds: tuple[type, ...], minimum: Number | None, maximum: Number | None) -> _Type:
    """Create a number type; `noun` is used in messages, `name` in JSON Schema, `kinds` are Python types of values."""
    words = f"{noun}{'' if minimum is None else f' from {minimum}'}{'' if maximum is None else f' to {maximum}'}"
    schema = _schema(name, minimum=minimum, maximum=maximum)
    if minimum is None and maximum is None:
        return _Type(words, schema, dict.fromkeys(kinds))
    low, high = _range(minimum, maximum)

    def read(value: Number, field: str) -> Number:
        if not low <= value <= high:
            raise BadRequestError(f"must be {words}", field)
        return value

    return _Type(words, schema, dict.fromkeys(kinds, read))


def _choice(choices: tuple[Any, ...]) -> _Type:
    words = "one of " + ", ".join(map(str, choices))

    def read(value: Any, field: str) -> Any:
        if value not in choices:
            raise BadRequestError(f"must be {words}", field)
        return value

    kinds = frozenset(map(type, choices))
    return _Type(words, {"enum": list(choices)}, dict.fromkeys(kinds, read), kinds)


def _union(parts: list[_Type]) -> _Type:
    words = " or ".join(part.words for part in parts if part.words)
    schemas = [part.schema for part in parts]
    if all(schema.keys() == {"type"} for schema in schemas):
        schema: Schema = {"type": [schema["type"] for schema in schemas]}
    else:
        schema = {"anyOf": schemas}
    reads = {kind: read for part in parts for kind, read in part.reads.items()}
    return _Type(words, schema, reads, frozenset().union(*(part.each for part in parts)))


def _list(of: _Type, minimum: Number | None, maximum: Number | None) -> _Type:
    low, high = _range(minimum, maximum)
    checked = {kind for kind, read in of.reads.items() if read is not None}

    def read(value: list[Any] | TypedList, field: str) -> list[Any] | TypedList:
        if len(value) > high:
            raise BadRequestError(f"must have at most {maximum} values", field)
        if len(value) < low:
            raise BadRequestError(f"must have at least {minimum} value{'s' if low > 1 else ''}", field)
        kinds = types_of(value)
        if not kinds <= of.reads.keys():
            raise BadRequestError(f"must be a list of values, each {of.words}", field)
        if kinds.isdisjoint(checked):
            return value
        if not kinds.isdisjoint(of.each):
            return [of.read(inner, field) for inner in value]
        for inner in _extremes(value, kinds):
            of.read(inner, field)
        return value

    schema = {"type": "array", "items": of.schema, **_schema("array", minItems=minimum, maxItems=maximum)}
    return _Type("a list", schema, {list: read, TypedList: read}, frozenset({list, TypedList}))


def _extremes(values: list[Any] | TypedList, kinds: set[type]) -> Sequence[Any]:
    """Return elements of a list that are valid only if all elements are, so that two are validated, not thousands."""
    if isinstance(values, TypedList):
        return values.extremes
    if kinds == {int}:
        return min(values), max(values)
    if kinds == {str}:
        sizes = [*map(len, values)]
        return values[sizes.index(min(sizes))], values[sizes.index(max(sizes))]
    return values


def _mapping(of: _Type) -> _Type:
    def read(value: dict[str, Any], field: str) -> dict[str, Any]:
        return {name: of.read(inner, f"{field}.{name[:64]}") for name, inner in value.items()}

    schema = {"type": "object", "additionalProperties": of.schema}
    return _Type("an object", schema, {dict: read}, frozenset({dict}))


def _schema(name: str, **bounds: Any) -> Schema:
    return {"type": name, **{bound: value for bound, value in bounds.items() if value is not None}}


def _range(minimum: Number | None, maximum: Number | None) -> tuple[Number, Number]:
    return -math.inf if minimum is None else minimum, math.inf if maximum is None else maximum


def _integral(bound: float) -> Number:
    """Convert an integral float to int, so that messages show 4096 and not 4096.0."""
    return int(bound) if float(bound).is_integer() else bound


def _field_hint(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is NotRequired else hint


def _required(shape: Any) -> list[str]:
    if typing.is_typeddict(shape):
        return [name for name in shape.__annotations__ if name in shape.__required_keys__]
    return [f.name for f in dataclasses.fields(shape) if f.default is MISSING and f.default_factory is MISSING]


def _docs(shape: type) -> dict[str, str]:
    try:
        return field_docs(shape)
    except (OSError, TypeError):  # the class was created by a function call, so it has no source code
        return {}


LATEST_MS = 7_258_118_400_000
"""Largest valid time in Unix milliseconds, the year 2200."""
ItemId = Annotated[str, AtMost("max_item_id_length")] | int
Category = Annotated[str, AtMost("max_text_length")] | int | float | bool | None
"""Category by name, number or boolean, as in the log, or the value of a numeric feature."""
Value = Category | list[Category]
"""Feature value as in the log: a category, a number, a text, a list of categories, or the elements of a vector."""
Moment = Annotated[int, NumberRange(0, LATEST_MS)]
Action = int | str | list[str] | None
UserId = Annotated[str, AtLeast(1), AtMost("max_user_id_length")] | int
Timeout = Annotated[int, AtLeast(1), AtMost("max_timeout_ms")]
ModelAddress = Annotated[str, NumberRange(1, 4096), NoControls()]
"""Folder or address of a model; Linux limits paths to 4,096 bytes."""
Unknown = Literal["last", "score", "drop", "reject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFields:
    """Events of a user, oldest first."""

    items: Annotated[list[ItemId], AtMost("max_history_events")] | None = None
    """Source ids of the items."""
    times_ms: list[Moment] | None = None
    """Time of each event in Unix milliseconds."""
    actions: list[Action] | None = None
    """Actions of the user at each event: the name of an action, a list of names, or the sum of their bits (GET
    /v1/models lists names and bits); null if unknown."""
    features: Mapping[str, list[Value] | None] | None = None
    """Feature values by feature name, one value per event; null if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRequest:
    """Fields of all requests that a model processes for a user."""

    user: UserId
    """User id; 7 and "7" are the same user."""
    history: HistoryFields | None = None
    """Events of the user; the stored events if omitted."""
    prefer_stored_history: bool | None = None
    """Whether to prefer the stored events to `history`, which is then the fallback if the store has no events or is
    unavailable."""
    user_features: Mapping[str, Value] | None = None
    """Values of user features by feature name."""
    now_ms: Moment | None = None
    """Time of the request in Unix milliseconds; the time of the server if omitted."""
    timeout_ms: Timeout | None = None
    """Timeout in milliseconds; the server rejects or abandons the request after it."""
    on_unknown: Unknown | None = None
    """Handling of ids that the model does not know: candidates are ranked last (last, the default), scored (score) or
    omitted (drop), or the request is rejected (reject); events are dropped, except with score or reject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreinferRequest(UserRequest):
    """Announcement of a ranking request of this user, so that the server can prefill the history ahead of time."""

    num_candidates: Annotated[int, AtLeast(1), AtMost("max_candidates")] | None = None
    """Number of candidates of the ranking request."""
    num_events: Annotated[int, AtLeast(0)] | None = None
    """Number of events in the history, sent instead of the history; the response reports whether it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest(UserRequest):
    """Request to score candidates."""

    candidates: Annotated[list[ItemId], AtLeast(1), AtMost("max_candidates")]
    """Source ids of the items to score."""
    context: Mapping[str, Value] | None = None
    """by name of a feature of an event: its value for every candidate, such as the device of this request"""
    candidate_features: Mapping[str, list[Value] | Category] | None = None
    """Event features by feature name: one value per candidate, or one value for all candidates; a list that is one
    value for all candidates belongs in `context`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendRequest(UserRequest):
    """Request for the best items of the catalog."""

    k: Annotated[int, AtLeast(1), AtMost("max_k")] | None = None
    """Number of items; 10 if omitted."""
    exclude_seen: bool | None = None
    """Whether items of the history are excluded; true if omitted."""
    exclude: Annotated[list[ItemId], AtMost("max_list_items")] | None = None
    """Source ids of items that are not recommended."""
    allow: Annotated[list[ItemId], AtMost("max_list_items")] | None = None
    """Source ids of the only items that can be recommended; the complete catalog if omitted."""
    context: Mapping[str, Value] | None = None
    """by name of a feature of an event: its value for every candidate, such as the device of this request"""
    candidate_features: Mapping[str, Value] | None = None
    """Same as `context`, because the candidates of a recommendation are not known in advance."""
    on_unknown: Unknown | None = None
    """Handling of ids that the model does not know: items that only the retrieval model knows are ranked last (last,
    the default), scored (score) or omitted (drop), or a request with unknown ids is rejected (reject); events are
    dropped, except with score or reject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRequest:
    """Request to swap models."""

    models: Annotated[list[ModelAddress], AtLeast(1)]
    """Folders of exported models on the machine of the server, or addresses of published versions (ADDRESS,
    ADDRESS@VERSION); one per role to replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest:
    """Request to roll back to the models before the last swap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """Request to start or stop draining an instance, so that its users are routed to other instances."""

    drain: bool | None = None
    """Whether to drain; true if omitted, false stops draining."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewItemFields:
    """New (cold-start) item."""

    id: Annotated[str, AtLeast(1), AtMost("max_item_id_length")] | int
    """Source id of the item in requests."""
    features: Mapping[str, Value] | None = None
    """Item features by feature name: a category, a list of categories, a number, a text, or the elements of a vector;
    omitted features are unknown."""
    title: Annotated[str, AtMost("max_text_length")] | None = None
    """Title of the item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsRequest:
    """Request to add cold-start items to the catalog."""

    items: Annotated[list[NewItemFields], AtLeast(1), AtMost("max_list_items")]
    """Items to add; items that are already in the catalog are unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TitlesRequest:
    """Request for the titles of items."""

    items: Annotated[list[ItemId], AtMost("max_list_items")]
    """Source ids of items; can be empty."""
    search: Annotated[str, AtLeast(1), AtMost("max_item_id_length")] | None = None
    """Case-insensitive text to search for in titles; the response has the first items whose title contains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsRequest:
    """Request to store events for later requests without a history."""

    user: UserId
    """User id; 7 and "7" are the same user."""
    history: HistoryFields
    """Events in the order of their times; they can be older than stored events, among which they are sorted in."""
