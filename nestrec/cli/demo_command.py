"""`nestrec demo`: training, a comparison of schedules, and serving, on synthetic logs and with the usual commands.

train      trains on two ranks with sharded tables and the schedule `nested`; compares the model with baselines
compare    runs `serial` and `nested` on the same batches: bitwise identical results, and two timelines
serve      exports the model, starts a server process and sends one request over HTTP
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import typer

from nestrec.api import export
from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError
from nestrec.base.files import check_folder
from nestrec.data import dataset_schema
from nestrec.data.dataset import Dataset
from nestrec.report import progress_for, write_report
from nestrec.report.speed_sections import two_schedules
from nestrec.serving.core.http_client import Request, send_blocking
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.trace import load_spans
from nestrec.training.recipes import recipe
from nestrec.training.state import run_digest

NUM_RANKS = 2
COMPARED_STEPS = 40
SCHEDULES = ("serial", "nested")
_START_TIMEOUT_S = 60.0
_OK = 200


def run_demo(output: Path, overrides: Mapping[str, str]) -> None:
    """Train, compare the schedules, serve one request, and print the path of the report."""
    check_folder(output, "--output")
    options = {"pipeline.schedule": "nested", "batch.num_micro_batches": "2", **overrides}
    _print_step(1, f"train HSTU on {NUM_RANKS} ranks with sharded tables, schedule `nested`")
    _train(output, options)
    _print_step(2, f"compare `serial` and `nested`: {COMPARED_STEPS} steps on the same batches")
    short = {"training.max_steps": str(COMPARED_STEPS), "training.eval_every_epochs": "0"}
    cfg = apply_overrides(recipe("demo"), {**options, **short})
    runs = _compare(output, {**options, **short})
    typer.echo(_compare_digests(runs))
    _print_step(3, "export the best epoch, start a server, send a request")
    _serve(output, Path(cfg.data.folder))
    spans = {name: load_spans(run / "trace.jsonl") for name, run in runs.items()}
    sections = {"One step, two schedules": two_schedules(spans, _compare_digests(runs))}
    typer.echo(f"\nreport: {write_report(output, sections)}")


def _print_step(number: int, text: str) -> None:
    typer.echo(f"\n[{number}/3] {text}")


def _train(output: Path, options: Mapping[str, str]) -> None:
    completed = subprocess.run(_launch(output, options), env=_environment(), check=False)
    if completed.returncode != 0:
        remedy = "see the message above; the same command resumes from the last checkpoint"
        raise UserError(
            f"training failed with exit code {completed.returncode}", option="train", value=str(output), remedy=remedy
        )


def _launch(output: Path, options: Mapping[str, str]) -> list[str]:
    """Return the command that trains the recipe `demo` on `NUM_RANKS` ranks."""
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    launch = [sys.executable, "-m", "nestrec", "launch", "-n", str(NUM_RANKS)]
    return [*launch, "train", "demo", "--output", str(output), *words]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _compare(output: Path, options: Mapping[str, str]) -> dict[str, Path]:
    """Train the same few steps with each schedule, for their final states and traces."""
    runs = {name: output / name for name in SCHEDULES}
    with progress_for("compare schedules") as progress:
        for i, (name, run) in enumerate(runs.items()):
            progress(name, i / len(runs))
            shutil.rmtree(run, ignore_errors=True)
            command = _launch(run, {**options, "pipeline.schedule": name})
            completed = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
            if completed.returncode != 0:
                print(completed.stderr, file=sys.stderr)
                remedy = "see the message above"
                raise UserError(
                    f"training failed with exit code {completed.returncode}",
                    option="train",
                    value=str(run),
                    remedy=remedy,
                )
    return runs


def _compare_digests(runs: Mapping[str, Path]) -> str:
    serial, nested = (run_digest(run) for run in runs.values())
    different = sorted(name for name in serial if serial[name] != nested.get(name))
    when = f"after {COMPARED_STEPS} steps on {NUM_RANKS} ranks"
    if different:
        return f"{when}, `nested` DIFFERS from `serial` in {', '.join(different)}: please report this"
    return (
        f"{when}, all {len(serial)} weights, optimizer states and tables of `nested` and `serial` are bitwise identical"
    )


def _serve(output: Path, data: Path) -> None:
    model = output / "model"
    if not model.exists():
        export(output, model)
    port = free_port()
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(model), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_ready(server, address)
        request = _request(data)
        response = _post(f"{address}/v1/recommend", request)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=_START_TIMEOUT_S)
    history = ", ".join(request["history"]["items"][-4:])
    (scores,) = response["scores"].values()
    items = ", ".join(f"{item} ({score:.2f})" for item, score in zip(response["items"], scores, strict=True))
    typer.echo(f"POST /v1/recommend, user {request['user']} after ... {history}: items {items}")
    typer.echo(f"to start a server: nestrec serve --model {model}")


def _request(data: Path) -> dict[str, Any]:
    """Return a request body with the history of a user of the dataset."""
    dataset = Dataset.open(data)
    rows = dataset.rows(np.array([0]))
    keys = dataset.items()["item_key"].to_pylist()
    items = [keys[item - 1] for item in rows.lists[dataset_schema.ITEM_IDS][0].tolist()]
    history = {"items": items, "times_ms": rows.lists[dataset_schema.TIMESTAMPS_MS][0].tolist()}
    timeout_ms = LimitsConfig().max_timeout_ms  # a busy machine may exceed the default timeout
    return {"user": dataset.user_keys(np.array([0]))[0], "history": history, "k": 5, "timeout_ms": timeout_ms}


def _wait_until_ready(server: "subprocess.Popen[bytes]", address: str) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    request = Request("GET", f"{address}/health/ready")
    while True:
        try:
            response = send_blocking(request, timeout_s=5.0)
        except (OSError, EOFError) as error:  # the server does not listen yet
            problem = str(error)
        else:
            if response.status == _OK:
                return
            problem = f"it responds with status {response.status}"
        if server.poll() is not None or time.monotonic() > until:
            remedy = "start it by hand to see the error: nestrec serve --model MODEL"
            raise UserError(f"the server did not become ready: {problem}", option="serve", value=address, remedy=remedy)
        time.sleep(0.1)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = Request("POST", url, {b"content-type": b"application/json"}, json.dumps(body).encode())
    remedy = "run the same command again; the trained and exported model is reused"
    try:
        response = send_blocking(request, timeout_s=30.0)
    except (OSError, EOFError) as error:
        raise UserError(f"the request failed: {error}", option="POST", value=url, remedy=remedy) from None
    if response.status != _OK:
        raise UserError(f"the request failed with status {response.status}", option="POST", value=url, remedy=remedy)
    return dict(json.loads(response.body))
