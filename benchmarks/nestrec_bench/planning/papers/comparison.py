"""A published number and ours for the same thing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nestrec.planning.simulator.program_replay import Cost, Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedResult:
    """A cell of a table in a paper."""

    table: str
    """which table, at which scale"""
    quantity: str
    """what, with its unit"""
    method: str
    """of whom"""
    published: float
    """as printed"""
    predicted: float
    """by the simulator"""
    bound: float | None = None
    """largest difference that counts as agreement; none where the number was used to fit, or nothing is claimed"""
    is_relative: bool = True
    """the bound is a part of the published number, else in its own unit"""

    @property
    def difference(self) -> float:
        """A part of the published number, or in its unit."""
        return (self.predicted - self.published) / (self.published if self.is_relative else 1.0)

    @property
    def agrees(self) -> bool | None:
        return None if self.bound is None else abs(self.difference) <= self.bound

    def row(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "quantity": self.quantity,
            "method": self.method,
            "published": self.published,
            "predicted": round(self.predicted, 4),
            "difference": round(self.difference, 4),
            "difference_is": "relative" if self.is_relative else "absolute",
            "bound": self.bound,
            "agrees": self.agrees,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """A paper."""

    rows: tuple[PublishedResult, ...]
    assumptions: tuple[str, ...]
    """what the paper does not say and had to be taken as given"""


_SCOPES: dict[str, Scope] = {
    "exchange_keys": "shards",
    "exchange_vectors": "shards",
    "exchange_gradients": "shards",
    "sum_over_holders": "replicas",
    "average_over_holders": "replicas",
    "dense_reduce": "all",
}


class UniformCosts:
    """Costs that depend on the operation alone. shared: part of the rows that the neighbouring batch uses too."""

    def __init__(self, seconds: Mapping[str, float], *, shared: float = 0.0) -> None:
        self._seconds = seconds
        self._shared = shared

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        name, _, half = operation.partition(":")
        part = {"": 1.0, "shared": self._shared, "exclusive": 1.0 - self._shared}[half]
        seconds = self._seconds.get(name, 0.0) * part
        scope = _SCOPES.get(name, "rank")
        return Cost(seconds) if scope == "rank" else Cost(0.0, seconds, scope)
