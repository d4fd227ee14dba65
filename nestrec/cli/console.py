"""How the commands' help looks, and commands that other packages bring.

A message that all ranks of one launch have is printed by one of them.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from nestrec.base.errors import UserError
from nestrec.base.plugins import PluginRegistry

TYPED_WORDS = "nestrec.typed_words"
"""Key in the `meta` of a command's context: all words that were typed after the command's name."""


class _PlainFlags:
    """Parameters of a command, of which flags show no type: they take no value."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.display_type_rich = lambda ctx: None
        return params


class PlainCommand(_PlainFlags, TyperCommand):
    """A command with plain flags, whose callbacks of parameters can read all typed words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[TYPED_WORDS] = tuple(args)
        return super().parse_args(ctx, args)


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


@dataclass(frozen=True, slots=True)
class ExternalCommand:
    """A command of another package, found by the entry-point group `nestrec.commands`."""

    app: typer.Typer
    """The command, or the group of commands."""
    options_of: Callable[[list[str]], tuple[Any, str]]
    """Maps the words after the command's name to its config and the words that are left, for `nestrec options`."""


EXTERNAL_COMMANDS: PluginRegistry[ExternalCommand] = PluginRegistry(
    "nestrec.commands", "command", {}, of=ExternalCommand
)
PASSED_ON_WHOLE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of a command that passes all its arguments on, `--help` included."""
_PACKAGES = {"bench": "nestrec-bench", "replay": "nestrec-bench"}


def external_command(name: str) -> ExternalCommand:
    """Returns a command of another package; raises a `UserError` that says how to install it if it is missing."""
    if name not in EXTERNAL_COMMANDS:
        package = _PACKAGES[name]
        remedy = f"pip install {package}, or in a checkout: pip install -e benchmarks"
        raise UserError(
            f"is in the package {package}, which is not installed", field="nestrec", value=name, remedy=remedy
        )
    return EXTERNAL_COMMANDS.find(name)


def run_external(name: str, arguments: list[str]) -> None:
    """Runs a command of another package with everything that was typed after its name."""
    command = external_command(name)
    with_plain_flags(command.app)
    code = typer.main.get_command(command.app)(arguments, prog_name=f"nestrec {name}", standalone_mode=False)
    if code:
        raise typer.Exit(code)


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
