"""Tests a wheel of nestrec end to end in an empty environment: demo, export, serve, one request.

    python deploy/try_wheel.py --wheel dist/nestrec-*.whl --folder /tmp/try --json docs/results/wheel.json

Then each extra is installed, and its modules are imported. Versions are constrained by requirements.txt, so that the
packages are those that the tests pass with. The script needs only the standard library and no checkout.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parents[1] / "requirements.txt"
MODULES_OF_EXTRA = {
    "serve": "uvicorn, httptools, orjson, prometheus_client",
    "redis": "redis",
    "client": "httpx, nestrec.client",
    "otel": "opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "docs": "mkdocs, mkdocstrings",
    "dev": "pytest, hypothesis, httpx, promql_parser, kubernetes_validate",
}
"""Modules that each extra makes importable. The extra `ray` needs a separate environment."""
SMALL = ["--training.max_steps", "40", "--training.epochs", "1"]
"""Options that shorten the demo to a few minutes."""
HISTORY = {"items": ["12", "7", "30"], "times_ms": [1642271351894, 1642271387634, 1642271468830]}


def run_timed(command: list[str], folder: Path) -> float:
    """Run a command and return its duration in seconds; exit if it fails."""
    start_s = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return round(time.monotonic() - start_s, 1)


@contextlib.contextmanager
def serving(nestrec: str, model: Path, folder: Path) -> Iterator[str]:
    """Start a server and yield its URL."""
    command = [nestrec, "serve", "--model", str(model), "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"serving on (\S+)", line):
                yield found[1]
                return
        sys.exit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as response:
        return dict(json.load(response))


def try_wheel(wheel: Path, folder: Path) -> list[dict[str, Any]]:
    """Run all steps and return one row per step."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = folder / "environment"
    run_timed([sys.executable, "-m", "venv", "--clear", str(environment)], folder)
    python, nestrec = str(environment / "bin" / "python"), str(environment / "bin" / "nestrec")
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        str(CONSTRAINTS),
    ]
    rows = [{"step": "install", "extra": "", "seconds": run_timed([*install, str(wheel)], folder)}]
    where = f"import nestrec; assert nestrec.__file__.startswith({str(environment)!r}), nestrec.__file__"
    rows.append({"step": "import", "extra": "", "seconds": run_timed([python, "-c", where], folder)})
    rows.append({"step": "install", "extra": "serve", "seconds": run_timed([*install, f"{wheel}[serve]"], folder)})
    rows.append(
        {"step": "demo", "extra": "serve", "seconds": run_timed([nestrec, "demo", "--output", "run", *SMALL], folder)}
    )
    rows.append({"step": "export", "extra": "serve", "seconds": run_timed([nestrec, "export", "run", "model"], folder)})
    start_s = time.monotonic()
    with serving(nestrec, folder / "model", folder) as url:
        items = post(f"{url}/v1/recommend", {"user": "ann", "history": HISTORY, "k": 5})["items"]
        assert len(items) == 5, items
    rows.append({"step": "serve and one request", "extra": "serve", "seconds": round(time.monotonic() - start_s, 1)})
    for extra, modules in MODULES_OF_EXTRA.items():
        seconds = run_timed([*install, f"{wheel}[{extra}]"], folder)
        run_timed([python, "-c", f"import {modules}"], folder)
        rows.append({"step": "install and import", "extra": extra, "seconds": seconds})
    run_timed([python, "-m", "pip", "check"], folder)
    return rows


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = try_wheel(chosen.wheel.resolve(), chosen.folder.resolve())
    for row in rows:
        print(f"{row['step']:24}{row['extra']:8}{row['seconds']:8.1f} s")
    if chosen.json is not None:
        command = "python deploy/try_wheel.py --wheel WHEEL --folder FOLDER --json docs/results/wheel.json"
        hardware = {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        written = {"bench": "wheel", "command": command, "date": date, "hardware": hardware, "emulated": False}
        chosen.json.write_text(json.dumps({**written, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
