"""`nestrec launch`: it returns the exit code of the ranks, unlike torchrun, and prints a line that explains it."""

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
LIMIT_S = 300  # long enough for a machine with other load; the time limit of the test is longer
pytestmark = pytest.mark.timeout(3 * LIMIT_S)


def launch(command: list[str], output: Path) -> RunningProcess:
    """Run a command under the launcher, which is forked from a process that has loaded torch; its ranks are not."""
    assert command[:3] == [sys.executable, "-m", "nestrec"]
    launch_command = [*command[:3], "launch", "-n", "2", *command[3:]]
    return start(launch_command, is_forked=True, env=ENV, cwd=None, output=output)


def test_launch_prints_user_error_once_with_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nestrec", "train", "demo", "--training.epochs", "0"]
    assert launch(command, tmp_path / "output").wait(LIMIT_S) == errors.USER_ERROR
    output = (tmp_path / "output").read_text()
    assert "Traceback" not in output
    assert "torch" not in output, "messages of torch's launcher are not shown"
    assert output.count("error: --training.epochs=0: must be 1 or more") == 1
    assert output.splitlines()[-1].endswith("exited with code 2: invalid input; see the error message above")


@pytest.mark.parametrize("event", ["sigterm", pytest.param("rank is killed", marks=pytest.mark.slow)])
def test_launch_signal_returns_exit_code_of_ranks(tmp_path: Path, event: str) -> None:
    make_datasets(tmp_path)
    more = {"training.epochs": 100_000, "training.checkpoint_every_steps": 5, "training.eval_every_epochs": 0}
    process = launch(command_of("hstu", tmp_path, tmp_path / "run", more), tmp_path / "output")
    end_s = time.monotonic() + LIMIT_S
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
        with contextlib.suppress(psutil.TimeoutExpired):
            assert process.wait(0.05) is None, (tmp_path / "output").read_text()
        assert time.monotonic() < end_s
    if event == "sigterm":
        os.kill(process.pid, signal.SIGTERM)
    else:
        os.kill(process.children()[-1].pid, signal.SIGKILL)
    code = errors.INTERRUPTED if event == "sigterm" else errors.PEER_LOST
    assert process.wait(LIMIT_S) == code
    output = (tmp_path / "output").read_text()
    assert "Traceback" not in output
    assert f"code {code}: " in output.splitlines()[-1]


def test_launch_runs_script_with_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "open(f'{sys.argv[1]}/rank{rank}', 'w').write(' '.join(sys.argv[2:]))\n"
        "sys.exit(3 if 'fails' in sys.argv else 0)\n"
    )
    command = [sys.executable, "-m", "nestrec", "launch", "-n", "2", str(script), str(tmp_path), "--flag", "-n", "7"]
    process = start(command, is_forked=True, env=ENV, cwd=None, output=tmp_path / "output")
    assert process.wait(LIMIT_S) == 0, (tmp_path / "output").read_text()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["--flag -n 7"] * 2
    process = start([*command, "fails"], is_forked=True, env=ENV, cwd=None, output=tmp_path / "output")
    assert process.wait(LIMIT_S) == 3
