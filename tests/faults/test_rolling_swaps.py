"""Processes behind a front get other models one after the other, time and again, while users ask."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys

import pytest
from rolling_load import NUM_INSTANCES, check_rolled, rolled, write_versions
from server_process import free_port


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_versions(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("front", ["gateway", "nginx"])
def test_models_roll_over_processes_time_and_again(front, folders):
    if front == "nginx" and shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    words = [sys.executable, "-m", "nestrec", "serve", "--model", str(folders / "0"), "--port", str(port)]
    words += ["--instances", str(NUM_INSTANCES), "--front", front]
    words += ["--service.session_s", "20"]  # requests of this test wait for the machine, not for a user
    process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    try:
        assert any(b"serving on" in line for line in process.stderr)
        load, took_s = asyncio.run(rolled(port, folders))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=100)
    check_rolled(front, folders, load, took_s)
