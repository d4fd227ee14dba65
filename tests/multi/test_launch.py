"""`nestrec launch`: torchrun whose exit code is that of the ranks, and which says in a line what it means."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from nestrec.base import errors
from support.command_runner import RunningProcess, start
from support.tiny_runs import command_of, make_datasets

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT_S = 300  # on a machine that others share; the test's own limit is longer still
pytestmark = pytest.mark.timeout(3 * LIMIT_S)


def launch(command: list[str], output: Path) -> RunningProcess:
    """The launcher is forked from a process that has loaded torch; its ranks are interpreters of their own."""
    assert command[:3] == [sys.executable, "-m", "nestrec"]
    words = [*command[:3], "launch", "-n", "2", *command[3:]]
    return start(words, is_forked=True, env=ENV, cwd=None, output=output)


def test_a_mistake_ends_with_its_code_and_is_told_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nestrec", "train", "demo", "--training.epochs", "0"]
    assert launch(command, tmp_path / "said").wait(LIMIT_S) == errors.USER_ERROR
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    assert "torch" not in said, "nor a log of its launcher's"
    assert said.count("error: training.epochs=0: must be 1 or more") == 1
    assert said.splitlines()[-1].endswith("ended with code 2: a mistake that its message names")


@pytest.mark.parametrize("ended", ["told to stop", pytest.param("a rank is killed", marks=pytest.mark.slow)])
def test_a_signal_ends_with_the_code_of_the_ranks(tmp_path: Path, ended: str) -> None:
    make_datasets(tmp_path)
    more = {"training.epochs": 100_000, "training.checkpoint_every_steps": 5, "training.evaluate_every_epochs": 0}
    process = launch(command_of("hstu", tmp_path, tmp_path / "run", more), tmp_path / "said")
    end_s = time.monotonic() + LIMIT_S
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
        with contextlib.suppress(psutil.TimeoutExpired):
            assert process.wait(0.05) is None, (tmp_path / "said").read_text()
        assert time.monotonic() < end_s
    if ended == "told to stop":
        os.kill(process.pid, signal.SIGTERM)
    else:
        os.kill(process.children()[-1].pid, signal.SIGKILL)
    code = errors.INTERRUPTED if ended == "told to stop" else errors.PEER_LOST
    assert process.wait(LIMIT_S) == code
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    assert f"code {code}: " in said.splitlines()[-1]


def test_launch_runs_a_script_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "open(f'{sys.argv[1]}/rank{rank}', 'w').write(' '.join(sys.argv[2:]))\n"
        "sys.exit(3 if 'fails' in sys.argv else 0)\n"
    )
    words = [sys.executable, "-m", "nestrec", "launch", "-n", "2", str(script), str(tmp_path), "--flag", "-n", "7"]
    process = start(words, is_forked=True, env=ENV, cwd=None, output=tmp_path / "said")
    assert process.wait(LIMIT_S) == 0, (tmp_path / "said").read_text()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["--flag -n 7"] * 2
    process = start([*words, "fails"], is_forked=True, env=ENV, cwd=None, output=tmp_path / "said")
    assert process.wait(LIMIT_S) == 3
