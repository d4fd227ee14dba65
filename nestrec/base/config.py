"""Configuration: frozen dataclasses beside their owners, loaded from plain data with checked names and types.

`@config` makes a frozen, keyword-only, slotted dataclass. `from_plain` builds one from JSON-like data, `to_plain`
is its inverse, and `with_overrides` applies dotted overrides (`{"model.num_layers": "4"}`) as given on a command line.
Unknown names and wrong types are errors that name the field and suggest the remedy.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

from nestrec.base.config_overrides import with_overrides
from nestrec.base.config_values import NumberRange, OneOf, check_limits, from_plain, join, limits_of

__all__ = ["config", "dumps", "from_plain", "leaves", "standard_json", "to_plain", "with_overrides"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, dataclasses.Field))
def config(cls: type[T]) -> type[T]:
    """Frozen, keyword-only, slotted dataclass; values outside the limits of their fields are refused."""
    if limits := limits_of(cls):
        _check_first(cls, limits)
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


def _check_first(cls: Any, limits: dict[str, NumberRange | OneOf]) -> None:
    """Limits are checked before what the class itself asks of its values."""
    of_class = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        check_limits(self, limits)
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
        found |= leaves(inner, join(where, name))
    return found


def dumps(value: Any) -> str:
    """Readable JSON of a config; `from_plain(type(value), json.loads(...))` gives it back."""
    return json.dumps(to_plain(value), indent=2)


def standard_json(plain: Any, *, indent: int | None = None) -> str:
    """Returns JSON that every parser reads: NaN and infinity, which it does not have, are written as null."""
    return json.dumps(_finite(plain), indent=indent, allow_nan=False)


def _finite(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        return {name: _finite(value) for name, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(value) for value in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
