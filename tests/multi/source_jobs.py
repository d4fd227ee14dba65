"""What ranks do that read a stream together."""

from typing import Any

from nestrec.base.errors import UserError
from nestrec.data.sources.source import StreamPiece, StreamPosition, StreamRows, open_source
from nestrec.distributed import Topology
from nestrec.testing.streams import follow_options
from nestrec.training.session import together
from nestrec.training.shared_source import SharedSource


def read_all(
    topology: Topology, address: str, max_rows: int, spoiled_rank: int | None = None
) -> tuple[list[Any], list[StreamPosition], list[int]]:
    """(rows, position behind each part of them, shares that this rank has read)"""
    source = open_source(address, follow_options({}).log)
    rows: list[Any] = []
    positions: list[StreamPosition] = []
    shares: list[int] = []
    fetch = source.fetch

    def counted(piece: StreamPiece) -> StreamRows | None:
        shares.append(piece.share)
        if topology.rank == spoiled_rank:
            raise UserError("is spoiled", field="SOURCE", value=address)
        return fetch(piece)

    source.fetch = counted  # type: ignore[method-assign]
    shared = SharedSource(source, topology)

    def read() -> None:
        with shared.helping():
            position: StreamPosition = {}
            while topology.is_first and (found := shared.read(position, max_rows)) is not None:
                assert found.batch.num_rows <= max_rows
                position = found.position
                positions.append(position)
                values = {name: column.to_pylist() for name, column in found.batch.columns.items()}
                rows.append((found.batch.file, found.batch.lines.tolist(), values, len(found.batch.bad)))

    try:
        together(topology, read)
    finally:
        shared.close()
    return rows, positions, shares


def words_while_nothing_comes(topology: Topology, address: str, looks: int) -> int:
    """How many collectives a rank takes part in while the first looks so often at a source that has nothing."""
    shared = SharedSource(open_source(address, follow_options({}).log), topology)
    before = topology.control.log.count
    with shared.helping():
        for _ in range(looks if topology.is_first else 0):
            assert shared.read({}, 16) is None
    shared.close()
    return topology.control.log.count - before
