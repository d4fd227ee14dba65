"""Every option says something that its name does not."""

import re

import pytest
from typer.testing import CliRunner

from nestrec.cli.app import app

COMMANDS = ["train demo", "train kuairand_ranking", "train criteo_dlrm", "serve", "export", "prepare log", "replay"]


def described(command: str) -> dict[str, str]:
    """Option to its description, as `nestrec options` prints them."""
    text = CliRunner().invoke(app, ["options", *command.split()]).output
    blocks = re.split(r"^(?=--)", text, flags=re.MULTILINE)[1:]
    return {block.split()[0]: " ".join(block.split("\n", 1)[1].split()) for block in blocks}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_is_documented_in_a_word_or_two(command):
    found = described(command)
    assert len(found) >= 5
    assert not {name: text for name, text in found.items() if len(text.split()) < 3}
