"""The live page in a real browser."""

import os
import shutil
import subprocess

import pytest
from server_process import exchange, post, running_server, status_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_live_page_shows_latency_tiers_and_admissions(retrieval, tmp_path):
    body = {"user": "someone-secret", "history": {"items": ["1", "2"], "times_ms": [1, 2]}, "k": 3}
    with running_server(retrieval.folder) as (port, _):
        assert status_of(exchange(port, post("/v1/recommend", body))) == 200
        assert status_of(exchange(port, post("/v1/preinfer", {k: v for k, v in body.items() if k != "k"}))) == 202
        command = [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--dump-dom",
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=4000",
            f"http://127.0.0.1:{port}/",
        ]
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=90, check=True, env={**os.environ}
        ).stdout
    assert "live, " in shown
    assert "p99 ms" in shown
    assert "device cache" in shown
    assert "DRAM tier" in shown
    assert "signal safe" in shown or "signal admitted" in shown
    assert "rank none" in shown
    assert "someone-secret" not in shown
