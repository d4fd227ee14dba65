"""The shape of requests and answers from the classes that declare them: one declaration checks what comes in, and
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

from nestrec.base.bounds import Bound
from nestrec.base.field_docs import docs_of
from nestrec.serving.api.schema import BadRequestError, LimitsConfig
from nestrec.serving.plain_list import PlainList, types_of

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
