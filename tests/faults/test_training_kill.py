"""`nestrec train` killed with -9: started again on its folder, it ends as a run that was never disturbed."""

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
STEPS = {"training.max_steps": 24, "training.checkpoint_every_steps": 3, "training.evaluate_every_epochs": 3}
BACKGROUND = {"training.checkpoint_async": True, "training.incremental_saves": 2}

pytestmark = pytest.mark.timeout(300)  # starting python and torch a dozen times takes long where others run too


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def random_kills(
    run: Path, *, seed: int, num_kills: int, after_step: int, num_steps: int, held_at: str = ""
) -> list[Fault]:
    """After a random checkpoint and up to some steps later; what is left of the run is long enough to be hit, or it
    waits at a fail point."""
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(after_step + 1, num_steps - 4), num_kills))
    due = [saves_reach(run / "checkpoints", step, delay_s=draw.uniform(0, 0.03)) for step in steps]
    return [KillWhen(is_due, held_at=held_at) for is_due in due]


def check_equal_to_undisturbed(
    family: str, data: Path, folder: Path, more: Mapping[str, object], faults: Callable[[Path], list[Fault]]
) -> int:
    """Train with and without faults and compare everything; the number of starts."""
    Trainer(config_of(family, data, more), folder / "whole", Topology.single()).train()
    planned = faults(folder / "cut")
    history = run_with_faults(command_of(family, data, folder / "cut", more), planned, env=ENV, is_forked=True)
    assert len(history) == len(planned) + 1
    assert run_digest(folder / "cut") == run_digest(folder / "whole")
    return len(history)


@pytest.mark.parametrize(
    "family", ["hstu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rows", "sasrec", "ranking"))]
)
def test_2n_steps_equal_n_steps_a_kill_and_n_more(data: Path, tmp_path: Path, family: str) -> None:
    """Killed in step 13 of 24, then once more at a random moment; every other family saves in the background."""
    more = {**STEPS, **(BACKGROUND if family in ("sasrec", "rows") else {})}

    def faults(run: Path) -> list[Fault]:
        last = random_kills(run, seed=7, num_kills=1, after_step=12, num_steps=24, held_at="train.step@11")
        return [FailPoint("train.step@13=kill"), *last]

    assert check_equal_to_undisturbed(family, data, tmp_path, more, faults) == 3


def test_a_kill_in_the_middle_of_a_save_in_the_background(data: Path, tmp_path: Path) -> None:
    more = {**STEPS, **BACKGROUND}

    def faults(run: Path) -> list[Fault]:
        middle_of_save = FailPoint("checkpoint.before_rename@4=kill")
        return [middle_of_save]

    assert check_equal_to_undisturbed("rows", data, tmp_path, more, faults) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("saving", [{}, BACKGROUND], ids=["full", "background"])
@pytest.mark.parametrize("family", FAMILIES)
def test_56_random_kills_change_nothing(data: Path, tmp_path: Path, family: str, saving: dict[str, object]) -> None:
    """7 for each family and way of saving."""
    more = {**STEPS, "training.max_steps": 200, "training.epochs": 1000, **saving}
    more |= {"training.keep_checkpoints": 2, "training.evaluate_every_epochs": 20}

    def faults(run: Path) -> list[Fault]:
        return random_kills(run, seed=FAMILIES.index(family), num_kills=7, after_step=0, num_steps=200)

    assert check_equal_to_undisturbed(family, data, tmp_path, more, faults) == 8


def test_sigterm_saves_and_exits_with_its_own_code_and_the_next_start_goes_on(data: Path, tmp_path: Path) -> None:
    more = {**STEPS, "training.checkpoint_every_steps": "none", "training.evaluate_every_epochs": 0}
    Trainer(config_of("hstu", data, more), tmp_path / "whole", Topology.single()).train()
    command = command_of("hstu", data, tmp_path / "cut", more)
    stopped, ended = run_with_faults(command, [FailPoint("train.step@10=terminate")], env=ENV, is_forked=True)
    assert stopped.exit_code == errors.INTERRUPTED
    assert "stopped at step 13; the same command goes on from there" in stopped.output
    assert ended.exit_code == 0
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "whole")


def test_a_non_finite_loss_exits_with_its_own_code_and_leaves_the_last_checkpoint(data: Path, tmp_path: Path) -> None:
    more = {**STEPS, "training.max_steps": 6, "training.evaluate_every_epochs": 0}
    Trainer(config_of("sasrec", data, more), tmp_path, Topology.single()).train()
    before = run_digest(tmp_path)
    broken = {**more, "training.max_steps": 24, "optimizer.learning_rate": 1e30}
    with pytest.raises(AssertionError, match=f"failed with {errors.NON_FINITE}") as caught:
        run_with_faults(command_of("sasrec", data, tmp_path, broken), [], env=ENV, is_forked=True)
    assert "error: step=8: loss nan" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert run_digest(tmp_path) == before
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [3, 6]
    assert verify(tmp_path / "checkpoints" / "step-00000006") == []
