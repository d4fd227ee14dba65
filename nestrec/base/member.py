"""What a member of a seam says of itself, against what its spec asks: kinds of values, and how functions are called.

A spec is a dataclass whose fields are annotated; nothing else tells whether a package has answered them. What cannot be
told by looking, such as what a function gives, is left to whoever calls it.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Misfit:
    """A field of a spec that holds what it cannot hold."""

    field: str
    value: Any
    problem: str
    wanted: str
    """what it may hold, in words"""


class _AnyName(dict[str, Any]):
    """Names that only a type checker knows stand for anything; they keep their words."""

    def __missing__(self, name: str) -> Any:
        return typing.TypeVar(name)


def misfit_of(member: Any) -> Misfit | None:
    """The first field of a spec that is not as its annotation says; none where all are, or where it is no dataclass."""
    if not dataclasses.is_dataclass(member) or isinstance(member, type):
        return None
    for field, hint in _hints(type(member)).items():
        if (found := _misfit(field, getattr(member, field), hint)) is not None:
            return found
    return None


def _hints(spec: type) -> dict[str, Any]:
    module = inspect.getmodule(spec)
    names = {**vars(typing), **({} if module is None else vars(module))}
    names = {name: value for name, value in names.items() if not name.startswith("__")}
    found = typing.get_type_hints(spec, {"__builtins__": __builtins__}, _AnyName(names))
    return {field.name: found[field.name] for field in dataclasses.fields(typing.cast(Any, spec))}


def _misfit(field: str, value: Any, hint: Any) -> Misfit | None:
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    if any(_fits(value, choice) for choice in choices):
        return None
    wanted = " or ".join(_said(choice) for choice in choices)
    calls = [choice for choice in choices if _is_call(choice)]
    if calls and callable(value):
        return Misfit(field, value, f"cannot be called as it will be: it takes {inspect.signature(value)}", wanted)
    return Misfit(field, value, "is not what is asked for", wanted)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint in (None, NoneType):
        return hint is Any or value is None
    if origin is Literal:
        return value in args
    if hint is type or origin is type:  # all classes that specs ask for are of values: configs, requests, answers
        return isinstance(value, type) and dataclasses.is_dataclass(value)
    if _is_call(hint):
        return callable(value) and _takes(value, hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, args[0]) for each in value)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def _is_call(hint: Any) -> bool:
    return typing.get_origin(hint) is Callable or _is_protocol(hint)


def _is_protocol(hint: Any) -> bool:
    return isinstance(hint, type) and Protocol in hint.__mro__ and "__call__" in vars(hint)


def _takes(value: Any, hint: Any) -> bool:
    """Whether it can be called with what it will be; where nobody can tell (functions in C), yes."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return True
    positional, named = _arguments(hint)
    try:
        signature.bind(*positional, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def _arguments(hint: Any) -> tuple[list[str], list[str]]:
    """What a function is called with: words for the values in order, names of the others."""
    if _is_protocol(hint):
        parameters = list(inspect.signature(hint.__call__).parameters.values())[1:]
        named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        return [one.name for one in parameters if one.name not in named], named
    given = typing.get_args(hint)[0]
    return [_name(one) for one in given], []


def _said(hint: Any) -> str:
    """A kind of value, for people."""
    if hint in (None, NoneType):
        return "none"
    if hint is type or typing.get_origin(hint) is type:
        return "a dataclass, such as a `@config` class"
    if _is_call(hint):
        positional, named = _arguments(hint)
        return f"a function of ({', '.join([*positional, *(f'{name}=' for name in named)])})"
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"a tuple of {_name(typing.get_args(hint)[0])}"
    return f"a {_name(hint)}"


def _name(hint: Any) -> str:
    if isinstance(hint, typing.ForwardRef):
        return hint.__forward_arg__
    origin = typing.get_origin(hint)
    return getattr(origin or hint, "__name__", str(hint))
