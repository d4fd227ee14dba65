import os
import signal
import sys
from pathlib import Path

import pytest

from support.fault_runner import FailPoint, KillWhen, lines_reach, random_kills, rank_of, run_with_faults

COUNT_TO_50 = """
import pathlib, sys, time
from nestrec.base.failpoints import fail_point
path = pathlib.Path(sys.argv[1])
done = path.read_text().count("\\n") if path.exists() else 0
with path.open("a") as log:
    for line in range(done, 50):
        fail_point("count")
        if line == 46:
            fail_point("nearly there")
        print(line, file=log, flush=True)
        time.sleep(0.002)
"""


def counting(path: Path) -> list[str]:
    return [sys.executable, "-c", COUNT_TO_50, str(path)]


@pytest.mark.parametrize("is_forked", [False, True])
def test_fault_runner_restarts_killed_command(tmp_path: Path, is_forked: bool) -> None:
    path = tmp_path / "lines.txt"
    kills = random_kills(path, seed=1, num_kills=2, num_lines=45, delay_s=0.005, wait_at="nearly there")
    faults = [FailPoint("count@10=kill"), *kills]
    history = run_with_faults(counting(path), faults, is_forked=is_forked)
    assert [attempt.exit_code for attempt in history] == [-signal.SIGKILL] * 3 + [0]
    assert [attempt.num_fired for attempt in history] == [1, 1, 1, 0]
    assert path.read_text().count("\n") == 50


@pytest.mark.parametrize("fault", [FailPoint("elsewhere=kill"), KillWhen(lambda: False)])
def test_fault_runner_requires_fault_to_fire(tmp_path: Path, fault: FailPoint | KillWhen) -> None:
    with pytest.raises(AssertionError, match="before these faults fired"):
        run_with_faults(counting(tmp_path / "lines.txt"), [fault])


@pytest.mark.parametrize("is_forked", [False, True])
def test_fault_runner_shows_output_of_failed_command(is_forked: bool) -> None:
    with pytest.raises(AssertionError, match=r"no fault fired:\s+cannot go on"):
        run_with_faults([sys.executable, "-c", "raise SystemExit('cannot go on')"], [], is_forked=is_forked)


@pytest.mark.parametrize("is_forked", [False, True])
def test_fault_runner_ends_hanging_command(is_forked: bool) -> None:
    for limit_s in (0.2, 0.0):  # even before it has started
        with pytest.raises(AssertionError, match="still running after"):
            run_with_faults(
                [sys.executable, "-c", "import time; time.sleep(60)"], [], limit_s=limit_s, is_forked=is_forked
            )


HANG_ONCE = """
import pathlib, sys, time
def hang_here():
    path.touch()
    time.sleep(600)
if not (path := pathlib.Path(sys.argv[1])).exists():
    hang_here()
"""


@pytest.mark.parametrize("is_forked", [False, True])
def test_fault_runner_prints_stack_of_aborted_command(tmp_path: Path, is_forked: bool) -> None:
    """A command that exceeds its time limit is aborted in the same way."""
    fault = KillWhen((tmp_path / "is_there").exists, signal=signal.SIGABRT)
    command = [sys.executable, "-c", HANG_ONCE, str(tmp_path / "is_there")]
    messages = list[str]()
    first, second = run_with_faults(command, [fault], is_forked=is_forked, on_attempt=messages.append)
    assert (first.exit_code, second.exit_code) == (-signal.SIGABRT, 0)
    assert "in hang_here" in first.output
    assert [line.split(": ")[1] for line in messages] == ["1 of 1 faults fired"] * 2


@pytest.mark.parametrize("is_forked", [False, True])
def test_fault_runner_passes_environment_and_arguments(tmp_path: Path, is_forked: bool) -> None:
    code = "import os, sys; print(os.environ['WORD'], 'HOME' in os.environ, sys.argv[1:]); open('here', 'x')"
    command = [sys.executable, "-c", code, "a", "b"]
    (attempt,) = run_with_faults(command, [], env={"WORD": "x"}, cwd=tmp_path, is_forked=is_forked)
    assert attempt.output == f"x {'HOME' in os.environ} ['a', 'b']\n"
    assert (tmp_path / "here").exists()


def test_forked_commands_freeze_preloaded_objects() -> None:
    code = "import gc, sys; print('torch' in sys.modules, gc.get_freeze_count() > 100_000)"
    (attempt,) = run_with_faults([sys.executable, "-c", code], [], is_forked=True)
    assert attempt.output == "True True\n"


LAUNCHER = """
import os, subprocess, sys
for attempt in range(3):
    codes = []
    environments = {**os.environ, "RANK": "0", "NESTREC_FAIL_POINTS": ""}, {**os.environ, "RANK": "1"}
    ranks = [subprocess.Popen(sys.argv[1:3] + [sys.argv[3] + env["RANK"]], env=env) for env in environments]
    codes = [rank.wait() for rank in ranks]
    if codes == [0, 0]:
        sys.exit(0)
sys.exit(1)
"""


def test_fault_runner_kills_rank_below_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, sys.executable, str(tmp_path / "count.py"), str(tmp_path / "lines")]
    (tmp_path / "count.py").write_text(COUNT_TO_50)
    # After the restart, fewer lines are left.
    fault = KillWhen(lines_reach(tmp_path / "lines1", 10), rank_of(1), wait_at="count@45")
    (attempt,) = run_with_faults(command, [fault])
    assert (attempt.exit_code, attempt.num_fired) == (0, 1)
    assert (tmp_path / "lines1").read_text().count("\n") == 50


def test_fault_runner_simultaneous_faults_hit_two_attempts(tmp_path: Path) -> None:
    """The second fault must not be used up by a process that the first one has already killed."""
    path = tmp_path / "lines.txt"
    faults = [KillWhen(lines_reach(path, count), wait_at="nearly there") for count in (5, 6)]
    history = run_with_faults(counting(path), faults)
    assert [attempt.num_fired for attempt in history] == [1, 1, 0]
