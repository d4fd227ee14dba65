"""Stream sources: the source interface, plugin specs, offsets and the validation of third-party sources.

A source returns rows from a position and can resume from any position. To add a source, write a file with a
`StreamSourceSpec` and register it here, or as an entry point of the group `nestrec.sources` in another package.

The position is committed with the data, together with those of sources that were read before. If a stream is resumed
from a different source than before, the source is rejected, because only the user knows whether it is the same stream
at a new location or a different stream.
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
"""Position (offset) in a source: JSON-serializable values; empty before the first row."""


@dataclass(frozen=True, slots=True)
class StreamRows:
    """Rows of a stream, in reading order."""

    batch: RawBatch
    position: StreamPosition
    """Position after the last row."""
    arrived_s: float
    """Arrival time of the newest row at the source, in seconds since 1970."""
    is_complete: bool = True
    """Whether these are all rows of the chunk, so that the next chunk follows."""
    arrived_ms: NDArray[np.int64] | None = None
    """Arrival time of each row in milliseconds since 1970, if the source records it; 0 or less if it is unknown for a
    row."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no rows, only a new position, for example because messages were compacted away."""
        return not self.batch.num_rows and not self.batch.bad


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Rows of a stream that can be read independently of the rows before them."""

    affinity: int
    """Affinity key: chunks with the same key, those of a partition or file, are best read by the same rank."""
    request: Mapping[str, Any]
    """Arguments of `fetch`, JSON-serializable."""


class StreamSource(ABC):
    """Interface of an open stream source."""

    @abstractmethod
    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        """Return at most `max_rows` rows after a position, or None if none are available now. Blocks only briefly.

        Rows after a position must not change: reading again returns the same rows.
        """

    def list_chunks(self, position: StreamPosition, max_rows: int, num_ranks: int) -> list[StreamChunk]:
        """Return the next chunks after a position, in order, for ranks that read in parallel.

        By default the stream is not divided, and one rank reads everything.

        Args:
            position: Position to start from.
            max_rows: Maximum number of rows that `fetch` returns per chunk.
            num_ranks: Number of ranks that read.
        """
        return [StreamChunk(0, {"position": dict(position), "max_rows": max_rows})]

    def fetch(self, chunk: StreamChunk) -> StreamRows | None:
        """Return the rows of a chunk, or None if none are available now."""
        return self.read(chunk.request["position"], chunk.request["max_rows"])

    def identity(self) -> str | None:
        """Return the identity of the stream as `KIND:...`, independent of its address; positions are valid for it only.

        None uses the address as the identity.
        """
        return None

    @abstractmethod
    def lag(self, position: StreamPosition) -> dict[str, float]:
        """Return the consumer lag, the amount of unread data, by name of the unit."""

    def skipped(self) -> dict[str, str]:
        """Return messages about data that is never read, by kind of data."""
        return {}

    def close(self) -> None:  # noqa: B027 - most sources have nothing to close
        """Close connections."""


class ValidatedSource(StreamSource):
    """Wrapper that validates a third-party source, for example that its position advances.

    A position that stays or moves backward would train on the same rows forever.

    Args:
        source: Source of another package.
        columns: Columns that all rows must have.
        make_error: Maps (method, problem) to an error that names the source.
    """

    def __init__(
        self, source: StreamSource, columns: Collection[str], make_error: Callable[[str, str], UserError]
    ) -> None:
        self._source = source
        self._columns = columns
        self._make_error = make_error
        self._recent_positions: list[str] = []

    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        rows = self._source.read(position, max_rows)
        return None if rows is None else self._check("read", rows, position, max_rows)

    def list_chunks(self, position: StreamPosition, max_rows: int, num_ranks: int) -> list[StreamChunk]:
        return self._source.list_chunks(position, max_rows, num_ranks)

    def fetch(self, chunk: StreamChunk) -> StreamRows | None:
        rows = self._source.fetch(chunk)
        start = chunk.request.get("position")
        return None if rows is None else self._check("fetch", rows, start, chunk.request.get("max_rows"))

    def identity(self) -> str | None:
        return self._source.identity()

    def lag(self, position: StreamPosition) -> dict[str, float]:
        return self._source.lag(position)

    def skipped(self) -> dict[str, str]:
        return self._source.skipped()

    def close(self) -> None:
        self._source.close()

    def _check(self, member: str, rows: Any, start: StreamPosition | None, limit: int | None) -> StreamRows:
        if not isinstance(rows, StreamRows) or not isinstance(rows.batch, RawBatch):
            raise self._make_error(member, f"returned {type(rows).__name__} instead of StreamRows with a RawBatch")
        batch = rows.batch
        for name, column in batch.columns.items():
            if len(column) != batch.num_rows:
                raise self._make_error(member, f"returned {len(column)} values of {name!r} for {batch.num_rows} rows")
        for name in self._columns if batch.num_rows else ():
            if name not in batch.columns:
                raise self._make_error(member, f"returned rows without the column {name!r}, which it was opened with")
        if limit is not None and batch.num_rows > limit:
            raise self._make_error(member, f"returned {batch.num_rows} rows, but {limit} were requested")
        end = self._to_json(member, rows.position)
        if start is not None:
            self._check_moved(member, self._to_json(member, start), end)
        return rows

    def _to_json(self, member: str, position: Any) -> str:
        try:
            if isinstance(position, Mapping):
                return json.dumps(dict(position), sort_keys=True)
            problem = "is not a mapping"
        except (TypeError, ValueError) as error:
            problem = f"is not JSON-serializable ({error})"
        raise self._make_error(member, f"returned the position {position!r}, which {problem}")

    def _check_moved(self, member: str, start: str, end: str) -> None:
        """Check that the position advances. A run that lost rows legitimately reads again from an earlier position."""
        passed = self._recent_positions
        self._recent_positions = (
            [*passed[: passed.index(start)], start]
            if start in passed
            else [*passed[1 - _NUM_RECENT_POSITIONS :], start]
        )
        if end in self._recent_positions:
            problem = f"returned the position {end} after its rows, from which it was read before, so it would repeat"
            raise self._make_error(member, problem)


_NUM_RECENT_POSITIONS = 100
"""Number of positions to remember; runs mostly go back by few positions."""


def empty_batch(file: str) -> RawBatch:
    """Return a batch without rows, for a chunk that only advances the position."""
    return RawBatch(file, np.zeros(0, np.int64), {})


@dataclass(frozen=True, slots=True)
class StreamSourceSpec:
    """Plugin spec of a stream source."""

    description: str
    """One-line description."""
    fits: Callable[[str], bool]
    """Returns whether an address belongs to this kind of source."""
    open: Callable[[str, LogColumns, tuple[str, ...]], StreamSource]
    """Opens a source from (address, format of the log, columns to read)."""


SOURCES: PluginRegistry[StreamSourceSpec] = PluginRegistry(
    "nestrec.sources",
    "source",
    {"kafka": "nestrec.data.streaming.kafka_source:SOURCE", "folder": "nestrec.data.streaming.folder_source:SOURCE"},
    of=StreamSourceSpec,
)


def open_source(address: str, log: LogColumns, extra_columns: Collection[str] = ()) -> StreamSource:
    """Open the source of an address: a folder, kafka://BROKERS/TOPIC, or an address of a plugin.

    Args:
        address: Address of the source.
        log: Columns and format of the log.
        extra_columns: Columns to read in addition to those of the log.

    Raises:
        UserError: If no source accepts the address.
    """
    columns = tuple(dict.fromkeys([*EventColumns.of(log).columns_to_read(), *extra_columns]))
    for name in SOURCES:
        spec = SOURCES.find(name)
        if spec.fits(address):
            source = spec.open(address, log, columns)
            if not isinstance(source, StreamSource):
                raise SOURCES.contract_error(
                    name, "open", f"returned {source!r} for {address}, which is not a StreamSource"
                )
            return (
                source
                if name in SOURCES.built_in_names
                else ValidatedSource(
                    source, EventColumns.of(log).required_columns(), partial(SOURCES.contract_error, name)
                )
            )
    problem = "a file cannot be a stream source" if Path(address).is_file() else "the folder does not exist"
    remedy = f"use an existing folder, or an address of {', '.join(SOURCES)} (kafka://localhost:9092/events)"
    raise UserError(problem, option="SOURCE", value=address, remedy=remedy)


OnSourceChange = Literal["error", "restart", "moved"]


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """Committed offset of a stream, as stored on the dataset card."""

    source: str
    """Identity of the current source; empty if an earlier format did not store it."""
    position: StreamPosition
    other_positions: Mapping[str, StreamPosition] = field(default_factory=dict)
    """Positions of sources that were read before, by identity."""

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "StreamOffset":
        """Return the offset in a stream state of a dataset card."""
        return StreamOffset(state.get("source", ""), state.get("position", {}), state.get("others", {}))

    def to_plain(self) -> dict[str, Any]:
        return {"source": self.source, "position": self.position, "others": dict(self.other_positions)}

    def with_position(self, position: StreamPosition) -> "StreamOffset":
        """Return the offset of the same source at another position."""
        return StreamOffset(self.source, position, self.other_positions)

    def resolve_source(self, identity: str, address: str, changed: OnSourceChange) -> "StreamOffset":
        """Return the offset to continue from in a source.

        Raises:
            UserError: If the source differs from the previous one and `changed` does not permit it.
        """
        if identity == self.source or not self.source:
            return StreamOffset(identity, self.position, self.other_positions)
        if changed == "restart":
            others = {name: where for name, where in self.other_positions.items() if name != identity}
            return StreamOffset(
                identity, self.other_positions.get(identity, {}), {**others, self.source: self.position}
            )
        if changed == "moved" and _source_kind(identity) == _source_kind(self.source):
            return StreamOffset(identity, self.position, self.other_positions)
        if changed == "moved":
            raise UserError(
                f"the kind of source differs from {self.source}, which was read before, so its position is not valid",
                option="SOURCE",
                value=address,
                remedy="read it as a new stream with --on_source_change restart",
            )
        raise UserError(
            f"{identity} is not the source that was read before, {self.source}",
            option="SOURCE",
            value=address,
            remedy="use the previous source; or, if this is the same stream at a new location, resume it with "
            "--on_source_change moved; or, if it is a different stream, read it with --on_source_change restart",
        )


def _source_kind(identity: str) -> str:
    return identity.partition(":")[0]
