"""Stream sources: their specs, checked reads and positions.

Whose a position is: that of one source, kept with the data beside those of sources that were read before it.

A stream that is given another source than the one it has read is refused, since nobody but its user knows whether that
is the same stream at another place or another stream.

What a source of a stream is: rows that can be read from a position, and positions that can be saved.

A new source is a file with a `StreamSourceSpec`, and one entry: here, or elsewhere an entry point of `nestrec.sources`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.base.plugins import PluginRegistry
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.prepare.raw_rows import RawBatch

StreamPosition = Mapping[str, Any]
"""How far a source was read: plain values that JSON holds; empty before the first row."""


@dataclass(frozen=True, slots=True)
class StreamRows:
    """Some rows of a stream, in the order in which they are read."""

    batch: RawBatch
    position: StreamPosition
    """behind the last of them"""
    arrived_s: float
    """when the newest of them came to the source, in seconds since 1970"""
    is_whole: bool = True
    """of a piece: there is no more in it, so that the next piece follows"""
    came_ms: NDArray[np.int64] | None = None
    """when each of them came, in milliseconds since 1970, where the source knows it of each; of one that is not known
    it is not above 0"""

    @property
    def is_empty(self) -> bool:
        """Nothing but a position: what it was thought to hold is not there."""
        return not self.batch.num_rows and not self.batch.bad


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Rows of a stream that can be read without those before them."""

    share: int
    """pieces of one share are best read by one rank: those of a partition, or of a file"""
    what: Mapping[str, Any]
    """for `fetch`; plain values that JSON holds"""


class StreamSource(ABC):
    """A stream that is open."""

    @abstractmethod
    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        """The rows behind a position, at most so many; none where there is nothing now. It does not wait long.

        What is behind a position does not change: read again, the same rows come.
        """

    def pieces(self, position: StreamPosition, max_rows: int, number: int) -> list[StreamChunk]:
        """What is behind a position, in order, for ranks that read together: each `fetch` gives at most so many rows.
        number: of ranks. Of a source that does not divide what it has, one rank reads all."""
        return [StreamChunk(0, {"position": dict(position), "max_rows": max_rows})]

    def fetch(self, piece: StreamChunk) -> StreamRows | None:
        """The rows of a piece; none where there is nothing now."""
        return self.read(piece.what["position"], piece.what["max_rows"])

    def identity(self) -> str | None:
        """What is read, by whatever address, with its kind before a colon: a position holds for nothing else. None: the
        address says it."""
        return None

    @abstractmethod
    def lag(self, position: StreamPosition) -> dict[str, float]:
        """How much is there and not read yet, by name of the unit."""

    def skipped(self) -> dict[str, str]:
        """Returns what is there and is never read, for people: a text for each kind of it."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back connections."""


class ValidatedSource(StreamSource):
    """A source of another package, of which what it gives is looked at: a position that does not move, or goes back,
    would have the same rows trained on for ever."""

    def __init__(
        self, source: StreamSource, columns: Collection[str], mistake: Callable[[str, str], UserError]
    ) -> None:
        """columns: that all rows have. mistake: (member, problem) to the error that names the source."""
        self._source = source
        self._columns = columns
        self._mistake = mistake
        self._passed: list[str] = []

    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        rows = self._source.read(position, max_rows)
        return None if rows is None else self._checked("read", rows, position, max_rows)

    def pieces(self, position: StreamPosition, max_rows: int, number: int) -> list[StreamChunk]:
        return self._source.pieces(position, max_rows, number)

    def fetch(self, piece: StreamChunk) -> StreamRows | None:
        rows = self._source.fetch(piece)
        asked = piece.what.get("position")
        return None if rows is None else self._checked("fetch", rows, asked, piece.what.get("max_rows"))

    def identity(self) -> str | None:
        return self._source.identity()

    def lag(self, position: StreamPosition) -> dict[str, float]:
        return self._source.lag(position)

    def skipped(self) -> dict[str, str]:
        return self._source.skipped()

    def close(self) -> None:
        self._source.close()

    def _checked(self, what: str, rows: Any, asked: StreamPosition | None, most: int | None) -> StreamRows:
        if not isinstance(rows, StreamRows) or not isinstance(rows.batch, RawBatch):
            raise self._mistake(what, f"gives {type(rows).__name__} and no StreamRows of a RawBatch")
        batch = rows.batch
        for name, column in batch.columns.items():
            if len(column) != batch.num_rows:
                raise self._mistake(what, f"gives {len(column)} values of {name!r} for {batch.num_rows} rows")
        for name in self._columns if batch.num_rows else ():
            if name not in batch.columns:
                raise self._mistake(what, f"gives rows without the column {name!r}, which it was opened with")
        if most is not None and batch.num_rows > most:
            raise self._mistake(what, f"gives {batch.num_rows} rows where {most} were asked for")
        behind = self._plain(what, rows.position)
        if asked is not None:
            self._check_moved(what, self._plain(what, asked), behind)
        return rows

    def _plain(self, what: str, position: Any) -> str:
        try:
            if isinstance(position, Mapping):
                return json.dumps(dict(position), sort_keys=True)
            problem = "is no mapping"
        except (TypeError, ValueError) as error:
            problem = f"is not what JSON holds ({error})"
        raise self._mistake(what, f"gives the position {position!r}, which {problem}")

    def _check_moved(self, what: str, asked: str, behind: str) -> None:
        """Reading again from an earlier position is what a run does that lost some; positions behind it are new."""
        passed = self._passed
        self._passed = [*passed[: passed.index(asked)], asked] if asked in passed else [*passed[1 - _PASSED :], asked]
        if behind in self._passed:
            problem = f"gives the position {behind} behind its rows, which it was asked from before: it goes round"
            raise self._mistake(what, problem)


_PASSED = 100
"""Positions that are remembered: who goes back goes back a little, mostly."""


def no_rows(file: str) -> RawBatch:
    """For a piece of which only the position behind it is known."""
    return RawBatch(file, np.zeros(0, np.int64), {})


@dataclass(frozen=True, slots=True)
class StreamSourceSpec:
    """A kind of source."""

    description: str
    """in a line"""
    fits: Callable[[str], bool]
    """whether an address is of this kind"""
    open: Callable[[str, LogColumns, tuple[str, ...]], StreamSource]
    """(address, how files are written, columns that are wanted)"""


SOURCES: PluginRegistry[StreamSourceSpec] = PluginRegistry(
    "nestrec.sources",
    "source",
    {"kafka": "nestrec.data.streaming.kafka_source:SOURCE", "folder": "nestrec.data.streaming.folder_source:SOURCE"},
    of=StreamSourceSpec,
)


def open_source(address: str, log: LogColumns, more: Collection[str] = ()) -> StreamSource:
    """The source of an address: a folder, kafka://BROKERS/TOPIC, or what other packages bring.

    more: columns that are wanted beside those of the log.
    """
    wanted = tuple(dict.fromkeys([*EventColumns.of(log).wanted(), *more]))
    for name in SOURCES:
        spec = SOURCES.find(name)
        if spec.fits(address):
            source = spec.open(address, log, wanted)
            if not isinstance(source, StreamSource):
                raise SOURCES.broken(name, "open", f"gives {source!r} of {address}, which is no StreamSource")
            return (
                source
                if name in SOURCES.own
                else ValidatedSource(source, EventColumns.of(log).needed(), partial(SOURCES.broken, name))
            )
    problem = "is no source: it is a file" if Path(address).is_file() else "is no source, and no folder that there is"
    remedy = f"name a folder that exists, or an address of {', '.join(SOURCES)} (kafka://localhost:9092/events)"
    raise UserError(problem, option="SOURCE", value=address, remedy=remedy)


ChangedSource = Literal["refuse", "begin", "moved"]


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """How far sources were read, as it lies on the card."""

    source: str
    """its identity; empty where that was not kept yet"""
    position: StreamPosition
    others: Mapping[str, StreamPosition] = field(default_factory=dict)
    """of those that were read before, by identity"""

    @staticmethod
    def of(state: Mapping[str, Any]) -> "StreamOffset":
        """That of a stream's state on a card."""
        return StreamOffset(state.get("source", ""), state.get("position", {}), state.get("others", {}))

    def to_plain(self) -> dict[str, Any]:
        return {"source": self.source, "position": self.position, "others": dict(self.others)}

    def at(self, position: StreamPosition) -> "StreamOffset":
        """The same source, read further."""
        return StreamOffset(self.source, position, self.others)

    def of_source(self, identity: str, address: str, changed: ChangedSource) -> "StreamOffset":
        """Where to go on in a source; a UserError where it is not the one that was read, and nothing is said of it."""
        if identity == self.source or not self.source:
            return StreamOffset(identity, self.position, self.others)
        if changed == "begin":
            others = {name: where for name, where in self.others.items() if name != identity}
            return StreamOffset(identity, self.others.get(identity, {}), {**others, self.source: self.position})
        if changed == "moved" and _kind(identity) == _kind(self.source):
            return StreamOffset(identity, self.position, self.others)
        if changed == "moved":
            raise UserError(
                f"is of another kind than {self.source}, which was read so far: no position of that holds here",
                option="SOURCE",
                value=address,
                remedy="read it as another stream: --changed_source begin",
            )
        raise UserError(
            f"is not what this data was fed from so far: that is {self.source}, this is {identity}",
            option="SOURCE",
            value=address,
            remedy="name that again; or, if this is the same stream at another place, go on where it stood with "
            "--changed_source moved; or, if it is another stream, begin to read it with --changed_source begin",
        )


def _kind(identity: str) -> str:
    return identity.partition(":")[0]
