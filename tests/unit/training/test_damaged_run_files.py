"""Files of a run folder that are truncated, edited or replaced: the run resumes, or an error names the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nestrec
from nestrec.api import resolve_config
from nestrec.base.errors import UserError
from nestrec.cli.training_output import evaluate_run
from nestrec.distributed import Topology
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of


def train(data: Path, run: Path, max_steps: int) -> None:
    overrides = {"training.max_steps": max_steps, "training.checkpoint_every_steps": 2}
    Trainer(config_of("hstu", data, overrides), run, Topology.single("cpu")).train()


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train(tiny_data, run, 4)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    copy: Path = shutil.copytree(trained, tmp_path / "run")
    return copy


def edit(file: Path, name: str, value: Any) -> None:
    plain = json.loads(file.read_text())
    inner = plain
    *parts, last = name.split(".")
    for part in parts:
        inner = inner[part]
    inner[last] = value
    file.write_text(json.dumps(plain))


def test_run_files_truncated_metrics_do_not_stop_a_resumed_run(tiny_data: Path, run: Path) -> None:
    metrics = run / "metrics.jsonl"
    before = metrics.read_bytes()
    infinite = b'{"kind": "step", "step": 1e999}\n'
    metrics.write_bytes(before + infinite + b'{"kind": "step", "step": 1, "text": "\xff\xfe')
    train(tiny_data, run, 6)
    rewritten = metrics.read_bytes()
    assert rewritten.startswith(before)
    assert b"resumed from step 4" in rewritten
    assert b"\xff" not in rewritten
    assert b"1e999" not in rewritten


@pytest.mark.parametrize("name", ["card.json", "config.json", "identity.json", "metrics.jsonl", "progress"])
def test_run_files_folder_instead_of_a_file_is_named(tiny_data: Path, run: Path, name: str) -> None:
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(UserError, match="Is a directory") as raised:
        train(tiny_data, run, 6)
    assert raised.value.option == "RUN"
    assert str(raised.value.value).startswith(str(run / name.partition(".")[0]))


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("config.json", "training.epochs", "many"),
        ("config.json", "training.epoch", 3),
        ("config.json", "task.encoder.dim", -8),
        ("config.json", "batch.batch_size", 32),
        ("config.json", "task.encoder.dim", 16),
        ("config.json", "data", None),
        ("config.json", "task.encoder.head_dim", 3),
        ("card.json", "counts.users", "many"),
        ("card.json", "counts", {}),
        ("card.json", "files", []),
    ],
)
def test_run_files_edited_file_is_named(tiny_data: Path, run: Path, file: str, name: str, value: Any) -> None:
    edit(run / file, name, value)
    uses: list[Callable[[], object]] = [
        lambda: evaluate_run(run, "test", best=True),
        lambda: train(tiny_data, run, 6),
    ]
    if file == "config.json":
        uses.append(lambda: nestrec.load(run))
    for use in uses:
        with pytest.raises(UserError) as raised:
            use()
        assert str(run / file) in str(raised.value)


@pytest.mark.parametrize(("name", "value"), [("training.epochs", "many"), ("training.epoch", 3)])
def test_run_files_edited_config_passed_to_train_is_named(run: Path, name: str, value: Any) -> None:
    edit(run / "config.json", name, value)
    with pytest.raises(UserError) as raised:
        resolve_config(str(run / "config.json"))
    assert str(run / "config.json") in str(raised.value)


@pytest.mark.parametrize("name", ["card.json", "parameters.json"])
def test_run_files_corrupt_file_of_warm_start_is_named(tiny_data: Path, run: Path, tmp_path: Path, name: str) -> None:
    (run / name).write_bytes(b'{"\xff')
    cfg = config_of("hstu", tiny_data, {"training.max_steps": 2})
    with pytest.raises(UserError) as raised:
        Trainer(cfg, tmp_path / "new", Topology.single("cpu"), warm_start=run)
    assert str(run / name) in str(raised.value)
