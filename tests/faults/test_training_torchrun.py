"""SIGKILL of a random rank under torchrun with restarts: the result equals that of an uninterrupted run."""

import random
import sys
from pathlib import Path

import pytest
from training_jobs import train

from nestrec.training.state import run_digest
from support.fault_runner import Fault, KillWhen, rank_of, run_with_faults, saves_reach
from support.tiny_runs import FAMILIES, command_of, make_datasets

WORLD = 2
ENV = {"OMP_NUM_THREADS": "1"}
BACKGROUND = {"training.checkpoint_async": True, "training.incremental_checkpoints": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def under_torchrun(command: list[str], max_restarts: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    return [*launcher, f"--max-restarts={max_restarts}", "--monitor-interval=0.05", *command[1:]]


def kills_of_random_ranks(run: Path, *, seed: int, num_kills: int, num_steps: int) -> list[Fault]:
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1, num_steps - 8), num_kills))
    # Only the first start reaches this hit: later starts resume after at least four steps.
    wait_at = f"train.step@{num_steps - 3}"
    return [
        KillWhen(
            saves_reach(run / "checkpoints", step, delay_s=draw.uniform(0, 0.1)),
            rank_of(draw.randrange(WORLD)),
            wait_at=wait_at,
        )
        for step in steps
    ]


def check_kills(
    pools,
    family: str,
    data: Path,
    folder: Path,
    *,
    seed: int,
    num_kills: int,
    num_steps: int,
    options: dict[str, object] | None = None,
) -> None:
    saving = BACKGROUND if seed % 2 else {}
    more = {"training.max_steps": num_steps, "training.epochs": 10_000, "training.checkpoint_every_steps": 4, **saving}
    more |= {"training.eval_every_epochs": 5, "batch.batch_size": 13, **(options or {})}
    limit_s = 150.0 + 30.0 * num_kills
    pools[WORLD].run(train, family, str(data), str(folder / "uninterrupted"), more)
    kills = kills_of_random_ranks(folder / "cut", seed=seed, num_kills=num_kills, num_steps=num_steps)
    command = under_torchrun(command_of(family, data, folder / "cut", more), num_kills)
    history = run_with_faults(command, kills, env=ENV, limit_s=limit_s, is_forked=True)
    assert len(history) == 1, f"the launcher gave up, because a rank failed without a kill:\n{history[0].output}"
    assert history[0].num_fired == num_kills
    assert run_digest(folder / "cut") == run_digest(folder / "uninterrupted")


@pytest.mark.timeout(300)
def test_torchrun_kill_of_random_rank_resumes_exactly(pools, data: Path, tmp_path: Path) -> None:
    """Use replica groups, `nested` and background saves; test_replicas_torchrun.py has all modes and schedules."""
    options: dict[str, object] = {"parallel.num_replicas": 2, "pipeline.schedule": "nested"}
    check_kills(pools, "hstu", data, tmp_path, seed=1, num_kills=1, num_steps=16, options=options)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [100, 101])
@pytest.mark.parametrize("family", FAMILIES)
def test_torchrun_104_kills_of_random_ranks_resume_exactly(
    pools, data: Path, tmp_path: Path, family: str, seed: int
) -> None:
    """Each run has 13 kills; runs with odd seeds save in the background."""
    check_kills(pools, family, data, tmp_path, seed=seed, num_kills=13, num_steps=16 * 13)
