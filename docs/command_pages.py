"""Generates the reference of the commands from their help texts, and the table of exit codes."""

import ast
import inspect
import re
from typing import Any

import typer.main
from markdown_text import code, escaped, page, table

from nestrec.base import errors
from nestrec.cli.app import app
from nestrec.cli.console import EXTERNAL_COMMANDS
from nestrec.cli.help_panels import COMMAND_PANELS, COMMON_OPTIONS, panel_of


def commands_page() -> str:
    """Return the page of all commands, by panel of the help."""
    root: Any = typer.main.get_command(app)
    parts = [
        "# Commands",
        "`nestrec COMMAND --help` prints the same. Commands with [dotted options](options.md) accept them in addition "
        "to the options listed here; `-` and `_` are equivalent in names of options.",
        table(["group", "commands"], [[panel, _command_links(names)] for panel, names in COMMAND_PANELS.items()]),
    ]
    for panel in COMMAND_PANELS:
        parts.append(f"## {panel}")
        for name, command in root.commands.items():
            if panel_of(name) == panel:
                parts += _command(name, command)
    return page(*parts, "## Exit codes", _EXIT_INTRO, exit_codes_table())


def _command_links(names: tuple[str, ...]) -> str:
    return ", ".join(f"[{name}](#nestrec-{name})" for name in names)


def _command(name: str, command: Any) -> list[str]:
    parts = [
        f"### nestrec {name}",
        _usage(name, command),
        *_help(command.help or ""),
        _parameters(command),
    ]
    if name in COMMON_OPTIONS:
        rows = [[code(f"{option} {value}"), escaped(text)] for option, value, text in COMMON_OPTIONS[name]]
        parts += ["Common options of the configuration:", table(["option", "meaning"], rows)]
    if name in EXTERNAL_COMMANDS:
        parts.append(_external(name))
    return parts


def _external(name: str) -> str:
    """Return the usage of a command of another package, as a table of its inner commands or of its parameters."""
    command: Any = typer.main.get_command(EXTERNAL_COMMANDS.find(name).app)
    inner = getattr(command, "commands", None)
    if inner is None:
        return _parameters(command)
    rows = [[code(word), _help(one.help or "")[0]] for word, one in sorted(inner.items())]
    return table(["NAME", "benchmark"], rows)


def _usage(name: str, command: Any) -> str:
    """Return the usage line of a command; that of a command of another package comes from the package."""
    if name in EXTERNAL_COMMANDS:
        command = typer.main.get_command(EXTERNAL_COMMANDS.find(name).app)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments]
    words = [f"{word}..." if p.nargs == -1 else word for word, p in zip(words, arguments, strict=True)]
    words = ["NAME", *words] if hasattr(command, "commands") else words
    return f"```sh\n{' '.join(['nestrec', name, *words, '[OPTIONS]'])}\n```"


def _help(text: str) -> list[str]:
    """Return the paragraphs of a help text as Markdown."""
    return [_paragraph(part) for part in re.split(r"\n\s*\n", inspect.cleandoc(text))]


def _paragraph(text: str) -> str:
    marked = re.sub(r"\[bold\](.*?)\[/bold\]", lambda found: code(" ".join(found[1].split())), text, flags=re.S)
    items = re.split(r"^- ", marked, flags=re.M)
    first, *rest = [escaped(" ".join(item.split())) for item in items]
    return "\n".join([*([first] if first else []), *(f"- {item}" for item in rest)])


def _parameters(command: Any) -> str:
    rows = [
        [code(_name(p)), _default(p), escaped(" ".join((getattr(p, "help", "") or "").split()))]
        for p in command.params
        if not getattr(p, "hidden", False)
    ]
    return table(["argument or option", "default", "meaning"], rows) if rows else ""


def _name(parameter: Any) -> str:
    return ", ".join(parameter.opts) if parameter.param_type_name == "option" else str(parameter.name).upper()


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if getattr(parameter, "is_flag", False) or parameter.default is None or callable(parameter.default):
        return ""
    return code(str(parameter.default))


_EXIT_INTRO = (
    "Commands exit with these codes. `nestrec launch` exits with the code of its ranks, so that a scheduler can decide "
    "whether to restart the job. Any other code is an unexpected error with a traceback, or a signal that ended the "
    "process."
)


def exit_codes() -> dict[int, tuple[str, str]]:
    """Return the name and meaning of each exit code, from the constants of `nestrec.base.errors`."""
    tree = ast.parse(inspect.getsource(errors))
    found = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(following, ast.Expr):
            name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
            if name.isupper() and isinstance(node.value.value, int) and not name.startswith("_"):
                found[node.value.value] = (name, " ".join(str(ast.literal_eval(following.value)).split()))
    return found


def exit_codes_table() -> str:
    """Return the table of exit codes."""
    rows = [["0", "", "The command succeeded."]]
    rows += [[str(number), code(name), escaped(meaning)] for number, (name, meaning) in exit_codes().items()]
    return table(["code", "constant in `nestrec.base.errors`", "meaning"], rows)
