"""Typed configuration: frozen dataclasses, loaded from plain data with checks of names, types and bounds.

`@config` declares a frozen, keyword-only, slotted dataclass, which is defined next to the code that reads it.
`from_plain` builds one from JSON-like data, `to_plain` is its inverse, and `apply_overrides` applies dotted overrides
(`{"encoder.num_layers": "4"}`) as typed on a command line. Errors for unknown names and wrong types name the field and
suggest a fix.
"""

import dataclasses
import enum
import json
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import (
    NumberRange,
    OneOf,
    check_limits,
    field_limits,
    from_plain,
    join,
    rename_former_fields,
)

__all__ = ["apply_overrides", "config", "dumps", "from_plain", "leaves", "standard_json", "to_plain"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, dataclasses.Field))
def config(cls: type[T]) -> type[T]:
    """Declare a frozen, keyword-only, slotted dataclass that checks the bounds of its fields.

    Bounds are part of the annotations: types of `nestrec.base.config_values` such as `Count` (an int of at least 1), or
    `Annotated[float, NumberRange(0, 1)]` with `NumberRange` of the same module. The string literal after a field is its
    documentation, which `nestrec options` prints.

    Args:
        cls: Class with annotated fields. Its `__post_init__`, if any, runs after the bounds were checked.

    Returns:
        The dataclass. Its constructor raises a `UserError` if a value is out of bounds.

    Example:
        >>> @nestrec.config
        ... class SamplerConfig:
        ...     num_negatives: Count = 128
        ...     "Number of sampled negatives per positive."
        >>> SamplerConfig(num_negatives=0)
        Traceback (most recent call last):
        nestrec.base.config_values.OutOfRangeError: num_negatives=0: must be 1 or more. Choose a value in this range.
    """
    if limits := field_limits(cls):
        _check_first(cls, limits)
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


def _check_first(cls: Any, limits: dict[str, NumberRange | OneOf]) -> None:
    """Extend `__post_init__` so that bounds are checked before the checks of the class itself."""
    class_post_init = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        check_limits(self, limits)
        if class_post_init is not None:
            class_post_init(self)

    cls.__post_init__ = __post_init__


def to_plain(value: Any) -> Any:
    """Convert a config, or any nesting of configs, mappings and sequences, to JSON-like data."""
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
    """Return all leaf values of a config or of plain data, by dotted name."""
    plain = to_plain(value)
    if not isinstance(plain, Mapping):
        return {where: plain}
    values: dict[str, Any] = {}
    for name, inner in plain.items():
        values |= leaves(inner, join(where, name))
    return values


def rename_former_leaves(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted names and values of `leaves` with all former field names replaced by the present ones."""
    hints = typing.get_type_hints(cls)
    mappings = {name for name, hint in hints.items() if typing.get_origin(hint) is Mapping}
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parts, last = name.split(".")
        if parts and parts[0] in mappings:  # the name of an entry, such as a table, may contain dots
            parts = [parts[0], *[".".join(parts[1:])] * (len(parts) > 1)]
        inner = nested
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return leaves(rename_former_fields(cls, nested))


def dumps(value: Any) -> str:
    """Return a config as indented JSON; `from_plain(type(value), json.loads(...))` is the inverse."""
    return json.dumps(to_plain(value), indent=2)


def standard_json(plain: Any, *, indent: int | None = None) -> str:
    """Return standard JSON; NaN and infinity, which JSON does not support, are written as null."""
    return json.dumps(_finite(plain), indent=indent, allow_nan=False)


def _finite(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        return {name: _finite(value) for name, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(value) for value in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
