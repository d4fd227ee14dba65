"""How the commands' help looks.

A message that all ranks of one launch have is printed by one of them.
"""

import contextlib
import hashlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _PlainFlags:
    """Parameters of a command, of which flags show no type: they take no value."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.display_type_rich = lambda ctx: None
        return params


class PlainCommand(_PlainFlags, TyperCommand):
    """A command with plain flags."""


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of commands with plain flags."""


def with_plain_flags(app: typer.Typer) -> None:
    """Make the help of all commands of an app show flags without `<bool>`."""
    app.info.cls = PlainGroup
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group.cls = PlainGroup
            with_plain_flags(group.typer_instance)


SAID_FOLDER = "NESTREC_SAID"
"""environment variable: a folder that the ranks of a launch share, with an empty file for each message"""


def say_once(text: str) -> None:
    """Print to standard error, unless another rank has said the same."""
    folder = os.environ.get(SAID_FOLDER)
    if folder is not None:
        file = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest())
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        except OSError:
            pass  # better twice than not at all
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr)
