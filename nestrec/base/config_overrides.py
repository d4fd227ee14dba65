"""Applies dotted overrides to configs, and describes their fields.

The fields of a config with their values and the line of documentation that stands under each.

Dotted overrides of a config (`{"model.num_layers": "4"}`): as they are typed, and all mistakes told at once.
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

from nestrec.base.config_values import NumberRange, OneOf, built, convert, join, parse
from nestrec.base.errors import ErrorCollector, UserError, did_you_mean

_PARSING = threading.Lock()
"""In Python 3.11 two threads that parse at once may both fail."""


@dataclass(frozen=True, slots=True)
class FieldDoc:
    name: str
    """dotted"""
    value: Any
    meaning: str
    """what the field is for, in a line"""
    allowed: str
    """type, choices or bounds"""


def describe(value: Any, where: str = "") -> Iterator[FieldDoc]:
    """Every single value of a config, those of its parts included, in the order of the source."""
    hints = typing.get_type_hints(type(value), include_extras=True)
    docs = docs_of(type(value))
    for field in dataclasses.fields(value):
        name = f"{where}.{field.name}" if where else field.name
        inner = getattr(value, field.name)
        of_entry = _class_of_entries(hints[field.name])
        if dataclasses.is_dataclass(inner):
            yield from describe(inner, name)
        elif of_entry is not None:
            entries = inner or {"NAME": of_entry()}
            for entry, options in entries.items():
                yield from describe(options, f"{name}.{entry}")
        else:
            yield FieldDoc(name, inner, docs.get(field.name, ""), _allowed(hints[field.name]))


def _class_of_entries(hint: Any) -> Any:
    """The config that the entries of a mapping by name are of; none where it has none."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return arguments[1] if is_mapping and dataclasses.is_dataclass(arguments[1]) else None


def docs_of(cls: type) -> dict[str, str]:
    """Field to the string under it in the source, in one line; those of classes that it extends are included."""
    inherited: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]):
        inherited |= _own_docs(base)
    return inherited | _own_docs(cls)


def _own_docs(cls: type) -> dict[str, str]:
    with _PARSING:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def _allowed(hint: Any) -> str:
    """A type as people read it."""
    for limit in getattr(hint, "__metadata__", ()):
        if isinstance(limit, NumberRange | OneOf):
            return str(limit) if isinstance(limit, OneOf) else f"{hint.__origin__.__name__}, {limit}"
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Annotated:
        return _allowed(arguments[0])
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is tuple:
        return ",".join("..." if argument is Ellipsis else _allowed(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("none" if argument is type(None) else _allowed(argument) for argument in arguments)
    return "named values" if origin is not None else str(hint.__name__)


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of a command that takes dotted options beside its own."""
ConfigT = TypeVar("ConfigT")
_Overrides = Mapping[tuple[str, ...], str]
"""Parts of a dotted name to the text given for it."""


def with_overrides(base: ConfigT, overrides: Mapping[str, str]) -> ConfigT:
    """A copy of `base` with dotted overrides applied, all at once; values are text as typed on a command line."""
    given = {tuple(path.split(".")): text for path, text in overrides.items()}
    return cast(ConfigT, _Overriding(base).of_fields(base, given, ""))


def override_text(value: Any) -> str:
    """A value, which may be a config, as it would be typed."""
    return str(value) if isinstance(value, str | Path) else json.dumps(value, default=_plain)


def override_texts(overrides: Any) -> dict[str, str]:
    """Values by dotted name, each as it would be typed.

    A mapping sets the fields that it names and no others: `{"training": {"epochs": 2}}` is `{"training.epochs": 2}`.
    Two kinds stand for the whole: one that says its `kind` is a choice made anew, and one with dots in its names is
    of columns of nested JSON, not of fields.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        remedy = 'give names with values, such as {"training.epochs": 2}'
        raise UserError("are not named values", option="overrides", value=overrides, remedy=remedy)
    return dict(_texts(overrides or {}, ""))


def _texts(overrides: Mapping[Any, Any], where: str) -> Iterator[tuple[str, str]]:
    for name, value in overrides.items():
        path = join(where, str(name))
        if isinstance(value, Mapping) and value and not _is_whole(value):
            yield from _texts(value, path)
            continue
        try:
            yield path, override_text(value)
        except TypeError:
            remedy = "give text, a number, a date, a path, a list, a mapping or a config"
            raise UserError("is no value of an option", option=path, value=value, remedy=remedy) from None


def _is_whole(value: Mapping[Any, Any]) -> bool:
    return "kind" in value or any("." in str(name) for name in value)


def _plain(value: Any) -> Any:
    """JSON-like data of what JSON does not know; a TypeError where there is none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, PurePath | datetime.date):
        return str(value)
    raise TypeError(type(value).__name__)


class _Overriding:
    def __init__(self, base: Any):
        self._base = base

    def of_fields(self, node: Any, given: _Overrides, where: str) -> Any:
        names = [field.name for field in dataclasses.fields(node)]
        hints = typing.get_type_hints(type(node), include_extras=True)
        mistakes = ErrorCollector()
        replaced = {}
        for name, inner in _by_first(given).items():
            with mistakes.collecting():
                if name not in names:
                    raise self._no_such_option(join(where, name), inner, names)
                replaced[name] = self._of_one(getattr(node, name), hints[name], inner, join(where, name))
        mistakes.raise_if_any()
        return built(lambda: _replaced(node, replaced), where)

    def _of_one(self, current: Any, hint: Any, given: _Overrides, path: str) -> Any:
        """`current`, of the type `hint`: set as a whole where its own name was given, then the named parts of it."""
        inner = dict(given)
        if (text := inner.pop((), None)) is not None:
            current = self._converted(current, hint, text, path)
        if current is None and inner:
            current = _blank(hint)
        if not inner or dataclasses.is_dataclass(current):
            return self.of_fields(current, inner, path) if inner else current
        parts, text = next(iter(inner.items()))
        if not isinstance(current, Mapping):
            remedy = f"{path} is a single value; drop the part after it"
            raise UserError("has no fields", option=".".join((path, *parts)), value=text, remedy=remedy)
        return {**current, **self._of_entries(current, hint, inner, path)}

    def _converted(self, current: Any, hint: Any, text: str, path: str) -> Any:
        """Convert `text`; the error for a group of options that was given a single value lists the options in it."""
        value = parse(text)
        try:
            return convert(value, hint, path, raw=text)
        except UserError as error:
            if error.option != path or isinstance(value, Mapping) or not dataclasses.is_dataclass(current):
                raise
            inside = [name for name in _field_names(current, path) if name.count(".") == path.count(".") + 1]
            meant = _by_habit(path, inside) or _nearest(path.rpartition(".")[2], inside)
            remedy = f"did you mean {meant[0]!r}? It has" if meant else "it has"
            raise UserError(
                "must hold named fields: it is a group of options",
                option=path,
                value=text,
                remedy=f"{remedy} {', '.join(inside)}",
            ) from error

    def _of_entries(self, current: Mapping[str, Any], hint: Any, given: _Overrides, path: str) -> dict[str, Any]:
        of_entry = get_args(hint)[1] if get_args(hint) else Any
        entries = {}
        for name, inner in _by_first(given).items():
            before = current.get(name)
            if () not in inner and before is None and dataclasses.is_dataclass(of_entry):
                before = of_entry()  # nothing was said of it yet
            elif () not in inner and name not in current:
                parts, text = next(iter(inner.items()))
                field = ".".join((path, name, *parts))
                remedy = did_you_mean(name, current)
                raise UserError("no such entry", option=field, value=text, remedy=remedy)
            entries[name] = self._of_one(before, of_entry, inner, f"{path}.{name}")
        return entries

    def _no_such_option(self, path: str, inner: _Overrides, siblings: list[str]) -> UserError:
        """Suggest options by their full names: `training.epochs` for `epochs`, `optimizer.learning_rate` for `lr`."""
        parts, text = next(iter(inner.items()))
        typed = ".".join((path, *parts))
        group = path.rpartition(".")[0]
        known = dict.fromkeys([*_field_names(self._base), *(join(group, name) for name in siblings)])
        if meant := _meant(typed, list(known)):
            remedy = f"did you mean {' or '.join(repr(name) for name in meant)}?"
        else:
            names = ", ".join(join(group, name) for name in sorted(siblings))
            remedy = f"known names: {names}; `nestrec options COMMAND` lists all options of a command"
        return UserError("no such option", option=typed, value=text, remedy=remedy)


def _blank(hint: Any) -> Any:
    """What an option that was none becomes where a part of it is named: the config it may hold, as by default."""
    held = [member for member in get_args(hint) if dataclasses.is_dataclass(member) and isinstance(member, type)]
    return held[0]() if len(held) == 1 and not any(map(_is_required, dataclasses.fields(held[0]))) else None


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _by_first(given: _Overrides) -> dict[str, dict[tuple[str, ...], str]]:
    """The overrides of each field, without its name."""
    found: dict[str, dict[tuple[str, ...], str]] = {}
    for (first, *rest), text in given.items():
        found.setdefault(first, {})[tuple(rest)] = text
    return found


def _field_names(value: Any, where: str = "") -> list[str]:
    """Dotted names of all fields."""
    found = []
    for field in dataclasses.fields(value):
        name = join(where, field.name)
        inner = getattr(value, field.name)
        found += [name, *(_field_names(inner, name) if dataclasses.is_dataclass(inner) else [])]
    return found


_HABITS = {
    "batch_size": ("batch_samples", "part_size"),
    "bs": ("batch_samples",),
    "checkpoint_every": ("checkpoint_every_steps",),
    "clip": ("clip_norm",),
    "data": ("data.folder",),
    "data_dir": ("data.folder",),
    "data_path": ("data.folder",),
    "dataset": ("data.folder",),
    "delimiter": ("log.separator",),
    "d_model": ("encoder.dim",),
    "early_stopping": ("patience",),
    "embedding_dim": ("encoder.dim",),
    "emb_dim": ("encoder.dim",),
    "grad_clip": ("clip_norm",),
    "heads": ("num_heads",),
    "hidden_dim": ("encoder.dim",),
    "hidden_size": ("encoder.dim",),
    "item_col": ("log.item",),
    "item_id": ("log.item",),
    "item_column": ("log.item",),
    "layers": ("num_layers",),
    "lr": ("learning_rate",),
    "max_epochs": ("epochs",),
    "max_grad_norm": ("clip_norm",),
    "max_len": ("history.max_length", "max_events"),
    "max_seq_len": ("history.max_length", "max_events"),
    "model": ("encoder.kind",),
    "n_epochs": ("epochs",),
    "n_heads": ("num_heads",),
    "n_layers": ("num_layers",),
    "negatives": ("num_negatives",),
    "num_blocks": ("num_layers",),
    "num_epochs": ("epochs",),
    "num_steps": ("max_steps",),
    "num_workers": ("batch.workers", "instances"),
    "optimizer": ("learning_rate",),
    "sep": ("log.separator",),
    "seq_len": ("history.max_length", "max_events"),
    "steps": ("max_steps",),
    "time_col": ("log.time",),
    "time_column": ("log.time",),
    "timestamp": ("log.time",),
    "top_k": ("k",),
    "user_col": ("log.user",),
    "user_column": ("log.user",),
    "user_id": ("log.user",),
    "warmup": ("warmup_steps",),
    "wd": ("weight_decay",),
    "workers": ("batch.workers", "instances"),
}
"""Names that other programs give to options, with the ends of our names for them."""
_MOST_MEANT = 3
"""Suggestions of one error."""


def _meant(typed: str, names: Sequence[str]) -> list[str]:
    """Return the options that were probably meant by an unknown name; an empty list if no name is similar."""
    typed = typed.replace("-", "_")
    parts = typed.split(".")
    found = _by_habit(typed, names)
    if not found and len(parts) > 1:
        as_deep = [name for name in names if name.count(".") == typed.count(".")]
        found = difflib.get_close_matches(typed, as_deep, n=1, cutoff=0.8)
    for start in range(len(parts)):
        found = found or _ending_with(".".join(parts[start:]), names)
    found = found or _nearest(parts[-1], names)
    return sorted(found, key=lambda name: name.count("."))[:_MOST_MEANT]


def _by_habit(typed: str, names: Sequence[str]) -> list[str]:
    ends = _HABITS.get(typed.rpartition(".")[2].replace("-", "_"), ())
    return [name for end in ends for name in _ending_with(end, names)]


def _ending_with(end: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if f".{name}".endswith(f".{end}")]


def _nearest(word: str, names: Sequence[str]) -> list[str]:
    """Return the options whose last part is spelled most like `word`."""
    lasts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    close = difflib.get_close_matches(word, lasts, n=1, cutoff=0.7)
    return [name for last in close for name in _ending_with(last, names)]


def _replaced(node: Any, fields: Mapping[str, Any]) -> Any:
    """A copy with these fields; a config whose other fields depend on them says so by a method `replaced`."""
    return node.replaced(**fields) if hasattr(node, "replaced") else dataclasses.replace(node, **fields)


def parse_overrides(
    arguments: Sequence[str], known: Sequence[str] = (), *, joins_repeated: bool = False
) -> dict[str, str]:
    """`--a.b 3` and `--a.b=3` as {"a.b": "3"}; `known` are the command's own options, for what was meant.

    joins_repeated: what is given several times is a list, as if written with commas; otherwise the last one counts.
    """
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise UserError(
                "does not belong to an option",
                option="argument",
                value=name,
                remedy="write --dotted.name value; a pattern of several files stands in quotes",
            )
        if not has_value:
            if not rest:
                remedy = did_you_mean(name.removeprefix("--"), known)
                raise UserError("needs a value", option=name, value="", remedy=f"write {name} VALUE; or {remedy}")
            value = rest.pop(0)
        key = name.removeprefix("--")
        found[key] = f"{found[key]},{value}" if joins_repeated and key in found else value
        if (close := difflib.get_close_matches(name.removeprefix("--"), known, n=1)) and "." not in name:
            raise UserError("no such option", option=name, value=value, remedy=f"did you mean --{close[0]}?")
    return found
