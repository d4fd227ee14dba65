"""Plugin registries: built-in entries and entry points, with checks of their specs.

What a member of a seam says of itself, against what its spec asks: kinds of values, and how functions are called.

A spec is a dataclass whose fields are annotated; nothing else tells whether a package has answered them. What cannot be
told by looking, such as what a function gives, is left to whoever calls it.

Seams: places where code of others joins in by name, in the same way as ours.

    SCHEDULES = Seam("nestrec.schedules", "schedule", {"serial": "nestrec....serial:SERIAL"}, of=ScheduleSpec)

Our own members are explicit entries: the member itself, or `module:attribute`, which is imported when it is asked for.
Members of other packages come by entry points of the group. A name stands for one member: who brings one twice, or one
of ours, is told so instead of being believed.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import NoneType, UnionType
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.lazy import import_attribute


@dataclasses.dataclass(frozen=True, slots=True)
class SpecViolation:
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


def misfit_of(member: Any) -> SpecViolation | None:
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


def _misfit(field: str, value: Any, hint: Any) -> SpecViolation | None:
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    if any(_fits(value, choice) for choice in choices):
        return None
    wanted = " or ".join(_said(choice) for choice in choices)
    calls = [choice for choice in choices if _is_call(choice)]
    if calls and callable(value):
        return SpecViolation(
            field, value, f"cannot be called as it will be: it takes {inspect.signature(value)}", wanted
        )
    return SpecViolation(field, value, "is not what is asked for", wanted)


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
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


T = TypeVar("T")


class PluginRegistry(Generic[T]):
    """Members of one extension point by name."""

    def __init__(self, group: str, noun: str, built_in: Mapping[str, T | str], *, of: Any = object) -> None:
        """`noun`: what one member is called in messages. `of`: the class that every member must be an instance of."""
        self.group = group
        self.noun = noun
        self._built_in = dict(built_in)
        self._of = of
        self._loaded: dict[str, T] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._foreign

    def __iter__(self) -> Iterator[str]:
        """All names: ours in the order of their entries, then those of other packages."""
        return iter([*self._built_in, *sorted(self._foreign)])

    def __len__(self) -> int:
        return len(self._built_in) + len(self._foreign)

    @property
    def own(self) -> tuple[str, ...]:
        """Our names alone."""
        return tuple(self._built_in)

    def find(self, name: str, *, field: str | None = None) -> T:
        """The member of this name; `field` is the option that named it, for the error."""
        if not isinstance(name, str) or name not in self._loaded:
            if not isinstance(name, str) or name not in self:
                problem = f"no such {self.noun}"
                remedy = f"{did_you_mean(str(name), self)} (other packages add some by entry points of {self.group!r})"
                raise UserError(problem, option=field or self.noun, value=name, remedy=remedy)
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def module_of(self, name: str) -> str:
        """The module that holds a member, without importing it."""
        entry = self._built_in.get(name)
        if entry is None:
            return self._foreign[name].module
        return entry.partition(":")[0] if isinstance(entry, str) else type(entry).__module__

    def package_of(self, name: str) -> str:
        """The distribution that brings a member; `nestrec` for ours."""
        point = self._foreign.get(name)
        return "nestrec" if point is None else point.dist.name if point.dist is not None else point.value

    def unanswered(self, name: str, what: str, problem: str, *, see: str = "") -> UserError:
        """The error for who needs what a member does not say; `what`: the field of its spec, `problem`: the reason."""
        package = self.package_of(name)
        remedy = f"let it answer: `{what}` of its spec in the package {package!r}, or take another {self.noun}{see}"
        return UserError(problem, option=self.noun, value=name, remedy=remedy)

    def broken(self, name: str, what: str, problem: str) -> UserError:
        """The error for who was given by a member what it must not give; `what`: the function of it that gave it."""
        remedy = f"mend `{what}` in the package {self.package_of(name)!r}, or take another {self.noun}"
        return UserError(f"its `{what}` {problem}", option=f"{self.group}: {name}", value=what, remedy=remedy)

    def by_default(self, name: str, what: str, *, field: str | None = None) -> Any:
        """The config whose class stands in the field `what` of a spec, where nothing is said of it."""
        config = getattr(self.find(name, field=field), what)
        try:
            return config()
        except TypeError as error:
            problem = f"its {what} {config.__name__} cannot be made without values ({error}): options have defaults"
            raise self.unanswered(name, what, problem) from error

    def resolved(self, name: str, what: str, value: Any, *, of: Any) -> Any:
        """What a member has in the field `what` of its spec, as it is or as `module:attribute`. of: its class."""
        try:
            found = import_attribute(value)
        except (Exception, SystemExit) as error:
            problem = f"its {what} {value!r} cannot be loaded ({type(error).__name__}: {error})"
            raise self.unanswered(name, what, problem) from error
        if not isinstance(found, of):
            raise self.unanswered(name, what, f"its {what} is {found!r}, which is no {of.__name__}")
        return found

    @cached_property
    def _foreign(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            if point.name in self._built_in or (point.name in found and found[point.name].value != point.value):
                other = found[point.name].value if point.name in found else "nestrec itself"
                remedy = f"rename it in the package of {point.value!r}, or uninstall one of the two"
                problem = f"two {self.noun}s of one name: {point.value!r} and that of {other!r}"
                raise UserError(problem, option=f"entry point of {self.group}", value=point.name, remedy=remedy)
            found[point.name] = point
        return found

    def _load(self, name: str) -> T:
        member: Any = self._built_in[name] if name in self._built_in else self._load_foreign(self._foreign[name])
        if name in self._built_in:
            member = import_attribute(member)
        if not isinstance(member, self._of):
            remedy = f"let its entry point name an instance of {self._of.__module__}.{self._of.__qualname__}"
            raise UserError(f"is no {self.noun}", option=f"{self.group}: {name}", value=member, remedy=remedy)
        if (misfit := misfit_of(member)) is not None:
            remedy = f"let the package {self.package_of(name)!r} give {misfit.wanted}"
            field = f"{self.group}: {name}, {misfit.field}"
            raise UserError(misfit.problem, option=field, value=misfit.value, remedy=remedy)
        return cast(T, member)

    def _load_foreign(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except (Exception, SystemExit) as error:  # a script that ends itself would end this program without a word
            remedy = f"mend or uninstall the package {self.package_of(point.name)!r}"
            problem = f"cannot be loaded ({type(error).__name__}: {error})"
            raise UserError(problem, option=f"{self.group}: {point.name}", value=point.value, remedy=remedy) from error
