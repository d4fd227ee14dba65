"""Stages of batches whose rows are split into those that the neighbouring batch shares and the others."""

from typing import Literal

from nestrec.embedding.flight.collisions import Collisions, Half, Halves, find_collisions
from nestrec.embedding.flight.overlap import Overlap
from nestrec.embedding.flight.split_window import SplitWindow
from nestrec.pipeline.lanes import Ticket
from nestrec.pipeline.machine import InFlight, Machine, counted
from nestrec.pipeline.stages import Rates
from nestrec.trace import OpenSpan

Which = Literal["exclusive", "shared"]


class CollisionStages:
    """Submits them to the lanes of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._engine = machine, machine.engine

    def find(self, older: InFlight, newer: InFlight) -> Ticket[Collisions]:
        """Which rows two batches share: found on the owner, told to the sources."""
        label = self._machine.label("train.embedding.collisions", "lookup", older.number, is_collective=True)
        routed, shards = (older.routed, newer.routed), self._engine.topology.keys
        older.collisions = self._machine.lanes.communication.submit(
            lambda span: find_collisions(routed[0].wait(), routed[1].wait(), shards), label, after=routed
        )
        return older.collisions

    def vectors(self, flying: InFlight, part: int, which: Which, found: Ticket[Collisions]) -> Ticket[None]:
        """Exchange E of a micro-batch, of one half of its rows."""
        assert flying.rows is not None

        def receive(span: OpenSpan) -> None:
            with counted(span, self._engine.statistics.vectors):
                self.window(flying).receive_half(part, _half(found.wait().vectors, which))

        label = self._machine.label("train.embedding.vectors", "communication", flying.number, part, is_collective=True)
        return self._machine.lanes.communication.submit(receive, label, after=[flying.rows, found])

    def window(self, flying: InFlight) -> SplitWindow:
        """Wait for the rows, and make the exchanges of the batch possible."""
        if flying.window is None:
            assert flying.rows is not None
            flying.window = SplitWindow(self._engine, flying.routed.wait(), flying.rows.wait())
        assert isinstance(flying.window, SplitWindow)
        return flying.window

    def gradients(self, flying: InFlight, part: int, which: Which) -> Ticket[None]:
        """Exchange G of a micro-batch, of one half of its rows; owners add up."""
        window, found = self.window(flying), flying.collisions
        assert found is not None

        def send(span: OpenSpan) -> None:
            with counted(span, self._engine.statistics.gradients):
                window.send_half(part, _half(found.wait().gradients, which))

        label = self._machine.label(
            "train.embedding.gradients", "communication", flying.number, part, is_collective=True
        )
        sent = self._machine.lanes.communication.submit(send, label, after=[found])
        if not window.routed.parts[part].crossing:
            return sent

        def cross(span: OpenSpan) -> None:
            with counted(span, self._engine.statistics.replicas):
                self._engine.sum_over_holders(_half(found.wait().gradients, which).routed, window.working, part)

        label = self._machine.label(
            "train.embedding.replicas", "communication", flying.number, part, is_collective=True
        )
        return self._machine.lanes.communication.submit(cross, label)

    def update_shared(self, flying: InFlight, rates: Rates) -> None:
        """One optimiser step on the rows that the next batch shares, on the compute lane."""
        with self._machine.span("train.embedding.update", "compute"):
            self._update(flying, "shared", rates)

    def finish(self, flying: InFlight, rates: Rates, shared: Overlap) -> None:
        """What was deferred: gradients of exclusive rows go, the rows are updated and written to the store."""
        for part in range(flying.num_parts):
            gone = self.gradients(flying, part, "exclusive")
        label = self._machine.label("train.embedding.update", "lookup", flying.number)
        self._machine.lanes.lookup.submit(lambda span: self._update(flying, "exclusive", rates), label, after=[gone])
        self._machine.write_back(flying, shared)

    def _update(self, flying: InFlight, which: Which, rates: Rates) -> None:
        assert flying.collisions is not None
        places = _half(flying.collisions.wait().gradients, which).owned
        self._engine.update_rows(self.window(flying).working, learning_rate=rates.tables, places=places)


def _half(halves: Halves, which: Which) -> Half:
    return halves.shared if which == "shared" else halves.exclusive
