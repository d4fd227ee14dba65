"""Published figures and their simulated counterparts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nestrec.planning.simulator.program_replay import Cost, Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedResult:
    """A table cell of a paper, and its prediction."""

    table: str
    """Name of the table, with its scale."""
    quantity: str
    """Measured quantity with its unit."""
    method: str
    """Name of the method."""
    published: float
    """Value in the paper."""
    predicted: float
    """Value from the simulator."""
    bound: float | None = None
    """Largest difference that counts as agreement; None if the figure was used for fitting, or agreement is not
    claimed."""
    is_relative: bool = True
    """Whether difference and bound are fractions of the published figure; otherwise, they have its unit."""

    @property
    def difference(self) -> float:
        """Predicted minus published figure; relative to the published one if `is_relative`."""
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
    """All compared figures of a paper."""

    rows: tuple[PublishedResult, ...]
    assumptions: tuple[str, ...]
    """Assumptions about facts that the paper does not state."""


_SCOPES: dict[str, Scope] = {
    "exchange_keys": "shards",
    "exchange_vectors": "shards",
    "exchange_gradients": "shards",
    "all_reduce_replica_gradients": "replicas",
    "average_replicas": "replicas",
    "dense_reduce": "all",
}


class UniformCosts:
    """Costs that depend on the operation only.

    Args:
        seconds: Operation to its duration.
        shared: Fraction of the rows that the neighboring batch uses too.
    """

    def __init__(self, seconds: Mapping[str, float], *, shared: float = 0.0) -> None:
        self._seconds = seconds
        self._shared = shared

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        name, _, half = operation.partition(":")
        part = {"": 1.0, "shared": self._shared, "exclusive": 1.0 - self._shared}[half]
        seconds = self._seconds.get(name, 0.0) * part
        scope = _SCOPES.get(name, "rank")
        return Cost(seconds) if scope == "rank" else Cost(0.0, seconds, scope)
