"""The generated reference pages list every option, command, public name, route, metric and exit code."""

import dataclasses
import importlib
import inspect
import pydoc
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

import nestrec
import nestrec.client
from nestrec.base import errors
from nestrec.base.config_overrides import apply_overrides, field_docs
from nestrec.base.config_values import PluginConfig
from nestrec.cli.app import app
from nestrec.cli.help_panels import COMMAND_PANELS, COMMON_OPTIONS
from nestrec.cli.options_command import CONFIGS, find_config
from nestrec.data.formats.format_registry import FORMATS
from nestrec.models.backbone_registry import BACKBONES
from nestrec.pipeline.schedule_spec import SCHEDULES
from nestrec.serving.http.routes import all_endpoints
from nestrec.tasks.task_registry import TASKS
from nestrec.training.recipes import RECIPES
from nestrec_bench.bench import BENCHES

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    *(f"train {name}" for name in RECIPES),
    *(f"prepare {name}" for name in FORMATS.built_in_names),
    *(f"bench {name}" for name in BENCHES.built_in_names),
    *(name for name in CONFIGS if name != "demo"),
    "load-test",
]
"""Commands with dotted options, with every recipe, format and benchmark."""
PAGE_OF = {
    "train": ("options-train", "options-models"),
    "prepare": ("options-data",),
    "bench": ("options-bench",),
    "load-test": ("options-bench",),
    "serve": ("options-serve",),
    "create-key": ("options-serve",),
}
"""Pages with the options of a command; the other commands are on the page `options-batch`."""


def docs_module(name: str) -> Any:
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return docs_module("reference_pages").generated_pages()


def option_names(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of all options of a config: those of its values, and of all types that it could have."""
    hints = typing.get_type_hints(type(value) if not isinstance(value, type) else value, include_extras=True)
    for field in dataclasses.fields(value):
        name = f"{path}.{field.name}" if path else field.name
        current = None if isinstance(value, type) else getattr(value, field.name)
        if dataclasses.is_dataclass(current):
            yield from option_names(current, name)
        configs = list(configs_in(hints[field.name]))
        for entry, config in configs:
            yield from option_names(config, f"{name}{entry}")
        if not configs and not dataclasses.is_dataclass(current):
            yield name


def configs_in(hint: Any) -> Iterator[tuple[str, type]]:
    """Yield the config classes of a type hint, with the part of the option name that precedes their fields."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        yield "", typing.cast(type, hint)
    elif origin is typing.Annotated:
        plugins = [each.registry for each in hint.__metadata__ if isinstance(each, PluginConfig)]
        yield from (("", registry.find(kind).config) for registry in plugins for kind in registry.built_in_names)
    elif origin in (typing.Union, types.UnionType):
        for member in arguments:
            yield from configs_in(member)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and dataclasses.is_dataclass(arguments[1]):
        yield ".NAME", arguments[1]


def documented_options(text: str) -> list[str]:
    return re.findall(r"^\| `--([\w.]+)` \|", text, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_reference_lists_every_option(pages: dict[str, str], command: str) -> None:
    config, _ = find_config(command.split())
    names = PAGE_OF.get(command.split(maxsplit=1)[0], ("options-batch",))
    text = "\n".join(pages[f"reference/{name}.md"] for name in names)
    expected = set(option_names(config))
    assert len(expected) >= 1
    assert expected - set(documented_options(text)) == set()


def test_reference_lists_only_existing_options(pages: dict[str, str]) -> None:
    expected = {name for command in COMMANDS for name in option_names(find_config(command.split())[0])}
    optional_sections = {"balance.cost", "balance.power_tuning", "log"}
    for name in ("train", "models", "data", "serve", "batch", "bench"):
        found = set(documented_options(pages[f"reference/options-{name}.md"]))
        assert found - expected - optional_sections == set(), name


@pytest.mark.parametrize("kind", ["hstu", "fuxi", "sasrec"])
def test_reference_lists_options_of_every_backbone(pages: dict[str, str], kind: str) -> None:
    section = pages["reference/options-models.md"].partition(f"## Backbone {kind}\n")[2].partition("\n## ")[0]
    names = {f"task.encoder.{field.name}" for field in dataclasses.fields(BACKBONES.find(kind).config)}
    sections = {name for name in names if name.endswith(".attention")}
    assert names - sections - set(documented_options(section)) == set()


def test_reference_option_tables_have_meanings(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        if name.startswith("reference/options-"):
            rows = [line for line in text.splitlines() if line.startswith("| `--")]
            assert rows, name
            assert [row for row in rows if row.count(" | ") < 3 or row.endswith("|  |")] == []


def test_generated_tables_have_at_most_8_columns(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        rules = [line for line in text.splitlines() if line.strip().startswith("| ---")]
        assert [rule for rule in rules if rule.count("---") > 8] == [], name


def test_generated_code_lines_fit_90_columns(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        blocks = re.findall(r"^```\w+\n(.*?)^```", text, re.M | re.S)
        assert [line for block in blocks for line in block.splitlines() if len(line) > 90] == [], name


def test_generated_pages_are_in_the_navigation(pages: dict[str, str]) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in pages if f"- {name}\n" not in navigation] == []


def test_reference_groups_list_every_public_name_once() -> None:
    groups = docs_module("api_pages").GROUPS
    listed = [name for group in groups.values() for name in group.names]
    expected = {f"nestrec.{name}" for name in nestrec.__all__ if name != "__version__"}
    expected |= {f"nestrec.client.{name}" for name in ("Client", "AsyncClient", "UserHistory")}
    assert expected - set(listed) == set()
    assert len(listed) == len(set(listed))
    assert [name for name in listed if pydoc.locate(name) is None] == []


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings that the pages of the Python API show: of names, methods and fields."""
    for group in docs_module("api_pages").GROUPS.values():
        for name in group.names:
            value = pydoc.locate(name)
            yield name, inspect.getdoc(value) or ""
            if inspect.isclass(value):
                members = {key: each for key, each in vars(value).items() if not key.startswith("_")}
                routines = {key: each for key, each in members.items() if inspect.isroutine(each)}
                yield from ((f"{name}.{key}", inspect.getdoc(each) or "") for key, each in routines.items())
                fields = field_docs(value) if dataclasses.is_dataclass(value) else {}
                yield from ((f"{name}.{key}", text) for key, text in fields.items())


_SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes", "Example", "Examples", "Note")


def test_public_docstrings_render_as_markdown() -> None:
    """Two asterisks outside of code become emphasis, and a line `word:` with an indented block an admonition."""
    for name, text in public_docstrings():
        prose = re.sub(r"`[^`]*`", "", "\n".join(line for line in text.splitlines() if ">>>" not in line))
        paragraphs = [part for part in re.split(r"\n\s*\n", prose) if not re.match(r"\s*(\w+:\n)?\s*\.\.\. ", part)]
        emphasized = [part for part in paragraphs if re.search(r"(?<![*\w])\*(?=\S)[^*]*\S\*(?![*\w(])", part)]
        assert emphasized == [], name
        admonitions = re.findall(r"^([\w][\w -]*):[ ]*\n[ ]+\S", text, re.M)
        assert set(admonitions) <= set(_SECTIONS), name


def test_reference_lists_every_command_and_its_options(pages: dict[str, str]) -> None:
    text = pages["reference/commands.md"]
    commands: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for name, command in commands.items():
        section = text.partition(f"### nestrec {name}\n")[2].partition("\n### ")[0]
        options = {opt for p in command.params for opt in p.opts if p.param_type_name == "option"}
        assert [opt for opt in options if f"`{opt}" not in section and f", {opt}`" not in section] == [], name


def test_command_panels_contain_every_command() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert list(commands) == [name for names in COMMAND_PANELS.values() for name in names]


@pytest.mark.parametrize(("command", "name"), [(c, option[0]) for c, some in COMMON_OPTIONS.items() for option in some])
def test_common_options_exist(command: str, name: str) -> None:
    config, _ = find_config([command])
    assert name.removeprefix("--") in set(option_names(config))


def test_reference_lists_every_route_with_its_fields(pages: dict[str, str]) -> None:
    text = pages["reference/requests.md"]
    for endpoint in all_endpoints().values():
        section = text.partition(f"\n## {endpoint.method} {endpoint.path}\n")[2].partition("\n## ")[0]
        assert f"`{endpoint.status}`" in section, endpoint.path
        fields = () if endpoint.request is None else dataclasses.fields(endpoint.request)
        assert [field.name for field in fields if f"| `{field.name}` |" not in section] == []


def test_reference_lists_every_metric(pages: dict[str, str]) -> None:
    text = pages["reference/metrics.md"]
    sources = ["http/server_metrics.py", "fleet/gateway_metrics.py", "fleet/ray_serve.py"]
    for source in sources:
        code = (ROOT / "nestrec" / "serving" / source).read_text()
        names = set(re.findall(r'"(nestrec_\w+)"', code)) - {"nestrec_gateway"}  # the prefix of process metrics
        assert names, source
        assert [name for name in names if not re.search(rf"`{name}(_total|_info)?`", text)] == []


def test_reference_lists_every_exit_code(pages: dict[str, str]) -> None:
    codes = {name: value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    codes = {name: value for name, value in codes.items() if not name.startswith("_")}
    assert len(codes) >= 5
    for name, value in codes.items():
        assert f"| {value} | `{name}` |" in pages["reference/commands.md"]


def test_compatibility_page_covers_every_registry(pages: dict[str, str]) -> None:
    text = pages["choose/compatibility.md"]
    for registry in (TASKS, BACKBONES, SCHEDULES):
        assert [name for name in registry.built_in_names if f"| `{name}` |" not in text] == []
    inexact = {name for name in SCHEDULES.built_in_names if f"| `{name}` | no |" in text}
    assert inexact == {"stale", "semi_async"}


def test_configuration_page_describes_the_order_of_overrides() -> None:
    """A section is applied before the options inside of it, in any order of the words."""
    config, _ = find_config(["train", "demo"])
    for order in (("training", "training.epochs"), ("training.epochs", "training")):
        texts = {"training": '{"max_steps": 7}', "training.epochs": "3"}
        changed = apply_overrides(config, {name: texts[name] for name in order})
        assert (changed.training.max_steps, changed.training.epochs) == (7, 3)
