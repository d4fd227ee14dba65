"""Repeated rolling updates of Ray Serve replicas under load."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from rolling_load import NUM_INSTANCES, check_rolling_updates, roll_under_load, write_versions

from nestrec.serving.fleet.readiness_probes import free_port


@pytest.mark.timeout(900)
def test_ray_repeated_rolling_updates_under_load(tmp_path):
    folders = write_versions(tmp_path)
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "nestrec", "serve", "--model", str(folders / "0")]
    command += [
        "--port",
        str(port),
        "--num_instances",
        str(NUM_INSTANCES),
        "--load_balancer",
        "ray",
        "--service.session_timeout_s",
        "20",
    ]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while not _is_ready(port):
            assert process.poll() is None
            time.sleep(0.5)  # other processes start: there is no clock to inject
        load, took_s = asyncio.run(roll_under_load(port, folders))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    check_rolling_updates("ray", folders, load, took_s)


def _is_ready(port):
    """Return whether all replicas report their model."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/admin/fleet", timeout=20.0) as response:
            return b"null" not in response.read().partition(b'"ready"')[0]
    except (urllib.error.URLError, OSError):
        return False
