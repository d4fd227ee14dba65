"""A rank that dies in any schedule or replica mode: the others end with a named cause, and the job resumes exactly."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nestrec.base.failpoints import armed
from nestrec.distributed import Topology
from nestrec.testing.faults import KillWhen, rank_of, run_with_faults, saves_reach
from nestrec.testing.ranks import RankPool
from nestrec.testing.run_digest import run_digest
from nestrec.testing.tiny_runs import command_of, config_of, make_datasets
from nestrec.training.trainer import Trainer

GROUPS = {"ranks.replicas": 2}
WEIGHTS = {**GROUPS, "replica_sync.mode": "weights", "replica_sync.every": 3}
CASES: dict[str, dict[str, Any]] = {
    "gradients, nested": {**GROUPS, "pipeline.schedule": "nested"},
    "weights, priority": {**WEIGHTS, "pipeline.schedule": "priority"},
    "semi_async": {"pipeline.schedule": "semi_async"},
    "gradients, serial": GROUPS,
    "gradients, priority": {**GROUPS, "pipeline.schedule": "priority"},
    "weights, nested": {**WEIGHTS, "pipeline.schedule": "nested"},
    "weights, semi_async": {**WEIGHTS, "pipeline.schedule": "semi_async"},
    "stale": {"pipeline.schedule": "stale"},
    "priority": {"pipeline.schedule": "priority"},
}
QUICK = 1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def marked(quick: int) -> list[Any]:
    return [case if i < quick else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(CASES)]


def train_until_one_dies(topology: Topology, data: str, run: str, more: dict[str, Any]) -> None:
    cfg = config_of("hstu", Path(data), {"training.max_steps": 30, "training.epochs": 30, **more})
    groups = Topology.of_process_group(topology.device, cfg.ranks, timeout_s=10.0)
    trainer = Trainer(cfg, Path(run), groups)
    with armed("train.step", lambda: os._exit(9) if topology.rank == 1 else None, at=5):
        trainer.train()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", marked(3))
def test_a_rank_that_dies_is_named_by_the_others(data: Path, tmp_path: Path, case: str) -> None:
    pool = RankPool(2, timeout_s=10)
    outcomes = pool.outcomes(train_until_one_dies, str(data), str(tmp_path), CASES[case], timeout_s=60)
    pool.close()
    assert [outcome.kind for outcome in outcomes] == ["PeerLostError", "died"], outcomes[0].text


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", marked(QUICK))
def test_a_killed_rank_changes_nothing(data: Path, tmp_path: Path, case: str) -> None:
    more = {"training.max_steps": 24, "training.epochs": 1000, "training.checkpoint_every_steps": 6,
            "training.evaluate_every_epochs": 0, **CASES[case]}  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def command(name: str) -> list[str]:
        restarts = ["--max-restarts=1", "--monitor-interval=0.05"]
        return [*launcher, *restarts, *command_of("hstu", data, tmp_path / name, more)[1:]]

    run_with_faults(command("whole"), [], limit_s=150.0, env={"OMP_NUM_THREADS": "1"})
    kill = KillWhen(saves_reach(tmp_path / "cut" / "checkpoints", 6, delay_s=0.05), rank_of(1))
    run_with_faults(command("cut"), [kill], limit_s=150.0, env={"OMP_NUM_THREADS": "1"})
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "whole")
