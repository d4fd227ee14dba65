"""Dotted overrides of configs (`{"encoder.num_layers": "4"}`), and descriptions of the fields of a config.

Overrides are text as typed on a command line, or Python values. All invalid overrides are reported in one error.
Descriptions contain the name, value, allowed values and field documentation (the string literal after the field), as
`nestrec options` prints them.
"""

import ast
import dataclasses
import datetime
import difflib
import inspect
import json
import textwrap
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast, get_args

from nestrec.base.config_values import NumberRange, OneOf, build_config, convert, join, parse
from nestrec.base.errors import ErrorCollector, UserError, did_you_mean
from nestrec.base.option_synonyms import EXPLANATIONS, SYNONYMS
from nestrec.base.renamed_fields import FORMER_NAMES

_PARSING = threading.Lock()
"""Serializes `ast.parse`: in Python 3.11, concurrent calls can fail."""


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """Description of one option."""

    name: str
    """Dotted name."""
    value: Any
    meaning: str
    """Documentation of the field, in one line."""
    allowed: str
    """Type, choices or bounds, as text."""


def describe_fields(value: Any, where: str = "") -> Iterator[FieldDoc]:
    """Yield the description of every option of a config, nested ones included, in source order."""
    hints = typing.get_type_hints(type(value), include_extras=True)
    docs = field_docs(type(value))
    for field in dataclasses.fields(value):
        name = f"{where}.{field.name}" if where else field.name
        inner = getattr(value, field.name)
        entry_class = _class_of_entries(hints[field.name])
        if dataclasses.is_dataclass(inner):
            yield from describe_fields(inner, name)
        elif entry_class is not None:
            entries = inner or {"NAME": entry_class()}
            for entry, options in entries.items():
                yield from describe_fields(options, f"{name}.{entry}")
        else:
            yield FieldDoc(name, inner, docs.get(field.name, ""), _describe_allowed(hints[field.name]))


def _class_of_entries(hint: Any) -> Any:
    """Return the config class of the values of a mapping type; None if the values are not configs."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return arguments[1] if is_mapping and dataclasses.is_dataclass(arguments[1]) else None


def field_docs(cls: type) -> dict[str, str]:
    """Return the documentation of each field in one line, inherited fields included."""
    inherited: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]):
        inherited |= _own_docs(base)
    return inherited | _own_docs(cls)


def _own_docs(cls: type) -> dict[str, str]:
    with _PARSING:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(following, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs


def _describe_allowed(hint: Any) -> str:
    """Describe the values that a type hint allows."""
    for limit in getattr(hint, "__metadata__", ()):
        if isinstance(limit, NumberRange | OneOf):
            return str(limit) if isinstance(limit, OneOf) else f"{hint.__origin__.__name__}, {limit}"
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Annotated:
        return _describe_allowed(arguments[0])
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is tuple:
        return ",".join("..." if argument is Ellipsis else _describe_allowed(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        members = [_describe_allowed(argument) for argument in arguments if argument is not type(None)]
        choices = [choice for member in members for choice in member.split(" | ")]
        if type(None) in arguments:  # typed as null if `none` is one of the choices
            choices.append("null" if "none" in choices else "none")
        return " | ".join(dict.fromkeys(choices))
    return "named values" if origin is not None else str(hint.__name__)


PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer settings of a command that accepts dotted options in addition to its own."""
ConfigT = TypeVar("ConfigT")
_Overrides = Mapping[tuple[str, ...], str]
"""Maps the parts of a dotted name to the text of its value."""


def apply_overrides(base: ConfigT, overrides: Mapping[str, str]) -> ConfigT:
    """Return a copy of a config with dotted overrides applied.

    Args:
        base: Config to copy.
        overrides: Maps dotted names to text as typed on a command line.

    Raises:
        UserError: Overrides are invalid. The error lists all of them, with suggestions for misspelled names.
    """
    texts_by_path = {tuple(path.split(".")): text for path, text in overrides.items()}
    return cast(ConfigT, _OverrideApplier(base).apply_to_fields(base, texts_by_path, ""))


def override_text(value: Any) -> str:
    """Return a value or a config as it would be typed on a command line."""
    return str(value) if isinstance(value, str | Path) else json.dumps(value, default=_plain)


def override_texts(overrides: Any) -> dict[str, str]:
    """Return overrides of a Python call as text by dotted name, as they would be typed on a command line.

    A mapping sets only the fields that it names: `{"training": {"epochs": 2}}` equals `{"training.epochs": 2}`. Two
    kinds of mappings replace the whole section instead: one with a `kind`, because it selects another config class, and
    one with dots in its names, because it maps columns of nested JSON and not fields.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        remedy = 'pass option names with values, such as {"training.epochs": 2}'
        raise UserError(
            "must be a mapping of option names to values", option="overrides", value=overrides, remedy=remedy
        )
    return dict(_texts(overrides or {}, ""))


def _texts(overrides: Mapping[Any, Any], where: str) -> Iterator[tuple[str, str]]:
    for name, value in overrides.items():
        path = join(where, str(name))
        if isinstance(value, Mapping) and value and not _replaces_section(value):
            yield from _texts(value, path)
            continue
        try:
            yield path, override_text(value)
        except TypeError:
            remedy = "pass text, a number, a date, a path, a list, a mapping or a config"
            raise UserError("unsupported type of value", option=path, value=value, remedy=remedy) from None


def _replaces_section(value: Mapping[Any, Any]) -> bool:
    return "kind" in value or any("." in str(name) for name in value)


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not support to JSON-like data; raise `TypeError` if that is not possible."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, PurePath | datetime.date):
        return str(value)
    raise TypeError(type(value).__name__)


class _OverrideApplier:
    """Applies overrides recursively; the root config provides the suggestions for misspelled names."""

    def __init__(self, base: Any):
        self._base = base

    def apply_to_fields(self, node: Any, overrides: _Overrides, where: str) -> Any:
        names = [field.name for field in dataclasses.fields(node)]
        hints = typing.get_type_hints(type(node), include_extras=True)
        mistakes = ErrorCollector()
        replaced = {}
        for typed, inner in _by_first(overrides).items():
            with mistakes.collecting():
                name = typed if typed in names else typed.replace("-", "_")
                if name not in names:
                    raise self._no_such_option(join(where, name), inner, names)
                replaced[name] = self._apply_to_value(getattr(node, name), hints[name], inner, join(where, name))
        mistakes.raise_if_any()
        return build_config(lambda: _replace_fields(node, replaced), where)

    def _apply_to_value(self, current: Any, hint: Any, overrides: _Overrides, path: str) -> Any:
        """Return the value with overrides: first the one of the value itself (the empty path), then those inside it."""
        inner = dict(overrides)
        if (text := inner.pop((), None)) is not None:
            current = self._convert_text(current, hint, text, path)
        if current is None and inner:
            current = _default_config(hint)
        if not inner or dataclasses.is_dataclass(current):
            return self.apply_to_fields(current, inner, path) if inner else current
        parts, text = next(iter(inner.items()))
        if not isinstance(current, Mapping):
            remedy = f"{path} is a single value; remove the name after it"
            raise UserError("no such option", option=".".join((path, *parts)), value=text, remedy=remedy)
        return {**current, **self._apply_to_entries(current, hint, inner, path)}

    def _convert_text(self, current: Any, hint: Any, text: str, path: str) -> Any:
        """Convert the text; the error for a single value of a group of options lists the options of the group."""
        value = parse(text)
        try:
            return convert(value, hint, path, raw=text)
        except UserError as error:
            if error.option != path or isinstance(value, Mapping) or not dataclasses.is_dataclass(current):
                raise
            inside = [name for name in _field_names(current, path) if name.count(".") == path.count(".") + 1]
            suggestions = _known_synonyms(path, inside) or _nearest(path.rpartition(".")[2], inside)
            remedy = f"did you mean --{suggestions[0]}? Its options:" if suggestions else "its options:"
            raise UserError(
                "this is a group of options and cannot have a single value",
                option=path,
                value=text,
                remedy=f"{remedy} {', '.join(inside)}",
            ) from error

    def _apply_to_entries(
        self, current: Mapping[str, Any], hint: Any, overrides: _Overrides, path: str
    ) -> dict[str, Any]:
        entry_class = get_args(hint)[1] if get_args(hint) else Any
        entries = {}
        for name, inner in _by_first(overrides).items():
            before = current.get(name)
            if () not in inner and before is None and dataclasses.is_dataclass(entry_class):
                before = entry_class()  # the entry is new
            elif () not in inner and name not in current:
                parts, text = next(iter(inner.items()))
                field = ".".join((path, name, *parts))
                remedy = did_you_mean(name, current)
                raise UserError("no such entry", option=field, value=text, remedy=remedy)
            entries[name] = self._apply_to_value(before, entry_class, inner, f"{path}.{name}")
        return entries

    def _no_such_option(self, path: str, inner: _Overrides, siblings: list[str]) -> UserError:
        """Build the error for an unknown option.

        It suggests full names: `training.epochs` for `epochs`, `optimizer.learning_rate` for `lr`.
        """
        parts, text = next(iter(inner.items()))
        typed = ".".join((path, *parts))
        group = path.rpartition(".")[0]
        known = dict.fromkeys([*_field_names(self._base), *(join(group, name) for name in siblings)])
        if _last_part(typed) in EXPLANATIONS:
            remedy = EXPLANATIONS[_last_part(typed)]
        elif suggestions := _suggestions(typed, list(known)):
            remedy = f"did you mean {' or '.join(f'--{name}' for name in suggestions)}?"
        else:
            names = ", ".join(join(group, name) for name in sorted(siblings))
            remedy = f"known names: {names}; `nestrec options COMMAND` lists all options of a command"
        return UserError("no such option", option=typed, value=text, remedy=remedy)


def _default_config(hint: Any) -> Any:
    """Return the default config of an option that is None, when an override names an option inside it."""
    configs = [member for member in get_args(hint) if dataclasses.is_dataclass(member) and isinstance(member, type)]
    return configs[0]() if len(configs) == 1 and not any(map(_is_required, dataclasses.fields(configs[0]))) else None


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _by_first(overrides: _Overrides) -> dict[str, dict[tuple[str, ...], str]]:
    """Group overrides by the first part of their names, and remove that part."""
    groups: dict[str, dict[tuple[str, ...], str]] = {}
    for (first, *rest), text in overrides.items():
        groups.setdefault(first, {})[tuple(rest)] = text
    return groups


def _field_names(value: Any, where: str = "") -> list[str]:
    """Return the dotted names of all fields and groups."""
    names = []
    for field in dataclasses.fields(value):
        name = join(where, field.name)
        inner = getattr(value, field.name)
        names += [name, *(_field_names(inner, name) if dataclasses.is_dataclass(inner) else [])]
    return names


_MAX_SUGGESTIONS = 3
"""Maximum number of suggestions in one error."""


def _suggestions(typed: str, names: Sequence[str]) -> list[str]:
    """Return the options that an unknown name probably refers to; an empty list if no name is similar."""
    typed = typed.replace("-", "_")
    parts = typed.split(".")
    suggestions = _known_synonyms(typed, names)
    if not suggestions and len(parts) > 1:
        same_depth = [name for name in names if name.count(".") == typed.count(".")]
        suggestions = difflib.get_close_matches(typed, same_depth, n=1, cutoff=0.8)
    for start in range(len(parts)):
        suggestions = suggestions or _ending_with(".".join(parts[start:]), names)
    suggestions = suggestions or _nearest(parts[-1], names)
    return sorted(suggestions, key=lambda name: name.count("."))[:_MAX_SUGGESTIONS]


def _known_synonyms(typed: str, names: Sequence[str]) -> list[str]:
    """Return the options that correspond to a name of another framework, or of an earlier version of nestrec."""
    last = _last_part(typed)
    former = [fields[last] for fields in FORMER_NAMES.values() if last in fields]
    return list(dict.fromkeys(name for end in (*SYNONYMS.get(last, ()), *former) for name in _ending_with(end, names)))


def _last_part(typed: str) -> str:
    return typed.rpartition(".")[2].replace("-", "_").lower()


def _ending_with(end: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if f".{name}".endswith(f".{end}")]


def _nearest(word: str, names: Sequence[str]) -> list[str]:
    """Return the options whose last part is spelled most like `word`."""
    lasts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    close = difflib.get_close_matches(word, lasts, n=1, cutoff=0.7)
    return [name for last in close for name in _ending_with(last, names)]


def _replace_fields(node: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy with these fields; a method `replaced` of the config adjusts other fields that depend on them."""
    return node.replaced(**fields) if hasattr(node, "replaced") else dataclasses.replace(node, **fields)


def parse_overrides(
    arguments: Sequence[str], known: Sequence[str] = (), *, joins_repeated: bool = False
) -> dict[str, str]:
    """Parse dotted options of a command line: `--a.b 3` and `--a.b=3` become `{"a.b": "3"}`.

    Args:
        arguments: The words after the options of the command itself.
        known: Names of the options of the command itself, for suggestions.
        joins_repeated: Join the values of a repeated option with commas, as a list; otherwise the last value wins.

    Raises:
        UserError: A word is not an option, an option has no value, or a name is similar to a known option.
    """
    overrides: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise UserError(
                "unexpected argument",
                option="argument",
                value=name,
                remedy="write options as --dotted.name value, and put file patterns in quotes",
            )
        if not has_value:
            if not rest:
                close = difflib.get_close_matches(name.removeprefix("--"), known, n=1)
                remedy = f"write {name} VALUE" + (f", or did you mean --{close[0]}?" if close else "")
                raise UserError("the value is missing", option=name, value="", remedy=remedy)
            value = rest.pop(0)
        key = name.removeprefix("--")
        key = key if "." in key else key.replace("-", "_")  # dotted names can contain names of the user's columns
        overrides[key] = f"{overrides[key]},{value}" if joins_repeated and key in overrides else value
        if (close := difflib.get_close_matches(name.removeprefix("--"), known, n=1)) and "." not in name:
            raise UserError("no such option", option=name, value=value, remedy=f"did you mean --{close[0]}?")
    return overrides
