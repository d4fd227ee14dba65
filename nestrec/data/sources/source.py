"""What a source of a stream is: rows that can be read from a position, and positions that can be saved.

A new source is a file with a `SourceSpec`, and one entry: here, or elsewhere an entry point of `nestrec.sources`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.base.seam import Seam
from nestrec.data.prepare.events import EventColumns
from nestrec.data.prepare.options import LogColumns
from nestrec.data.prepare.raw import RawBatch

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
class StreamPiece:
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

    def pieces(self, position: StreamPosition, max_rows: int, number: int) -> list[StreamPiece]:
        """What is behind a position, in order, for ranks that read together: each `fetch` gives at most so many rows.
        number: of ranks. Of a source that does not divide what it has, one rank reads all."""
        return [StreamPiece(0, {"position": dict(position), "max_rows": max_rows})]

    def fetch(self, piece: StreamPiece) -> StreamRows | None:
        """The rows of a piece; none where there is nothing now."""
        return self.read(piece.what["position"], piece.what["max_rows"])

    def identity(self) -> str | None:
        """What is read, by whatever address, with its kind before a colon: a position holds for nothing else. None: the
        address says it."""
        return None

    @abstractmethod
    def lag(self, position: StreamPosition) -> dict[str, float]:
        """How much is there and not read yet, by name of the unit."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back connections."""


def no_rows(file: str) -> RawBatch:
    """For a piece of which only the position behind it is known."""
    return RawBatch(file, np.zeros(0, np.int64), {})


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A kind of source."""

    description: str
    """in a line"""
    fits: Callable[[str], bool]
    """whether an address is of this kind"""
    open: Callable[[str, LogColumns, tuple[str, ...]], StreamSource]
    """(address, how files are written, columns that are wanted)"""


SOURCES: Seam[SourceSpec] = Seam(
    "nestrec.sources",
    "source",
    {"kafka": "nestrec.data.sources.kafka:SOURCE", "folder": "nestrec.data.sources.folder:SOURCE"},
    of=SourceSpec,
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
                raise SOURCES.unanswered(name, "open", f"gives {source!r} of {address}, which is no StreamSource")
            return source
    problem = "is no source: it is a file" if Path(address).is_file() else "is no source, and no folder that there is"
    remedy = f"name a folder that exists, or an address of {', '.join(SOURCES)} (kafka://localhost:9092/events)"
    raise UserError(problem, field="SOURCE", value=address, remedy=remedy)
