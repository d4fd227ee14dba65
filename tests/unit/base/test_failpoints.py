import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nestrec.base.failpoints import fail_point
from support.fail_points import armed, fail_variables


def test_fail_point_does_nothing_unless_armed() -> None:
    fail_point("unknown")


def test_fail_point_fires_at_every_hit_or_the_nth() -> None:
    hits: list[int] = []
    with armed("point", lambda: hits.append(1)):
        fail_point("point")
        fail_point("point")
        fail_point("other")
    assert len(hits) == 2
    with armed("point", lambda: hits.append(1), at=2):
        for _ in range(3):
            fail_point("point")
    assert len(hits) == 3
    fail_point("point")
    assert len(hits) == 3


def test_fail_point_is_disarmed_when_block_fails() -> None:
    hits: list[int] = []
    with pytest.raises(ValueError, match="x"), armed("point", lambda: hits.append(1)):
        raise ValueError("x")
    fail_point("point")
    assert not hits


def in_another_process(points: str, log: Path) -> subprocess.CompletedProcess[str]:
    code = "from nestrec.base.failpoints import fail_point as f\nfor i in range(3): f('a'); print(i, flush=True)"
    env = {**os.environ, **fail_variables(points, log)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_fail_point_is_armed_by_environment_and_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    killed = in_another_process("b=raise,a@2=kill", log)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "0\n")
    assert log.read_text() == "a\n"
    raised = in_another_process("a@3=raise", log)
    assert (raised.returncode, raised.stdout) == (1, "0\n1\n")
    assert "a fail point fired" in raised.stderr
    assert in_another_process("b=kill", log).returncode == 0


def test_fail_point_wait_blocks_until_process_is_killed(tmp_path: Path) -> None:
    code = "from nestrec.base.failpoints import fail_point as f\nprint(1, flush=True); f('a'); print(2, flush=True)"
    env = {**os.environ, **fail_variables("a=wait", tmp_path / "log")}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.kill()
        assert process.stdout.read() == ""
    assert not (tmp_path / "log").exists()
