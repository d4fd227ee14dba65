"""`nestrec replay URL`: a command of `nestrec`, found by its entry point."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nestrec.base.config_overrides import PASSED_ON, parse_overrides
from nestrec.base.files import check_file
from nestrec.cli.console import ExternalCommand

app = typer.Typer(no_args_is_help=True)


@app.command(context_settings=PASSED_ON)
def replay(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="A running server, such as http://127.0.0.1:8000.")],
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows into this result file.", callback=check_file)
    ] = None,
) -> None:
    """Load-test a server: requests leave at their moments (open loop), so that stalls are not hidden.

    - [bold]nestrec replay http://127.0.0.1:8000 --rate 100 --duration_s 20
      --history 200 --candidates 256[/bold]
    - [bold]nestrec replay http://127.0.0.1:8000 --finds rate --slo_ms 50[/bold]: searches
      for the largest rate.
    - [bold]nestrec replay https://rec.example.org --recorded requests.jsonl[/bold]:
      sends recorded requests; each line is a JSON object with at_s (seconds
      from the start), path and body.

    Without --recorded, requests are synthetic: users and histories are random,
    and items are ids that the server names, or those of --items FILE (one id
    per line). If the system does not trust the certificate of a server with
    TLS, set SSL_CERT_FILE. A key is read from NESTREC_KEY.
    [bold]nestrec options replay[/bold] lists all options.
    """
    from nestrec.base.config_overrides import with_overrides
    from nestrec.report import print_rows, progress_for
    from nestrec.report.result_file import write_frame
    from nestrec_bench.load_test.load_test import LoadTestConfig
    from nestrec_bench.load_test.load_test import replay as run_replay

    cfg = with_overrides(LoadTestConfig(), parse_overrides(context.args, ("json",)))
    with progress_for(f"replay {url}"):
        rows = run_replay(url, cfg, lambda text: typer.echo(text, err=True))
    print_rows(rows, title="replay")
    if json is not None:
        write_frame(json, bench="replay", command=" ".join(["nestrec", *sys.argv[1:]]), rows=rows)


def _options_of(words: list[str]) -> tuple[Any, str]:
    from nestrec_bench.load_test.load_test import LoadTestConfig

    return LoadTestConfig(), " ".join(words)


COMMAND = ExternalCommand(app=app, options_of=_options_of)
