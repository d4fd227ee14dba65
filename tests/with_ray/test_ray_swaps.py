"""Replicas of Ray Serve get other models one after the other, time and again, while users ask."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from rolling_load import NUM_INSTANCES, check_rolled, rolled, write_versions

from nestrec.serving.fleet.readiness_probes import free_port


@pytest.mark.timeout(900)
def test_models_roll_over_replicas_time_and_again(tmp_path):
    folders = write_versions(tmp_path)
    port = free_port()
    words = [sys.executable, "-W", "ignore", "-m", "nestrec", "serve", "--model", str(folders / "0")]
    words += ["--port", str(port), "--instances", str(NUM_INSTANCES), "--front", "ray", "--service.session_s", "20"]
    process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while not _is_ready(port):
            assert process.poll() is None
            time.sleep(0.5)  # other processes start: there is no clock to inject
        load, took_s = asyncio.run(rolled(port, folders))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    check_rolled("ray", folders, load, took_s)


def _is_ready(port):
    """All replicas tell what they serve."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/admin/fleet", timeout=20.0) as response:
            return b"null" not in response.read().partition(b'"ready"')[0]
    except (urllib.error.URLError, OSError):
        return False
