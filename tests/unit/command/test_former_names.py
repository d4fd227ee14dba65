"""Former names of commands and options are errors that name the present ones."""

from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.cli.former_names import FORMER_COMMANDS, FORMER_OPTIONS

COMMANDS: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def rejection(*arguments: str) -> UserError:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, UserError), result.output
    return result.exception


@pytest.mark.parametrize(
    ("former", "present"),
    [("follow", "train-stream"), ("key", "create-key"), ("replay", "load-test"), ("fleet", "status")],
)
def test_former_command_names_suggest_present_command(former: str, present: str) -> None:
    for arguments in ([former, "x"], [former, "--help"], ["options", former], ["launch", "-n", "2", former]):
        assert rejection(*arguments).remedy == f"did you mean {present!r}?", arguments


def test_former_command_names_map_to_existing_commands() -> None:
    assert set(FORMER_COMMANDS.values()) <= set(COMMANDS)
    assert not set(FORMER_COMMANDS) & set(COMMANDS)


@pytest.mark.parametrize("words", [["--from", "runs/a"], ["--from=runs/a"]])
def test_train_from_suggests_warm_start(tmp_path: Path, words: list[str]) -> None:
    error = rejection("train", "demo", *words, "--output", str(tmp_path / "run"))
    assert (error.option, error.value, error.remedy) == ("--from", "runs/a", "did you mean --warm-start?")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "former"), [(c, name) for c, names in FORMER_OPTIONS.items() for name in names])
def test_former_command_options_map_to_existing_options(command: str, former: str) -> None:
    present = FORMER_OPTIONS[command][former]
    options = {name for param in COMMANDS[command].params for name in param.opts}
    assert present in options
    assert former not in options
    assert rejection(command, former, "1").remedy == f"did you mean {present}?"


def test_unknown_command_without_former_name_is_usage_error() -> None:
    result = CliRunner().invoke(app, ["trian", "demo"])
    assert result.exit_code == 2
    assert "train" in result.output
