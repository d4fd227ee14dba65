"""Numbers that a field of a config may hold: part of its type, so that a value out of range is refused by name.

`batch_samples: Count = 128` is an int for a type checker, and 1 or more for everybody who builds the config.
"""

import typing
from dataclasses import dataclass
from typing import Annotated, Any

from nestrec.base.errors import UserError


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
    """A number out of range, named by its field alone until whoever knows the rest of its path adds it."""

    def under(self, where: str) -> "BoundError":
        return self if not where else BoundError(
            self.problem, field=f"{where}.{self.field}", value=self.value, remedy=self.remedy
        )  # fmt: skip


def bounds_of(cls: type) -> dict[str, Bound]:
    """Bounds of the fields that have one."""
    found = ((name, _bound_in(hint)) for name, hint in cls.__annotations__.items())
    return {name: bound for name, bound in found if bound is not None}


def check_bounds(value: Any, bounds: dict[str, Bound]) -> None:
    """Raise a BoundError for the first field that is out of range; of a sequence, every element must be in it."""
    for name, bound in bounds.items():
        given = getattr(value, name)
        for number in given if isinstance(given, tuple | list) else (given,):
            if isinstance(number, int | float) and not bound.holds(number):
                raise BoundError(f"must be {bound}", field=name, value=given, remedy=f"give {bound}")


def _bound_in(hint: Any) -> Bound | None:
    for found in getattr(hint, "__metadata__", ()):
        if isinstance(found, Bound):
            return found
    inner = (_bound_in(part) for part in typing.get_args(hint))
    return next((bound for bound in inner if bound is not None), None)
