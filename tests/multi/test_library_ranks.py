"""Runs from Python on several ranks: a call releases its process groups."""

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
from support.rank_pool import preloaded_context
from support.tiny_runs import config_of, make_datasets

WORLD = 2
LIMIT_S = 200.0
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


class FailingCallback(TrainingCallback):
    """A callback that raises an error in the first report."""

    def on_step_report(self, step: int, epoch: int, values: object) -> None:
        raise RuntimeError("an error of the script")


def fail(rank: int, folder: Path) -> list[str | bool]:
    """Make calls that fail: on all ranks, before and during training, and finally on one rank only.

    The other ranks detect the last failure when that rank makes its next call.

    Returns:
        The name of each error on this rank, followed by whether a process group was left.
    """
    outcomes: list[str | bool] = []
    cfg = config_of("hstu", folder)
    for name, changes, is_alone in (
        ("mesh", {"parallel.num_replicas": 3}, False),
        ("data", {"data.folder": "/nowhere"}, False),
        ("last", {}, True),
    ):
        callback = FailingCallback() if is_alone and rank == WORLD - 1 else None
        try:
            nestrec.train(cfg, {"training.max_steps": 3, **changes}, output=folder / name, callback=callback)
        except (UserError, RuntimeError) as error:
            outcomes.append(type(error).__name__)
        outcomes.append(dist.is_initialized())
    return outcomes


def train_again(rank: int, port: int, folder: Path, pipe) -> None:
    """Run like a script under torchrun: first calls that fail, then calls that succeed."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update({"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)})
    pipe.send(fail(rank, folder))
    results = [dist.is_initialized()]
    cfg = config_of("hstu", folder)
    for name in ("first", "second"):
        run = nestrec.train(cfg, {"training.epochs": 1, "training.max_steps": 2}, output=folder / name)
        results += [dist.is_initialized(), run.steps]
    results.append(nestrec.evaluate(run).part)
    versions = [nestrec.export(run, folder / "model", {"table_dtype": "int8"}).version]
    versions.append(nestrec.publish(run, folder / "published").version)
    nestrec.load(run)
    pipe.send([*results, dist.is_initialized()])
    pipe.send(versions)
    dist.init_process_group("gloo")
    files = []
    for _ in range(3):
        nestrec.evaluate(run)
        gc.collect()
        files.append(psutil.Process().num_fds())
    pipe.send([dist.is_initialized(), files[2] - files[0]])


def test_python_call_releases_process_groups(tmp_path: Path) -> None:
    make_datasets(tmp_path)
    context = preloaded_context()
    port = free_port()
    pipes = []
    processes = []
    for rank in range(WORLD):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=train_again, args=(rank, port, tmp_path, sender), daemon=True))
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    rejected = ["UserError", False, "UserError", False]
    for pipe, error in zip(pipes, ("PeerLostError", "RuntimeError"), strict=True):
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() == [*rejected, error, False]
    for pipe in pipes:
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() == [False, False, 2, False, 2, "test", False]
    exported = nestrec.export(tmp_path / "second", tmp_path / "alone", {"table_dtype": "int8"}).version
    (published,) = (tmp_path / "published" / "versions").glob("*/full.json")
    for pipe in pipes:
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() == [exported, json.loads(published.read_text())["version"]]
    for pipe in pipes:
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() == [True, 0], "the caller's group remains, and groups of the library are released"
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
