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

More = Mapping[str, object]


def trainer_of(  # noqa: PLR0917
    topology: Topology, family: str, data: str, run: str, more: More, start_from: Path | None = None
) -> Trainer:
    cfg = config_of(family, Path(data), more)
    return Trainer(cfg, Path(run), regrouped(topology, cfg.ranks), start_from=start_from)


def train(  # noqa: PLR0917
    topology: Topology, family: str, data: str, run: str, more: More, start_from: Path | None = None
) -> dict[str, Any]:
    """Train to the end; the loss of every step, and this rank's weights, moments and rows."""
    trainer = trainer_of(topology, family, data, run, more, start_from)
    losses: list[float] = []

    def note_loss() -> None:
        trainer._meter.flush()
        losses.append(trainer._meter.loss)

    with armed("train.step", note_loss):
        trainer.train()
    engine = trainer.session.engine
    return {
        "losses": losses,
        "dense": {name: tensor.clone() for name, tensor in trainer.session.dense.tensors().items()},
        "rows": {name: list(engine.snapshot(name)) for name in engine.tables},
        "slots": {name: shard.residency.num_slots for name, shard in engine.shards.items()},
        "digests": {name: engine.digest(name) for name in engine.tables},
        "state": trainer.state,
        "held_dense": sum(weight.numel() for weight in trainer.session.dense.held.values()),
    }


def train_without_warnings(topology: Topology, family: str, data: str, run: str, more: More) -> dict[str, Any]:
    """The same where what libraries are to lose is an error: users would read of it at every start."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return train(topology, family, data, run, more)


def train_with_a_slow_rank(topology: Topology, family: str, data: str, run: str, more: More) -> None:
    """The last rank takes far longer for the loss of a micro-batch, also where a busy machine is slow for all."""
    trainer = trainer_of(topology, family, data, run, more)
    task = trainer.session.task
    loss = trainer.session.task.loss

    def slow_loss(*args: Any) -> Any:
        start_s = time.perf_counter()
        found = loss(*args)
        time.sleep(0.02 + min(0.2, 4 * (time.perf_counter() - start_s)))
        return found

    if topology.rank == topology.world - 1:
        task.loss = slow_loss  # type: ignore[method-assign]
    with patch("nestrec.training.trainer.REPORT_EVERY_STEPS", 5):
        trainer.train()


def tables(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of all ranks put together, in order of key: `table column` to values."""
    found = {}
    for name in ranks[0]["rows"]:
        chunks = [chunk for rank in ranks for chunk in rank["rows"][name]]
        columns = {column: torch.cat([chunk[column] for chunk in chunks]) for column in chunks[0]}
        order = columns["keys"].argsort()
        found |= {f"{name} {column}": values[order] for column, values in columns.items()}
    return found


def largest_difference(ranks: list[dict[str, Any]], alone: dict[str, Any], *, names: str = "") -> float:
    """Norm of the difference over the norm, of the tensor that differs most.

    A bias of all keys changes no softmax: the gradient of `key.bias` is rounding alone, and so is what it learns.
    """
    mine, theirs = {**tables(ranks), **ranks[0]["dense"]}, {**tables([alone]), **alone["dense"]}
    assert set(mine) == set(theirs)
    for rank in ranks:
        assert all(torch.equal(rank["dense"][name], ranks[0]["dense"][name]) for name in rank["dense"])
    differences = []
    for name in (name for name in mine if names in name and "key.bias" not in name):
        if name.endswith("keys"):
            assert torch.equal(mine[name], theirs[name])
        norm = theirs[name].double().norm()
        differences.append(float((mine[name].double() - theirs[name].double()).norm() / norm) if norm else 0.0)
    return max(differences)


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def train_through_crashes(  # noqa: PLR0917
    topology: Topology, family: str, data: str, run: str, more: More, crashes: list[int]
) -> dict[str, str]:
    """All ranks stop dead at the same steps, given as steps since each start; digests of the tables at the end."""
    for count in crashes:
        trainer = trainer_of(topology, family, data, run, more)
        try:
            with armed("train.step", crash, at=count):
                trainer.train()
            raise AssertionError("no crash")
        except Crash:
            trainer.saving.close()  # a process that dies takes its background save with it; here it would go on
    trainer = trainer_of(topology, family, data, run, more)
    trainer.train()
    return {name: trainer.session.engine.digest(name) for name in trainer.session.engine.tables}


def measure(topology: Topology, family: str, data: str, run: str, more: More) -> dict[str, Any]:
    """What an evaluation of a run's last checkpoint finds, and whether it left the tables as they were."""
    trainer = trainer_of(topology, family, data, run, more)
    trainer.saving.restore_last()
    engine = trainer.session.engine
    before = {name: (engine.digest(name), shard.residency.num_rows) for name, shard in engine.shards.items()}
    details = {part: trainer.session.task.evaluate(engine, part).details for part in ("valid", "test")}
    after = {name: (engine.digest(name), shard.residency.num_rows) for name, shard in engine.shards.items()}
    assert before == after
    return details


def save_again(  # noqa: PLR0917
    topology: Topology, family: str, data: str, source: str, target: str, more: More
) -> dict[str, str]:
    """Load another run's checkpoint, written by any number of ranks, and save it from here; digests of the tables."""
    trainer = trainer_of(topology, family, data, target, more)
    restored = CheckpointManager(Path(source) / "checkpoints").restore_latest()
    assert restored is not None
    trainer.saving.save(trainer.session.restore(restored))
    trainer.saving.close()
    engine = trainer.session.engine
    return {name: engine.digest(name) for name in engine.tables}


def other_width_on_last_rank(topology: Topology, data: str, run: str) -> None:
    width = 8 if topology.rank + 1 < topology.world else 12
    trainer_of(topology, "hstu", data, run, {"task.encoder.dim": width})


def no_data(topology: Topology, run: str) -> None:
    trainer_of(topology, "hstu", "/nowhere", run, {"data.folder": "/nowhere", "data.synthetic": "none"})


def terminate_one_rank(topology: Topology, family: str, data: str, run: str, more: More) -> int:
    """One rank is told to stop; the step at which this rank stopped."""
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


def train_on_full_disk(topology: Topology, family: str, data: str, run: str, more: More) -> None:
    """No small file can be written."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with armed("file.before_rename", full):
        trainer_of(topology, family, data, run, more).train()


def fill_disk_of_one_rank(topology: Topology, family: str, data: str, run: str, more: More) -> None:
    """From step 5 on, when step 4 is saved, one rank can write no file of more than some bytes."""
    trainer = trainer_of(topology, family, data, run, more)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        if topology.rank == 1:
            while committed_steps(Path(run) / "checkpoints") != [4]:
                time.sleep(0.01)  # it may be written beside training
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))

    try:
        with armed("train.step", fill, at=5):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
