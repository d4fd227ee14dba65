"""Repeated rolling updates and scaling of instances behind a gateway, under load."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest
from operator_results import record
from rolling_load import NUM_INSTANCES, check_rolling_updates, roll_under_load, scale_under_load, write_versions

from nestrec.serving.fleet.readiness_probes import free_port


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_versions(tmp_path_factory.mktemp("models"))


@contextlib.contextmanager
def running_gateway(folder, num_instances):
    """Start a gateway with instances and yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--num_instances", str(num_instances), "--load_balancer", "gateway"]
    command += ["--service.session_timeout_s", "20"]  # requests of this test wait for a busy machine, not for a user
    # Otherwise, the gateway itself responds to pre-infer requests of short histories.
    command += ["--service.engine.preinfer.policy", "all"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    try:
        assert any(b"serving on" in line for line in process.stderr)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rolling_update_repeated_under_load(folders):
    with running_gateway(folders / "0", NUM_INSTANCES) as port:
        load, took_s = asyncio.run(roll_under_load(port, folders))
    check_rolling_updates("gateway", folders, load, took_s)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gateway_instances_come_and_go_under_load(folders):
    with running_gateway(folders / "0", 2) as port:
        load = asyncio.run(scale_under_load(port, (3, 1, 2)))
    record("scaling behind gateway", requests=load.num_requests, failed=load.num_failed)
    assert load.num_failed == load.num_split == 0
    assert load.num_requests > 100
