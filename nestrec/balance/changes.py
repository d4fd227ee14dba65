"""Which cost model deals which batch: given at the start, changed only at logged steps, and the same when replayed."""

from collections.abc import Iterable, Sequence

from nestrec.balance.cost import CostModel
from nestrec.base.config import config
from nestrec.data.order import Position


@config
class CostChange:
    """A decision of a run, logged and saved in its checkpoints."""

    step: int
    """steps made when it was taken"""
    first: Position
    """the first batch that is dealt by it; those before it may have been dealt already"""
    cost: CostModel
    """the cost model from then on"""


class CostSchedule:
    """The cost model of each batch. Data threads ask for it while the loop adds changes."""

    def __init__(self, cost: CostModel, changes: Iterable[CostChange] = ()):
        self._cost = cost
        self._changes = tuple(changes)
        self._last_asked: Position | None = None

    @property
    def changes(self) -> Sequence[CostChange]:
        """All changes so far, in order."""
        return self._changes

    @property
    def newest(self) -> CostModel:
        """The model of the batches that have not been asked for."""
        return self._changes[-1].cost if self._changes else self._cost

    def at(self, position: Position) -> CostModel:
        """The model that deals the batch of this position."""
        self._last_asked = position if self._last_asked is None else max(self._last_asked, position)
        cost = self._cost
        for change in self._changes:
            if change.first <= position:
                cost = change.cost
        return cost

    def restore(self, changes: Iterable[CostChange]) -> None:
        """Go on where a run stood that had made these changes."""
        self._changes, self._last_asked = tuple(changes), None

    def add(self, change: CostChange) -> None:
        """A change applies to batches that no rank has dealt yet, or ranks would not agree on them."""
        assert self._last_asked is None or change.first > self._last_asked
        assert not self._changes or change.first > self._changes[-1].first
        self._changes = (*self._changes, change)
