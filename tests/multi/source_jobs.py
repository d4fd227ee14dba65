"""What ranks do that read a stream together."""

import os
import signal
from pathlib import Path
from typing import Any

from nestrec.base.errors import UserError
from nestrec.data.streaming.stream_source import StreamChunk, StreamPosition, StreamRows, open_source
from nestrec.distributed import Topology
from nestrec.training.distributed_source import DistributedSource
from nestrec.training.run_checkpointer import RunInterruptedError, StopRequest
from nestrec.training.stream_trainer import StreamTrainer
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import together
from support.stream_fixtures import follow_options
from support.tiny_runs import config_of


def read_all(
    topology: Topology, address: str, max_rows: int, spoiled_rank: int | None = None
) -> tuple[list[Any], list[StreamPosition], list[int]]:
    """(rows, position behind each part of them, shares that this rank has read)"""
    source = open_source(address, follow_options({}).log)
    rows: list[Any] = []
    positions: list[StreamPosition] = []
    shares: list[int] = []
    fetch = source.fetch

    def counted(piece: StreamChunk) -> StreamRows | None:
        shares.append(piece.share)
        if topology.rank == spoiled_rank:
            raise UserError("is spoiled", option="SOURCE", value=address)
        return fetch(piece)

    source.fetch = counted  # type: ignore[method-assign]
    shared = DistributedSource(source, topology)

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
    shared = DistributedSource(open_source(address, follow_options({}).log), topology)
    before = topology.control.log.count
    with shared.helping():
        for _ in range(looks if topology.is_first else 0):
            assert shared.read({}, 16) is None
    shared.close()
    return topology.control.log.count - before


def follow_until_told(topology: Topology, data: str, run: str, address: str) -> bool:
    """A run that waits for events, of which the last rank alone is told to stop; whether it was stopped."""
    cfg = config_of("hstu", Path(data), {"training.max_steps": 2, "training.evaluate_every_epochs": 0})
    Trainer(cfg, Path(run), topology).train()
    follower = StreamTrainer(address, Path(run), topology, follow_options({"idle_s": 20, "poll_s": 0.01}))
    follow = follower._follow

    def told(stop: StopRequest) -> None:
        if topology.rank == topology.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        follow(stop)

    follower._follow = told  # type: ignore[method-assign]
    try:
        follower.follow()
    except RunInterruptedError:
        return True
    return False
