"""Which cost model and which shares deal which batch: given at the start, changed only at logged steps, and the same
when replayed."""

from collections.abc import Iterable, Sequence

from nestrec.balance.cost import CostModel
from nestrec.balance.power import PowerTuning
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
    tuning: PowerTuning | None = None
    """what `power` deals by from then on; none: as the cost model says, in equal shares"""


class CostSchedule:
    """The cost model and tuning of each batch. Data threads ask for them while the loop adds changes."""

    def __init__(self, cost: CostModel, changes: Iterable[CostChange] = (), *, tuning: PowerTuning | None = None):
        self._cost, self._tuning = cost, tuning
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

    @property
    def newest_tuning(self) -> PowerTuning | None:
        """Their tuning."""
        return self._changes[-1].tuning if self._changes else self._tuning

    def at(self, position: Position) -> CostModel:
        """The model that deals the batch of this position."""
        return self.both_at(position)[0]

    def both_at(self, position: Position) -> tuple[CostModel, PowerTuning | None]:
        """The model and the tuning that deal the batch of this position."""
        self._last_asked = position if self._last_asked is None else max(self._last_asked, position)
        found = self._cost, self._tuning
        for change in self._changes:
            if change.first <= position:
                found = change.cost, change.tuning
        return found

    def is_newest(self, position: Position) -> bool:
        """Whether the batch of this position was dealt after the last change."""
        return not self._changes or self._changes[-1].first <= position

    def restore(self, changes: Iterable[CostChange]) -> None:
        """Go on where a run stood that had made these changes."""
        self._changes, self._last_asked = tuple(changes), None

    def add(self, change: CostChange) -> None:
        """A change applies to batches that no rank has dealt yet, or ranks would not agree on them."""
        assert self._last_asked is None or change.first > self._last_asked
        assert not self._changes or change.first > self._changes[-1].first
        self._changes = (*self._changes, change)
