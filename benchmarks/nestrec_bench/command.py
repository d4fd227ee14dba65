"""`nestrec bench NAME`: a command for every bench. Each prints its tables and, with `--json`, writes a result file.

A bench is imported when it runs, so that help answers at once: its docstring is read from the source.
"""

import ast
import importlib.util
import json as encoded
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestrec.base.config_overrides import PASSED_ON, parse_overrides, with_overrides
from nestrec.base.errors import UserError
from nestrec.base.files import check_file
from nestrec.cli.console import ExternalCommand
from nestrec_bench.bench import BENCHES

if TYPE_CHECKING:
    from nestrec_bench.bench import Row, Shown


app = typer.Typer(
    help="Measure, and write result files that anyone can repeat. `nestrec options bench NAME` lists the fields that a "
    "benchmark takes as options.",
    no_args_is_help=True,
)
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the rows into this result file.", callback=check_file)
]
PageFile = Annotated[Path | None, typer.Option(help="Also write the bench's page, where it has one.")]


@app.callback()
def show_progress(context: typer.Context) -> None:
    """A bar for as long as a benchmark runs, on a terminal; its help and its result do not need one."""
    list(BENCHES)
    if "--help" not in sys.argv:
        from nestrec.report import progress_for

        context.with_resource(progress_for(f"bench {context.invoked_subcommand}"))


def _command_of(name: str) -> Callable[..., None]:
    def run(context: typer.Context, json: JsonFile = None, page: PageFile = None) -> None:
        run_bench(name, context.args, json, page)

    run.__name__ = name
    return run


def _help_of(name: str) -> str:
    """The docstring of a bench's module, read without importing it. One of another package that cannot be read is told
    when it is run: all commands come by here."""
    try:
        spec = importlib.util.find_spec(BENCHES.module_of(name))
        source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text()
        return ast.get_docstring(ast.parse(source)) or ""
    except (Exception, SystemExit):  # of its source, or of the package around it, which is imported
        return ""


def _names() -> list[str]:
    """Where two packages bring one name, ours: whoever asks for a bench is told (`show_progress`), and no other command
    ends by it."""
    try:
        return list(BENCHES)
    except UserError:
        return list(BENCHES.own)


for _name in _names():
    app.command(_name, help=_help_of(_name), context_settings=PASSED_ON)(_command_of(_name))


def run_bench(name: str, arguments: Sequence[str], json: Path | None = None, page: Path | None = None) -> None:
    """Measure, show, and write what is asked for."""
    from nestrec.report.result_file import make_frame, save_frame

    bench = BENCHES.find(name)
    if page is not None and bench.page is None:
        raise UserError("has no page", option="--page", value=str(page), remedy="leave --page out")
    cfg = configured(name, arguments)
    rows: list[Row] = []

    def frame(more: Mapping[str, Any]) -> dict[str, Any]:
        is_emulated = bench.is_emulated(cfg) or any(row.get("emulated", False) for row in rows)
        made = make_frame(bench=name, command=_typed(), rows=rows, emulated=is_emulated)
        return {**made, **more}

    def keep(row: "Row") -> None:
        _check_row(name, row)
        rows.append(row)
        if bench.said is not None:
            typer.echo(bench.said(row), err=True)
        if json is not None:
            save_frame(json, frame({}))

    measured = bench.measure(cfg)
    if not isinstance(measured, Iterable):
        raise BENCHES.broken(name, "measure", f"gives {measured!r}, which holds no rows")
    more = _each(measured, keep)
    _show(bench.show(rows, more) if bench.show is not None else [(name, rows)])
    if json is not None and rows:
        save_frame(json, frame(more))
    if page is not None and bench.page is not None:
        bench.page(page, frame(more))


def configured(name: str, arguments: Sequence[str]) -> Any:
    """The config of a bench from what was typed behind its name: bare words first, then options, some repeated."""
    bench = BENCHES.find(name)
    words = list(arguments)
    bare = words[: next((i for i, word in enumerate(words) if word.startswith("--")), len(words))]
    if bare and bench.argument is None:
        raise UserError("does not belong to an option", option="argument", value=bare[0], remedy="write --name value")
    overrides = parse_overrides(words[len(bare) :], ("json", "page"), joins_repeated=True)
    if bare:
        overrides = {str(bench.argument): ",".join(bare), **overrides}
    default = BENCHES.by_default(name, "config")
    return with_overrides(default, {option.replace("-", "_"): value for option, value in overrides.items()})


@app.command()
def join(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Result files.")],
    json: Annotated[Path, typer.Option("--json", help="The file that holds all of them.")],
    bench: Annotated[str, typer.Option(help="What the joined file calls itself.")] = "schedules",
) -> None:
    """Put result files of several commands into one."""
    from nestrec.report.result_file import join_frames, load_frame, save_frame

    save_frame(json, join_frames([load_frame(file) for file in files], bench=bench, command=_typed()))


def _each(measured: "Iterable[Row]", keep: "Callable[[Row], None]") -> Mapping[str, Any]:
    """Hands on every row; what a generator returned at its end."""
    rows = iter(measured)
    while True:
        try:
            row = next(rows)
        except StopIteration as end:
            return end.value or {}
        keep(row)


def _check_row(name: str, row: Any) -> None:
    """Told at its first row, and not when all is measured and nothing of it can be written."""
    try:
        if isinstance(row, Mapping):
            encoded.dumps(row)
            return
        problem = "which is no mapping of fields to values"
    except (TypeError, ValueError) as error:
        problem = f"which no result file can hold ({error}); tensors and arrays have `item` and `tolist`"
    raise BENCHES.broken(name, "measure", f"gives the row {row!r}, {problem}")


def _show(parts: "Iterable[Shown]") -> None:
    from nestrec.report import print_rows

    for part in parts:
        if isinstance(part, str):
            typer.echo(part)
        elif part[1]:
            print_rows(part[1], title=part[0])


def _typed() -> str:
    """What was typed."""
    return shlex.join(["nestrec", *sys.argv[1:]])


def _options_of(words: list[str]) -> tuple[Any, str]:
    return BENCHES.by_default(words[0], "config", field="bench"), " ".join(words[1:])


COMMAND = ExternalCommand(app=app, options_of=_options_of)
