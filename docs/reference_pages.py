"""The reference pages of the site, made while it is built: public Python names, commands, and every dotted option."""

import sys
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.structure.files import File, Files

import nestrec
from nestrec.base.config_overrides import describe
from nestrec.cli.app import app
from nestrec.cli.options_command import CONFIGS, config_of, option_text
from nestrec.client import Client
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.pages import openapi
from nestrec.serving.http.routes import all_endpoints
from nestrec_bench.bench import BENCHES

sys.path.append(str(Path(__file__).parent))
from request_examples import examples_page


def on_files(files: Files, config: Any) -> Files:
    """A hook of mkdocs."""
    pages = {"api": _api(), "commands": _commands(), "options": _options(), "requests": _requests()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def _api() -> str:
    names = [name for name in nestrec.__all__ if name != "__version__"]
    modules = {name: f"{getattr(nestrec, name).__module__}.{name}" for name in names}
    parts = ["# Python", "Everything here is exported by `nestrec` itself."]
    return "\n\n".join([*parts, *(f"::: {path}" for path in modules.values())])


def _requests() -> str:
    return examples_page(openapi(all_endpoints(), LimitsConfig()), set(dir(Client)))


def _commands() -> str:
    parts = ["# Commands", "`nestrec COMMAND --help` prints the same."]
    root: Any = typer.main.get_command(app)
    for name, command in sorted(root.commands.items()):
        for words, one in _with_inner(name, command):
            parts.append(f"## nestrec {words}")
            parts.append(_plain(one.help or ""))
            rows = [f"| `{_name(p)}` | {_plain(getattr(p, 'help', '') or '')} |" for p in one.params]
            if rows:
                parts.append("\n".join(["| argument or option | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def _name(parameter: Any) -> str:
    return " ".join(parameter.opts) if parameter.param_type_name == "option" else str(parameter.name)


def _with_inner(name: str, command: Any) -> list[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    return [(name, command), *((f"{name} {word}", one) for word, one in sorted(inner.items()))]


def _options() -> str:
    parts = ["# Options", "`nestrec options COMMAND [WORD]` prints them, with the values of a recipe."]
    for words in ("train demo", "prepare log", *CONFIGS, *(f"bench {name}" for name in BENCHES)):
        if words == "demo":
            continue
        parts.append(f"## {words}")
        rows = ["| option | default | may be | meaning |", "| --- | --- | --- | --- |"]
        for field in describe(config_of(words.split())[0]):
            cells = (f"`--{field.name}`", f"`{option_text(field.value) or chr(39) * 2}`", field.allowed, field.meaning)
            rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def _plain(text: str) -> str:
    """Help without the marks of rich."""
    return _cell(text.replace("[bold]", "`").replace("[/bold]", "`")).replace("`\\[", "`[")
