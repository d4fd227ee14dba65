"""Jobs of ranks that read a stream together."""

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
from nestrec.training.training_session import run_on_all_ranks
from support.stream_fixtures import stream_config
from support.tiny_runs import config_of


def read_all(
    topology: Topology, address: str, max_rows: int, failing_rank: int | None = None
) -> tuple[list[Any], list[StreamPosition], list[int]]:
    """Return the rows, the position after each batch of rows, and the affinities of the chunks read by this rank."""
    source = open_source(address, stream_config({}).log)
    rows: list[Any] = []
    positions: list[StreamPosition] = []
    affinities: list[int] = []
    fetch = source.fetch

    def recorded_fetch(chunk: StreamChunk) -> StreamRows | None:
        affinities.append(chunk.affinity)
        if topology.rank == failing_rank:
            raise UserError("cannot be read", option="SOURCE", value=address)
        return fetch(chunk)

    source.fetch = recorded_fetch  # type: ignore[method-assign]
    shared = DistributedSource(source, topology)

    def read() -> None:
        with shared.serving_reads():
            position: StreamPosition = {}
            while topology.is_first and (result := shared.read(position, max_rows)) is not None:
                assert result.batch.num_rows <= max_rows
                position = result.position
                positions.append(position)
                values = {name: column.to_pylist() for name, column in result.batch.columns.items()}
                rows.append((result.batch.file, result.batch.lines.tolist(), values, len(result.batch.bad)))

    try:
        run_on_all_ranks(topology, read)
    finally:
        shared.close()
    return rows, positions, affinities


def count_collectives_while_idle(topology: Topology, address: str, num_reads: int) -> int:
    """Return the number of collectives of this rank while rank 0 reads `num_reads` times from an empty source."""
    shared = DistributedSource(open_source(address, stream_config({}).log), topology)
    before = topology.control.log.count
    with shared.serving_reads():
        for _ in range(num_reads if topology.is_first else 0):
            assert shared.read({}, 16) is None
    shared.close()
    return topology.control.log.count - before


def follow_until_sigterm(topology: Topology, data: str, run: str, address: str) -> bool:
    """Train on a stream without events, send SIGTERM to the last rank, and return whether this rank was stopped."""
    cfg = config_of("hstu", Path(data), {"training.max_steps": 2, "training.eval_every_epochs": 0})
    Trainer(cfg, Path(run), topology).train()
    follower = StreamTrainer(
        address, Path(run), topology, stream_config({"stop_after_idle_s": 20, "poll_interval_s": 0.01})
    )
    follow = follower._follow

    def follow_after_signal(stop: StopRequest) -> None:
        if topology.rank == topology.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        follow(stop)

    follower._follow = follow_after_signal  # type: ignore[method-assign]
    try:
        follower.follow()
    except RunInterruptedError:
        return True
    return False
