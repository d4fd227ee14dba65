"""Commands `nestrec bench NAME`: run a benchmark, print its tables and, with `--json`, write a result file.

The module of a benchmark is imported when the benchmark runs. The help is fast because the docstring is read from the
source file.
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

from nestrec.base.config_overrides import PASS_THROUGH, apply_overrides, parse_overrides
from nestrec.base.errors import UserError
from nestrec.base.files import check_file
from nestrec.cli.console import ExternalCommand
from nestrec_bench.bench import BENCHES

if TYPE_CHECKING:
    from nestrec_bench.bench import OutputPart, Row


app = typer.Typer(
    help="Run benchmarks and write reproducible result files. `nestrec options bench NAME` lists the options of a "
    "benchmark.",
    no_args_is_help=True,
)
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the rows into this result file.", callback=check_file)
]
PageFile = Annotated[Path | None, typer.Option(help="Also write the page of the benchmark, if it has one.")]


@app.callback()
def show_progress(context: typer.Context) -> None:
    """Show a progress bar on a terminal while a benchmark runs, but not for its help."""
    list(BENCHES)
    if "--help" not in sys.argv:
        from nestrec.report import progress_for

        context.with_resource(progress_for(f"bench {context.invoked_subcommand}"))


def _make_command(name: str) -> Callable[..., None]:
    def run(context: typer.Context, json: JsonFile = None, page: PageFile = None) -> None:
        run_bench(name, context.args, json, page)

    run.__name__ = name
    return run


def _help_of(name: str) -> str:
    """Return the docstring of a benchmark's module, which is read without importing the module.

    A broken benchmark of another package is reported only when it is run, because every `nestrec` command calls this.
    """
    try:
        spec = importlib.util.find_spec(BENCHES.module_of(name))
        source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text()
        return ast.get_docstring(ast.parse(source)) or ""
    except (Exception, SystemExit):  # an error in its source, or in its parent package, which is imported
        return ""


def _names() -> list[str]:
    """Return the names of all benchmarks, or only the built-in ones if two packages define the same name.

    The conflict is then reported by `show_progress`, so that it affects only the commands of benchmarks.
    """
    try:
        return list(BENCHES)
    except UserError:
        return list(BENCHES.built_in_names)


for _name in _names():
    app.command(_name, help=_help_of(_name), context_settings=PASS_THROUGH)(_make_command(_name))


def run_bench(name: str, arguments: Sequence[str], json: Path | None = None, page: Path | None = None) -> None:
    """Run a benchmark, print its results, and write the requested files.

    Args:
        name: Name of the benchmark.
        arguments: Its positional arguments and options, as typed.
        json: Result file to write.
        page: Page to write, for benchmarks with a page.
    """
    from nestrec.report.result_file import make_frame, save_frame

    bench = BENCHES.find(name)
    if page is not None and bench.page is None:
        raise UserError(
            "this benchmark does not write a page", option="--page", value=str(page), remedy="remove --page"
        )
    cfg = parse_config(name, arguments)
    rows: list[Row] = []

    def make_result(more: Mapping[str, Any]) -> dict[str, Any]:
        is_emulated = bench.is_emulated(cfg) or any(row.get("emulated", False) for row in rows)
        frame = make_frame(bench=name, command=_command_line(), rows=rows, emulated=is_emulated)
        return {**frame, **more}

    def add(row: "Row") -> None:
        _check_row(name, row)
        rows.append(row)
        if bench.progress_line is not None:
            typer.echo(bench.progress_line(row), err=True)
        if json is not None:
            save_frame(json, make_result({}))

    measured = bench.measure(cfg)
    if not isinstance(measured, Iterable):
        raise BENCHES.contract_error(name, "measure", f"returned {measured!r} instead of an iterable of rows")
    more = _consume(measured, add)
    _show(bench.show(rows, more) if bench.show is not None else [(name, rows)])
    if json is not None and rows:
        save_frame(json, make_result(more))
    if page is not None and bench.page is not None:
        bench.page(page, make_result(more))


def parse_config(name: str, arguments: Sequence[str]) -> Any:
    """Return the config of a benchmark for its arguments.

    Args:
        name: Name of the benchmark.
        arguments: Words after the name: positional arguments, then options. The values of a repeated option are joined.
    """
    bench = BENCHES.find(name)
    words = list(arguments)
    positional = words[: next((i for i, word in enumerate(words) if word.startswith("--")), len(words))]
    if positional and bench.argument is None:
        remedy = "write options as --option value"
        raise UserError("unexpected argument", option="argument", value=positional[0], remedy=remedy)
    overrides = parse_overrides(words[len(positional) :], ("json", "page"), joins_repeated=True)
    if positional:
        overrides = {str(bench.argument): ",".join(positional), **overrides}
    default = BENCHES.default_config(name, "config")
    return apply_overrides(default, {option.replace("-", "_"): value for option, value in overrides.items()})


@app.command()
def join(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Result files.")],
    json: Annotated[Path, typer.Option("--json", help="Joined result file to write.")],
    bench: Annotated[str, typer.Option(help="Name of the benchmark in the joined file.")] = "schedules",
) -> None:
    """Join the result files of several commands into one file."""
    from nestrec.report.result_file import join_frames, load_frame, save_frame

    save_frame(json, join_frames([load_frame(file) for file in files], bench=bench, command=_command_line()))


def _consume(measured: "Iterable[Row]", add: "Callable[[Row], None]") -> Mapping[str, Any]:
    """Call `add` with every row, and return the mapping that a generator returned, or an empty one."""
    rows = iter(measured)
    while True:
        try:
            row = next(rows)
        except StopIteration as end:
            return end.value or {}
        add(row)


def _check_row(name: str, row: Any) -> None:
    """Raise an error for an invalid row.

    Every row is checked as soon as it is measured: after the last one, the result file could no longer be written.
    """
    try:
        if isinstance(row, Mapping):
            encoded.dumps(row)
            return
        problem = "which is not a mapping of fields to values"
    except (TypeError, ValueError) as error:
        problem = f"which cannot be encoded as JSON ({error}); convert tensors and arrays by `item` and `tolist`"
    raise BENCHES.contract_error(name, "measure", f"returned the row {row!r}, {problem}")


def _show(parts: "Iterable[OutputPart]") -> None:
    from nestrec.report import print_rows

    for part in parts:
        if isinstance(part, str):
            typer.echo(part)
        elif part[1]:
            print_rows(part[1], title=part[0])


def _command_line() -> str:
    return shlex.join(["nestrec", *sys.argv[1:]])


def _options_of(words: list[str]) -> tuple[Any, str]:
    return BENCHES.default_config(words[0], "config", field="bench"), " ".join(words[1:])


COMMAND = ExternalCommand(app=app, options_of=_options_of)
