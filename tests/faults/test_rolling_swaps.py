"""Processes behind a front get other models one after the other, time and again, while users ask."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest
from operator_results import record
from rolling_load import NUM_INSTANCES, check_rolled, rolled, scaled, write_versions

from nestrec.serving.fleet.readiness_probes import free_port


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_versions(tmp_path_factory.mktemp("models"))


@contextlib.contextmanager
def running_front(front, folder, num_instances):
    """Yield the port of a front over processes."""
    port = free_port()
    words = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port)]
    words += ["--instances", str(num_instances), "--front", front]
    words += ["--service.session_s", "20"]  # requests of this test wait for the machine, not for a user
    words += ["--service.engine.trigger.policy", "all"]  # else the gateway answers signals of short histories itself
    process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    try:
        assert any(b"serving on" in line for line in process.stderr)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_models_roll_over_processes_time_and_again(folders):
    with running_front("gateway", folders / "0", NUM_INSTANCES) as port:
        load, took_s = asyncio.run(rolled(port, folders))
    check_rolled("gateway", folders, load, took_s)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_processes_come_and_go_while_users_ask(folders):
    with running_front("gateway", folders / "0", 2) as port:
        load = asyncio.run(scaled(port, (3, 1, 2)))
    record("scaling behind gateway", requests=load.num_requests, failed=load.num_failed)
    assert load.num_failed == load.num_split == 0
    assert load.num_requests > 100
