"""A run for servers from Python: what `nestrec export` and `nestrec publish` write, with values instead of text."""

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
    """The best weights are those of an epoch, after which there was one more step."""
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return nestrec.train(config_of("hstu", folder), {"training.max_steps": 4}, output=folder / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def said_by(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.output


def test_an_export_from_python_is_that_of_the_command(run: nestrec.Run, tmp_path: Path) -> None:
    manifest = nestrec.export(run, tmp_path / "python", {"tables": "int8", "device": "cpu"})
    said = said_by("export", run.folder, tmp_path / "command", "--tables", "int8", "--device", "cpu")
    assert contents(tmp_path / "python") == contents(tmp_path / "command")
    assert f"model {manifest.version[:12]}: " in said
    assert said.splitlines()[-1] == f"next: nestrec serve --model {tmp_path / 'command'}"
    assert manifest.precision is not None
    told = json.loads((tmp_path / "python/manifest.json").read_text())["precision"]
    assert told == to_plain(manifest.precision)
    assert nestrec.load(tmp_path / "python").recommend(HISTORY, k=5).items


def test_an_export_holds_the_best_or_the_last_weights(run: nestrec.Run, tmp_path: Path) -> None:
    scores = []
    for best in (True, False):
        folder = tmp_path / str(best)
        nestrec.export(str(run.folder), str(folder), best=best)
        found, wanted = (nestrec.load(at, best=best).recommend(HISTORY, k=5) for at in (folder, run))
        assert found.items == wanted.items
        scores.append(found.scores["score"].tolist())
        assert scores[-1] == wanted.scores["score"].tolist()
    assert scores[0] != scores[1]


def test_a_version_published_from_python_is_that_of_the_command(run: nestrec.Run, tmp_path: Path) -> None:
    manifest = nestrec.publish(run, tmp_path / "python")
    said = said_by("publish", run.folder, tmp_path / "command")
    (command,) = (tmp_path / "command" / "versions").glob("*/full.json")
    told = json.loads(command.read_text())
    written = [(entry["name"], entry["sha256"]) for entry in told["files"]]
    assert written == [(entry.name, entry.sha256) for entry in manifest.files]
    assert said == f"version {command.parent.name} of step {manifest.step}: {manifest.num_bytes / 1e6:.1f} MB\n"
    assert nestrec.publish(run, str(tmp_path / "python")).version == manifest.version, "it is there already"
    found, wanted = (nestrec.load(at).recommend(HISTORY, k=5).items for at in (tmp_path / "python", run))
    assert found == wanted


@pytest.mark.parametrize("by_command", [False, True])
def test_as_many_versions_stay_as_are_wanted(run: nestrec.Run, tmp_path: Path, by_command: bool) -> None:
    nestrec.publish(run, tmp_path)
    if by_command:
        said_by("publish", run.folder, tmp_path, "--last", "--keep", "1")
    else:
        nestrec.publish(run, tmp_path, {"keep": 1}, best=False)
    (stayed,) = (tmp_path / "versions").iterdir()
    assert int(stayed.name.partition("-")[0]) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run, out: nestrec.export(None, out), "run=None: is no run"),
        (lambda run, out: nestrec.export(run, None), "output=None: is no path"),
        (lambda run, out: nestrec.export(run, out, {"dytpe": "bfloat16"}), "(?s)dytpe = .*did you mean 'dtype'"),
        (lambda run, out: nestrec.publish(None, out), "run=None: is no run"),
        (lambda run, out: nestrec.publish(run, 3), "address=3: is no path"),
        (lambda run, out: nestrec.publish(run, out, {"keep": 0}), "keep = "),
        (lambda run, out: nestrec.publish(run, out, {"every_steps": 5}), "every_steps=5: no such option"),
    ],
)
def test_what_a_server_could_not_be_given_is_refused_before_anything_is_written(
    run: nestrec.Run, call: Callable[[nestrec.Run, Any], Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(nestrec.UserError, match=words):
        call(run, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_refused_before_the_weights_are_read(run: nestrec.Run, tmp_path: Path) -> None:
    (tmp_path / "young").mkdir()
    shutil.copy(run.folder / "config.json", tmp_path / "young")
    with pytest.raises(nestrec.UserError, match=r"OUT=.*: exists already"):
        nestrec.export(tmp_path / "young", tmp_path)
    with pytest.raises(nestrec.UserError, match="has no checkpoint yet"):
        nestrec.export(tmp_path / "young", tmp_path / "new")
