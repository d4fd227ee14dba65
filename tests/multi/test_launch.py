"""`nestrec launch`: torchrun whose exit code is that of the ranks, and which says in a line what it means."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestrec.base import exit_codes
from nestrec.testing.tiny_runs import command_of, make_datasets

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT_S = 300  # on a machine that others share; the test's own limit is longer still
pytestmark = pytest.mark.timeout(3 * LIMIT_S)


def launch(command: list[str]) -> "subprocess.Popen[str]":
    assert command[:3] == [sys.executable, "-m", "nestrec"]
    words = [*command[:3], "launch", "-n", "2", *command[3:]]
    return subprocess.Popen(words, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_mistake_ends_with_its_code_and_is_told_once() -> None:
    process = launch([sys.executable, "-m", "nestrec", "train", "demo", "--training.epochs", "0"])
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == exit_codes.USER_ERROR
    assert "Traceback" not in errors
    assert "torch" not in errors, "nor a log of its launcher's"
    assert errors.count("error: training.epochs = 0: must be 1 or more") == 1
    assert errors.splitlines()[-1].endswith("ended with code 2: a mistake that its message names")


@pytest.mark.parametrize("ended", ["told to stop", pytest.param("a rank is killed", marks=pytest.mark.slow)])
def test_a_signal_ends_with_the_code_of_the_ranks(tmp_path: Path, ended: str) -> None:
    make_datasets(tmp_path)
    more = {"training.epochs": 100_000, "training.checkpoint_every_steps": 5, "training.evaluate_every_epochs": 0}
    process = launch(command_of("hstu", tmp_path, tmp_path / "run", more))
    end_s = time.monotonic() + LIMIT_S
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end_s
        time.sleep(0.05)
    if ended == "told to stop":
        process.send_signal(signal.SIGTERM)
    else:
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
        os.kill(int(ranks.split()[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=LIMIT_S)
    code = exit_codes.INTERRUPTED if ended == "told to stop" else exit_codes.PEER_LOST
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert f"code {code}: " in errors.splitlines()[-1]
