"""Types, bounds and conversions of config values.

What a field of a config may hold: part of its type, so that a value out of range is refused by name.

`batch_samples: Count = 128` is an int for a type checker, and 1 or more for everybody who builds the config.
`policy: Annotated[str, OneOf(POLICIES)]` is a name in a registry that may grow.

Fields whose config is that of a member of a seam: `kind` names the member, ours or another package's.

    encoder: Annotated[BackboneConfig, PluginConfig(BACKBONES)]

Members of such a seam have an attribute `config`, a class with a field `kind: Literal["the member's name"]`.

Plain data, and text as typed on a command line, to the types of a config's fields: every name and type is checked.

All mistakes are told at once. A value of a union is read as the member whose `kind` it names, where members have one.

Dates and moments as people write them, in Unix milliseconds.
"""

import dataclasses
import datetime
import enum
import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from nestrec.base.errors import ErrorCollector, UserError, UserErrorGroup, did_you_mean
from nestrec.base.plugins import PluginRegistry


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Finite numbers from `low` (or above it) to `high`."""

    low: float
    high: float = float("inf")
    above: bool = False
    """`low` itself is not allowed"""
    below: bool = False
    """nor is `high`"""

    def holds(self, value: float) -> bool:
        is_enough = value > self.low if self.above else value >= self.low
        return is_enough and (value < self.high if self.below else value <= self.high) and value < float("inf")

    def __str__(self) -> str:
        if self.high < float("inf"):
            return (
                f"{'more than ' if self.above else ''}{self.low:g} to {'less than ' if self.below else ''}{self.high:g}"
            )
        return f"more than {self.low:g}" if self.above else f"{self.low:g} or more"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The names of a registry, as it is when somebody asks."""

    known: Collection[str]

    def __str__(self) -> str:
        return " | ".join(self.known)


@dataclass(frozen=True, slots=True)
class RemovedChoice:
    """A choice that an option had in an earlier version."""

    choice: str
    remedy: str
    """What to do instead, for the error message."""


Count = Annotated[int, NumberRange(1)]
"""1 or more."""
Natural = Annotated[int, NumberRange(0)]
"""0 or more."""
Seed = Annotated[int, NumberRange(0, 2**63 - 1)]
"""What 63 bits hold."""
Port = Annotated[int, NumberRange(0, 65535)]
"""Where a server listens; 0 takes a free one."""
Positive = Annotated[float, NumberRange(0, above=True)]
"""More than 0."""
NonNegative = Annotated[float, NumberRange(0)]
"""0 or more."""
Share = Annotated[float, NumberRange(0, 1)]
"""0 to 1."""
Decay = Annotated[float, NumberRange(0, 1, below=True)]
"""0 to less than 1."""


class OutOfRangeError(UserError):
    """A value out of range, named by its field alone until whoever knows the rest of its path adds it."""

    def under(self, where: str) -> "OutOfRangeError":
        return (
            self
            if not where
            else OutOfRangeError(self.problem, option=f"{where}.{self.option}", value=self.value, remedy=self.remedy)
        )


def limits_of(cls: type) -> dict[str, NumberRange | OneOf]:
    """What the fields that are limited may hold, those of classes that it extends included."""
    annotations = [inspect.get_annotations(base) for base in reversed(cls.__mro__)]
    found = ((name, _limit_in(hint)) for named in annotations for name, hint in named.items())
    return {name: limit for name, limit in found if limit is not None}


def check_limits(value: Any, limits: dict[str, NumberRange | OneOf]) -> None:
    """Raise for the fields that hold what they may not; of a sequence, every element must be allowed."""
    mistakes = ErrorCollector()
    for name, limit in limits.items():
        with mistakes.collecting():
            _check_limit(name, getattr(value, name), limit)
    mistakes.raise_if_any()


def _check_limit(name: str, given: Any, limit: NumberRange | OneOf) -> None:
    for one in given if isinstance(given, tuple | list) else (given,):
        if isinstance(limit, OneOf):
            if isinstance(one, str) and one not in limit.known:
                remedy = did_you_mean(one, limit.known)
                raise OutOfRangeError("is not one of the choices", option=name, value=given, remedy=remedy)
        elif isinstance(one, int | float) and not limit.holds(one):
            raise OutOfRangeError(f"must be {limit}", option=name, value=given, remedy=f"give {limit}")


def _limit_in(hint: Any) -> NumberRange | OneOf | None:
    for found in getattr(hint, "__metadata__", ()):
        if isinstance(found, NumberRange | OneOf):
            return found
    inner = (_limit_in(part) for part in typing.get_args(hint))
    return next((limit for limit in inner if limit is not None), None)


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """Part of a field's type: the field holds the config of some member of the seam."""

    seam: PluginRegistry[Any]

    def config(self, kind: str, *, field: str) -> type:
        """The config class of the member of this name; `field`: where the name was given."""
        cls: type = self.seam.find(kind, field=field).config
        try:
            names = typing.get_args(typing.get_type_hints(cls).get("kind")) if dataclasses.is_dataclass(cls) else ()
        except Exception as error:  # of a package that names types for its type checker alone, mostly
            problem = f"types of its config {cls.__name__} cannot be read ({type(error).__name__}: {error})"
            raise self.seam.unanswered(kind, "config", problem) from error
        if kind not in names:
            package = self.seam.package_of(kind)
            raise UserError(
                f"its config {cls.__name__} is not of this kind",
                option=f"{self.seam.group}: {kind}",
                value=kind,
                remedy=f"give {cls.__name__} of the package {package!r} the field `kind: Literal[{kind!r}] = {kind!r}`",
            )
        return cls

    def config_for(self, value: Mapping[str, Any], where: str) -> type:
        """The config class that plain data is of: the one it names, else the first that has all of its fields."""
        if "kind" in value:
            return self.config(str(value["kind"]), field=f"{where}.kind")
        for name in self.seam:
            cls = self.config(name, field=where)
            if value.keys() <= {field.name for field in dataclasses.fields(cls)}:
                return cls
        raise UserError(
            "does not say of which kind it is",
            option=where,
            value=dict(value),
            remedy=f'add "kind", one of {", ".join(self.seam)}',
        )

    def check(self, value: Any, where: str) -> None:
        """Raise where a value is no config of a member."""
        kind = getattr(value, "kind", None)
        if not (isinstance(kind, str) and kind in self.seam and isinstance(value, self.config(kind, field=where))):
            problem = f"is no config of a {self.seam.noun}"
            raise UserError(problem, option=where, value=value, remedy=f"give one of kind {', '.join(self.seam)}")


T = TypeVar("T")
_EXPECTED = {bool: "true or false", int: "an int", float: "a float", str: "a str"}


def from_plain(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Build a config from JSON-like data; every name and type is checked."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cast(Any, cls))
    names = [field.name for field in fields]
    mistakes = ErrorCollector()
    given = {}
    for key, value in data.items():
        with mistakes.collecting():
            if key not in names:
                raise UserError(
                    f"{cls.__name__} has no such field",
                    option=join(where, key),
                    value=value,
                    remedy=did_you_mean(key, names),
                )
            given[key] = convert(value, hints[key], join(where, key))
    for field in fields:
        if field.name not in data and not _has_default(field):
            mistakes.add("is required", option=join(where, field.name), value=None, remedy="give it a value")
    mistakes.raise_if_any()
    return built(lambda: cls(**given), where)


def built(build: Callable[[], T], where: str) -> T:
    """What `build` makes of checked values; limits of numbers are named by their whole path."""
    try:
        return build()
    except OutOfRangeError as error:
        raise error.under(where) from None
    except UserErrorGroup as several:
        named = [error.under(where) if isinstance(error, OutOfRangeError) else error for error in several.errors]
        raise UserErrorGroup(named) from None


def parse(text: str) -> Any:
    """What a command line's text stands for: a number, true, none, JSON, or itself."""
    try:
        return json.loads({"true": "true", "false": "false", "none": "null"}.get(text.lower(), text))
    except (ValueError, RecursionError):  # no JSON, a number of more than 4,300 digits, or nested too deeply
        return text


def convert(value: Any, hint: Any, where: str, raw: str | None = None) -> Any:
    """`value` as the type `hint`, or an error that names the field. `raw`: the text that `value` was parsed from."""
    if get_origin(hint) is Annotated:
        return _convert_annotated(value, hint, where, raw)
    return _convert_bare(value, hint, where, raw)


def _convert_bare(value: Any, hint: Any, where: str, raw: str | None) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), where, raw)
    if origin is Literal:
        return _convert_choice(value, get_args(hint), where, raw)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_plain(hint, _expect_fields(value, where), where)
    if origin in (tuple, list):
        return _convert_sequence(value, hint, where, raw)
    if origin is not None and issubclass(origin, Mapping):
        return _convert_mapping(value, get_args(hint)[1], where, raw)
    return _convert_scalar(value, hint, where, raw)


def _convert_annotated(value: Any, hint: Any, where: str, raw: str | None) -> Any:
    for part in hint.__metadata__:
        if isinstance(part, RemovedChoice) and value == part.choice:
            raise UserError("was removed", option=where, value=value, remedy=part.remedy)
    of_kind = next((part for part in hint.__metadata__ if isinstance(part, PluginConfig)), None)
    if of_kind is None:  # limits are checked by the config that has the field
        return convert(value, hint.__origin__, where, raw)
    if dataclasses.is_dataclass(value):
        of_kind.check(value, where)
        return value
    plain = _expect_fields(value, where)
    return convert(plain, of_kind.config_for(plain, where), where, raw)


def join(where: str, key: str) -> str:
    """A dotted name."""
    return f"{where}.{key}" if where else key


def _convert_choice(value: Any, choices: tuple[Any, ...], where: str, raw: str | None) -> Any:
    if raw in choices:  # such as the choice "none", which reads as null
        return raw
    if value not in choices:
        remedy = did_you_mean(str(value), [str(choice) for choice in choices])
        if len(choices) == 1 and where.endswith("kind"):  # it decides what other fields there are
            whole = where.removesuffix(".kind")
            remedy = (
                f"here it can only be {choices[0]}; take a recipe of the other kind (see `nestrec recipes`), or give"
                f' the whole of {whole} as JSON with its kind: --{whole} \'{{"kind": "{value}", ...}}\''
            )
        raise UserError("is not one of the choices", option=where, value=value, remedy=remedy)
    return value


def _convert_union(value: Any, members: tuple[Any, ...], where: str, raw: str | None) -> Any:
    if value is None and type(None) in members:
        return None
    others = [member for member in members if member is not type(None)]
    if isinstance(value, Mapping) and (kinds := _members_by_kind(others)):
        return convert(value, _member_named(value, kinds, where), where, raw)
    errors = []
    for member in others:
        try:
            return convert(value, member, where, raw)
        except UserError as error:
            errors.append(error)
    if len(errors) == 1 and (len(members) == 1 or errors[0].option != where):  # of a part of the value
        raise errors[0]
    remedy = ", or ".join([str(error.remedy) for error in errors] + ["none"] * (len(others) < len(members)))
    problem = errors[0].problem if len(errors) == 1 else "is nothing that this option takes"
    raise UserError(problem, option=where, value=value, remedy=remedy)


def _members_by_kind(members: list[Any]) -> dict[str, type]:
    """Dataclasses of a union by the one value of their field `kind`; empty where a member has none."""
    found: dict[str, type] = {}
    for member in members:
        hint = typing.get_type_hints(member).get("kind") if dataclasses.is_dataclass(member) else None
        if get_origin(hint) is not Literal:
            return {}
        found |= {str(name): member for name in get_args(hint)}
    return found


def _member_named(value: Mapping[str, Any], kinds: dict[str, type], where: str) -> type:
    """The member that a value's `kind` names; without a name, the only one that has all the fields given."""
    if "kind" in value:
        kind = str(value["kind"])
        if kind not in kinds:
            remedy = did_you_mean(kind, kinds)
            raise UserError("is not one of the choices", option=join(where, "kind"), value=kind, remedy=remedy)
        return kinds[kind]
    fitting = [cls for cls in kinds.values() if set(value) <= {field.name for field in dataclasses.fields(cls)}]
    if not fitting:
        raise UserError(
            "does not say of which kind it is",
            option=where,
            value=dict(value),
            remedy=f'add "kind", one of {", ".join(kinds)}',
        )
    return fitting[0]


def _convert_sequence(value: Any, hint: Any, where: str, raw: str | None) -> Any:
    args = get_args(hint)
    texts: list[str | None] = []
    if raw is not None and not isinstance(value, list | Mapping):
        texts = [*raw.split(",")] if raw else []
        value = [parse(text) for text in texts if text is not None]
    elif isinstance(value, str):
        texts = [*value.split(",")]
        value = [parse(text) for text in value.split(",")]
    elif not isinstance(value, list | tuple):
        value = [value]
    is_fixed = get_origin(hint) is tuple and not (len(args) == 2 and args[1] is Ellipsis)
    if is_fixed and len(value) != len(args):
        raise UserError(f"has {len(value)} values", option=where, value=value, remedy=f"give {len(args)} values")
    hints = args if is_fixed else [args[0]] * len(value)
    mistakes = ErrorCollector()
    items = []
    for i, (item, of_item, text) in enumerate(zip(value, hints, texts or [None] * len(value), strict=True)):
        with mistakes.collecting():
            items.append(convert(item, of_item, f"{where}[{i}]", text))
    mistakes.raise_if_any()
    return tuple(items) if get_origin(hint) is tuple else items


def _convert_mapping(value: Any, hint: Any, where: str, raw: str | None) -> dict[str, Any]:
    """Named values, on a command line also as `name=value,other=value`; nothing at all is none of them."""
    if raw is not None and not isinstance(value, Mapping) and (not raw or "=" in raw):
        pairs = [part.partition("=") for part in raw.split(",")] if raw else []
        for name, equals, _ in pairs:
            if not (name and equals):
                raise UserError(
                    "is no list of names and values",
                    option=where,
                    value=raw,
                    remedy="write name=value,other=value, or JSON",
                )
        return {name: convert(parse(text), hint, join(where, name), text) for name, _, text in pairs}
    if raw is not None and not isinstance(value, Mapping):
        remedy = "write name=value,other=value, or JSON; `nestrec options COMMAND` describes the values of each option"
        raise UserError("must hold names with values", option=where, value=raw, remedy=remedy)
    mistakes = ErrorCollector()
    found = {}
    for name, inner in _expect_fields(value, where).items():
        with mistakes.collecting():
            found[str(name)] = convert(inner, hint, join(where, str(name)))
    mistakes.raise_if_any()
    return found


def _convert_scalar(value: Any, hint: Any, where: str, raw: str | None) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            remedy = "give a number that a float can hold"
            raise UserError("is too large", option=where, value=f"{str(value)[:40]}...", remedy=remedy) from error
    if hint is str and raw is not None and not isinstance(value, str):
        return raw
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _convert_enum(value, hint, where)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        remedy = f"give {_EXPECTED.get(hint, hint.__name__)}"
        raise UserError(f"is not of type {hint.__name__}", option=where, value=value, remedy=remedy)
    return value


def _convert_enum(value: Any, hint: type[enum.Enum], where: str) -> Any:
    try:
        return hint(value)
    except ValueError:
        remedy = did_you_mean(str(value), [str(member.value) for member in hint])
        raise UserError("is not one of the choices", option=where, value=value, remedy=remedy) from None


def _expect_fields(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError("must hold named fields", option=where, value=value, remedy="give a mapping of field to value")
    return value


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def moment_ms(text: str | None, field: str) -> int | None:
    """Unix milliseconds of a date or moment in ISO form."""
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        remedy = "write a date (2026-11-01) or a moment (2026-11-01T12:00+02:00)"
        raise UserError("is no date", option=field, value=text, remedy=remedy) from None
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return round(zoned.timestamp() * 1000)


def iso_moment(time_ms: int) -> str:
    """The moment in UTC as text."""
    return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC).isoformat()
