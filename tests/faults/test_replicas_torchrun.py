"""Death of a rank in each schedule and replica mode: the other ranks report it, and the job resumes exactly."""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from training_jobs import train

from nestrec.distributed import Topology
from nestrec.pipeline import SCHEDULES
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.fail_points import armed
from support.fault_runner import KillWhen, rank_of, run_with_faults, saves_reach
from support.rank_pool import RankPool
from support.tiny_runs import command_of, config_of, make_datasets

GROUPS = {"parallel.num_replicas": 2}
WEIGHTS = {**GROUPS, "replica_sync.mode": "weights", "replica_sync.every_steps": 3}
MODES: dict[str, dict[str, Any]] = {"one group": {}, "gradients": GROUPS, "weights": WEIGHTS}
FAST_CASES = [("gradients", "nested"), ("weights", "priority"), ("one group", "semi_async")]
ALL_CASES = [*FAST_CASES, *(case for case in itertools.product(MODES, SCHEDULES) if case not in FAST_CASES)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def cases(num_fast: int) -> list[Any]:
    """Return every replica mode with every schedule; all cases except the first `num_fast` are slow tests."""
    return [pytest.param(*case, marks=[] if i < num_fast else pytest.mark.slow) for i, case in enumerate(ALL_CASES)]


def options_of(mode: str, schedule: str) -> dict[str, Any]:
    return {**MODES[mode], "pipeline.schedule": schedule}


def train_until_one_dies(topology: Topology, data: str, run: str, more: dict[str, Any]) -> None:
    cfg = config_of("hstu", Path(data), {"training.max_steps": 30, "training.epochs": 30, **more})
    groups = Topology.of_process_group(topology.device, cfg.parallel, timeout_s=60.0)
    trainer = Trainer(cfg, Path(run), groups)
    with armed("train.step", lambda: os._exit(9) if topology.rank == 1 else None, at=5):
        trainer.train()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "schedule"), cases(3))
def test_replica_peer_failure_is_named_by_survivors(data: Path, tmp_path: Path, mode: str, schedule: str) -> None:
    pool = RankPool(2, timeout_s=60)  # a death is detected at once
    more = options_of(mode, schedule)
    outcomes = pool.outcomes(train_until_one_dies, str(data), str(tmp_path), more, timeout_s=150)
    pool.close()
    assert [outcome.kind for outcome in outcomes] == ["PeerLostError", "died"], outcomes[0].text


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "schedule"), cases(0))
def test_replica_kill_of_a_rank_resumes_exactly(pools, data: Path, tmp_path: Path, mode: str, schedule: str) -> None:
    more = {
        "training.max_steps": 24,
        "training.epochs": 1000,
        "training.checkpoint_every_steps": 6,
        "training.eval_every_epochs": 0,
        **options_of(mode, schedule),
    }
    pools[2].run(train, "hstu", str(data), str(tmp_path / "uninterrupted"), more)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*launcher, "--monitor-interval=0.05", *command_of("hstu", data, tmp_path / "cut", more)[1:]]
    kill = KillWhen(saves_reach(tmp_path / "cut" / "checkpoints", 6, delay_s=0.05), rank_of(1))
    run_with_faults(command, [kill], limit_s=150.0, env={"OMP_NUM_THREADS": "1"})
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")
