"""`nestrec.export` and `nestrec.publish` in Python write the same files as the commands."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nestrec
from nestrec.base.config import to_plain
from nestrec.cli.app import app
from support.tiny_runs import config_of, make_datasets

HISTORY = {"items": ["1", "2"], "times_ms": [1, 2], "now_ms": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> nestrec.Run:
    """A run whose best weights are those of an epoch, with one more step after it."""
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return nestrec.train(config_of("hstu", folder), {"training.max_steps": 4}, output=folder / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def output_of(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.output


def test_export_from_python_equals_command(run: nestrec.Run, tmp_path: Path) -> None:
    manifest = nestrec.export(run, tmp_path / "python", {"table_dtype": "int8", "device": "cpu"})
    output = output_of("export", run.folder, tmp_path / "command", "--table_dtype", "int8", "--device", "cpu")
    assert contents(tmp_path / "python") == contents(tmp_path / "command")
    assert f"model {manifest.version[:12]}: " in output
    assert output.splitlines()[-1] == f"next: nestrec serve --model {tmp_path / 'command'}"
    assert manifest.precision is not None
    precision = json.loads((tmp_path / "python/manifest.json").read_text())["precision"]
    assert precision == to_plain(manifest.precision)
    assert nestrec.load(tmp_path / "python").recommend(HISTORY, k=5).items


def test_export_contains_best_or_last_weights(run: nestrec.Run, tmp_path: Path) -> None:
    scores = []
    for best in (True, False):
        folder = tmp_path / str(best)
        nestrec.export(str(run.folder), str(folder), best=best)
        found, expected = (nestrec.load(source, best=best).recommend(HISTORY, k=5) for source in (folder, run))
        assert found.items == expected.items
        scores.append(found.scores["score"].tolist())
        assert scores[-1] == expected.scores["score"].tolist()
    assert scores[0] != scores[1]


def test_publish_from_python_equals_command(run: nestrec.Run, tmp_path: Path) -> None:
    manifest = nestrec.publish(run, tmp_path / "python")
    output = output_of("publish", run.folder, tmp_path / "command")
    (command,) = (tmp_path / "command" / "versions").glob("*/full.json")
    manifest_of_command = json.loads(command.read_text())
    written = [(entry["name"], entry["sha256"]) for entry in manifest_of_command["files"]]
    assert written == [(entry.name, entry.sha256) for entry in manifest.files]
    assert output == f"version {command.parent.name} of step {manifest.step}: {manifest.num_bytes / 1e6:.1f} MB\n"
    assert nestrec.publish(run, str(tmp_path / "python")).version == manifest.version, "the version already exists"
    found, expected = (nestrec.load(source).recommend(HISTORY, k=5).items for source in (tmp_path / "python", run))
    assert found == expected


@pytest.mark.parametrize("by_command", [False, True])
def test_publish_retains_max_versions(run: nestrec.Run, tmp_path: Path, by_command: bool) -> None:
    nestrec.publish(run, tmp_path)
    if by_command:
        output_of("publish", run.folder, tmp_path, "--last", "--max_versions", "1")
    else:
        nestrec.publish(run, tmp_path, {"max_versions": 1}, best=False)
    (remaining,) = (tmp_path / "versions").iterdir()
    assert int(remaining.name.partition("-")[0]) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run, out: nestrec.export(None, out), "run=None: must be a run or a path"),
        (lambda run, out: nestrec.export(run, None), "output=None: must be a path"),
        (lambda run, out: nestrec.export(run, out, {"dytpe": "bfloat16"}), "(?s)dytpe=.*Did you mean dtype"),
        (lambda run, out: nestrec.publish(None, out), "run=None: must be a run or a path"),
        (lambda run, out: nestrec.publish(run, 3), "address=3: must be a path"),
        (lambda run, out: nestrec.publish(run, out, {"max_versions": 0}), "max_versions=0"),
        (lambda run, out: nestrec.publish(run, out, {"every_steps": 5}), "every_steps=5: no such option"),
    ],
)
def test_export_rejects_invalid_arguments_before_writing(
    run: nestrec.Run, call: Callable[[nestrec.Run, Any], Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(nestrec.UserError, match=words):
        call(run, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_export_rejects_existing_folder_early(run: nestrec.Run, tmp_path: Path) -> None:
    (tmp_path / "young").mkdir()
    shutil.copy(run.folder / "config.json", tmp_path / "young")
    with pytest.raises(nestrec.UserError, match=r"OUT=.*: the folder already exists"):
        nestrec.export(tmp_path / "young", tmp_path)
    with pytest.raises(nestrec.UserError, match="does not have a checkpoint yet"):
        nestrec.export(tmp_path / "young", tmp_path / "new")
