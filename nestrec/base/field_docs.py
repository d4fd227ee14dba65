"""The fields of a config with their values and the line of documentation that stands under each."""

import ast
import dataclasses
import inspect
import textwrap
import threading
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nestrec.base.bounds import Bound, OneOf

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
    hints, docs = typing.get_type_hints(type(value), include_extras=True), docs_of(type(value))
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
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
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
        if isinstance(limit, Bound | OneOf):
            return str(limit) if isinstance(limit, OneOf) else f"{hint.__origin__.__name__}, {limit}"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is tuple:
        return ",".join("..." if argument is Ellipsis else _allowed(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("none" if argument is type(None) else _allowed(argument) for argument in arguments)
    return "named values" if origin is not None else str(hint.__name__)
