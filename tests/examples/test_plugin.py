"""An external package with seven kinds of plugins is used from its input format to its endpoint.

It is trained on two ranks, of which one is killed with SIGKILL, and planned, benchmarked, exported and served.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from server_process import running_server

from nestrec.base.config_overrides import apply_overrides
from nestrec.distributed import Topology
from nestrec.training.recipes import recipe
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.command_runner import start
from support.fail_points import armed
from support.fault_runner import KillWhen, rank_of, run_with_faults, saves_reach
from support.rank_pool import RankPool

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "plugin"
ENCODER = {"kind": "linear", "dim": 8, "num_heads": 2, "head_dim": 4, "max_length": 12}
TASK = {
    "kind": "pairwise",
    "encoder": ENCODER,
    "history": {"max_events": 12},
    "negatives": {"num_negatives": 4},
    "table_optimizer": {"kind": "lion", "options": {"beta1": 0.8}},
    "evaluation": {"ks": [5, 10]},
}
TRAIN = {
    "task": json.dumps(TASK),
    "batch.batch_size": "16",
    "batch.num_micro_batches": "2",
    "training.device": "cpu",
    "training.epochs": "100",
    "training.max_steps": "24",
    "training.checkpoint_every_steps": "4",
    "training.eval_every_epochs": "0",
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package into a separate folder that is on the path of the processes of the test."""
    source = tmp_path / "source"
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, source)  # a build writes files into the source folder
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=300)
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *([before] if before else [])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return site


def nestrec(output: Path, *commands: list[str]) -> None:
    """Run several commands one after the other in one process; their output is written to the file `output`."""
    code = "import json, sys; from nestrec.cli.app import app; "
    code += "[app(command, standalone_mode=False) for command in json.loads(sys.argv[1])]"
    command = [sys.executable, "-c", code, json.dumps(commands)]
    started = start(command, is_forked=True, env=os.environ, cwd=None, output=output)
    assert started.wait(300) == 0, output.read_text()


def options(**more: str) -> list[str]:
    return [f"--{name}={value}" for name, value in {**TRAIN, **more}.items()]


def train_run(topology: Topology, site: str, run: str, overrides: dict[str, str]) -> None:
    """Train on a rank of the pool, which was started before the package was installed."""
    sys.path.insert(0, site)
    Trainer(apply_overrides(recipe("demo"), overrides), Path(run), topology).train()


def train_until_killed(topology: Topology, site: str, run: str, overrides: dict[str, str]) -> None:
    """Train, and kill the second rank in the tenth step."""
    action = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if topology.rank == 1 else None
    with armed("train.step", action, at=10):
        train_run(topology, site, run, overrides)


def train_with_killed_rank(run: Path, site: Path, overrides: dict[str, str]) -> None:
    pool = RankPool(2, timeout_s=60)  # lost ranks are detected at once, but a busy machine may compile for long
    outcomes = pool.outcomes(train_until_killed, str(site), str(run), overrides)
    pool.close()
    assert [outcome.kind for outcome in outcomes] == ["PeerLostError", "died"], outcomes[0].text
    pool = RankPool(2)
    pool.run(train_run, str(site), str(run), overrides)
    pool.close()


def train_with_killed_rank_under_torchrun(run: Path, data: Path, schedule: str) -> None:
    kill = KillWhen(saves_reach(run / "checkpoints", 8), rank_of(1))
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--monitor-interval=0.05",
    ]
    arguments = options(**{"data.folder": str(data), "pipeline.schedule": schedule})
    (attempt,) = run_with_faults(
        [*launcher, "-m", "nestrec", "train", "demo", "--output", str(run), *arguments], [kill], limit_s=300.0
    )
    assert attempt.num_fired == 1


def request_json(port: int, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


def prepare_and_train(pools, installed: Path, tmp_path: Path) -> dict[str, str]:
    """Prepare data in the format of the plugin, train an uninterrupted run, and return its options."""
    baskets = tmp_path / "baskets.txt"
    data = tmp_path / "data"
    lines = [
        f"u{u}> " + " ".join(f"i{(3 * u + 4 * b + j) % 30}" for j in range(4)) for u in range(40) for b in range(3)
    ]
    baskets.write_text("\n".join(lines))
    nestrec(tmp_path / "output.txt", ["prepare", "baskets", str(baskets), str(data), "--after_user", ">"])
    overrides = {**TRAIN, "data.folder": str(data), "pipeline.schedule": "serial"}
    pools[2].run(train_run, str(installed), str(tmp_path / "reference"), overrides)
    return overrides


@pytest.mark.slow
def test_plugin_run_resumes_exactly_under_torchrun(pools, installed: Path, tmp_path: Path) -> None:
    prepare_and_train(pools, installed, tmp_path)
    train_with_killed_rank_under_torchrun(tmp_path / "killed", tmp_path / "data", "lanes")
    assert run_digest(tmp_path / "killed") == run_digest(tmp_path / "reference"), (
        "the killed and resumed run with the plugin schedule must equal the reference"
    )


def test_plugin_trains_exports_and_serves(pools, installed: Path, tmp_path: Path) -> None:
    overrides = prepare_and_train(pools, installed, tmp_path)
    model = tmp_path / "model"
    train_with_killed_rank(tmp_path / "killed", installed, {**overrides, "pipeline.schedule": "lanes"})
    assert run_digest(tmp_path / "killed") == run_digest(tmp_path / "reference"), (
        "the killed and resumed run with the plugin schedule must equal the reference"
    )

    data_options = options(**{"data.folder": overrides["data.folder"]})
    nestrec(
        tmp_path / "output.txt",
        ["plan", "demo", "--cluster", "cpu-hosts", "--json", str(tmp_path / "plan.json"), *data_options],
        ["train", "demo", "--plan-only", *data_options, "--pipeline.schedule", "lanes"],
        [
            "bench",
            "step",
            "--cases",
            "linear-2x4-u1024",
            "--dim",
            "8",
            "--num_layers",
            "1",
            "--tokens",
            "2048",
            "--num_items",
            "50",
            "--num_negatives",
            "3",
            "--row_optimizer",
            "lion",
            "--schedule",
            "lanes",
            "--precision",
            "fp32",
            "--device",
            "cpu",
            "--warm_up",
            "1",
            "--steps",
            "1",
            "--profiled",
            "0",
            "--memory_length",
            "0",
            "--json",
            str(tmp_path / "step.json"),
        ],
        ["bench", "lion", "--rows", "100", "--json", str(tmp_path / "lion.json")],
        ["export", str(tmp_path / "killed"), str(model)],
    )
    plans, steps, lion = (
        json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("plan", "step", "lion")
    )
    assert plans[0]["step_ms"] > 0
    assert steps[0]["dense_weights"] == 1025 * 8 + (8 + 1) * 4 * 8 + (8 + 1) * 8, "positions, input, output"
    assert steps[0]["mfu"] >= 0, "bench step knows its FLOPs"
    assert {row["op"] for row in lion} == {"sgd", "lion"}

    history = {"items": ["i3", "i4", "i5", "i6"]}
    patient = ("--limits.default_timeout_ms", "10000")
    with running_server(model, "--limits.expose_cache_source", "true", *patient) as (port, _):
        first = request_json(port, "/v1/recommend", {"user": "u", "history": history, "k": 5})
        again = request_json(port, "/v1/recommend", {"user": "u", "history": history, "k": 5})
        similar = request_json(port, "/v1/similar", {"item": "i3", "k": 4})
        described = request_json(port, "/openapi.json")
    assert len(first["items"]) == 5
    assert not set(first["items"]) & set(history["items"])
    assert (first["cache_source"]["tokens"], again["cache_source"]["tokens"]) == (0, 3), "its cached forward is used"
    assert again["items"] == first["items"]
    assert again["scores"]["score"] == pytest.approx(first["scores"]["score"], rel=1e-5)
    assert len(similar["items"]) == 4
    assert "i3" not in similar["items"]
    assert "/v1/similar" in described["paths"]
