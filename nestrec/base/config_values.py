"""Types, bounds and conversions of config values.

Bounds are part of the type of a field, so that an error can name the field:

    batch_size: Count = 128                    # an int for the type checker; the config checks that it is at least 1
    policy: Annotated[str, OneOf(POLICIES)]    # a name in a plugin registry
    encoder: Annotated[BackboneConfig, PluginConfig(BACKBONES)]    # config of a plugin, selected by its `kind`

The specs in the registry of a `PluginConfig` have an attribute `config`: a class with a field
`kind: Literal["name of the plugin"]`.

`from_plain` and `convert` turn plain data, and text as typed on a command line, into typed values of fields. They check
every name and type, and report all invalid values in one error. A mapping for a union of configs is read as the member
that its `kind` names.

Dates and times in ISO format are converted to Unix milliseconds.
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
from nestrec.base.renamed_fields import with_present_names


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Bounds of a number; infinity and NaN are never allowed."""

    low: float
    high: float = float("inf")
    above: bool = False
    """Excludes the lower bound itself."""
    below: bool = False
    """Excludes the upper bound itself."""

    def contains(self, value: float) -> bool:
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
    """Names of a registry, looked up at each check because plugins can add names."""

    known: Collection[str]

    def __str__(self) -> str:
        return " | ".join(self.known)


@dataclass(frozen=True, slots=True)
class RemovedChoice:
    """Choice of an option that an earlier version supported."""

    choice: str
    remedy: str
    """Replacement, as the remedy of the error message."""


Count = Annotated[int, NumberRange(1)]
"""Integer of at least 1."""
Natural = Annotated[int, NumberRange(0)]
"""Integer of at least 0."""
Seed = Annotated[int, NumberRange(0, 2**63 - 1)]
"""Random seed: an integer of 63 bits."""
Port = Annotated[int, NumberRange(0, 65535)]
"""TCP port of a server; 0 selects a free port."""
Positive = Annotated[float, NumberRange(0, above=True)]
"""Float greater than 0."""
NonNegative = Annotated[float, NumberRange(0)]
"""Float of at least 0."""
Fraction = Annotated[float, NumberRange(0, 1)]
"""Float from 0 to 1."""
Decay = Annotated[float, NumberRange(0, 1, below=True)]
"""Float from 0 to less than 1, such as the decay of a moving average."""


class OutOfRangeError(UserError):
    """A value is out of range. The option is the field name until the caller adds the rest of its dotted path."""

    def under(self, where: str) -> "OutOfRangeError":
        """Return the error with the path of the config in front of the field name."""
        return (
            self
            if not where
            else OutOfRangeError(self.problem, option=f"{where}.{self.option}", value=self.value, remedy=self.remedy)
        )


def field_limits(cls: type) -> dict[str, NumberRange | OneOf]:
    """Return the bounds of each field that has bounds, inherited fields included."""
    annotations = [inspect.get_annotations(base) for base in reversed(cls.__mro__)]
    limits = ((name, _limit_in(hint)) for hints in annotations for name, hint in hints.items())
    return {name: limit for name, limit in limits if limit is not None}


def check_limits(value: Any, limits: dict[str, NumberRange | OneOf]) -> None:
    """Raise an `OutOfRangeError` for fields that are out of bounds; bounds of a sequence apply to each element."""
    mistakes = ErrorCollector()
    for name, limit in limits.items():
        with mistakes.collecting():
            _check_limit(name, getattr(value, name), limit)
    mistakes.raise_if_any()


def _check_limit(name: str, value: Any, limit: NumberRange | OneOf) -> None:
    for one in value if isinstance(value, tuple | list) else (value,):
        if isinstance(limit, OneOf):
            if isinstance(one, str) and one not in limit.known:
                remedy = did_you_mean(one, limit.known)
                raise OutOfRangeError("is not one of the choices", option=name, value=value, remedy=remedy)
        elif isinstance(one, int | float) and not limit.contains(one):
            raise OutOfRangeError(f"must be {limit}", option=name, value=value, remedy="choose a value in this range")


def _limit_in(hint: Any) -> NumberRange | OneOf | None:
    for metadata in getattr(hint, "__metadata__", ()):
        if isinstance(metadata, NumberRange | OneOf):
            return metadata
    inner = (_limit_in(part) for part in typing.get_args(hint))
    return next((limit for limit in inner if limit is not None), None)


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """Annotation of a field that holds the config of a plugin in `registry`."""

    registry: PluginRegistry[Any]

    def config(self, kind: str, *, field: str) -> type:
        """Return the config class of a plugin; `field` is the option that named it, for the error."""
        cls: type = self.registry.find(kind, field=field).config
        try:
            names = typing.get_args(typing.get_type_hints(cls).get("kind")) if dataclasses.is_dataclass(cls) else ()
        except Exception as error:  # usually the package imports types only for its type checker
            problem = f"types of its config {cls.__name__} cannot be resolved ({type(error).__name__}: {error})"
            raise self.registry.missing_field_error(kind, "config", problem) from error
        if kind not in names:
            package = self.registry.package_of(kind)
            raise UserError(
                f"its config {cls.__name__} does not have this kind",
                option=f"{self.registry.group}: {kind}",
                value=kind,
                remedy=f"add `kind: Literal[{kind!r}] = {kind!r}` to {cls.__name__} in the package {package!r}",
            )
        return cls

    def infer_config(self, value: Mapping[str, Any], where: str) -> type:
        """Return the config class of plain data: the one that `kind` names, else the first one with all its fields."""
        if "kind" in value:
            return self.config(str(value["kind"]), field=f"{where}.kind")
        for name in self.registry:
            cls = self.config(name, field=where)
            if with_present_names(cls, value).keys() <= {field.name for field in dataclasses.fields(cls)}:
                return cls
        raise UserError(
            'the field "kind" is missing',
            option=where,
            value=dict(value),
            remedy=f'add "kind", one of {", ".join(self.registry)}',
        )

    def check(self, value: Any, where: str) -> None:
        """Raise a `UserError` if a value is not the config of a plugin in the registry."""
        kind = getattr(value, "kind", None)
        if not (isinstance(kind, str) and kind in self.registry and isinstance(value, self.config(kind, field=where))):
            problem = f"must be the config of a {self.registry.noun}"
            raise UserError(
                problem, option=where, value=value, remedy=f"use one of the kinds {', '.join(self.registry)}"
            )


T = TypeVar("T")
_EXPECTED = {bool: "true or false", int: "an integer, such as 8", float: "a number, such as 0.1", str: "text"}


def from_plain(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Build a config from JSON-like data.

    Args:
        cls: Config class.
        data: Maps field names to values.
        where: Dotted path of the config, for error messages.

    Raises:
        UserError: Names, types or values are invalid; the error lists all of them.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cast(Any, cls))
    names = [field.name for field in fields]
    data = with_present_names(cls, data)
    mistakes = ErrorCollector()
    values = {}
    for key, value in data.items():
        with mistakes.collecting():
            if key not in names:
                raise UserError(
                    f"{cls.__name__} has no such field",
                    option=join(where, key),
                    value=value,
                    remedy=did_you_mean(key, names),
                )
            values[key] = convert(value, hints[key], join(where, key))
    for field in fields:
        if field.name not in data and not _has_default(field):
            mistakes.add("is required", option=join(where, field.name), value=None, remedy="set a value")
    mistakes.raise_if_any()
    return build_config(lambda: cls(**values), where)


def rename_former_fields(hint: Any, value: Any) -> Any:
    """Return plain data of a config with all former field names replaced by the present ones, at any depth.

    Args:
        hint: The config class, or the type of a field.
        value: Plain data that `from_plain` can read, or a part of it.
    """
    hint = _select_hint(hint, value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        hints = typing.get_type_hints(hint, include_extras=True)
        present = with_present_names(hint, value)
        return {name: rename_former_fields(hints.get(name), inner) for name, inner in present.items()}
    arguments = get_args(hint)
    if isinstance(value, Mapping) and len(arguments) == 2:
        return {name: rename_former_fields(arguments[1], inner) for name, inner in value.items()}
    if isinstance(value, list) and arguments:
        return [rename_former_fields(arguments[0], inner) for inner in value]
    return value


def _select_hint(hint: Any, value: Any) -> Any:
    """Return the type as which a value is read: the plugin config or union member that its `kind` selects."""
    if get_origin(hint) is Annotated:
        plugin = next((part for part in hint.__metadata__ if isinstance(part, PluginConfig)), None)
        if plugin is not None and isinstance(value, Mapping) and "kind" in value:
            return plugin.config(str(value["kind"]), field="kind")
        return _select_hint(hint.__origin__, value)
    if get_origin(hint) in (Union, types.UnionType) and isinstance(value, Mapping):
        members = [member for member in get_args(hint) if member is not type(None)]
        named = _members_by_kind(members).get(str(value.get("kind")))
        return _select_hint(named or members[0], value)
    return hint


def build_config(build: Callable[[], T], where: str) -> T:
    """Call `build`, and add the path of the config to the field names of its `OutOfRangeError`s."""
    try:
        return build()
    except OutOfRangeError as error:
        raise error.under(where) from None
    except UserErrorGroup as several:
        errors = [error.under(where) if isinstance(error, OutOfRangeError) else error for error in several.errors]
        raise UserErrorGroup(errors) from None


def parse(text: str) -> Any:
    """Parse the text of an option: a number, `true`, `false`, `none`, or JSON; other text is returned unchanged."""
    try:
        return json.loads({"true": "true", "false": "false", "none": "null"}.get(text.lower(), text))
    except (ValueError, RecursionError):  # not JSON, a number of more than 4,300 digits, or nested too deeply
        return text


def convert(value: Any, hint: Any, where: str, raw: str | None = None) -> Any:
    """Convert a value to a type.

    Args:
        value: JSON-like value.
        hint: Type to convert to, as in an annotation.
        where: Dotted name of the field, for error messages.
        raw: Text that `value` was parsed from; None if it does not come from a command line.

    Raises:
        UserError: The value does not fit the type.
    """
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
    plugin_config = next((part for part in hint.__metadata__ if isinstance(part, PluginConfig)), None)
    if plugin_config is None:  # bounds are checked by the constructor of the config
        return convert(value, hint.__origin__, where, raw)
    if dataclasses.is_dataclass(value):
        plugin_config.check(value, where)
        return value
    plain = _expect_fields(value, where)
    return convert(plain, plugin_config.infer_config(plain, where), where, raw)


def join(where: str, key: str) -> str:
    """Return a dotted name."""
    return f"{where}.{key}" if where else key


def _convert_choice(value: Any, choices: tuple[Any, ...], where: str, raw: str | None) -> Any:
    if raw in choices:  # such as the choice "none", which is parsed as null
        return raw
    if value not in choices:
        remedy = did_you_mean(str(value), [str(choice) for choice in choices])
        if len(choices) == 1 and where.endswith("kind"):  # the kind determines the other fields
            section = where.removesuffix(".kind")
            remedy = (
                f"here it can only be {choices[0]}; use a recipe with the other kind (see `nestrec recipes`), or set"
                f' all of {section} as JSON with its kind: --{section} \'{{"kind": "{value}", ...}}\''
            )
        raise UserError("is not one of the choices", option=where, value=value, remedy=remedy)
    return value


def _convert_union(value: Any, members: tuple[Any, ...], where: str, raw: str | None) -> Any:
    if value is None and type(None) in members:
        is_choice = any(get_origin(member) is Literal and raw in get_args(member) for member in members)
        return raw if is_choice else None  # the choice "none" differs from None, which is typed as null
    others = [member for member in members if member is not type(None)]
    if isinstance(value, Mapping) and (kinds := _members_by_kind(others)):
        return convert(value, _find_member(value, kinds, where), where, raw)
    errors = []
    for member in others:
        try:
            return convert(value, member, where, raw)
        except UserError as error:
            errors.append(error)
    if len(errors) == 1 and (len(members) == 1 or errors[0].option != where):  # the error is inside the value
        raise errors[0]
    remedy = ", or ".join([str(error.remedy) for error in errors] + ["none"] * (len(others) < len(members)))
    problem = errors[0].problem if len(errors) == 1 else "invalid value"
    raise UserError(problem, option=where, value=value, remedy=remedy)


def _members_by_kind(members: list[Any]) -> dict[str, type]:
    """Return the dataclasses of a union by the values of their field `kind`; empty if any member does not have it."""
    kinds: dict[str, type] = {}
    for member in members:
        hint = typing.get_type_hints(member).get("kind") if dataclasses.is_dataclass(member) else None
        if get_origin(hint) is not Literal:
            return {}
        kinds |= {str(name): member for name in get_args(hint)}
    return kinds


def _find_member(value: Mapping[str, Any], kinds: dict[str, type], where: str) -> type:
    """Return the member that the `kind` of a value names, or the first one with all of its fields."""
    if "kind" in value:
        kind = str(value["kind"])
        if kind not in kinds:
            remedy = did_you_mean(kind, kinds)
            raise UserError("is not one of the choices", option=join(where, "kind"), value=kind, remedy=remedy)
        return kinds[kind]
    fitting = [
        cls
        for cls in kinds.values()
        if with_present_names(cls, value).keys() <= {field.name for field in dataclasses.fields(cls)}
    ]
    if not fitting:
        raise UserError(
            'the field "kind" is missing',
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
        raise UserError(f"contains {len(value)} values", option=where, value=value, remedy=f"set {len(args)} values")
    hints = args if is_fixed else [args[0]] * len(value)
    mistakes = ErrorCollector()
    items = []
    for i, (item, item_hint, text) in enumerate(zip(value, hints, texts or [None] * len(value), strict=True)):
        with mistakes.collecting():
            items.append(convert(item, item_hint, f"{where}[{i}]", text))
    mistakes.raise_if_any()
    return tuple(items) if get_origin(hint) is tuple else items


def _convert_mapping(value: Any, hint: Any, where: str, raw: str | None) -> dict[str, Any]:
    """Convert a mapping, which can be typed as `name=value,other=value`; empty text is an empty mapping."""
    if raw is not None and not isinstance(value, Mapping) and (not raw or "=" in raw):
        pairs = [part.partition("=") for part in raw.split(",")] if raw else []
        for name, equals, _ in pairs:
            if not (name and equals):
                raise UserError(
                    "must be a list of names with values",
                    option=where,
                    value=raw,
                    remedy="write name=value,other=value, or JSON",
                )
        return {name: convert(parse(text), hint, join(where, name), text) for name, _, text in pairs}
    if raw is not None and not isinstance(value, Mapping):
        remedy = "write name=value,other=value, or JSON; `nestrec options COMMAND` describes the values of each option"
        raise UserError("must be a list of names with values", option=where, value=raw, remedy=remedy)
    mistakes = ErrorCollector()
    entries = {}
    for name, inner in _expect_fields(value, where).items():
        with mistakes.collecting():
            entries[str(name)] = convert(inner, hint, join(where, str(name)))
    mistakes.raise_if_any()
    return entries


def _convert_scalar(value: Any, hint: Any, where: str, raw: str | None) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            remedy = "set a number in the range of a float"
            raise UserError("is too large", option=where, value=f"{str(value)[:40]}...", remedy=remedy) from error
    if hint is str and raw is not None and not isinstance(value, str):
        return raw
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _convert_enum(value, hint, where)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        remedy = f"write {_EXPECTED.get(hint, hint.__name__)}"
        raise UserError(f"must be of type {hint.__name__}", option=where, value=value, remedy=remedy)
    return value


def _convert_enum(value: Any, hint: type[enum.Enum], where: str) -> Any:
    try:
        return hint(value)
    except ValueError:
        remedy = did_you_mean(str(value), [str(member.value) for member in hint])
        raise UserError("is not one of the choices", option=where, value=value, remedy=remedy) from None


def _expect_fields(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError("must be a mapping", option=where, value=value, remedy="set field names with values")
    return value


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def parse_time_ms(text: str | None, field: str) -> int | None:
    """Parse a date or time in ISO format to Unix milliseconds; without a time zone it is read as UTC.

    Args:
        text: Date or time; None returns None.
        field: Name of the option, for the error message.

    Raises:
        UserError: The text is not in ISO format.
    """
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        remedy = "write a date (2026-11-01) or a time (2026-11-01T12:00+02:00)"
        raise UserError("not a date or time in ISO format", option=field, value=text, remedy=remedy) from None
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return round(zoned.timestamp() * 1000)


def format_iso_time(time_ms: int) -> str:
    """Format Unix milliseconds as an ISO time in UTC."""
    return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC).isoformat()
