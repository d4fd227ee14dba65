"""SIGKILL of `nestrec train`: restarted on its folder, it ends like an uninterrupted run."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nestrec.base import errors
from nestrec.checkpoint import CheckpointManager, verify
from nestrec.distributed import Topology
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.fault_runner import FailPoint, Fault, KillWhen, run_with_faults, saves_reach
from support.tiny_runs import FAMILIES, command_of, config_of, make_datasets

ENV = {"OMP_NUM_THREADS": "1"}
STEPS = {"training.max_steps": 24, "training.checkpoint_every_steps": 3, "training.eval_every_epochs": 3}
BACKGROUND = {"training.checkpoint_async": True, "training.incremental_checkpoints": 2}

pytestmark = pytest.mark.timeout(300)  # starting Python and torch a dozen times takes long on a busy machine


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def random_kills(
    run: Path, *, seed: int, num_kills: int, after_step: int, num_steps: int, wait_at: str = ""
) -> list[Fault]:
    """Return kills at random moments after random checkpoints.

    The rest of the run must be long enough for the last kill, or the run must wait at the fail point `wait_at`.
    """
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(after_step + 1, num_steps - 4), num_kills))
    due = [saves_reach(run / "checkpoints", step, delay_s=draw.uniform(0, 0.03)) for step in steps]
    return [KillWhen(is_due, wait_at=wait_at) for is_due in due]


def check_equal_to_uninterrupted(
    family: str, data: Path, folder: Path, more: Mapping[str, object], make_faults: Callable[[Path], list[Fault]]
) -> int:
    """Train with and without faults, compare the digests of the runs, and return the number of starts."""
    Trainer(config_of(family, data, more), folder / "uninterrupted", Topology.single()).train()
    faults = make_faults(folder / "cut")
    history = run_with_faults(command_of(family, data, folder / "cut", more), faults, env=ENV, is_forked=True)
    assert len(history) == len(faults) + 1
    assert run_digest(folder / "cut") == run_digest(folder / "uninterrupted")
    return len(history)


@pytest.mark.parametrize(
    "family", ["hstu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rows", "sasrec", "ranking"))]
)
def test_training_kill_resumes_exactly(data: Path, tmp_path: Path, family: str) -> None:
    """Kill the run in step 13 of 24, and again at a random moment; two of the families save in the background."""
    more = {**STEPS, **(BACKGROUND if family in ("sasrec", "rows") else {})}

    def faults(run: Path) -> list[Fault]:
        last = random_kills(run, seed=7, num_kills=1, after_step=12, num_steps=24, wait_at="train.step@11")
        return [FailPoint("train.step@13=kill"), *last]

    assert check_equal_to_uninterrupted(family, data, tmp_path, more, faults) == 3


def test_training_kill_during_background_checkpoint(data: Path, tmp_path: Path) -> None:
    more = {**STEPS, **BACKGROUND}

    def faults(run: Path) -> list[Fault]:
        return [FailPoint("checkpoint.before_rename@4=kill")]

    assert check_equal_to_uninterrupted("rows", data, tmp_path, more, faults) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("checkpoint_options", [{}, BACKGROUND], ids=["full", "background"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_56_random_kills_resume_exactly(
    data: Path, tmp_path: Path, family: str, checkpoint_options: dict[str, object]
) -> None:
    """There are 7 kills per family and mode of saving."""
    more = {**STEPS, "training.max_steps": 200, "training.epochs": 1000, **checkpoint_options}
    more |= {"training.max_checkpoints": 2, "training.eval_every_epochs": 20}

    def faults(run: Path) -> list[Fault]:
        return random_kills(run, seed=FAMILIES.index(family), num_kills=7, after_step=0, num_steps=200)

    assert check_equal_to_uninterrupted(family, data, tmp_path, more, faults) == 8


def test_training_sigterm_saves_checkpoint_and_resumes(data: Path, tmp_path: Path) -> None:
    more = {**STEPS, "training.checkpoint_every_steps": "none", "training.eval_every_epochs": 0}
    Trainer(config_of("hstu", data, more), tmp_path / "uninterrupted", Topology.single()).train()
    command = command_of("hstu", data, tmp_path / "cut", more)
    stopped, ended = run_with_faults(command, [FailPoint("train.step@10=terminate")], env=ENV, is_forked=True)
    assert stopped.exit_code == errors.INTERRUPTED
    assert "interrupted at step 13; the same command resumes the run" in stopped.output
    assert ended.exit_code == 0
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")


def test_training_nonfinite_loss_keeps_last_checkpoint(data: Path, tmp_path: Path) -> None:
    more = {**STEPS, "training.max_steps": 6, "training.eval_every_epochs": 0}
    Trainer(config_of("sasrec", data, more), tmp_path, Topology.single()).train()
    before = run_digest(tmp_path)
    broken = {**more, "training.max_steps": 24, "optimizer.learning_rate": 1e30}
    with pytest.raises(AssertionError, match=f"failed with {errors.NON_FINITE}") as caught:
        run_with_faults(command_of("sasrec", data, tmp_path, broken), [], env=ENV, is_forked=True)
    assert "error: step=8: the loss (nan)" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert run_digest(tmp_path) == before
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [3, 6]
    assert verify(tmp_path / "checkpoints" / "step-00000006") == []
