"""Configuration: frozen dataclasses beside their owners, loaded from plain data with checked names and types.

`@config` makes a frozen, keyword-only, slotted dataclass. `from_plain` builds one from JSON-like data, `to_plain`
is its inverse, and `with_overrides` applies dotted overrides (`{"model.num_layers": "4"}`) as given on a command line.
Unknown names and wrong types are errors that name the field and suggest the remedy.
"""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin

from nestrec.base.bounds import Bound, BoundError, bounds_of, check_bounds
from nestrec.base.errors import UserError, did_you_mean

T = TypeVar("T")
ConfigT = TypeVar("ConfigT")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, dataclasses.Field))
def config(cls: type[T]) -> type[T]:
    """Frozen, keyword-only, slotted dataclass; numbers outside the bounds of their fields are refused."""
    if bounds := bounds_of(cls):
        _check_first(cls, bounds)
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


def _check_first(cls: Any, bounds: dict[str, Bound]) -> None:
    """Bounds are checked before what the class itself asks of its values."""
    of_class = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        check_bounds(self, bounds)
        if of_class is not None:
            of_class(self)

    cls.__post_init__ = __post_init__


def to_plain(value: Any) -> Any:
    """JSON-like data of a config (or of any nested value made of configs, mappings and sequences)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


def leaves(value: Any, where: str = "") -> dict[str, Any]:
    """Dotted names of all single values in a config or in plain data, with the values."""
    plain = to_plain(value)
    if not isinstance(plain, Mapping):
        return {where: plain}
    found: dict[str, Any] = {}
    for name, inner in plain.items():
        found |= leaves(inner, _join(where, name))
    return found


def from_plain(cls: type[ConfigT], data: Mapping[str, Any], where: str = "") -> ConfigT:
    """Build a config from JSON-like data; every name and type is checked."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cast(Any, cls))]
    for key in data:
        if key not in names:
            raise UserError(f"{cls.__name__} has no such field", field=_join(where, key), value=data[key],
                            remedy=did_you_mean(key, names))  # fmt: skip
    given = {k: _convert(v, hints[k], _join(where, k)) for k, v in data.items()}
    missing = [f.name for f in dataclasses.fields(cast(Any, cls)) if f.name not in given and not _has_default(f)]
    if missing:
        raise UserError("is required", field=_join(where, missing[0]), value=None, remedy="give it a value")
    return _built(lambda: cls(**given), where)


def with_overrides(base: ConfigT, overrides: Mapping[str, str]) -> ConfigT:
    """A copy of `base` with dotted overrides applied, all at once; values are text as typed on a command line."""
    given = {tuple(path.split(".")): text for path, text in overrides.items()}
    return cast(ConfigT, _override(base, given, ""))


def dumps(value: Any) -> str:
    """Readable JSON of a config; `from_plain(type(value), json.loads(...))` gives it back."""
    return json.dumps(to_plain(value), indent=2)


_Overrides = Mapping[tuple[str, ...], str]
"""Parts of a dotted name to the text given for it."""


def _override(node: Any, given: _Overrides, where: str) -> Any:
    names = [f.name for f in dataclasses.fields(node)]
    hints = typing.get_type_hints(type(node))
    replaced = {}
    for name, inner in _by_first(given).items():
        if name not in names:
            parts, text = next(iter(inner.items()))
            field = _join(where, ".".join((name, *parts)))
            raise UserError("no such option", field=field, value=text, remedy=did_you_mean(name, names))
        replaced[name] = _overridden(getattr(node, name), hints[name], inner, _join(where, name))
    return _built(lambda: dataclasses.replace(node, **replaced), where)


def _by_first(given: _Overrides) -> dict[str, dict[tuple[str, ...], str]]:
    """The overrides of each field, without its name."""
    found: dict[str, dict[tuple[str, ...], str]] = {}
    for (first, *rest), text in given.items():
        found.setdefault(first, {})[tuple(rest)] = text
    return found


def _overridden(current: Any, hint: Any, given: _Overrides, path: str) -> Any:
    """`current`, of the type `hint`: set as a whole where its own name was given, then the named parts of it."""
    inner = dict(given)
    if (text := inner.pop((), None)) is not None:
        current = _convert(_parse(text), hint, path, raw=text)
    if not inner or dataclasses.is_dataclass(current):
        return _override(current, inner, path) if inner else current
    parts, text = next(iter(inner.items()))
    if not isinstance(current, Mapping):
        remedy = f"{path} is a single value; drop the part after it"
        raise UserError("has no fields", field=".".join((path, *parts)), value=text, remedy=remedy)
    return {**current, **_overridden_entries(current, hint, inner, path)}


def _overridden_entries(current: Mapping[str, Any], hint: Any, given: _Overrides, path: str) -> dict[str, Any]:
    of_entry = get_args(hint)[1] if get_args(hint) else Any
    entries = {}
    for name, inner in _by_first(given).items():
        if () not in inner and name not in current:
            parts, text = next(iter(inner.items()))
            field, remedy = ".".join((path, name, *parts)), did_you_mean(name, current)
            raise UserError("no such entry", field=field, value=text, remedy=remedy)
        entries[name] = _overridden(current.get(name), of_entry, inner, f"{path}.{name}")
    return entries


def _built(build: Callable[[], T], where: str) -> T:
    try:
        return build()
    except BoundError as error:
        raise error.under(where) from None


def _parse(text: str) -> Any:
    try:
        return json.loads({"true": "true", "false": "false", "none": "null"}.get(text.lower(), text))
    except json.JSONDecodeError:
        return text


def _convert(value: Any, hint: Any, where: str, raw: str | None = None) -> Any:
    """`value` as the type `hint`, or an error that names the field."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), where, raw)
    if origin is Literal:
        return _convert_choice(value, get_args(hint), where, raw)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else _convert_nested(value, hint, where)
    if origin in (tuple, list):
        return _convert_sequence(value, hint, where, raw)
    if origin is not None and issubclass(origin, Mapping):
        inner = get_args(hint)[1]
        return {str(k): _convert(v, inner, _join(where, str(k))) for k, v in _expect(value, Mapping, where).items()}
    return _convert_scalar(value, hint, where, raw)


def _convert_choice(value: Any, choices: tuple[Any, ...], where: str, raw: str | None) -> Any:
    if raw in choices:  # such as the choice "none", which reads as null
        return raw
    if value not in choices:
        remedy = did_you_mean(str(value), [str(choice) for choice in choices])
        if len(choices) == 1:  # the name of a kind, which decides what other fields there are
            remedy = f"here it can only be {choices[0]}; take a recipe of the other kind (see `nestrec recipes`)"
        raise UserError("is not one of the choices", field=where, value=value, remedy=remedy)
    return value


def _convert_nested(value: Any, hint: type, where: str) -> Any:
    return from_plain(hint, _expect(value, Mapping, where), where)


def _convert_union(value: Any, options: tuple[Any, ...], where: str, raw: str | None) -> Any:
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _convert(value, option, where, raw)
        except UserError as error:
            errors.append(error)
    raise errors[-1]


def _convert_sequence(value: Any, hint: Any, where: str, raw: str | None) -> Any:
    args = get_args(hint)
    raws: list[str | None] = []
    if isinstance(value, str):
        raws = [*value.split(",")]
        value = [_parse(part) for part in value.split(",")]
    elif not isinstance(value, list | tuple):
        raws, value = [raw], [value]
    is_fixed = get_origin(hint) is tuple and not (len(args) == 2 and args[1] is Ellipsis)
    if is_fixed and len(value) != len(args):
        raise UserError(f"has {len(value)} values", field=where, value=value, remedy=f"give {len(args)} values")
    hints = args if is_fixed else [args[0]] * len(value)
    texts = raws or [None] * len(value)
    triples = enumerate(zip(value, hints, texts, strict=True))
    items = [_convert(item, of_item, f"{where}[{i}]", text) for i, (item, of_item, text) in triples]
    return tuple(items) if get_origin(hint) is tuple else items


def _convert_scalar(value: Any, hint: Any, where: str, raw: str | None) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and raw is not None and not isinstance(value, str):
        return raw
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _convert_enum(value, hint, where)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"is not of type {hint.__name__}", field=where, value=value, remedy=f"give a {hint.__name__}")
    return value


def _convert_enum(value: Any, hint: type[enum.Enum], where: str) -> Any:
    try:
        return hint(value)
    except ValueError:
        remedy = did_you_mean(str(value), [str(member.value) for member in hint])
        raise UserError("is not one of the choices", field=where, value=value, remedy=remedy) from None


def _expect(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise UserError("must hold named fields", field=where, value=value, remedy="give a mapping of field to value")
    return value


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
