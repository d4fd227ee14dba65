"""Distributed reading of a stream source: each rank reads its partitions or files, and rank 0 merges them in order.

Which rows are read next is a function of the offset only, so the number of ranks does not change the rows or their
order. Rank 0 decides what to read, and the other ranks serve its read requests until it leaves the block:

    with shared.serving_reads():                    # on every rank
        rows = shared.read(position, max_rows)      # on rank 0 only
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
from nestrec.distributed.collectives import all_gather_json, all_gather_rows, raise_on_all_ranks

_LINES, _ARRIVED = "line of a row", "when a row arrived"


class DistributedSource(StreamSource):
    """Stream source that all ranks have open and read together; only rank 0 may call `read` and `lag`."""

    def __init__(self, source: StreamSource, topology: Topology):
        self._source = source
        self._topology = topology
        self._ready: deque[tuple[StreamPosition, StreamRows]] = deque()
        self.is_stop_requested_remotely = False
        """Whether another rank was asked to stop; only set on rank 0."""

    @contextlib.contextmanager
    def serving_reads(self, stop_requested: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Serve read requests of rank 0; rank 0 runs the block, and the other ranks return from it afterwards.

        Args:
            stop_requested: Called on the other ranks at each request; the results are reported to rank 0.
        """
        if not self._topology.is_first:
            while (request := all_gather_json(self._topology.control, stop_requested())[0]) is not None:
                if request:
                    with contextlib.suppress(UserError):  # rank 0 has the same error, and raises it on all ranks later
                        self._fetch([StreamChunk(**chunk) for chunk in request])
            yield
            return
        try:
            yield
        except UserError:
            self._send_request(None)
            raise
        self._send_request(None)

    def _send_request(self, chunks: list[dict[str, Any]] | None) -> None:
        """Ask the other ranks to read these chunks, or to return if `chunks` is None."""
        _, *stop_requests = all_gather_json(self._topology.control, chunks)
        self.is_stop_requested_remotely = self.is_stop_requested_remotely or any(stop_requests)

    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        ready = self._ready
        if not ready or ready[0][0] != position or ready[0][1].batch.num_rows > max_rows:
            ready.clear()
            self._prefetch(position, max_rows)
        return ready.popleft()[1] if ready else None

    def _prefetch(self, position: StreamPosition, max_rows: int) -> None:
        """Read the next rows and the rows after them that other ranks have read at the same time."""
        start, end = position, position
        while not self._ready:
            chunks = self._source.list_chunks(end, max_rows, self._topology.world)
            if not chunks:
                # Heartbeat: an idle source must not let the collectives of the other ranks time out.
                self._send_request([])
                return
            self._send_request([asdict(chunk) for chunk in chunks])
            before = end
            for rows in _in_order(self._fetch(chunks)):
                end = rows.position
                if not rows.is_empty:
                    self._ready.append((start, rows))
                    start = end
            if end == before:
                return

    def identity(self) -> str | None:
        return self._source.identity()

    def lag(self, position: StreamPosition) -> dict[str, float]:
        return self._source.lag(position)

    def skipped(self) -> dict[str, str]:
        return self._source.skipped()

    def close(self) -> None:
        self._source.close()

    def _fetch(self, chunks: Sequence[StreamChunk]) -> list[StreamRows | None]:
        """Read each chunk on the rank it is assigned to, and return the rows on rank 0. Collective."""
        control = self._topology.control
        rank = self._topology.rank
        world = self._topology.world
        local: list[StreamRows | None] = []
        error = None
        try:
            local = [self._source.fetch(chunk) for chunk in chunks if chunk.affinity % world == rank]
        except UserError as local_error:
            if world == 1:
                raise
            error = local_error
        raise_on_all_ranks(control, error)
        if world == 1:
            return local
        packed = [b"" if rows is None else _serialize(rows) for rows in local]
        sizes = torch.tensor([len(part) for part in packed], dtype=torch.int64)
        content = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)
        all_sizes, counts = all_gather_rows(control, control, sizes)
        all_content, lengths = all_gather_rows(control, control, content)
        if not self._topology.is_first:
            return []
        of_rank = [deque(part.tolist()) for part in all_sizes.split(counts)]
        content_of = [bytes(part.numpy()) for part in all_content.split(lengths)]
        offset = [0] * world
        all_rows = list[StreamRows | None]()
        for chunk in chunks:
            reader = chunk.affinity % world
            size = of_rank[reader].popleft()
            all_rows.append(_deserialize(content_of[reader][offset[reader] : offset[reader] + size]) if size else None)
            offset[reader] += size
        return all_rows


def _in_order(chunks: Sequence[StreamRows | None]) -> Iterator[StreamRows]:
    """Yield the rows of chunks up to the first incomplete chunk, after which later chunks are not next in order."""
    for rows in chunks:
        if rows is not None:
            yield rows
            if not rows.is_complete:
                return


def _serialize(rows: StreamRows) -> bytes:
    batch = rows.batch
    about = {"file": batch.file, "bad": [asdict(bad) for bad in batch.bad], "done": batch.fraction_read}
    about |= {"position": rows.position, "arrived_s": rows.arrived_s, "is_complete": rows.is_complete}
    arrived = np.zeros(batch.num_rows, np.int64) if rows.arrived_ms is None else rows.arrived_ms
    table = pa.table({**batch.columns, _LINES: pa.array(batch.lines), _ARRIVED: pa.array(arrived)})
    table = table.replace_schema_metadata({"about": json.dumps(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _deserialize(content: bytes) -> StreamRows:
    table = pa.ipc.open_stream(content).read_all()
    about: dict[str, Any] = json.loads(table.schema.metadata[b"about"])
    columns = {name: _one(table[name]) for name in table.column_names if name not in (_LINES, _ARRIVED)}
    lines, arrived = (table[name].to_numpy().astype(np.int64) for name in (_LINES, _ARRIVED))
    bad = tuple(BadRow(**entry) for entry in about["bad"])
    batch = RawBatch(about["file"], lines, columns, bad, about["done"])
    return StreamRows(batch, about["position"], about["arrived_s"], about["is_complete"], arrived)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
