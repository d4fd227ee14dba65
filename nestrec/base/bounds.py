"""What a field of a config may hold: part of its type, so that a value out of range is refused by name.

`batch_samples: Count = 128` is an int for a type checker, and 1 or more for everybody who builds the config.
`policy: Annotated[str, OneOf(POLICIES)]` is a name in a registry that may grow.
"""

import inspect
import typing
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

from nestrec.base.errors import Mistakes, UserError, did_you_mean


@dataclass(frozen=True, slots=True)
class Bound:
    """Finite numbers from `low` (or above it) to `high`."""

    low: float
    high: float = float("inf")
    above: bool = False
    """`low` itself is not allowed"""
    below: bool = False
    """nor is `high`"""

    def holds(self, value: float) -> bool:
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
    """The names of a registry, as it is when somebody asks."""

    known: Collection[str]

    def __str__(self) -> str:
        return " | ".join(self.known)


Count = Annotated[int, Bound(1)]
"""1 or more."""
Natural = Annotated[int, Bound(0)]
"""0 or more."""
Seed = Annotated[int, Bound(0, 2**63 - 1)]
"""What 63 bits hold."""
Port = Annotated[int, Bound(0, 65535)]
"""Where a server listens; 0 takes a free one."""
Positive = Annotated[float, Bound(0, above=True)]
"""More than 0."""
NonNegative = Annotated[float, Bound(0)]
"""0 or more."""
Share = Annotated[float, Bound(0, 1)]
"""0 to 1."""
Decay = Annotated[float, Bound(0, 1, below=True)]
"""0 to less than 1."""


class BoundError(UserError):
    """A value out of range, named by its field alone until whoever knows the rest of its path adds it."""

    def under(self, where: str) -> "BoundError":
        return (
            self
            if not where
            else BoundError(self.problem, field=f"{where}.{self.field}", value=self.value, remedy=self.remedy)
        )


def limits_of(cls: type) -> dict[str, Bound | OneOf]:
    """What the fields that are limited may hold, those of classes that it extends included."""
    annotations = [inspect.get_annotations(base) for base in reversed(cls.__mro__)]
    found = ((name, _limit_in(hint)) for named in annotations for name, hint in named.items())
    return {name: limit for name, limit in found if limit is not None}


def check_limits(value: Any, limits: dict[str, Bound | OneOf]) -> None:
    """Raise for the fields that hold what they may not; of a sequence, every element must be allowed."""
    mistakes = Mistakes()
    for name, limit in limits.items():
        with mistakes.noted():
            _check_limit(name, getattr(value, name), limit)
    mistakes.raise_all()


def _check_limit(name: str, given: Any, limit: Bound | OneOf) -> None:
    for one in given if isinstance(given, tuple | list) else (given,):
        if isinstance(limit, OneOf):
            if isinstance(one, str) and one not in limit.known:
                remedy = did_you_mean(one, limit.known)
                raise BoundError("is not one of the choices", field=name, value=given, remedy=remedy)
        elif isinstance(one, int | float) and not limit.holds(one):
            raise BoundError(f"must be {limit}", field=name, value=given, remedy=f"give {limit}")


def _limit_in(hint: Any) -> Bound | OneOf | None:
    for found in getattr(hint, "__metadata__", ()):
        if isinstance(found, Bound | OneOf):
            return found
    inner = (_limit_in(part) for part in typing.get_args(hint))
    return next((limit for limit in inner if limit is not None), None)
