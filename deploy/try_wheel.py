"""Installs a wheel of nestrec into an empty environment and goes the whole way: demo, export, serve, one request.

    python deploy/try_wheel.py --wheel dist/nestrec-*.whl --folder /tmp/try --json docs/results/wheel.json

Then each extra is installed beside it, and what it brings is imported. Versions are those of requirements.txt, so that
nothing newer is taken than what the tests pass with. Runs with the standard library alone, outside of any checkout.
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
BROUGHT = {
    "serve": "uvicorn, httptools, orjson, prometheus_client",
    "redis": "redis",
    "client": "httpx, nestrec.client",
    "otel": "opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "docs": "mkdocs, mkdocstrings",
    "dev": "pytest, hypothesis, httpx, promql_parser, kubernetes_validate",
}
"""what an extra is for, as modules; ray wants an environment of its own"""
SMALL = ["--training.max_steps", "40", "--training.epochs", "1"]
"""options of the demo, for a try of minutes"""
HISTORY = {"items": ["12", "7", "30"], "times_ms": [1642271351894, 1642271387634, 1642271468830]}


def ran(command: list[str], folder: Path) -> float:
    """Seconds; ends the try where the command fails."""
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
    """The address of a server."""
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


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as response:
        return dict(json.load(response))


def tried(wheel: Path, folder: Path) -> list[dict[str, Any]]:
    """A row for each step."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = folder / "environment"
    ran([sys.executable, "-m", "venv", "--clear", str(environment)], folder)
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
    rows = [{"step": "install", "extra": "", "seconds": ran([*install, str(wheel)], folder)}]
    where = f"import nestrec; assert nestrec.__file__.startswith({str(environment)!r}), nestrec.__file__"
    rows.append({"step": "import", "extra": "", "seconds": ran([python, "-c", where], folder)})
    rows.append({"step": "install", "extra": "serve", "seconds": ran([*install, f"{wheel}[serve]"], folder)})
    rows.append(
        {"step": "demo", "extra": "serve", "seconds": ran([nestrec, "demo", "--output", "run", *SMALL], folder)}
    )
    rows.append({"step": "export", "extra": "serve", "seconds": ran([nestrec, "export", "run", "model"], folder)})
    start_s = time.monotonic()
    with serving(nestrec, folder / "model", folder) as url:
        items = asked(f"{url}/v1/recommend", {"user": "ann", "history": HISTORY, "k": 5})["items"]
        assert len(items) == 5, items
    rows.append({"step": "serve and one request", "extra": "serve", "seconds": round(time.monotonic() - start_s, 1)})
    for extra, modules in BROUGHT.items():
        seconds = ran([*install, f"{wheel}[{extra}]"], folder)
        ran([python, "-c", f"import {modules}"], folder)
        rows.append({"step": "install and import", "extra": extra, "seconds": seconds})
    ran([python, "-m", "pip", "check"], folder)
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
    rows = tried(chosen.wheel.resolve(), chosen.folder.resolve())
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
