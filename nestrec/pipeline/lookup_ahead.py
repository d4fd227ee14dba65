"""Dual-buffer lookup: while batch t trains, rows of t+1 are fetched, keys of t+2 are exchanged, and t+3 is loaded.

    lookup lane      write back t-1 | fetch t+1 | intersect t with t+1
    compute lane     ... batch t ... update t | copy rows of both from buffer t to buffer t+1 | batch t+1 ...

The lookup lane is the one FIFO of rules 2 and 3: rows of t-1 reach the store before t+1 reads it, and write-backs keep
their order. Rows that t+1 has taken over are not written back by t.
"""

from collections.abc import Callable

from nestrec.base.failpoints import is_broken
from nestrec.embedding.flight.overlap import Overlap
from nestrec.embedding.flight.row_buffers import RowBuffers
from nestrec.pipeline.feed import Feed
from nestrec.pipeline.keys_ahead import KeysAhead
from nestrec.pipeline.machine import InFlight, Machine
from nestrec.pipeline.stages import Step

_KEYS_AHEAD = 2


class LookupAhead:
    """Stages 2 to 4 of the batches that follow."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._buffers = RowBuffers(turns=2)
        self._keys = KeysAhead(machine, _KEYS_AHEAD)
        # Filled only where a test has broken rule 2 or rule 3: write-backs that come too late.
        self._after_fetch: list[Callable[[], object]] = []
        self._after_write_back: list[Callable[[], object]] = []

    def rows_of(self, step: Step) -> InFlight:
        """The batch of this step with its rows: fetched during the step before, or now after a fence."""
        now = self._keys.begun(step.number, step.batch)
        if now.rows is None:
            self._machine.fetch(now, self._buffers)
        self._machine.open_window(now)
        return now

    def look_ahead(self, step: Step, feed: Feed) -> None:
        """Submit what may run beside this step."""
        self._keys.look_ahead(step, feed)
        now, following = self._keys.get(step.number), self._keys.get(step.number + 1)
        assert now is not None
        if following is not None and not step.is_fence:  # a fetch creates rows, so none may pass a fence
            self._machine.fetch(following, self._buffers)
            self._machine.find_shared(now, following)
        _run_all(self._after_fetch)

    def hand_over(self, step: Step) -> InFlight | None:
        """After the update: give the next batch the rows it shares, and write the others back. The next batch."""
        now, following = self._keys.pop(step.number), self._keys.get(step.number + 1)
        if following is None or following.rows is None or following.is_refused():
            self._machine.write_back(now, None)
            return None
        shared = self._machine.copy_shared(now, following)
        self._write_back(now, shared)
        return following

    def _write_back(self, now: InFlight, shared: Overlap) -> None:
        if is_broken("pipeline.rule2"):
            keep_rows(now)
            self._after_fetch.append(lambda: self._machine.write_back(now, shared))
            return
        self._machine.write_back(now, shared)
        if is_broken("pipeline.rule3"):
            _run_all(self._after_write_back)
            keep_rows(now)
            self._after_write_back.append(lambda: self._machine.write_back(now, None))


def _run_all(tasks: list[Callable[[], object]]) -> None:
    for task in tasks:
        task()
    tasks.clear()


def keep_rows(flying: InFlight) -> None:
    """Rows of its own for a batch whose buffer will be filled anew before a test has done with it."""
    assert flying.rows is not None
    for table in flying.rows.wait().tables.values():
        table.fetched.rows = table.fetched.rows.clone()
