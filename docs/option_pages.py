"""Generates the reference of all dotted options, one page per group of commands.

The pages are generated from the types of the config fields, not from the values of a recipe: they contain the options
of every task, backbone, format and benchmark, and those of optional sections, which `nestrec options COMMAND` lists
only if they apply to the command.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from markdown_text import code, escaped, page, table

from nestrec.base.config import to_plain
from nestrec.base.config_overrides import field_docs
from nestrec.base.config_values import NumberRange, OneOf, PluginConfig
from nestrec.base.lazy import import_attribute
from nestrec.cli.console import external_command
from nestrec.cli.help_panels import COMMON_OPTIONS
from nestrec.cli.options_command import CONFIGS, option_text
from nestrec.data.formats.format_registry import FORMATS
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS
from nestrec.models.backbone_registry import BACKBONES
from nestrec.tasks.task_registry import TASKS
from nestrec.training.recipes import RECIPES
from nestrec.training.run_config import RunConfig
from nestrec_bench.bench import BENCHES

ENTRY = "NAME"
"""Stands for the name of an entry of a mapping, such as a table."""


@dataclass(frozen=True)
class Option:
    """One row of the reference."""

    name: str
    default: str
    values: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """A config class at a position in the tree of options."""

    path: str
    """Dotted name of the section; empty for the top level."""
    kind: str
    """Plugin or alternative that the section belongs to; empty if there is only one."""
    meaning: str
    options: list[Option]


def sections_of(cls: type, path: str = "", kind: str = "", meaning: str = "") -> Iterator[Section]:
    """Yield the sections of a config class: its own options first, then its nested configs, at any depth."""
    hints = typing.get_type_hints(cls, include_extras=True)
    docs = field_docs(cls)
    own: list[Option] = []
    inner: list[Section] = []
    for field in dataclasses.fields(cls):
        name = f"{path}.{field.name}" if path else field.name
        text = docs.get(field.name, "")
        nested = list(_nested(hints[field.name], name, text))
        if not nested or _is_optional(hints[field.name]):
            own.append(Option(name, _default(field), _values(hints[field.name]), text))
        inner += nested
    if own:
        yield Section(path, kind, meaning, own)
    yield from inner


def _nested(hint: Any, name: str, meaning: str) -> Iterator[Section]:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        yield from sections_of(typing.cast(type, hint), name, "", meaning)
    elif origin is typing.Annotated:
        for plugins in (each for each in hint.__metadata__ if isinstance(each, PluginConfig)):
            for kind in plugins.registry.built_in_names:
                yield from sections_of(plugins.registry.find(kind).config, name, kind, meaning)
    elif origin in (typing.Union, types.UnionType):
        for member in arguments:
            yield from _nested(member, name, meaning)
    elif isinstance(origin, type) and issubclass(origin, Mapping) and dataclasses.is_dataclass(arguments[1]):
        yield from sections_of(arguments[1], f"{name}.{ENTRY}", "", meaning)


def _is_optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return _text(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else _text(field.default_factory())


def _text(value: Any) -> str:
    return json.dumps(to_plain(value)) if dataclasses.is_dataclass(value) else option_text(value)


def _values(hint: Any) -> str:
    """Describe the values that a type hint allows, as Markdown."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Annotated:
        limits = [_limited(hint.__origin__, each) for each in hint.__metadata__]
        return next((text for text in limits if text), _values(hint.__origin__))
    if origin is typing.Literal:
        return ", ".join(code(str(choice)) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return ", ".join(dict.fromkeys(part for member in arguments for part in _values(member).split(", ")))
    if dataclasses.is_dataclass(hint):
        return "JSON"
    return _values_of_class(hint, origin, arguments)


def _values_of_class(hint: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin in (tuple, list):
        return f"list of {_values(arguments[0])}" if arguments[-1] in (Ellipsis, arguments[0]) else "JSON"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"{ENTRY}=VALUE,..."
    return code("none") if hint is type(None) else str(hint.__name__)


def _limited(cls: type, limit: Any) -> str:
    if isinstance(limit, OneOf):
        return ", ".join(code(name) for name in limit.known)
    return f"{cls.__name__} ({limit})" if isinstance(limit, NumberRange) else ""


def _table(options: list[Option]) -> str:
    rows = [
        [code(f"--{option.name}"), _default_cell(option.default), option.values, escaped(option.meaning)]
        for option in options
    ]
    return table(["option", "default", "values", "meaning"], rows)


def _default_cell(text: str) -> str:
    return text if text == "required" else code(text or "''")


def _section_text(section: Section, heading: str, level: str = "##") -> str:
    return page(f"{level} {heading}", escaped(section.meaning), _table(section.options)).rstrip()


def _heading(section: Section) -> str:
    path = section.path or "General"
    return f"{path}, {section.kind}" if section.kind else path


def option_pages() -> dict[str, str]:
    """Return the pages of the options by name."""
    return {
        "options": _index_page(),
        "options-train": _training_page(),
        "options-models": _models_page(),
        "options-data": _data_page(),
        "options-serve": _serving_page(),
        "options-batch": _batch_page(),
        "options-bench": _bench_page(),
        "recipe-values": _recipes_page(),
    }


_PAGES = (
    ("options-train", "`train`, `tune`, `plan`, `demo`", "data, batches, parallelism, optimizer, pipeline"),
    ("options-models", "`train`, `tune`, `plan`, `demo`", "tasks, backbones and embedding tables"),
    ("options-data", "`prepare`, `append`", "input formats"),
    ("options-serve", "`serve`, `create-key`", "server, engine, KV cache, security"),
    ("options-batch", "`export`, `publish`, `recommend`, `embed`, `train-stream`", "export, batch inference, streams"),
    ("options-bench", "`bench NAME`, `load-test`", "benchmarks and load generator"),
    ("recipe-values", "`train RECIPE`", "values that each recipe sets"),
)


def _index_page() -> str:
    common = [
        page(
            f"## Common options of {command}",
            table(["option", "meaning"], [[code(f"{name} {value}"), escaped(text)] for name, value, text in options]),
        )
        for command, options in COMMON_OPTIONS.items()
    ]
    return page(
        "# Options",
        "Dotted options set fields of the configuration of a command: `--training.epochs 3` sets the field `epochs` "
        "of the section `training`. [Configuration](configuration.md) describes how values are written and which "
        "value takes precedence. `nestrec options COMMAND [WORD]` prints the options of a command, with the values of "
        "a recipe; an unknown name is an error that suggests the nearest names.",
        table(["page", "commands", "content"], [[f"[{page_title(n)}]({n}.md)", c, t] for n, c, t in _PAGES]),
        "In the column *values*, `none` disables an option or selects the behavior that the text describes. A mapping "
        "is written as `NAME=VALUE,...`, a list as values with commas between them, and a section as JSON. Default "
        "values are those of the configuration classes; [recipes](recipe-values.md) set others.",
        *common,
    )


_TITLES = {
    "options-train": "Options: training",
    "options-models": "Options: tasks, models and tables",
    "options-data": "Options: data",
    "options-serve": "Options: server",
    "options-batch": "Options: export, inference and streams",
    "options-bench": "Options: benchmarks",
    "recipe-values": "Values of the recipes",
}


def page_title(name: str) -> str:
    """Return the title of a page of options."""
    return _TITLES[name]


def _training_page() -> str:
    sections = [s for s in sections_of(RunConfig) if not s.path.startswith(("task", "tables"))]
    return page(
        f"# {_TITLES['options-train']}",
        "Options of `nestrec train`, `tune`, `plan` and `demo` that do not depend on the task. The options of tasks, "
        "backbones and tables are on [their own page](options-models.md).",
        *(_section_text(section, _heading(section)) for section in sections),
    )


def _models_page() -> str:
    sections = list(sections_of(RunConfig))
    parts = [
        f"# {_TITLES['options-models']}",
        "The recipe selects the task and the backbone; `--task.encoder.kind` cannot change the backbone. To replace "
        "it, set its section as JSON, with the maximum length of the recipe: "
        '`--task.encoder \'{"kind": "sasrec", "dim": 48, "max_length": 64}\'` for `demo`.',
    ]
    for kind in TASKS.built_in_names:
        parts.append(f"## Task {kind}")
        parts += [_section_text(s, f"{s.path} ({kind})", "###") for s in _sections_of_task(kind)]
    for kind in BACKBONES.built_in_names:
        parts += [f"## Backbone {kind}", "For the tasks `retrieval` and `ranking`."]
        found = sections_of(BACKBONES.find(kind).config, "task.encoder", kind, "")
        parts += [_section_text(s, f"{s.path} ({kind})", "###") for s in found]
    return page(*parts, *_tables_parts(sections), *_row_optimizer_parts())


def _sections_of_task(kind: str) -> list[Section]:
    """Return the sections of a task without those of its backbones, which have their own headings."""
    found = sections_of(TASKS.find(kind).config, "task", kind)
    return [s for s in found if not (s.path.startswith("task.encoder") and _has_plugin_encoder(kind))]


def _has_plugin_encoder(kind: str) -> bool:
    hints = typing.get_type_hints(TASKS.find(kind).config, include_extras=True)
    return any(isinstance(each, PluginConfig) for each in getattr(hints["encoder"], "__metadata__", ()))


def _tables_parts(sections: list[Section]) -> list[str]:
    (tables,) = [s for s in sections if s.path == f"tables.{ENTRY}"]
    text = "NAME is the name of a table, of a feature without its prefix, or `*` for all tables."
    return ["## Embedding tables", text, _table(tables.options)]


def _row_optimizer_parts() -> list[str]:
    rows = [
        [code(name), ", ".join(code(field) for field in sorted(ROW_OPTIMIZERS.find(name).reads)) or "none"]
        for name in ROW_OPTIMIZERS.built_in_names
    ]
    text = "Fields of `--task.table_optimizer` that each row optimizer uses; setting another one is an error."
    return ["## Row optimizers", text, table(["kind", "fields"], rows)]


def _data_page() -> str:
    parts = [
        f"# {_TITLES['options-data']}",
        "Options of `nestrec prepare FORMAT INPUT OUTPUT` by format. `nestrec append` accepts the options of the "
        "format of its dataset.",
    ]
    for format in FORMATS.built_in_names:
        parts += [f"## Format {format}", escaped(FORMATS.find(format).description)]
        sections = list(sections_of(FORMATS.find(format).options))
        parts += [_section_text(s, f"{format}: {s.path}", "###") if s.path else _table(s.options) for s in sections]
    return page(*parts)


def _command_parts(command: str) -> list[str]:
    sections = sections_of(import_attribute(CONFIGS[command]))
    return [_section_text(s, f"{command}: {s.path}", "###") if s.path else _table(s.options) for s in sections]


def _serving_page() -> str:
    intro = "Options of `nestrec serve`, and of `nestrec create-key`, which writes the key file of a server."
    parts = [f"# {_TITLES['options-serve']}", intro]
    for command in ("serve", "create-key"):
        parts += [f"## nestrec {command}", *_command_parts(command)]
    return page(*parts)


def _batch_page() -> str:
    parts = [f"# {_TITLES['options-batch']}", "Options of the commands that read a trained run."]
    for command in ("export", "publish", "recommend", "embed", "train-stream"):
        parts += [f"## nestrec {command}", *_command_parts(command)]
    return page(*parts)


def _bench_page() -> str:
    intro = "Options of `nestrec bench NAME` and `nestrec load-test`, from the package `nestrec-bench`."
    parts = [f"# {_TITLES['options-bench']}", intro]
    for name in BENCHES.built_in_names:
        parts += [
            f"## nestrec bench {name}",
            *_bench_parts(f"{name}: ", external_command("bench").options_of([name])[0]),
        ]
    return page(*parts, "## nestrec load-test", *_bench_parts("", external_command("load-test").options_of([])[0]))


def _bench_parts(prefix: str, config: Any) -> list[str]:
    sections = list(sections_of(type(config)))
    if not sections:
        return ["This benchmark does not have options."]
    return [_section_text(s, f"{prefix}{s.path}", "###") if s.path else _table(s.options) for s in sections]


def _recipes_page() -> str:
    parts = [
        f"# {_TITLES['recipe-values']}",
        "Options that each recipe sets to other values than the defaults of the configuration. "
        "`nestrec train auto` chooses values by the statistics of a dataset and prints the reasons.",
    ]
    for name, make in RECIPES.items():
        cfg = make()
        rows = [[code(f"--{option}"), code(value or "''")] for option, value in _changed_values(cfg)]
        description = escaped(" ".join((make.__doc__ or "").split()))
        parts += [f"## {name}", description, _collapsed("Values", table(["option", "value"], rows))]
    return page(*parts)


def _collapsed(title: str, text: str) -> str:
    indented = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? note "{title}"\n\n{indented}'


def _changed_values(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the options of a recipe that differ from the default values, nested ones included."""
    task: Any = cfg.task
    default_task = TASKS.default_config(task.kind, "config")
    if hasattr(task, "encoder") and task.encoder.kind in BACKBONES:
        encoder = BACKBONES.default_config(task.encoder.kind, "config")
        default_task = dataclasses.replace(default_task, encoder=encoder)
    yield from _differences(cfg, RunConfig(name="", task=default_task), "")


def _differences(value: Any, default: Any, path: str) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(value):
        name = f"{path}.{field.name}" if path else field.name
        mine = getattr(value, field.name)
        other = getattr(default, field.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(other):
            yield from _differences(mine, other, name)
        elif mine != other or field.name == "kind":
            yield name, _text(mine)
