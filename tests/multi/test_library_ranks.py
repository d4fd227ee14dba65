"""Runs from Python on several ranks: what a call leaves behind."""

import gc
import json
import os
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import nestrec
from nestrec.base.errors import UserError
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.training.callbacks import TrainingCallback
from support.rank_pool import loaded_context
from support.tiny_runs import config_of, make_datasets

WORLD = 2
LIMIT_S = 200.0
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


class Failing(TrainingCallback):
    """Fails in the first report."""

    def stepped(self, step: int, epoch: int, values: object) -> None:
        raise RuntimeError("a script's own mistake")


def fail(rank: int, folder: Path) -> list[str]:
    """What this rank is told of calls that fail: on all ranks alike, before they train and while they do, and then on
    one rank alone, of which the others hear when it makes its next call."""
    told = []
    cfg = config_of("hstu", folder)
    for name, changes, alone in (
        ("mesh", {"ranks.replicas": 3}, False),
        ("data", {"data.folder": "/nowhere"}, False),
        ("last", {}, True),
    ):
        listener = Failing() if alone and rank == WORLD - 1 else None
        try:
            nestrec.train(cfg, {"training.max_steps": 3, **changes}, output=folder / name, listener=listener)
        except (UserError, RuntimeError) as error:
            told.append(type(error).__name__)
        told.append(dist.is_initialized())
    return told


def train_again(rank: int, port: int, folder: Path, pipe) -> None:
    """As a script does that torchrun has started: calls that fail, and then some that do not."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)})
    pipe.send(fail(rank, folder))
    seen = [dist.is_initialized()]
    cfg = config_of("hstu", folder)
    for name in ("first", "second"):
        run = nestrec.train(cfg, {"training.epochs": 1, "training.max_steps": 2}, output=folder / name)
        seen += [dist.is_initialized(), run.steps]
    seen.append(nestrec.evaluate(run).part)
    versions = [nestrec.export(run, folder / "model", {"tables": "int8"}).version]
    versions.append(nestrec.publish(run, folder / "published").version)
    nestrec.load(run)
    pipe.send([*seen, dist.is_initialized()])
    pipe.send(versions)
    dist.init_process_group("gloo")
    files = []
    for _ in range(3):
        nestrec.evaluate(run)
        gc.collect()
        files.append(psutil.Process().num_fds())
    pipe.send([dist.is_initialized(), files[2] - files[0]])


def test_a_call_gives_its_process_groups_back_even_if_it_fails_and_the_next_one_makes_its_own(tmp_path: Path) -> None:
    make_datasets(tmp_path)
    context = loaded_context()
    port = free_port()
    pipes = []
    processes = []
    for rank in range(WORLD):
        mine, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=train_again, args=(rank, port, tmp_path, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    refused = ["UserError", False, "UserError", False]
    for pipe, told in zip(pipes, ("PeerLostError", "RuntimeError"), strict=True):
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() == [*refused, told, False]
    for pipe in pipes:
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() == [False, False, 2, False, 2, "test", False]
    exported = nestrec.export(tmp_path / "second", tmp_path / "alone", {"tables": "int8"}).version
    (published,) = (tmp_path / "published" / "versions").glob("*/full.json")
    for pipe in pipes:
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() == [exported, json.loads(published.read_text())["version"]]
    for pipe in pipes:
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() == [True, 0], "the caller's group stays; those that were made beside it do not"
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
