"""A source of a stream that all ranks read together: each its partitions or files, the first puts them in order.

What is read next, and where it ends, is a function of the position alone, so one rank and several read the same rows in
the same order. The first rank decides, and the others do what it says until it lets them go:

    with shared.helping():      # on every rank
        rows = shared.read(position, max_rows)      # on the first alone
"""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from nestrec.base.errors import UserError
from nestrec.data.prepare.raw_rows import BadRow, RawBatch
from nestrec.data.streaming.stream_source import StreamChunk, StreamPosition, StreamRows, StreamSource
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json, all_gather_rows, raise_together

_LINES, _CAME = "line of a row", "when a row came"


class DistributedSource(StreamSource):
    """Every rank has the source open; `read` and `lag` are for the first."""

    def __init__(self, source: StreamSource, topology: Topology):
        self._source = source
        self._topology = topology
        self._ready: deque[tuple[StreamPosition, StreamRows]] = deque()
        self.others_want_stop = False
        """One of the other ranks was told to stop. Known to the first."""

    @contextlib.contextmanager
    def helping(self, wants_stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """The first rank goes on inside; the others come back from here when it has left.

        wants_stop: asked on the others, whenever the first says something.
        """
        if not self._topology.is_first:
            while (said := all_gather_json(self._topology.control, wants_stop())[0]) is not None:
                if said:
                    with contextlib.suppress(UserError):  # the first has it too, and all raise it when they are let go
                        self._fetched([StreamChunk(**piece) for piece in said])
            yield
            return
        try:
            yield
        except UserError:
            self._say(None)
            raise
        self._say(None)

    def _say(self, said: list[dict[str, Any]] | None) -> None:
        """To the other ranks, which read these pieces, or leave."""
        _, *answers = all_gather_json(self._topology.control, said)
        self.others_want_stop = self.others_want_stop or any(answers)

    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        ready = self._ready
        if not ready or ready[0][0] != position or ready[0][1].batch.num_rows > max_rows:
            ready.clear()
            self._read_ahead(position, max_rows)
        return ready.popleft()[1] if ready else None

    def _read_ahead(self, position: StreamPosition, max_rows: int) -> None:
        """What is next, and what every rank has found behind it."""
        asked, behind = position, position
        while not self._ready:
            pieces = self._source.pieces(behind, max_rows, self._topology.world)
            if not pieces:
                # A sign of life: who hears nothing for minutes takes the first for lost, and a source may be quiet.
                self._say([])
                return
            self._say([asdict(piece) for piece in pieces])
            before = behind
            for rows in _in_order(self._fetched(pieces)):
                behind = rows.position
                if not rows.is_empty:
                    self._ready.append((asked, rows))
                    asked = behind
            if behind == before:
                return

    def identity(self) -> str | None:
        return self._source.identity()

    def lag(self, position: StreamPosition) -> dict[str, float]:
        return self._source.lag(position)

    def skipped(self) -> dict[str, str]:
        return self._source.skipped()

    def close(self) -> None:
        self._source.close()

    def _fetched(self, pieces: Sequence[StreamChunk]) -> list[StreamRows | None]:
        """What each piece holds, read by the rank of its share. Collective."""
        control = self._topology.control
        rank = self._topology.rank
        world = self._topology.world
        mine: list[StreamRows | None] = []
        error = None
        try:
            mine = [self._source.fetch(piece) for piece in pieces if piece.share % world == rank]
        except UserError as found:
            if world == 1:
                raise
            error = found
        raise_together(control, error)
        if world == 1:
            return mine
        packed = [b"" if rows is None else _packed(rows) for rows in mine]
        sizes = torch.tensor([len(part) for part in packed], dtype=torch.int64)
        content = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)
        all_sizes, counts = all_gather_rows(control, control, sizes)
        all_content, lengths = all_gather_rows(control, control, content)
        if not self._topology.is_first:
            return []
        of_rank = [deque(part.tolist()) for part in all_sizes.split(counts)]
        content_of = [bytes(part.numpy()) for part in all_content.split(lengths)]
        at = [0] * world
        found_rows = list[StreamRows | None]()
        for piece in pieces:
            reader = piece.share % world
            size = of_rank[reader].popleft()
            found_rows.append(_unpacked(content_of[reader][at[reader] : at[reader] + size]) if size else None)
            at[reader] += size
        return found_rows


def _in_order(found: Sequence[StreamRows | None]) -> Iterator[StreamRows]:
    """Rows of pieces up to the first that has more: what follows that is not next."""
    for rows in found:
        if rows is not None:
            yield rows
            if not rows.is_whole:
                return


def _packed(rows: StreamRows) -> bytes:
    batch = rows.batch
    about = {"file": batch.file, "bad": [asdict(bad) for bad in batch.bad], "done": batch.done}
    about |= {"position": rows.position, "arrived_s": rows.arrived_s, "is_whole": rows.is_whole}
    came = np.zeros(batch.num_rows, np.int64) if rows.came_ms is None else rows.came_ms
    table = pa.table({**batch.columns, _LINES: pa.array(batch.lines), _CAME: pa.array(came)})
    table = table.replace_schema_metadata({"about": json.dumps(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _unpacked(content: bytes) -> StreamRows:
    table = pa.ipc.open_stream(content).read_all()
    about: dict[str, Any] = json.loads(table.schema.metadata[b"about"])
    columns = {name: _one(table[name]) for name in table.column_names if name not in (_LINES, _CAME)}
    lines, came = (table[name].to_numpy().astype(np.int64) for name in (_LINES, _CAME))
    bad = tuple(BadRow(**entry) for entry in about["bad"])
    batch = RawBatch(about["file"], lines, columns, bad, about["done"])
    return StreamRows(batch, about["position"], about["arrived_s"], about["is_whole"], came)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
