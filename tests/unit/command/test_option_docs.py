"""The description of every option is a phrase of at least three words."""

import re

import pytest
from typer.testing import CliRunner

from nestrec.cli.app import app

COMMANDS = ["train demo", "train kuairand_ranking", "train criteo_dlrm", "serve", "export", "prepare log", "load-test"]


def descriptions_of(command: str) -> dict[str, str]:
    """Return the description of each option as `nestrec options` prints it."""
    text = CliRunner().invoke(app, ["options", *command.split()]).output
    blocks = re.split(r"^(?=--)", text, flags=re.MULTILINE)[1:]
    return {block.split()[0]: " ".join(block.split("\n", 1)[1].split()) for block in blocks}


@pytest.mark.parametrize("command", COMMANDS)
def test_option_docs_are_complete_phrases(command):
    descriptions = descriptions_of(command)
    assert len(descriptions) >= 5
    assert not {name: text for name, text in descriptions.items() if len(text.split()) < 3}
