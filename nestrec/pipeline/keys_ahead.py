"""Keys ahead of rows: while batch t trains, the keys of t + ahead are exchanged, and the batch after that is loaded.

Each of the stages has a step of its own. Were a batch loaded and its keys exchanged in one step, the exchange would
stand in the communication lane and wait for the loading, with the gradients of batch t behind it.
"""

from nestrec.data.batches import Batch
from nestrec.embedding.flight.phases import LoadedBatch, RoutedBatch
from nestrec.pipeline.feed import Feed
from nestrec.pipeline.machine import Machine
from nestrec.pipeline.stages import Step


class KeysAhead:
    """Stages 2 and 3 of the batches that follow."""

    def __init__(self, machine: Machine, ahead: int) -> None:
        self._machine, self._ahead = machine, ahead
        self._loading: dict[int, LoadedBatch] = {}
        self._routed: dict[int, RoutedBatch] = {}

    def look_ahead(self, step: Step, feed: Feed) -> None:
        """Submit what may run beside this step."""
        for ahead in range(1, self._ahead + 1):
            batch = feed.peek(ahead)
            if batch is not None:
                self.begun(step.number + ahead, batch)
        batch, number = feed.peek(self._ahead + 1), step.number + self._ahead + 1
        if batch is not None:
            self._loading[number] = self._loaded(number, batch)

    def begun(self, number: int, batch: Batch) -> RoutedBatch:
        """The batch in flight under this number; begun now where it is another batch, or none."""
        routed = self._routed.get(number)
        if routed is None or routed.batch is not batch:
            routed = self._routed[number] = self._machine.route(self._loaded(number, batch))
            self._loading.pop(number, None)
        return routed

    def get(self, number: int) -> RoutedBatch | None:
        """The batch in flight under this number, if any."""
        return self._routed.get(number)

    def pop(self, number: int) -> RoutedBatch:
        """A batch that leaves."""
        return self._routed.pop(number)

    def _loaded(self, number: int, batch: Batch) -> LoadedBatch:
        loading = self._loading.get(number)
        return loading if loading is not None and loading.batch is batch else self._machine.load(number, batch)
