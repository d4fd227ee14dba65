"""`nestrec options`: lists the dotted options of a command with their values, allowed values and documentation."""

import contextlib
import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nestrec.base.config_overrides import FieldDoc, describe_fields
from nestrec.base.errors import UserError
from nestrec.base.lazy import import_attribute
from nestrec.cli.console import external_command
from nestrec.cli.former_names import command_remedy

CONFIGS = {
    "demo": "nestrec.training.recipes.dataset_recipes:demo",
    "embed": "nestrec.inference.batch_inference:BatchJobConfig",
    "export": "nestrec.exporters.servable_writer:ExportConfig",
    "train-stream": "nestrec.training.stream_trainer:StreamConfig",
    "serve": "nestrec.serving.http.serve_config:ServeConfig",
    "create-key": "nestrec.serving.security.auth:ApiKeyOptions",
    "publish": "nestrec.exporters.version_publisher:PublishRunConfig",
    "recommend": "nestrec.inference.batch_inference:BatchJobConfig",
}
"""Config of each command with a fixed config; others depend on the recipe, the dataset format or the benchmark."""
_CONFIG_MODULES = {
    **dict.fromkeys(("train", "plan", "tune"), "nestrec.training.recipes"),
    **dict.fromkeys(("prepare", "append"), "nestrec.data.formats.format_registry"),
    **dict.fromkeys(("bench", "load-test"), "nestrec_bench"),
}
"""Module that provides the configs of each other command."""


def find_config(words: list[str], commands: Collection[str] = ()) -> tuple[Any, str]:
    """Find the config of a command.

    Args:
        words: Words that name it, such as `train demo` or `prepare log`, and a word to search for.
        commands: Names of all commands, for error messages.

    Returns:
        The config with its default values, and the remaining words.
    """
    command, *rest = words
    if command in ("train", "plan", "tune"):
        from nestrec.training.recipes import recipe

        if _is_auto_recipe(words):
            raise _auto_recipe_error(command, rest[1:])
        return recipe(rest[0] if rest else "demo"), " ".join(rest[1:])
    if command in ("prepare", "append"):
        from nestrec.data.formats.format_registry import FORMATS

        format = rest.pop(0) if rest and rest[0] in FORMATS else "log"
        return FORMATS.default_config(format, "options"), " ".join(rest)
    if command == "bench" and not rest:
        remedy = "add its name, such as `nestrec options bench stores`; `nestrec bench --help` lists them"
        raise UserError("the name of a benchmark is missing", option="command", value=command, remedy=remedy)
    if command in ("bench", "load-test"):
        return external_command(command).options_of(rest)
    if command not in CONFIGS:
        raise _no_options_error(command, commands)
    return import_attribute(CONFIGS[command])(), " ".join(rest)


def undotted_options(command: Any, words: Sequence[str]) -> set[str]:
    """Return the options of a command whose names have no dot, without hyphens.

    The config of the command is used only if its module is imported: otherwise the error that is printed does not
    concern its options, and the import would delay the error message.

    Args:
        command: The command as a Click command; None if there is no such command.
        words: Words of the command line.
    """
    options = _parameter_names(command)
    module = _CONFIG_MODULES.get(words[0]) or CONFIGS.get(words[0], "").partition(":")[0]
    if module in sys.modules:
        with contextlib.suppress(UserError):
            config, _ = find_config(list(words[:2]))
            options |= {field.name for field in describe_fields(config) if "." not in field.name}
    return options


def _parameter_names(command: Any, *, are_flags: bool = False) -> set[str]:
    """Return the options that a command itself declares, or only its flags, as names of config fields."""
    return {
        name.removeprefix("--").replace("-", "_")
        for each in getattr(command, "params", ())
        for name in each.opts
        if each.param_type_name == "option" and (each.is_flag or not are_flags)
    }


def _auto_recipe_error(command: str, searched: list[str]) -> UserError:
    """Return the error that refers to the recipes with the same options as `auto`."""
    from nestrec.training.recipes.auto_recipe import RECIPE_WITH_SAME_OPTIONS

    lines = (
        shlex.join(["nestrec", "options", command, recipe, *searched]) for recipe in RECIPE_WITH_SAME_OPTIONS.values()
    )
    remedy = "; ".join(f"{line} ({task})" for line, task in zip(lines, RECIPE_WITH_SAME_OPTIONS, strict=True))
    problem = "the options depend on the task, and their values on a dataset"
    return UserError(problem, option="RECIPE", value="auto", remedy=remedy)


def _no_options_error(command: str, commands: Collection[str]) -> UserError:
    if command in commands:
        remedy = f"see `nestrec {command} --help`"
        return UserError("this command does not have dotted options", option="command", value=command, remedy=remedy)
    known = ["train", "plan", "tune", "prepare", "append", "bench", "load-test", *CONFIGS]
    return UserError("no such command", option="command", value=command, remedy=command_remedy(command, known))


def show_commands() -> None:
    """Print how to list the options of each command that has dotted options."""
    print("Commands with dotted options; add a word to search names and descriptions:")
    with_argument = ("train RECIPE", "plan RECIPE", "tune RECIPE", "prepare FORMAT", "append FORMAT", "bench NAME")
    for command in (*with_argument, "load-test", *CONFIGS):
        print(f"  nestrec options {command}")
    print("`nestrec recipes`, `nestrec formats` and `nestrec bench --help` list the recipes, formats and benchmarks.")


def show_options(words: list[str], commands: Mapping[str, Any]) -> None:
    """Print the options whose name or description contains the last word, or all options.

    Args:
        words: Words that name a command, and a word to search for.
        commands: All commands by name, as Click commands.
    """
    if _is_auto_recipe(words):
        _show_options_of_auto(words)
        return
    config, search_word = find_config(words, commands)
    flags = _parameter_names(commands.get(words[0]), are_flags=True)
    options = list(_matching_options(config, search_word))
    if not options:
        remedy = f"list all options: nestrec options {' '.join(words[:-1])}"
        raise UserError(
            "not found in the name or description of any option", option="word", value=search_word, remedy=remedy
        )
    for field in options:
        if field.name in flags:
            print(f"--{field.name}  (flag without a value)")
        else:
            is_null = field.value is None and "null" in field.allowed.split(" | ")
            value = "null" if is_null else option_text(field.value)
            print(f"--{field.name} {shlex.quote(value)}  ({field.allowed})")
        _print_meaning(field)


def _print_meaning(field: FieldDoc) -> None:
    width = min(shutil.get_terminal_size().columns, 120)
    print(textwrap.fill(field.meaning, width, initial_indent="    ", subsequent_indent="    "))


def _is_auto_recipe(words: Sequence[str]) -> bool:
    from nestrec.training.recipes.auto_recipe import NAME as AUTO

    return words[0] in ("train", "plan", "tune") and list(words[1:2]) == [AUTO]


def _show_options_of_auto(words: Sequence[str]) -> None:
    """Print the options that `auto` has for every task, without values, and refer to those of each task."""
    from nestrec.training.recipes import recipe
    from nestrec.training.recipes.auto_recipe import RECIPE_WITH_SAME_OPTIONS

    search_word = " ".join(words[2:])
    first, *others = (
        {field.name: field for field in _matching_options(recipe(name), search_word)}
        for name in RECIPE_WITH_SAME_OPTIONS.values()
    )
    shared = [field for field in first.values() if all(field.name in other for other in others)]
    refer_to_tasks = _auto_recipe_error(words[0], list(words[2:]))
    if not shared:
        raise refer_to_tasks
    for field in shared:
        print(f"--{field.name}  ({field.allowed})")
        _print_meaning(field)
    print("These are the options of all tasks. `auto` chooses their values for a dataset.")
    print(f"Options of each task: {refer_to_tasks.remedy}")


def _matching_options(config: Any, search_word: str) -> Iterator[FieldDoc]:
    for field in describe_fields(config):
        if search_word.lower() in f"{field.name} {field.meaning}".lower():
            yield field


def option_text(value: Any) -> str:
    """Return a value as it would be typed on the command line."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={option_text(part)}" for name, part in value.items())
    if isinstance(value, tuple | list):
        return ",".join(option_text(part) for part in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
