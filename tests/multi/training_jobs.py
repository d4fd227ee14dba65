"""Jobs that ranks run in the tests of the trainer."""

import errno
import os
import resource
import signal
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from schedule_jobs import regrouped

from nestrec.checkpoint import CheckpointManager
from nestrec.checkpoint.checkpoint_manifest import committed_steps
from nestrec.distributed import Topology
from nestrec.training.run_checkpointer import RunInterruptedError
from nestrec.training.trainer import Trainer
from support.fail_points import armed
from support.tiny_runs import config_of

ExtraFields = Mapping[str, object]


def trainer_of(  # noqa: PLR0917
    topology: Topology, family: str, data: str, run: str, more: ExtraFields, start_from: Path | None = None
) -> Trainer:
    cfg = config_of(family, Path(data), more)
    return Trainer(cfg, Path(run), regrouped(topology, cfg.parallel), warm_start=start_from)


def train(  # noqa: PLR0917
    topology: Topology, family: str, data: str, run: str, more: ExtraFields, start_from: Path | None = None
) -> dict[str, Any]:
    """Train to the end and return the loss of every step, and the weights, moments and rows of this rank."""
    trainer = trainer_of(topology, family, data, run, more, start_from)
    losses: list[float] = []

    def record_loss() -> None:
        trainer._meter.flush()
        losses.append(trainer._meter.loss)

    with armed("train.step", record_loss):
        trainer.train()
    engine = trainer.session.engine
    return {
        "losses": losses,
        "dense": {name: tensor.clone() for name, tensor in trainer.session.dense.tensors().items()},
        "rows": {name: list(engine.snapshot(name)) for name in engine.tables},
        "slots": {name: shard.key_index.num_slots for name, shard in engine.shards.items()},
        "digests": {name: engine.digest(name) for name in engine.tables},
        "state": trainer.state,
        "num_local_weights": sum(weight.numel() for weight in trainer.session.dense.local_weights.values()),
    }


def train_without_warnings(topology: Topology, family: str, data: str, run: str, more: ExtraFields) -> dict[str, Any]:
    """Train like `train`, with FutureWarnings of libraries as errors, because users would see them at every start."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return train(topology, family, data, run, more)


def train_with_slow_rank(topology: Topology, family: str, data: str, run: str, more: ExtraFields) -> None:
    """Train with a last rank that takes several times as long for the loss, even if a busy machine slows all ranks."""
    trainer = trainer_of(topology, family, data, run, more)
    task = trainer.session.task
    loss = trainer.session.task.loss

    def slow_loss(*args: Any) -> Any:
        start_s = time.perf_counter()
        result = loss(*args)
        time.sleep(0.02 + min(0.2, 4 * (time.perf_counter() - start_s)))
        return result

    if topology.rank == topology.world - 1:
        task.loss = slow_loss  # type: ignore[method-assign]
    with patch("nestrec.training.trainer.REPORT_EVERY_STEPS", 5):
        trainer.train()


def tables(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the rows of all ranks in the order of their keys, as values by `table column`."""
    values_by_name = {}
    for name in ranks[0]["rows"]:
        chunks = [chunk for rank in ranks for chunk in rank["rows"][name]]
        columns = {column: torch.cat([chunk[column] for chunk in chunks]) for column in chunks[0]}
        order = columns["keys"].argsort()
        values_by_name |= {f"{name} {column}": values[order] for column, values in columns.items()}
    return values_by_name


def largest_difference(ranks: list[dict[str, Any]], alone: dict[str, Any], *, names: str = "") -> float:
    """Return the largest relative difference of a tensor, as the norm of the difference divided by the norm.

    `key.bias` is excluded: a bias of all keys does not change a softmax, so its gradient consists of rounding errors.
    """
    tensors = {**tables(ranks), **ranks[0]["dense"]}
    expected = {**tables([alone]), **alone["dense"]}
    assert set(tensors) == set(expected)
    for rank in ranks:
        assert all(torch.equal(rank["dense"][name], ranks[0]["dense"][name]) for name in rank["dense"])
    differences = []
    for name in (name for name in tensors if names in name and "key.bias" not in name):
        if name.endswith("keys"):
            assert torch.equal(tensors[name], expected[name])
        norm = expected[name].double().norm()
        differences.append(float((tensors[name].double() - expected[name].double()).norm() / norm) if norm else 0.0)
    return max(differences)


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def train_through_crashes(  # noqa: PLR0917
    topology: Topology, family: str, data: str, run: str, more: ExtraFields, crashes: list[int]
) -> dict[str, str]:
    """Train through crashes of all ranks, and return the digests of the tables at the end.

    `crashes` contains the number of steps after which each start crashes.
    """
    for count in crashes:
        trainer = trainer_of(topology, family, data, run, more)
        try:
            with armed("train.step", crash, at=count):
                trainer.train()
            raise AssertionError("no crash")
        except Crash:
            trainer.checkpointer.close()  # the process continues to run, and with it the background save
    trainer = trainer_of(topology, family, data, run, more)
    trainer.train()
    return {name: trainer.session.engine.digest(name) for name in trainer.session.engine.tables}


def measure(topology: Topology, family: str, data: str, run: str, more: ExtraFields) -> dict[str, Any]:
    """Evaluate the last checkpoint of a run, check that the tables did not change, and return the details."""
    trainer = trainer_of(topology, family, data, run, more)
    trainer.checkpointer.restore_last()
    engine = trainer.session.engine
    before = {name: (engine.digest(name), shard.key_index.num_rows) for name, shard in engine.shards.items()}
    details = {part: trainer.session.task.evaluate(engine, part).details for part in ("valid", "test")}
    after = {name: (engine.digest(name), shard.key_index.num_rows) for name, shard in engine.shards.items()}
    assert before == after
    return details


def save_again(  # noqa: PLR0917
    topology: Topology, family: str, data: str, source: str, target: str, more: ExtraFields
) -> dict[str, str]:
    """Load the checkpoint of another run, written by any number of ranks, save it, and return the table digests."""
    trainer = trainer_of(topology, family, data, target, more)
    restored = CheckpointManager(Path(source) / "checkpoints").restore_latest()
    assert restored is not None
    trainer.checkpointer.save(trainer.session.restore(restored))
    trainer.checkpointer.close()
    engine = trainer.session.engine
    return {name: engine.digest(name) for name in engine.tables}


def other_width_on_last_rank(topology: Topology, data: str, run: str) -> None:
    width = 8 if topology.rank + 1 < topology.world else 12
    trainer_of(topology, "hstu", data, run, {"task.encoder.dim": width})


def no_data(topology: Topology, run: str) -> None:
    trainer_of(topology, "hstu", "/nowhere", run, {"data.folder": "/nowhere", "data.synthetic": "none"})


def terminate_one_rank(topology: Topology, family: str, data: str, run: str, more: ExtraFields) -> int:
    """Send SIGTERM to rank 1 and return the step at which this rank stopped."""
    trainer = trainer_of(topology, family, data, run, more)

    def terminate() -> None:
        if topology.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with armed("train.step", terminate, at=4):
            trainer.train()
    except RunInterruptedError:
        return trainer.state.step
    raise AssertionError("did not stop")


def train_on_full_disk(topology: Topology, family: str, data: str, run: str, more: ExtraFields) -> None:
    """Train although atomic writes of small files fail with ENOSPC."""

    def raise_disk_full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with armed("file.before_rename", raise_disk_full):
        trainer_of(topology, family, data, run, more).train()


def fill_disk_of_one_rank(topology: Topology, family: str, data: str, run: str, more: ExtraFields) -> None:
    """Train with a file size limit of 64 bytes on rank 1 from step 5 on, after step 4 was saved."""
    trainer = trainer_of(topology, family, data, run, more)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        if topology.rank == 1:
            while committed_steps(Path(run) / "checkpoints") != [4]:
                time.sleep(0.01)  # it may be written in the background
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))

    try:
        with armed("train.step", fill, at=5):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
