"""A stream that feeds a dataset: a window of it is a generation, with the position behind it on the same card.

What a window holds is on the disk before anybody trains on it, together with how far the source was read. So a kill at
any moment loses nothing and doubles nothing, whatever the source does meanwhile.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nestrec.base.failpoints import fail_point
from nestrec.data.card import Card
from nestrec.data.formats.log import LogOptions
from nestrec.data.growth.append import append_source
from nestrec.data.prepare.events import EventColumns
from nestrec.data.prepare.raw import RawBatch
from nestrec.data.prepare.source import LogSource
from nestrec.data.sources.closing import ClosedWindow, OpenWindow, WindowRule, read_waiting, write_waiting
from nestrec.data.sources.source import StreamSource

ROWS_AT_A_TIME = 1 << 14


@dataclass(frozen=True, slots=True)
class WindowTimes:
    """When the events of a window came, in seconds since 1970."""

    first_at_s: float
    mean_at_s: float
    newest_at_s: float
    closed_at_s: float


class Stream:
    """Reads a source into a dataset."""

    def __init__(self, source: StreamSource, name: str, folder: Path, rule: WindowRule, options: LogOptions):
        """name: of the source, for messages. options: what the columns mean and others, as for `prepare`."""
        self._source, self._name, self._folder, self._rule, self._options = source, name, folder, rule, options
        self._log = options.log
        self._columns = EventColumns.of(self._log)

    def next_window(self, wants_end: Callable[[], bool]) -> tuple[Card, WindowTimes] | None:
        """Wait until a window closes and append it; none where `wants_end` says so before that.

        `wants_end` is asked whenever there is nothing to read.
        """
        card = Card.load(self._folder)
        before = card.generations[-1].stream if card.generations else {}
        position = before.get("position", {})
        newest = self._folder / card.all_layers[-1].folder
        window = OpenWindow.of(self._rule, self._log, before, read_waiting(newest) if before else [])
        while not window.is_full:
            rows = self._source.read(position, min(ROWS_AT_A_TIME, window.room))
            if rows is None:
                if wants_end():
                    return None
                continue
            window.add(rows)
            position = rows.position
            fail_point("stream.read")
        closed = window.close()
        return self._append(closed, position), WindowTimes(
            closed.first_at_s, closed.mean_at_s, closed.newest_at_s, time.time()
        )

    def lag(self, card: Card) -> dict[str, float]:
        """What the source has beyond a generation."""
        stream = card.generations[-1].stream if card.generations else {}
        return self._source.lag(stream.get("position", {}))

    def _append(self, window: ClosedWindow, position: object) -> Card:
        def batches() -> Iterator[tuple[RawBatch, float]]:
            for batch in window.batches:
                yield batch, 1.0

        return append_source(
            self._folder,
            LogSource(self._name, "log", self._columns, batches),
            self._options,
            inputs={},
            stream={**window.state, "position": position},
            beside=lambda folder: write_waiting(folder, window.waiting),
        )
