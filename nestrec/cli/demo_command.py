"""`nestrec demo`: the whole story on synthetic logs, by the commands that anyone would use.

train      two ranks, tables sharded over them, `nested`; the model beside its baselines
compare    `serial` and `nested` on the same batches: the same bits, and two timelines
serve      export, a server of its own process, one request over HTTP
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
from nestrec.base.config_overrides import with_overrides
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
    """Train, compare, serve; ends with the path of the report."""
    check_folder(output, "--output")
    options = {"pipeline.schedule": "nested", "batch.micro_batches": "2", **overrides}
    _say(1, f"train HSTU on {NUM_RANKS} ranks, schedule `nested`, tables sharded over them")
    _train(output, options)
    _say(2, f"`serial` and `nested`, {COMPARED_STEPS} steps on the same batches")
    short = {"training.max_steps": str(COMPARED_STEPS), "training.evaluate_every_epochs": "0"}
    cfg = with_overrides(recipe("demo"), {**options, **short})
    runs = _compare(output, {**options, **short})
    typer.echo(_verdict(runs))
    _say(3, "export the best epoch, serve it, ask it")
    _serve(output, Path(cfg.data.folder))
    spans = {name: load_spans(run / "trace.jsonl") for name, run in runs.items()}
    more = {"One step, two schedules": two_schedules(spans, _verdict(runs))}
    typer.echo(f"\nreport: {write_report(output, more)}")


def _say(number: int, text: str) -> None:
    typer.echo(f"\n[{number}/3] {text}")


def _train(output: Path, options: Mapping[str, str]) -> None:
    ended = subprocess.run(_launch(output, options), env=_environment(), check=False)
    if ended.returncode != 0:
        remedy = "see the message above; the same command goes on from the last checkpoint"
        raise UserError(f"ended with code {ended.returncode}", option="train", value=str(output), remedy=remedy)


def _launch(output: Path, options: Mapping[str, str]) -> list[str]:
    """Returns the command that trains the demo's recipe on the demo's ranks."""
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    launch = [sys.executable, "-m", "nestrec", "launch", "-n", str(NUM_RANKS)]
    return [*launch, "train", "demo", "--output", str(output), *words]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _compare(output: Path, options: Mapping[str, str]) -> dict[str, Path]:
    """Trains the same few steps under each schedule; only the bits and the traces of these runs matter."""
    runs = {name: output / name for name in SCHEDULES}
    with progress_for("compare schedules") as progress:
        for i, (name, run) in enumerate(runs.items()):
            progress(name, i / len(runs))
            shutil.rmtree(run, ignore_errors=True)
            command = _launch(run, {**options, "pipeline.schedule": name})
            ended = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
            if ended.returncode != 0:
                print(ended.stderr, file=sys.stderr)
                remedy = "see the message above"
                raise UserError(f"ended with code {ended.returncode}", option="train", value=str(run), remedy=remedy)
    return runs


def _verdict(runs: Mapping[str, Path]) -> str:
    serial, nested = (run_digest(run) for run in runs.values())
    different = sorted(name for name in serial if serial[name] != nested.get(name))
    what = f"after {COMPARED_STEPS} steps on {NUM_RANKS} ranks"
    if different:
        return f"{what} `nested` DIFFERS from `serial` in {', '.join(different)}: please report this"
    return (
        f"{what} all {len(serial)} weights, optimiser states and tables of `nested` equal those of `serial`, bit by bit"
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
        answer = _post(f"{address}/v1/recommend", request)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=_START_TIMEOUT_S)
    history = ", ".join(request["history"]["items"][-4:])
    (scores,) = answer["scores"].values()
    found = ", ".join(f"{item} ({score:.2f})" for item, score in zip(answer["items"], scores, strict=True))
    typer.echo(f"POST /v1/recommend, user {request['user']} after ... {history}: items {found}")
    typer.echo(f"serve it yourself: nestrec serve --model {model}")


def _request(data: Path) -> dict[str, Any]:
    """The history of a user of the logs, as a client would send it."""
    dataset = Dataset.open(data)
    rows = dataset.rows(np.array([0]))
    keys = dataset.items()["item_key"].to_pylist()
    items = [keys[item - 1] for item in rows.lists[dataset_schema.ITEM_IDS][0].tolist()]
    history = {"items": items, "times_ms": rows.lists[dataset_schema.TIMESTAMPS_MS][0].tolist()}
    most_ms = LimitsConfig().max_timeout_ms  # a machine that is busy with others may need more than the default
    return {"user": dataset.user_keys(np.array([0]))[0], "history": history, "k": 5, "timeout_ms": most_ms}


def _wait_until_ready(server: "subprocess.Popen[bytes]", address: str) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    request = Request("GET", f"{address}/health/ready")
    while True:
        try:
            response = send_blocking(request, timeout_s=5.0)
        except (OSError, EOFError) as error:  # it does not listen yet
            problem = str(error)
        else:
            if response.status == _OK:
                return
            problem = f"it answers with status {response.status}"
        if server.poll() is not None or time.monotonic() > until:
            remedy = "start it by hand to see why: nestrec serve --model MODEL"
            raise UserError(f"did not become ready: {problem}", option="serve", value=address, remedy=remedy)
        time.sleep(0.1)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = Request("POST", url, {b"content-type": b"application/json"}, json.dumps(body).encode())
    remedy = "run the same command once more: what is trained and exported is kept"
    try:
        response = send_blocking(request, timeout_s=30.0)
    except (OSError, EOFError) as error:
        raise UserError(f"was not answered: {error}", option="POST", value=url, remedy=remedy) from None
    if response.status != _OK:
        raise UserError(f"was answered with status {response.status}", option="POST", value=url, remedy=remedy)
    return dict(json.loads(response.body))
