"""`nestrec options`: every dotted option of a command, with its value here, what it may be, and what it is for."""

import shlex
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nestrec.base.config_overrides import FieldDoc, describe
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.lazy import import_attribute
from nestrec.cli.console import external_command

CONFIGS = {
    "demo": "nestrec.training.recipes.dataset_recipes:demo",
    "embed": "nestrec.inference.batch_inference:BatchJobConfig",
    "export": "nestrec.exporters.servable_writer:ExportConfig",
    "follow": "nestrec.training.stream_trainer:StreamConfig",
    "serve": "nestrec.serving.http.serve_config:ServeConfig",
    "key": "nestrec.serving.security.auth:ApiKeyOptions",
    "publish": "nestrec.exporters.version_publisher:PublishRunConfig",
    "recommend": "nestrec.inference.batch_inference:BatchJobConfig",
}
"""What commands build from dotted options; `train`, `plan`, `tune` build recipes, `prepare` and `bench` members."""


def config_of(words: list[str], commands: Collection[str] = ()) -> tuple[Any, str]:
    """What a command is configured by, from its words (`train demo`, `prepare log`), and what is left to look for."""
    command, *rest = words
    if command in ("train", "plan", "tune"):
        from nestrec.training.recipes import recipe
        from nestrec.training.recipes.auto_recipe import NAME as AUTO

        if rest[:1] == [AUTO]:
            raise _of_auto(command, rest[1:])
        return recipe(rest[0] if rest else "demo"), " ".join(rest[1:])
    if command in ("prepare", "append"):
        from nestrec.data.formats.format_registry import FORMATS

        format = rest.pop(0) if rest and rest[0] in FORMATS else "log"
        return FORMATS.by_default(format, "options"), " ".join(rest)
    if command == "bench" and not rest:
        remedy = "name a bench, such as `nestrec options bench stores`; `nestrec bench --help` lists them"
        raise UserError("each bench has options of its own", option="command", value=command, remedy=remedy)
    if command in ("bench", "replay"):
        return external_command(command).options_of(rest)
    if command not in CONFIGS:
        raise _without_options(command, commands)
    return import_attribute(CONFIGS[command])(), " ".join(rest)


def _of_auto(command: str, searched: list[str]) -> UserError:
    """Returns the error that names the recipes whose options `auto` takes."""
    from nestrec.training.recipes.auto_recipe import OPTIONS_OF

    lines = (shlex.join(["nestrec", "options", command, recipe, *searched]) for recipe in OPTIONS_OF.values())
    remedy = "; ".join(f"{line} ({task})" for line, task in zip(lines, OPTIONS_OF, strict=True))
    problem = "takes the options of the recipe of its task, and chooses their values from a dataset"
    return UserError(problem, option="RECIPE", value="auto", remedy=remedy)


def _without_options(command: str, commands: Collection[str]) -> UserError:
    if command in commands:
        remedy = f"see `nestrec {command} --help`"
        return UserError("takes no dotted options", option="command", value=command, remedy=remedy)
    known = ["train", "plan", "tune", "prepare", "append", "bench", "replay", *CONFIGS]
    return UserError("is not a command", option="command", value=command, remedy=did_you_mean(command, known))


def show_commands() -> None:
    """Print the commands that have dotted options, as they are asked about."""
    print("Commands with dotted options; a word at the end searches names and meanings:")
    with_a_name = ("train RECIPE", "plan RECIPE", "tune RECIPE", "prepare FORMAT", "append FORMAT", "bench NAME")
    for command in (*with_a_name, "replay", *CONFIGS):
        print(f"  nestrec options {command}")
    print("`nestrec recipes`, `nestrec formats` and `nestrec bench --help` list the recipes, formats and benches.")


def show_options(words: list[str], commands: Collection[str] = ()) -> None:
    """Print the options whose name or meaning holds the last word, or all of them."""
    config, wanted = config_of(words, commands)
    chosen = list(_chosen(config, wanted))
    if not chosen:
        remedy = f"see all: nestrec options {' '.join(words[:-1])}"
        raise UserError("is in no option's name or meaning", option="word", value=wanted, remedy=remedy)
    width = min(shutil.get_terminal_size().columns, 120)
    for field in chosen:
        print(f"--{field.name} {shlex.quote(option_text(field.value))}  ({field.allowed})")
        print(textwrap.fill(field.meaning, width, initial_indent="    ", subsequent_indent="    "))


def _chosen(config: Any, wanted: str) -> Iterator[FieldDoc]:
    for field in describe(config):
        if wanted.lower() in f"{field.name} {field.meaning}".lower():
            yield field


def option_text(value: Any) -> str:
    """As it can be given back to the command."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={option_text(part)}" for name, part in value.items())
    if isinstance(value, tuple | list):
        return ",".join(option_text(part) for part in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
