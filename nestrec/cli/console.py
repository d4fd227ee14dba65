"""Helpers of the command line: the form of the help, errors about required options, and commands of other packages.

A message that all ranks of one launch have is printed by one of them.
"""

import contextlib
import difflib
import hashlib
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
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
    """A command with plain flags that names a mistyped or left-out option that it needs.

    Callbacks of its parameters can read all typed words.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[TYPED_WORDS] = tuple(args)
        if not ctx.resilient_parsing and "--help" not in args:
            self._check_required_options(ctx, args)
        return super().parse_args(ctx, args)

    def _check_required_options(self, ctx: Any, args: list[str]) -> None:
        params = self.get_params(ctx)
        options = [param for param in params if param.param_type_name == "option"]
        known = {name for param in options for name in param.opts}
        for param in options:
            if not param.required or _is_given(param.opts, args):
                continue
            _raise_mistyped(args, param.opts[0], known)
            lengths = [each.nargs for each in params if each.param_type_name == "argument"]
            if ctx.allow_interspersed_args and min(lengths, default=0) >= 0:
                _raise_without_option(ctx, args, param, sum(lengths))


def _is_given(names: Sequence[str], args: Sequence[str]) -> bool:
    """Return whether an option is among the words: `--ranks 2`, `--ranks=2`, `-n 2` or `-n2`."""
    short = tuple(name for name in names if not name.startswith("--"))
    return any(word.partition("=")[0] in names or word.startswith(short) for word in args)


def _raise_mistyped(args: list[str], option: str, known: Collection[str]) -> None:
    """Raise a `UserError` if one of the words looks like a misspelled `option`."""
    for i, word in enumerate(args):
        name, has_value, value = word.partition("=")
        is_close = difflib.get_close_matches(name.removeprefix("--"), [option.removeprefix("--")], n=1)
        if name.startswith("--") and name not in known and is_close:
            given = value if has_value else " ".join(args[i + 1 : i + 2])
            raise UserError("no such option", option=name, value=given, remedy=f"did you mean {option}?")


def _raise_without_option(ctx: Any, args: list[str], param: Any, num_arguments: int) -> None:
    """Raise a `UserError` if there are more words before the first option than the command has arguments."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), args))
    extra = words[num_arguments:]
    if not extra:
        return
    values = extra if param.multiple else extra[:1]
    named = [word for value in values for word in (param.opts[0], value)]
    root = ctx.find_root().info_name or ""
    program = root if root.startswith("nestrec ") else "nestrec"
    command = [*program.split(), *ctx.command_path.removeprefix(root).split()]
    remedy = shlex.join([*command, *words[:num_arguments], *named, *args[num_arguments + len(values) :]])
    raise UserError(f"needs its option {param.opts[0]}", option="argument", value=extra[0], remedy=f"write {remedy}")


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
            f"is in the package {package}, which is not installed", option="nestrec", value=name, remedy=remedy
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
