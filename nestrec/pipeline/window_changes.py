"""How many micro-batches each batch has: changed only at logged steps, and the same when replayed (agreed choices)."""

from collections.abc import Iterable

from nestrec.base.config import config
from nestrec.data.order import Position


@config
class WindowChange:
    """A decision of a run, logged and saved in its checkpoints."""

    step: int
    """steps made when it was taken"""
    first: Position
    """the first batch that is cut so; those before it may have been cut already"""
    micro_batches: int
    """micro-batches from then on"""
    before_ms: tuple[float, float] | None = None
    """computation and communication of a step as it was cut before, where a choice between the two is still to come: a
    run that is started again before it has no measurements of its own of them"""


class WindowSchedule:
    """The number of micro-batches of each batch. Data threads ask for it while the loop adds changes."""

    def __init__(self, micro_batches: int, changes: Iterable[WindowChange] = ()) -> None:
        self._micro_batches, self.changes = micro_batches, tuple(changes)

    @property
    def newest(self) -> int:
        """That of the batches that have not been cut."""
        return self.changes[-1].micro_batches if self.changes else self._micro_batches

    def at(self, position: Position) -> int:
        """That of the batch of this position."""
        found = self._micro_batches
        for change in self.changes:
            if change.first <= position:
                found = change.micro_batches
        return found

    def restore(self, changes: Iterable[WindowChange]) -> None:
        """Go on where a run stood that had made these changes."""
        self.changes = tuple(changes)

    def add(self, change: WindowChange) -> None:
        assert not self.changes or change.first > self.changes[-1].first
        self.changes = (*self.changes, change)
