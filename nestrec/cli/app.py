"""Entry point of the `nestrec` command. `commands` has one module per group of commands; next to it are their outputs.

Heavy imports are inside the commands, so that `nestrec --help` is fast. After the first paragraph, help texts keep the
line breaks of the docstring, which must fit a terminal of 80 columns. Examples are list items; the documentation page
of the commands shows them, too.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.main

import nestrec
from nestrec.base import errors
from nestrec.base.errors import NonFiniteError, PeerLostError, UserError
from nestrec.base.process import enable_huge_pages, exit_process
from nestrec.cli.commands import data_commands, model_commands, run_commands, serving_commands
from nestrec.cli.console import (
    PASS_THROUGH_ALL,
    RootGroup,
    arrange_commands,
    print_once,
    run_external,
    use_plain_flags,
)
from nestrec.cli.options_command import undotted_options

app = typer.Typer(
    help="""Train and serve large sequence recommenders.

    Start with [bold]nestrec demo[/bold], which generates its data and takes a few minutes
    on two cores. Then use your own logs:

    - [bold]nestrec prepare log events.csv data/mine --log.user uid --log.item iid
      --log.time ts --log.time_unit iso[/bold]
    - [bold]nestrec train auto --data.folder data/mine --output runs/mine[/bold]
    - [bold]nestrec report runs/mine[/bold]
    - [bold]nestrec export runs/mine models/mine[/bold]
    - [bold]nestrec serve --model models/mine[/bold]

    [bold]nestrec COMMAND --help[/bold] shows examples of each command.
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for group in (run_commands.app, data_commands.app, model_commands.app, serving_commands.app):
    app.registered_commands += group.registered_commands


@app.command(context_settings=PASS_THROUGH_ALL, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Run a benchmark and write a reproducible result file (needs nestrec-bench).

    In a clone of the repository: pip install ./benchmarks

    - [bold]nestrec bench --help[/bold]: list the benchmarks
    - [bold]nestrec bench NAME --json FILE[/bold]
    - [bold]nestrec options bench NAME[/bold]: list the options of a benchmark
    """
    run_external("bench", context.args)


@app.command("load-test", context_settings=PASS_THROUGH_ALL, add_help_option=False)
def load_test(context: typer.Context) -> None:
    """Load-test a running server at a fixed request rate (needs nestrec-bench).

    In a clone of the repository: pip install ./benchmarks

    - [bold]nestrec load-test http://127.0.0.1:8000 --requests_per_s 100
      --duration_s 20[/bold]
    - [bold]nestrec load-test --help[/bold]
    """
    run_external("load-test", context.args)


def _show_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"nestrec {nestrec.__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a `UserError` is printed without a traceback."""
    enable_huge_pages()
    try:
        app(standalone_mode=True)
    except SystemExit as exit_request:
        if not isinstance(exit_request.code, int | None):
            raise
        exit_process(exit_request.code or 0)
    except NonFiniteError as error:
        _fail(error, errors.NON_FINITE)
    except PeerLostError as error:
        _fail(error, errors.PEER_LOST)
    except UserError as error:
        _fail(error, errors.USER_ERROR)


def find_command(words: Sequence[str]) -> Any:
    """Return the command that the first word names, as a Click command; None if there is no such command."""
    root: Any = typer.main.get_command(app)
    return root.commands.get(words[0])


def _fail(error: UserError, code: int) -> NoReturn:
    words = sys.argv[1:]
    error.name_options(words, undotted_options(find_command(words), words) if words else ())
    print_once(f"error: {error}")
    exit_process(code)


use_plain_flags(app)
arrange_commands(app)
app.info.cls = RootGroup

if __name__ == "__main__":
    main()
