"""Helpers of the command line: help format, errors for missing options, commands of other packages, output of ranks.

A message that every rank of a launch would print is printed by one of them only.
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
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from nestrec.base.errors import UserError
from nestrec.base.lazy import INSTALL_BENCHMARKS
from nestrec.base.plugins import PluginRegistry
from nestrec.cli.former_names import FORMER_COMMANDS, FORMER_OPTIONS, command_remedy
from nestrec.cli.help_panels import COMMAND_PANELS, COMMON_OPTIONS, COMMON_PANEL, panel_of

TYPED_WORDS = "nestrec.typed_words"
"""Key in the `meta` of a command's context, for all words that were typed after the command's name."""

_SHOWS_HELP = "nestrec.shows_help"
"""Key in the `meta` of a command's context while its help is formatted."""


class _PlainFlags:
    """Mixin that hides the type of flags in the help, because flags do not take a value."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.display_type_rich = lambda ctx: None
        return params


class PlainCommand(_PlainFlags, TyperCommand):
    """Command with plain flags that reports misspelled and missing required options by name.

    Its help has a panel of common dotted options (`COMMON_OPTIONS`), which are not parameters of the command itself.
    Callbacks of its parameters can read all typed words (`TYPED_WORDS`).
    """

    def get_params(self, context: Any) -> list[Any]:
        params = super().get_params(context)
        return [*params, *self._common_options()] if context.meta.get(_SHOWS_HELP) else params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[_SHOWS_HELP] = True
        super().format_help(ctx, formatter)

    def _common_options(self) -> list[Any]:
        """Return the common dotted options as Typer parameters, for the help only."""

        def command() -> None: ...

        panel = f"{COMMON_PANEL} (nestrec options {self.name} lists all)"
        parameters = []
        for name, placeholder, description in COMMON_OPTIONS.get(str(self.name), ()):
            option = typer.Option(name, metavar=placeholder, help=description, rich_help_panel=panel)
            identifier = name.removeprefix("--").replace(".", "_")
            hint = Annotated[str | None, option]
            parameters.append(Parameter(identifier, Parameter.KEYWORD_ONLY, default=None, annotation=hint))
        vars(command)["__signature__"] = Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        helper = typer.Typer(add_completion=False)
        helper.command(add_help_option=False)(command)
        return list(typer.main.get_command(helper).params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = self._with_declared_hyphens(ctx, args)
        ctx.meta[TYPED_WORDS] = tuple(args)
        if not ctx.resilient_parsing and "--help" not in args:
            self._check_former_options(args)
            self._check_required_options(ctx, args)
        return super().parse_args(ctx, args)

    def _with_declared_hyphens(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the words with this command's own options as declared: `--warm-start` for `--warm_start`."""
        declared = {name.replace("_", "-"): name for param in self.get_params(ctx) for name in param.opts}
        found = []
        for word in args:
            name, equals, value = word.partition("=")
            is_option = name.startswith("--")
            found.append(declared.get(name.replace("_", "-"), name) + equals + value if is_option else word)
        return found

    def _check_former_options(self, args: list[str]) -> None:
        former = FORMER_OPTIONS.get(str(self.name), {})
        for i, word in enumerate(args):
            name, has_value, value = word.partition("=")
            if name in former:
                typed_value = value if has_value else " ".join(args[i + 1 : i + 2])
                raise UserError(
                    "no such option", option=name, value=typed_value, remedy=f"did you mean {former[name]}?"
                )

    def _check_required_options(self, ctx: Any, args: list[str]) -> None:
        params = self.get_params(ctx)
        options = [param for param in params if param.param_type_name == "option"]
        known = {name for param in options for name in param.opts}
        for param in options:
            if not param.required or _is_typed(param.opts, args):
                continue
            _raise_mistyped(args, param.opts[0], known)
            lengths = [each.nargs for each in params if each.param_type_name == "argument"]
            if ctx.allow_interspersed_args and min(lengths, default=0) >= 0:
                _raise_without_option(ctx, args, param, sum(lengths))


def _is_typed(names: Sequence[str], args: Sequence[str]) -> bool:
    """Return whether an option is among the words: `--ranks 2`, `--ranks=2`, `-n 2` or `-n2`."""
    short = tuple(name for name in names if not name.startswith("--"))
    return any(word.partition("=")[0] in names or word.startswith(short) for word in args)


def _raise_mistyped(args: list[str], option: str, known: Collection[str]) -> None:
    """Raise a `UserError` if one of the words looks like a misspelled `option`."""
    for i, word in enumerate(args):
        name, has_value, value = word.partition("=")
        is_close = difflib.get_close_matches(name.removeprefix("--"), [option.removeprefix("--")], n=1)
        if name.startswith("--") and name not in known and is_close:
            typed_value = value if has_value else " ".join(args[i + 1 : i + 2])
            raise UserError("no such option", option=name, value=typed_value, remedy=f"did you mean {option}?")


def _raise_without_option(ctx: Any, args: list[str], param: Any, num_arguments: int) -> None:
    """Raise a `UserError` if more words precede the first option than the command has arguments."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), args))
    extra = words[num_arguments:]
    if not extra:
        return
    values = extra if param.multiple else extra[:1]
    option_words = [word for value in values for word in (param.opts[0], value)]
    root = ctx.find_root().info_name or ""
    program = root if root.startswith("nestrec ") else "nestrec"
    command = [*program.split(), *ctx.command_path.removeprefix(root).split()]
    remedy = shlex.join([*command, *words[:num_arguments], *option_words, *args[num_arguments + len(values) :]])
    raise UserError(
        f"the option name {param.opts[0]} is missing", option="argument", value=extra[0], remedy=f"write {remedy}"
    )


class PlainGroup(_PlainFlags, TyperGroup):
    """Group of commands with plain flags."""


class RootGroup(PlainGroup):
    """The `nestrec` command itself, which reports former names of commands with the present ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in FORMER_COMMANDS and args[0] not in self.commands:
            raise UserError("no such command", option="nestrec", value=args[0], remedy=command_remedy(args[0], ()))
        return super().resolve_command(ctx, args)


def arrange_commands(app: typer.Typer) -> None:
    """Assign the commands of the root app to their panels, and sort them in the order of the help."""
    order = [name for names in COMMAND_PANELS.values() for name in names]
    for command in app.registered_commands:
        command.rich_help_panel = panel_of(_name_of(command))
    app.registered_commands.sort(key=lambda command: order.index(_name_of(command)))


def _name_of(command: Any) -> str:
    return command.name or typer.main.get_command_name(command.callback.__name__)


def use_plain_flags(app: typer.Typer) -> None:
    """Hide `<bool>` after flags in the help of all commands of an app."""
    app.info.cls = PlainGroup
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group.cls = PlainGroup
            use_plain_flags(group.typer_instance)


@dataclass(frozen=True, slots=True)
class ExternalCommand:
    """Command of another package, from the entry-point group `nestrec.commands`."""

    app: typer.Typer
    """Command, or group of commands."""
    options_of: Callable[[list[str]], tuple[Any, str]]
    """Maps the words after the command's name to its config and the remaining words, for `nestrec options`."""


EXTERNAL_COMMANDS: PluginRegistry[ExternalCommand] = PluginRegistry(
    "nestrec.commands", "command", {}, of=ExternalCommand
)
PASS_THROUGH_ALL = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of a command that forwards all its arguments, `--help` included."""


def external_command(name: str) -> ExternalCommand:
    """Return a command of the package nestrec-bench, or raise a `UserError` that names the package to install."""
    if name not in EXTERNAL_COMMANDS:
        problem = f"nestrec {name} requires the package nestrec-bench, which is not installed"
        raise UserError(problem, remedy=INSTALL_BENCHMARKS)
    return EXTERNAL_COMMANDS.find(name)


def run_external(name: str, arguments: list[str]) -> None:
    """Run a command of another package with all words that were typed after its name."""
    command = external_command(name)
    use_plain_flags(command.app)
    code = typer.main.get_command(command.app)(arguments, prog_name=f"nestrec {name}", standalone_mode=False)
    if code:
        raise typer.Exit(code)


PRINTED_ONCE_FOLDER = "NESTREC_PRINTED_ONCE"
"""Environment variable with a folder that all ranks of a launch share; it has an empty file per printed message."""


def print_once(text: str) -> None:
    """Print to standard error, unless another rank has printed the same text."""
    folder = os.environ.get(PRINTED_ONCE_FOLDER)
    if folder is not None:
        file = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest())
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        except OSError:
            pass  # print the message twice rather than not at all
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr)
