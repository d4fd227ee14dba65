"""Requests that clients may send, and the table of types that checks them and describes them in OpenAPI.

Requests are dataclasses, responses are typed dictionaries (`responses`). Each type of a field has one entry, `_Type`:
its words in error messages, its JSON Schema, and the functions that read its values. So checks, messages and OpenAPI
cannot differ. docs/decisions/request-schemas.md explains why msgspec does not do this.

A field is text, a number, a boolean, one of several choices, a list, a mapping by name, or another such class;
`X | None` may be left out or null. Bounds that an operator may set are given by name: `AtMost("max_candidates")` is
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

from nestrec.base.config_overrides import docs_of
from nestrec.base.config_values import NumberRange
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.core.typed_list import TypedList, types_of

Read = Callable[[Any, str], Any]
"""Returns a JSON value with dataclasses in place of objects; raises `BadRequestError` with the name of the field."""
Schema = dict[str, Any]
Number = int | float
_NO_CONTROLS = re.compile("^[^\\x00-\\x1f\\x7f]*$")


@dataclass(frozen=True, slots=True)
class AtMost:
    """The largest length of a list or text, or the largest number, as the name of a field of `LimitsConfig`."""

    limit: str


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The smallest length of a list or text, or the smallest number."""

    value: int


@dataclass(frozen=True, slots=True)
class NoControls:
    """A text without control characters: the file system rejects NUL, and a line break would end a line of a log."""


def reader(shape: type, limits: LimitsConfig) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function that checks the fields of a request and makes the dataclass that declares them."""
    read = _Types(limits, None).object(shape)
    return lambda data: read(data, "")


def json_schema(shape: Any, limits: LimitsConfig, named: dict[str, Schema]) -> Schema:
    """Returns the JSON Schema of a type, for OpenAPI 3.1. Classes are added to `named` and referred to."""
    return _Types(limits, named).of(shape).schema


@dataclass(frozen=True, slots=True)
class _Type:
    """The table's entry of a type."""

    words: str
    """What a value must be, in error messages."""
    schema: Schema
    reads: Mapping[type, Read | None]
    """By the Python type of a JSON value; None if all its values are valid as they are."""
    each: frozenset[type] = frozenset()
    """Python types of which a list's values must all be read. For others its smallest and largest value suffice."""

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
    """Makes the entries of types for the limits of one server."""

    def __init__(self, limits: LimitsConfig, named: dict[str, Schema] | None):
        """named: collects the JSON Schema of classes; None: nothing is described, which needs no source code."""
        self._limits = limits
        self._named = named

    def of(self, hint: Any) -> _Type:
        hint, notes = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
        origin = get_origin(hint)
        arguments = get_args(hint)
        least, most = self._bounds(notes)
        if hint is str:
            found = _text(least, most, is_printable=NoControls() in notes)
        elif hint is int:
            found = _number("a whole number", "integer", (int,), least, most)
        elif hint is float:
            found = _number("a number", "number", (float, int), least, most)
        elif typing.is_typeddict(hint) or (dataclasses.is_dataclass(hint) and isinstance(hint, type)):
            reference = {"$ref": f"#/components/schemas/{hint.__name__}"}
            found = _Type("an object", reference, {dict: self.object(hint)}, frozenset({dict}))
        elif origin is None:
            found = _PLAIN[hint]
        elif origin is Literal:
            found = _choice(arguments)
        elif origin in (Union, types.UnionType):
            found = _union([self.of(argument) for argument in arguments])
        elif origin is list:
            found = _list(self.of(arguments[0]), least, most)
        else:
            found = _mapping(self.of(arguments[1]))
        for note in notes:
            if isinstance(note, str):
                found = replace(found, schema={"description": note, **found.schema})
        return found

    def object(self, shape: Any) -> Read:
        """Returns the function that reads a class, and describes the class."""
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
            where = f"{field}." if field else ""
            found = {}
            for name, inner in value.items():
                if name not in reads:
                    raise BadRequestError(f"unknown field; known: {known}", where + name[:64])
                found[name] = reads[name](inner, where + name)
            for name in required:
                if name not in found:
                    raise BadRequestError("is needed", where + name)
            return shape(**found)

        return read

    def _fields(self, shape: Any, required: list[str]) -> dict[str, _Type]:
        """Required fields come first, since a class that extends another one declares its own last."""
        hints = typing.get_type_hints(shape, include_extras=True)
        names = sorted(hints, key=lambda name: name not in required)
        return {name: self.of(_field_hint(hints[name])) for name in names}

    def _bounds(self, notes: tuple[Any, ...]) -> tuple[Number | None, Number | None]:
        least: Number | None = None
        most: Number | None = None
        for note in notes:
            match note:
                case AtLeast(value):
                    least = value
                case AtMost(limit):
                    most = getattr(self._limits, limit)
                case NumberRange(low, high):
                    least, most = _integral(low), _integral(high) if high < math.inf else None
        return least, most


def _text(least: Number | None, most: Number | None, *, is_printable: bool) -> _Type:
    words = "text"
    if most is not None:
        words += f" of {least or 0} to {most} characters"
    elif least is not None:
        words += f" of at least {least} character{'s' if least > 1 else ''}"
    if is_printable:
        words += " without control characters"
    pattern = _NO_CONTROLS.pattern if is_printable else None
    schema = _schema("string", minLength=least, maxLength=most, pattern=pattern)
    if words == "text":
        return _Type(words, schema, {str: None})
    low, high = _range(least, most)

    def read(value: str, field: str) -> str:
        if not low <= len(value) <= high or (is_printable and not _NO_CONTROLS.fullmatch(value)):
            raise BadRequestError(f"must be {words}", field)
        return value

    return _Type(words, schema, {str: read}, frozenset({str}) if is_printable else frozenset())


def _number(noun: str, name: str, kinds: tuple[type, ...], least: Number | None, most: Number | None) -> _Type:
    """noun: in messages. name: in JSON Schema. kinds: Python types of the values."""
    words = f"{noun}{'' if least is None else f' from {least}'}{'' if most is None else f' to {most}'}"
    schema = _schema(name, minimum=least, maximum=most)
    if least is None and most is None:
        return _Type(words, schema, dict.fromkeys(kinds))
    low, high = _range(least, most)

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


def _list(of: _Type, least: Number | None, most: Number | None) -> _Type:
    low, high = _range(least, most)
    checked = {kind for kind, read in of.reads.items() if read is not None}

    def read(value: list[Any] | TypedList, field: str) -> list[Any] | TypedList:
        if len(value) > high:
            raise BadRequestError(f"must have at most {most} values", field)
        if len(value) < low:
            raise BadRequestError(f"must have at least {least} value{'s' if low > 1 else ''}", field)
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

    schema = {"type": "array", "items": of.schema, **_schema("array", minItems=least, maxItems=most)}
    return _Type("a list", schema, {list: read, TypedList: read}, frozenset({list, TypedList}))


def _extremes(values: list[Any] | TypedList, kinds: set[type]) -> Sequence[Any]:
    """Returns values of a list that are valid only if all of them are: two to read instead of thousands."""
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


def _range(least: Number | None, most: Number | None) -> tuple[Number, Number]:
    return -math.inf if least is None else least, math.inf if most is None else most


def _integral(bound: float) -> Number:
    """Messages show 4096 and not 4096.0."""
    return int(bound) if float(bound).is_integer() else bound


def _field_hint(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is NotRequired else hint


def _required(shape: Any) -> list[str]:
    if typing.is_typeddict(shape):
        return [name for name in shape.__annotations__ if name in shape.__required_keys__]
    return [f.name for f in dataclasses.fields(shape) if f.default is MISSING and f.default_factory is MISSING]


def _docs(shape: type) -> dict[str, str]:
    try:
        return docs_of(shape)
    except (OSError, TypeError):  # made by a call: there is no class in the source
        return {}


LATEST_MS = 7_258_118_400_000
"""the year 2200"""
ItemId = Annotated[str, AtMost("max_id_characters")] | int
Category = Annotated[str, AtMost("max_text_characters")] | int | float | bool | None
"""a category by its name or number, true and false where the log has those, or the value of a number"""
Value = Category | list[Category]
"""the same, a text, a list of categories, or the numbers of a vector: what the log has of the feature"""
Moment = Annotated[int, NumberRange(0, LATEST_MS)]
Action = int | str | list[str] | None
UserId = Annotated[str, AtLeast(1), AtMost("max_user_characters")] | int
Timeout = Annotated[int, AtLeast(1), AtMost("max_timeout_ms")]
ModelAddress = Annotated[str, NumberRange(1, 4096), NoControls()]
"""a folder or an address; Linux takes paths of 4,096 bytes"""
Unknown = Literal["last", "score", "drop", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFields:
    """Events of a user, oldest first."""

    items: Annotated[list[ItemId], AtMost("max_history")] | None = None
    """source ids"""
    times_ms: list[Moment] | None = None
    """Unix milliseconds of each event"""
    actions: list[Action] | None = None
    """what the user did at each event: the name of an action, a list of names, or the sum of their bits (GET /v1/models
    lists both); null where nobody knows"""
    features: Mapping[str, list[Value] | None] | None = None
    """by name of a feature, a value an event; null is a value that nobody knows"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRequest:
    """The fields of every request that is computed for a user."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    history: HistoryFields | None = None
    """where it is left out, the events that the server keeps"""
    prefer_kept: bool | None = None
    """the events that the server keeps are read even so; `history` stands in where it has none or cannot reach them"""
    user_features: Mapping[str, Value] | None = None
    """by name of a feature of the user"""
    now_ms: Moment | None = None
    """when it is asked, in Unix milliseconds; the time of the server where it is left out"""
    timeout_ms: Timeout | None = None
    """an answer is of no use later"""
    unknown: Unknown | None = None
    """what to do with ids that the model does not know: candidates get the last place (last, the default), a score all
    the same (score), are left out (drop), or the request is refused (refuse); events are left out unless it says
    score or refuse"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreinferRequest(UserRequest):
    """A ranking request of this user is on its way."""

    num_candidates: Annotated[int, AtLeast(1), AtMost("max_candidates")] | None = None
    """that will be ranked"""
    events: Annotated[int, AtLeast(0)] | None = None
    """how many events the history has, instead of the history: the answer says whether it is wanted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest(UserRequest):
    """Scores of candidates are wanted."""

    candidates: Annotated[list[ItemId], AtLeast(1), AtMost("max_candidates")]
    """source ids of the items to be scored"""
    context: Mapping[str, Value] | None = None
    """by name of a feature of an event: its value for every candidate, such as the device of this request"""
    candidate_features: Mapping[str, list[Value] | Category] | None = None
    """by name of a feature of an event: a value a candidate, or one for all of them; a list for all is `context`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendRequest(UserRequest):
    """The best items of the catalogue are wanted."""

    k: Annotated[int, AtLeast(1), AtMost("max_k")] | None = None
    """how many items; 10 where it is left out"""
    exclude_seen: bool | None = None
    """items of the history are not recommended, which is the default"""
    exclude: Annotated[list[ItemId], AtMost("max_listed")] | None = None
    """items that are not recommended"""
    allow: Annotated[list[ItemId], AtMost("max_listed")] | None = None
    """only these are recommended"""
    context: Mapping[str, Value] | None = None
    """by name of a feature of an event: its value for every candidate, such as the device of this request"""
    candidate_features: Mapping[str, Value] | None = None
    """the same as `context`: a request cannot know its candidates"""
    unknown: Unknown | None = None
    """what to do with ids that the model does not know: items that only retrieval knows get the last place (last, the
    default), a score all the same (score) or are left out (drop); a request with unknown ids is refused (refuse);
    events are left out unless it says score or refuse"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRequest:
    """Other models are to be served."""

    models: Annotated[list[ModelAddress], AtLeast(1)]
    """folders of exported models, on the machine of the server, or addresses of versions (ADDRESS, ADDRESS@VERSION);
    one of each role that is to change"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest:
    """What was served before the last swap is to be served again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """Users are to go elsewhere, or may come back."""

    drain: bool | None = None
    """false ends it; true where it is left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewItemFields:
    """An item that the models are to know."""

    id: Annotated[str, AtLeast(1), AtMost("max_id_characters")] | int
    """as requests will name it"""
    features: Mapping[str, Value] | None = None
    """by name of a feature of items: a category, a list of them, a number, a text, or the numbers of a vector; what is
    left out nobody knows"""
    title: Annotated[str, AtMost("max_text_characters")] | None = None
    """what people call it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsRequest:
    """Items are to be served that no training has met."""

    items: Annotated[list[NewItemFields], AtLeast(1), AtMost("max_listed")]
    """those that are known already stay as they are"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TitlesRequest:
    """What people call items, where the model knows it."""

    items: Annotated[list[ItemId], AtMost("max_listed")]
    """source ids; may be empty"""
    search: Annotated[str, AtLeast(1), AtMost("max_id_characters")] | None = None
    """words of a title, in any case: the first items whose title has it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsRequest:
    """Events to be kept for requests without a history."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    history: HistoryFields
    """events in the order of their times; those that are older than some that are kept take their place among them"""
