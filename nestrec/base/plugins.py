"""Plugin registries: extension points whose plugins are built in or come from entry points of other packages.

    SCHEDULES = PluginRegistry("nestrec.schedules", "schedule", {"serial": "nestrec....:SERIAL"}, of=ScheduleSpec)

A built-in plugin is an explicit entry: the spec itself, or `module:attribute`, which is imported at the first use.
Plugins of other packages are entry points of the group. A name must be unique: an entry point with the name of another
plugin is an error.

A spec is a dataclass. When a plugin is loaded, the values of its spec are checked against the annotations of the
fields, including the parameters of functions. Return values cannot be checked that way; the caller of a function
checks them.
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
    """Field of a plugin spec whose value does not match its annotation."""

    field: str
    value: Any
    problem: str
    expected: str
    """Description of the values that the annotation allows."""


class _AnyName(dict[str, Any]):
    """Namespace in which names that are imported only for type checkers resolve to an unconstrained type."""

    def __missing__(self, name: str) -> Any:
        return typing.TypeVar(name)


def find_spec_violation(member: Any) -> SpecViolation | None:
    """Return the first field of a spec that does not match its annotation; None if all match or it is not a spec."""
    if not dataclasses.is_dataclass(member) or isinstance(member, type):
        return None
    for field, hint in _hints(type(member)).items():
        if (violation := _find_violation(field, getattr(member, field), hint)) is not None:
            return violation
    return None


def _hints(spec: type) -> dict[str, Any]:
    module = inspect.getmodule(spec)
    names = {**vars(typing), **({} if module is None else vars(module))}
    names = {name: value for name, value in names.items() if not name.startswith("__")}
    hints = typing.get_type_hints(spec, {"__builtins__": __builtins__}, _AnyName(names))
    return {field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, spec))}


def _find_violation(field: str, value: Any, hint: Any) -> SpecViolation | None:
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    if any(_fits(value, choice) for choice in choices):
        return None
    expected = " or ".join(_describe_type(choice) for choice in choices)
    calls = [choice for choice in choices if _is_call(choice)]
    if calls and callable(value):
        return SpecViolation(
            field,
            value,
            f"does not accept the required arguments: its signature is {inspect.signature(value)}",
            expected,
        )
    return SpecViolation(field, value, "the value has the wrong type", expected)


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any or hint in (None, NoneType):
        return hint is Any or value is None
    if origin is Literal:
        return value in args
    if hint is type or origin is type:  # all classes in specs are value classes: configs, requests, responses
        return isinstance(value, type) and dataclasses.is_dataclass(value)
    if _is_call(hint):
        return callable(value) and _accepts_arguments(value, hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, args[0]) for each in value)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def _is_call(hint: Any) -> bool:
    return typing.get_origin(hint) is Callable or _is_protocol(hint)


def _is_protocol(hint: Any) -> bool:
    return isinstance(hint, type) and Protocol in hint.__mro__ and "__call__" in vars(hint)


def _accepts_arguments(value: Any, hint: Any) -> bool:
    """Return whether a callable accepts the arguments; True if its signature is unknown (functions in C)."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return True
    positional, named = _expected_arguments(hint)
    try:
        signature.bind(*positional, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def _expected_arguments(hint: Any) -> tuple[list[str], list[str]]:
    """Return the arguments that a function must accept: descriptions of positional ones, and names of keywords."""
    if _is_protocol(hint):
        parameters = list(inspect.signature(hint.__call__).parameters.values())[1:]
        keywords = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        return [one.name for one in parameters if one.name not in keywords], keywords
    types = typing.get_args(hint)[0]
    return [_name(one) for one in types], []


def _describe_type(hint: Any) -> str:
    """Describe the values of a type, for an error message."""
    if hint in (None, NoneType):
        return "none"
    if hint is type or typing.get_origin(hint) is type:
        return "a dataclass, such as a `@config` class"
    if _is_call(hint):
        positional, named = _expected_arguments(hint)
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
    """Plugins of one extension point, by name.

    Args:
        group: Entry-point group of plugins in other packages, such as `nestrec.schedules`.
        noun: Word for one plugin in messages, such as "schedule".
        built_in: Maps names to plugins, or to `module:attribute` strings.
        of: Class of all plugins.
    """

    def __init__(self, group: str, noun: str, built_in: Mapping[str, T | str], *, of: Any = object) -> None:
        self.group = group
        self.noun = noun
        self._built_in = dict(built_in)
        self._of = of
        self._loaded: dict[str, T] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._external

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names: first the built-in ones in the order of their entries, then the others, sorted."""
        return iter([*self._built_in, *sorted(self._external)])

    def __len__(self) -> int:
        return len(self._built_in) + len(self._external)

    @property
    def built_in_names(self) -> tuple[str, ...]:
        """Names of the built-in plugins."""
        return tuple(self._built_in)

    def find(self, name: str, *, field: str | None = None) -> T:
        """Return the plugin with this name, and load and check it at the first use.

        Args:
            name: Name of the plugin.
            field: Option that named it, for the error.

        Raises:
            UserError: There is no such plugin, it cannot be loaded, or its spec is invalid.
        """
        if not isinstance(name, str) or name not in self._loaded:
            if not isinstance(name, str) or name not in self:
                problem = f"no such {self.noun}"
                remedy = f"{did_you_mean(str(name), self)} (packages can add more by entry points of {self.group!r})"
                raise UserError(problem, option=field or self.noun, value=name, remedy=remedy)
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def module_of(self, name: str) -> str:
        """Return the name of the module of a plugin, without importing it."""
        entry = self._built_in.get(name)
        if entry is None:
            return self._external[name].module
        return entry.partition(":")[0] if isinstance(entry, str) else type(entry).__module__

    def package_of(self, name: str) -> str:
        """Return the distribution (package) of a plugin; `nestrec` for built-in ones."""
        point = self._external.get(name)
        if point is None:
            return "nestrec"
        return point.dist.name if point.dist is not None else point.value

    def missing_field_error(self, name: str, field: str, problem: str, *, hint: str = "") -> UserError:
        """Return the error for a plugin without a required or valid spec field.

        Args:
            name: Name of the plugin.
            field: Field of its spec.
            problem: Reason why the field is required.
            hint: End of the remedy.
        """
        package = self.package_of(name)
        remedy = f"set `{field}` of its spec in the package {package!r}, or use another {self.noun}{hint}"
        return UserError(problem, option=self.noun, value=name, remedy=remedy)

    def contract_error(self, name: str, function: str, problem: str) -> UserError:
        """Return the error for a function of a plugin that returned an invalid value."""
        remedy = f"fix `{function}` in the package {self.package_of(name)!r}, or use another {self.noun}"
        return UserError(f"its `{function}` {problem}", option=f"{self.group}: {name}", value=function, remedy=remedy)

    def default_config(self, name: str, spec_field: str, *, field: str | None = None) -> Any:
        """Return the default config of the class in the field `spec_field` of a plugin's spec."""
        config = getattr(self.find(name, field=field), spec_field)
        try:
            return config()
        except TypeError as error:
            problem = f"its {spec_field} {config.__name__} must have a default for every field ({error})"
            raise self.missing_field_error(name, spec_field, problem) from error

    def resolve_field(self, name: str, field: str, value: Any, *, of: Any) -> Any:
        """Return the value of a spec field, and import it if it is `module:attribute`.

        Args:
            name: Name of the plugin.
            field: Field of its spec.
            value: Value of the field.
            of: Required class of the resolved value.
        """
        try:
            resolved = import_attribute(value)
        except (Exception, SystemExit) as error:
            problem = f"its {field} {value!r} cannot be loaded ({type(error).__name__}: {error})"
            raise self.missing_field_error(name, field, problem) from error
        if not isinstance(resolved, of):
            raise self.missing_field_error(name, field, f"its {field} must be a {of.__name__}, not {resolved!r}")
        return resolved

    @cached_property
    def _external(self) -> dict[str, EntryPoint]:
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            if point.name in self._built_in or (point.name in points and points[point.name].value != point.value):
                other = points[point.name].value if point.name in points else "nestrec itself"
                remedy = f"rename it in the package of {point.value!r}, or uninstall one of the two packages"
                problem = f"two {self.noun}s have this name: {point.value!r} and the one of {other!r}"
                raise UserError(problem, option=f"entry point of {self.group}", value=point.name, remedy=remedy)
            points[point.name] = point
        return points

    def _load(self, name: str) -> T:
        member: Any = self._built_in[name] if name in self._built_in else self._load_external(self._external[name])
        if name in self._built_in:
            member = import_attribute(member)
        if not isinstance(member, self._of):
            remedy = f"let its entry point name an instance of {self._of.__module__}.{self._of.__qualname__}"
            raise UserError(f"must be a {self.noun}", option=f"{self.group}: {name}", value=member, remedy=remedy)
        if (violation := find_spec_violation(member)) is not None:
            remedy = f"set {violation.expected} in the package {self.package_of(name)!r}"
            field = f"{self.group}: {name}, {violation.field}"
            raise UserError(violation.problem, option=field, value=violation.value, remedy=remedy)
        return cast(T, member)

    def _load_external(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except (Exception, SystemExit) as error:  # a module that calls sys.exit would end this process silently
            remedy = f"fix or uninstall the package {self.package_of(point.name)!r}"
            problem = f"cannot be loaded ({type(error).__name__}: {error})"
            raise UserError(problem, option=f"{self.group}: {point.name}", value=point.value, remedy=remedy) from error
