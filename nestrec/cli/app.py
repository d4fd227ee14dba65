"""The command line. Each group of commands is a file in `commands`; what they print and do stands beside this one.

Heavy imports stand inside the commands, so that `nestrec --help` answers at once. Below its first paragraph, help keeps
the lines of a docstring: they fit a terminal of 80 columns. Examples are a list there, and on the page of commands too.
"""

import sys
from typing import Annotated, NoReturn

import typer

import nestrec
from nestrec.base import errors
from nestrec.base.errors import NonFiniteError, PeerLostError, UserError
from nestrec.base.process import ask_for_huge_pages, leave
from nestrec.cli.commands import data_commands, model_commands, run_commands, serving_commands
from nestrec.cli.console import PASSED_ON_WHOLE, run_external, say_once, with_plain_flags

app = typer.Typer(
    help="""Train and serve large sequence recommenders.

    Start with [bold]nestrec demo[/bold]: it needs no data and takes a few minutes on two
    cores. Then, with a log of your own:

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
for group in (
    run_commands.app,
    data_commands.app,
    model_commands.app,
    serving_commands.app,
):  # as help and pages list them
    app.registered_commands += group.registered_commands


@app.command(context_settings=PASSED_ON_WHOLE, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Run a benchmark and write a result file that anyone can repeat.

    Benchmarks are in the package `nestrec-bench`.

    - [bold]nestrec bench --help[/bold]: lists the benchmarks
    - [bold]nestrec bench NAME --json FILE[/bold]
    - [bold]nestrec options bench NAME[/bold]: lists the options of a benchmark
    """
    run_external("bench", context.args)


@app.command(context_settings=PASSED_ON_WHOLE, add_help_option=False)
def replay(context: typer.Context) -> None:
    """Load-test a running server with requests at a fixed rate (open loop).

    The load generator is in the package `nestrec-bench`.

    - [bold]nestrec replay http://127.0.0.1:8000 --rate 100 --duration_s 20[/bold]
    - [bold]nestrec replay --help[/bold]
    """
    run_external("replay", context.args)


def _show_version(wanted: bool) -> None:
    if wanted:
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
    """Entry point: a user's mistake ends with a message and no traceback."""
    ask_for_huge_pages()
    try:
        app(standalone_mode=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        leave(ended.code or 0)
    except NonFiniteError as error:
        _fail(error, errors.NON_FINITE)
    except PeerLostError as error:
        _fail(error, errors.PEER_LOST)
    except UserError as error:
        _fail(error, errors.USER_ERROR)


def _fail(error: UserError, code: int) -> NoReturn:
    error.name_options(sys.argv[1:])
    say_once(f"error: {error}")
    leave(code)


with_plain_flags(app)

if __name__ == "__main__":
    main()
