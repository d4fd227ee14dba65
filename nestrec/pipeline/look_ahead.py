"""Ahead of the step: while batch t trains, the batches after it go through the stages before their own.

Keys ahead of rows: keys of t + ahead are exchanged, and the batch after that is loaded. Each of the stages has a step
of its own. Were a batch loaded and its keys exchanged in one step, the exchange would stand in the communication lane
and wait for the loading, with the gradients of batch t behind it.

Rows ahead (dual buffer): rows of t+1 are fetched, keys of t+2 are exchanged, and t+3 is loaded.

    lookup lane      write back t-1 | fetch t+1 | intersect t with t+1
    compute lane     ... batch t ... update t | copy rows of both from buffer t to buffer t+1 | batch t+1 ...

The lookup lane is the one FIFO of write-back before gather and of ordered write-back: rows of t-1 reach the store
before t+1 reads it, and write-backs keep their order. Rows that t+1 has taken over are not written back by t.
"""

from nestrec.data.batches import Batch
from nestrec.embedding.flight.overlap import Overlap
from nestrec.embedding.flight.working_set import RowBuffers
from nestrec.pipeline.machine import Machine
from nestrec.pipeline.phases import FetchedBatch, FollowingBatch, LoadedBatch, RoutedBatch
from nestrec.pipeline.stages import Feed, Step
from nestrec.pipeline.window import Window

_KEYS_AHEAD = 2


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


class LookupAhead:
    """Stages 2 to 4 of the batches that follow."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._buffers = RowBuffers(turns=2)
        self._keys = KeysAhead(machine, _KEYS_AHEAD)
        self._following: FollowingBatch[Window] | None = None

    def rows_of(self, step: Step) -> FetchedBatch[Window]:
        """The batch of this step with its rows: fetched during the step before, or now after a fence."""
        keys = self._keys.begun(step.number, step.batch)
        following, self._following = self._following, None
        fetched = following is not None and following.batch.keys is keys
        now = following.batch if following is not None and fetched else self.machine.fetch(keys, self._buffers)
        _ = now.window  # the rows are waited for here
        return now

    def look_ahead(self, now: FetchedBatch[Window], step: Step, feed: Feed) -> None:
        """Submit what may run beside this step."""
        self._keys.look_ahead(step, feed)
        keys = self._keys.get(step.number + 1)
        if keys is not None and not step.is_fence:  # a fetch creates rows, so none may pass a fence
            self._following = self.machine.find_shared(now, self.machine.fetch(keys, self._buffers))

    def hand_over(self, now: FetchedBatch[Window]) -> FetchedBatch[Window] | None:
        """After the update: give the next batch the rows it shares, and write the others back. The next batch."""
        self._keys.pop(now.number)
        following = self._following
        if following is None or following.batch.keys.is_refused():
            self.machine.write_back(now, None)
            return None
        self.write_back(now, self.machine.copy_shared(now, following))
        return following.batch

    def write_back(self, now: FetchedBatch[Window], shared: Overlap) -> None:
        """Rows of a batch to the store, but for those that the next one has taken over (ordered write-back)."""
        self.machine.write_back(now, shared)
