"""What may be asked: each field is checked as it is declared here, and OpenAPI says the same.

The shape of requests and answers from the classes that declare them: one declaration checks what comes in, and
OpenAPI says the same. Requests are dataclasses, answers typed dictionaries.

A field is text, a number, true or false, one of some choices, a list, named values, or another such class; `X |
None` may be left out or null. Bounds that an operator may set are named: `Most("max_candidates")` is that field of
`LimitsConfig`.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin

from nestrec.base.config_overrides import docs_of
from nestrec.base.config_values import Bound
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.core.typed_list import PlainList, types_of

Check = Callable[[Any, str], None]
"""Raises `BadRequestError` with the field's name."""
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Most:
    """Values of a list, characters of a text, or the number itself: at most this field of the limits."""

    limit: str


@dataclass(frozen=True, slots=True)
class Least:
    """Values of a list, characters of a text, or the number itself: at least so many."""

    value: int


@dataclass(frozen=True, slots=True)
class NoControls:
    """A text without control characters: the file system rejects NUL, and a line break would end a line of a log."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a field may hold: a check, or none, for each type that JSON is read into."""

    words: str
    checks: Mapping[type, Check | None]
    needs_each: bool = False
    """Every value of a list must be checked: its extremes alone do not show whether all are valid."""

    def check(self, value: Any, field: str) -> None:
        try:
            inner = self.checks[type(value)]
        except KeyError:
            raise BadRequestError(f"must be {self.words}", field) from None
        if inner is not None:
            inner(value, field)


def reader(shape: type, limits: LimitsConfig) -> Callable[[Mapping[str, Any]], Any]:
    """Of requests: checked, and as the dataclass that declares them."""
    check, build = _object(shape, limits), _builder(shape)

    def read(data: Mapping[str, Any]) -> Any:
        check(data, "")
        return build(data)

    return read


def json_schema(shape: Any, limits: LimitsConfig, named: dict[str, Schema]) -> Schema:
    """JSON Schema of what the type holds, as OpenAPI 3.1 wants it; classes are added to `named` and referred to."""
    hint, metadata = _bare(shape)
    schema = _bare_schema(hint, metadata, limits, named)
    for note in metadata:
        if isinstance(note, str):
            schema = {"description": note, **schema}
    return schema


def _bare_schema(hint: Any, metadata: tuple[Any, ...], limits: LimitsConfig, named: dict[str, Schema]) -> Schema:
    arguments, (least, most) = get_args(hint), _size(metadata, limits)
    match _sort(hint):
        case "object":
            if hint.__name__ not in named:
                named[hint.__name__] = _object_schema(hint, limits, named)
            found: Schema = {"$ref": f"#/components/schemas/{hint.__name__}"}
        case "union":
            found = _union_schema([json_schema(argument, limits, named) for argument in arguments])
        case "choice":
            found = {"enum": list(arguments)}
        case "list":
            found = {"type": "array", "items": json_schema(arguments[0], limits, named), "minItems": least}
            found["maxItems"] = most
        case "mapping":
            found = {"type": "object", "additionalProperties": json_schema(arguments[1], limits, named)}
        case "any":
            found = {}
        case "text":
            pattern = _NO_CONTROLS.pattern if NoControls() in metadata else None
            found = {"type": "string", "minLength": least, "maxLength": most, "pattern": pattern}
        case plain:
            found = {"type": plain, "minimum": least, "maximum": most}
    return {name: value for name, value in found.items() if value is not None}


_PLAIN: Mapping[Any, str] = {
    Any: "any",
    str: "text",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def _sort(hint: Any) -> str:
    """What sort of type it is; an error where JSON has no such thing."""
    if typing.is_typeddict(hint) or (dataclasses.is_dataclass(hint) and isinstance(hint, type)):
        return "object"
    origin = get_origin(hint)
    if origin is None:
        return _PLAIN[hint]
    sorts = {Union: "union", types.UnionType: "union", Literal: "choice", list: "list"}
    return sorts.get(origin, "mapping")


def _object_schema(shape: type, limits: LimitsConfig, named: dict[str, Schema]) -> Schema:
    hints, docs = typing.get_type_hints(shape, include_extras=True), _docs(shape)
    properties = {}
    for name, hint in hints.items():
        held = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        described = json_schema(held, limits, named)
        properties[name] = {"description": docs[name], **described} if name in docs else described
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    required = _required(shape)
    return {**found, "required": required} if required else found


def _docs(shape: type) -> dict[str, str]:
    try:
        return docs_of(shape)
    except (OSError, TypeError):  # made by a call: there is no class in the source
        return {}


def _union_schema(parts: list[Schema]) -> Schema:
    if all(part.keys() == {"type"} for part in parts):
        return {"type": [part["type"] for part in parts]}
    return {"anyOf": parts}


def _kind(hint: Any, limits: LimitsConfig) -> _Kind:
    hint, metadata = _bare(hint)
    arguments, (least, most) = get_args(hint), _size(metadata, limits)
    match _sort(hint):
        case "object":
            found = _Kind("an object", {dict: _object(hint, limits)})
        case "union":
            found = _either([_kind(argument, limits) for argument in arguments])
        case "choice":
            found = _choice(arguments)
        case "list":
            found = _list(_kind(arguments[0], limits), least or 0, most)
        case "mapping":
            found = _named_values(_kind(arguments[1], limits))
        case "text":
            found = _text(least, most)
            found = _without_controls(found) if NoControls() in metadata else found
        case "integer":
            found = _whole(least, most)
        case plain:
            found = _KINDS[plain]
    return found


_ANYTHING: Mapping[type, Check | None] = dict.fromkeys((str, int, float, bool, list, dict, type(None)))
_KINDS: Mapping[str, _Kind] = {
    "number": _Kind("a number", {float: None, int: None}),
    "boolean": _Kind("true or false", {bool: None}),
    "null": _Kind("", {type(None): None}),
    "any": _Kind("anything", _ANYTHING),
}


def _object(shape: type, limits: LimitsConfig) -> Check:
    hints = typing.get_type_hints(shape, include_extras=True)
    fields = dataclasses.fields(shape)
    checks = {field.name: _kind(hints[field.name], limits).check for field in fields}
    required = _required(shape)
    known = ", ".join(checks)

    def check(value: Any, field: str) -> None:
        where = f"{field}." if field else ""
        for name, inner in value.items():
            if name not in checks:
                raise BadRequestError(f"unknown field; known: {known}", where + name[:64])
            checks[name](inner, where + name)
        for name in required:
            if name not in value:
                raise BadRequestError("is needed", where + name)

    return check


def _builder(shape: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Makes the dataclass, and those inside it, from data that has been checked."""
    hints = typing.get_type_hints(shape)
    makers = {name: found for name, hint in hints.items() if (found := _makers(hint))}
    if not makers:
        return lambda data: shape(**data)

    def build(data: Mapping[str, Any]) -> Any:
        return shape(**{**data, **{name: _made(data[name], kinds) for name, kinds in makers.items() if name in data}})

    return build


_Makers = dict[type, Callable[[Any], Any]]
"""How values with classes inside are made, by the type that JSON is read into."""


def _makers(hint: Any) -> _Makers:
    arguments = get_args(hint)
    match _sort(hint):
        case "object":
            return {dict: _builder(hint)}
        case "union":
            return {kind: make for argument in arguments for kind, make in _makers(argument).items()}
        case "list" if inner := _makers(arguments[0]):
            return {list: lambda values: [_made(value, inner) for value in values]}
        case "mapping" if inner := _makers(arguments[1]):
            return {dict: lambda values: {name: _made(value, inner) for name, value in values.items()}}
        case _:
            return {}


def _made(value: Any, makers: _Makers) -> Any:
    make = makers.get(type(value))
    return value if make is None else make(value)


def _list(of: _Kind, least: int, most: int | None) -> _Kind:
    ranges = {kind: check for kind, check in of.checks.items() if check is not None}

    def check(value: list[Any] | PlainList, field: str) -> None:
        if most is not None and len(value) > most:
            raise BadRequestError(f"must have at most {most} values", field)
        if len(value) < least:
            raise BadRequestError(f"must have at least {least} value{'s' if least > 1 else ''}", field)
        kinds = types_of(value)
        if not kinds <= of.checks.keys():
            raise BadRequestError(f"must be a list of values, each {of.words}", field)
        if isinstance(value, PlainList):
            for inner in () if kinds.isdisjoint(ranges) else value.extremes:
                of.check(inner, field)
        elif of.needs_each:
            for inner in value:
                of.check(inner, field)
        elif kinds == {int} and int in ranges:  # a range is kept by all where it is kept by the least and the largest
            of.check(min(value), field)
            of.check(max(value), field)
        elif kinds == {str} and str in ranges:
            sizes = [*map(len, value)]
            of.check(value[sizes.index(min(sizes))], field)
            of.check(value[sizes.index(max(sizes))], field)
        elif not kinds.isdisjoint(ranges):
            for inner in value:
                of.check(inner, field)

    return _Kind("a list", {list: check, PlainList: check})


def _named_values(of: _Kind) -> _Kind:
    def check(value: dict[str, Any], field: str) -> None:
        for name, inner in value.items():
            of.check(inner, f"{field}.{name[:64]}")

    return _Kind("an object", {dict: check})


def _choice(choices: tuple[Any, ...]) -> _Kind:
    words = "one of " + ", ".join(map(str, choices))

    def check(value: Any, field: str) -> None:
        if value not in choices:
            raise BadRequestError(f"must be {words}", field)

    return _Kind(words, {type(choice): check for choice in choices})


def _text(least: int | None, most: int | None) -> _Kind:
    if most is None:
        return _Kind("text", {str: None})
    words = f"text of {least or 0} to {most} characters"

    def check(value: str, field: str) -> None:
        if not (least or 0) <= len(value) <= most:
            raise BadRequestError(f"must be {words}", field)

    return _Kind(words, {str: check})


_NO_CONTROLS = re.compile("^[^\\x00-\\x1f\\x7f]*$")


def _without_controls(text: _Kind) -> _Kind:
    words = f"{text.words} without control characters"

    def check(value: str, field: str) -> None:
        text.check(value, field)
        if not _NO_CONTROLS.fullmatch(value):
            raise BadRequestError(f"must be {words}", field)

    return _Kind(words, {str: check}, needs_each=True)


def _whole(least: int | None, most: int | None) -> _Kind:
    words = f"a whole number{'' if least is None else f' from {least}'}{'' if most is None else f' to {most}'}"
    if least is None and most is None:
        return _Kind(words, {int: None})

    def check(value: int, field: str) -> None:
        if (least is not None and value < least) or (most is not None and value > most):
            raise BadRequestError(f"must be {words}", field)

    return _Kind(words, {int: check})


def _either(kinds: list[_Kind]) -> _Kind:
    checks: dict[type, Check | None] = {}
    for kind in kinds:
        checks |= kind.checks
    needs_each = any(kind.needs_each for kind in kinds)
    return _Kind(" or ".join(kind.words for kind in kinds if kind.words), checks, needs_each)


def _bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without what was noted about it, and the notes."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _size(metadata: tuple[Any, ...], limits: LimitsConfig) -> tuple[int | None, int | None]:
    least: int | None = None
    most: int | None = None
    for note in metadata:
        match note:
            case Least(value):
                least = value
            case Most(limit):
                most = getattr(limits, limit)
            case Bound(low, high):
                least, most = int(low), int(high) if high < float("inf") else None
    return least, most


def _required(shape: Any) -> list[str]:
    """Names of the fields that must be there, in their order."""
    if typing.is_typeddict(shape):
        return [name for name in shape.__annotations__ if name in shape.__required_keys__]
    return [f.name for f in dataclasses.fields(shape) if f.default is MISSING and f.default_factory is MISSING]


LATEST_MS = 7_258_118_400_000
"""the year 2200"""
ItemId = Annotated[str, Most("max_id_characters")] | int
Category = Annotated[str, Most("max_text_characters")] | int | float | bool | None
"""a category by its name or number, true and false where the log has those, or the value of a number"""
Value = Category | list[Category]
"""the same, a text, a list of categories, or the numbers of a vector: what the log has of the feature"""
Moment = Annotated[int, Bound(0, LATEST_MS)]
Action = int | str | list[str] | None
UserId = Annotated[str, Least(1), Most("max_user_characters")] | int
Timeout = Annotated[int, Least(1), Most("max_timeout_ms")]
ModelAddress = Annotated[str, Bound(1, 4096), NoControls()]
"""a folder or an address; Linux takes paths of 4,096 bytes"""
Unknown = Literal["last", "score", "drop", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFields:
    """Events of a user, oldest first."""

    items: Annotated[list[ItemId], Most("max_history")] | None = None
    """source ids"""
    times_ms: list[Moment] | None = None
    """Unix milliseconds of each event"""
    actions: list[Action] | None = None
    """what the user did at each event: the name of an action, a list of names, or the sum of their bits (GET /v1/models
    lists both); null where nobody knows"""
    features: Mapping[str, list[Value] | None] | None = None
    """by name of a feature, a value an event; null is a value that nobody knows"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreinferRequest:
    """A ranking request of this user is on its way."""

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
    num_candidates: Annotated[int, Least(1), Most("max_candidates")] | None = None
    """that will be ranked"""
    events: Annotated[int, Least(0)] | None = None
    """how many events the history has, instead of the history: the answer says whether it is wanted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Scores of candidates are wanted."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    candidates: Annotated[list[ItemId], Least(1), Most("max_candidates")]
    """source ids of the items to be scored"""
    history: HistoryFields | None = None
    """where it is left out, the events that the server keeps"""
    prefer_kept: bool | None = None
    """the events that the server keeps are read even so; `history` stands in where it has none or cannot reach them"""
    user_features: Mapping[str, Value] | None = None
    """by name of a feature of the user"""
    context: Mapping[str, Value] | None = None
    """by name of a feature of an event: its value for every candidate, such as the device of this request"""
    candidate_features: Mapping[str, list[Value] | Category] | None = None
    """by name of a feature of an event: a value a candidate, or one for all of them; a list for all is `context`"""
    now_ms: Moment | None = None
    """when it is asked, in Unix milliseconds; the time of the server where it is left out"""
    timeout_ms: Timeout | None = None
    """an answer is of no use later"""
    unknown: Unknown | None = None
    """what to do with ids that the model does not know: candidates get the last place (last, the default), a score all
    the same (score), are left out (drop), or the request is refused (refuse); events are left out unless it says
    score or refuse"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendRequest:
    """The best items of the catalogue are wanted."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    history: HistoryFields | None = None
    """where it is left out, the events that the server keeps"""
    prefer_kept: bool | None = None
    """the events that the server keeps are read even so; `history` stands in where it has none or cannot reach them"""
    k: Annotated[int, Least(1), Most("max_k")] | None = None
    """how many items; 10 where it is left out"""
    exclude_seen: bool | None = None
    """items of the history are not recommended, which is the default"""
    exclude: Annotated[list[ItemId], Most("max_listed")] | None = None
    """items that are not recommended"""
    allow: Annotated[list[ItemId], Most("max_listed")] | None = None
    """only these are recommended"""
    user_features: Mapping[str, Value] | None = None
    """by name of a feature of the user"""
    context: Mapping[str, Value] | None = None
    """by name of a feature of an event: its value for every candidate, such as the device of this request"""
    candidate_features: Mapping[str, Value] | None = None
    """the same as `context`: a request cannot know its candidates"""
    now_ms: Moment | None = None
    """when it is asked, in Unix milliseconds; the time of the server where it is left out"""
    timeout_ms: Timeout | None = None
    """an answer is of no use later"""
    unknown: Unknown | None = None
    """what to do with ids that the model does not know: items that only retrieval knows get the last place (last, the
    default), a score all the same (score) or are left out (drop); a request with unknown ids is refused (refuse);
    events are left out unless it says score or refuse"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRequest:
    """Other models are to be served."""

    models: Annotated[list[ModelAddress], Least(1)]
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

    id: Annotated[str, Least(1), Most("max_id_characters")] | int
    """as requests will name it"""
    features: Mapping[str, Value] | None = None
    """by name of a feature of items: a category, a list of them, a number, a text, or the numbers of a vector; what is
    left out nobody knows"""
    title: Annotated[str, Most("max_text_characters")] | None = None
    """what people call it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsRequest:
    """Items are to be served that no training has met."""

    items: Annotated[list[NewItemFields], Least(1), Most("max_listed")]
    """those that are known already stay as they are"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TitlesRequest:
    """What people call items, where the model knows it."""

    items: Annotated[list[ItemId], Most("max_listed")]
    """source ids; may be empty"""
    search: Annotated[str, Least(1), Most("max_id_characters")] | None = None
    """words of a title, in any case: the first items whose title has it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsRequest:
    """Events to be kept for requests without a history."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    history: HistoryFields
    """events in the order of their times; those that are older than some that are kept take their place among them"""
