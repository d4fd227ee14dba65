"""Command `nestrec load-test URL`, which nestrec finds by an entry point."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nestrec.base.config_overrides import PASS_THROUGH, parse_overrides
from nestrec.base.files import check_file
from nestrec.cli.console import ExternalCommand

app = typer.Typer(no_args_is_help=True)


@app.command(context_settings=PASS_THROUGH)
def load_test(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="Address of a running server, such as http://127.0.0.1:8000.")],
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows into this result file.", callback=check_file)
    ] = None,
) -> None:
    """Load-test a server: send requests at fixed times (open loop), so that stalls are not hidden.

    - [bold]nestrec load-test http://127.0.0.1:8000 --requests_per_s 100
      --duration_s 20 --history_events 200 --num_candidates 256[/bold]
    - [bold]nestrec load-test http://127.0.0.1:8000 --search_for rate --slo_ms 50[/bold]:
      search for the maximum rate.
    - [bold]nestrec load-test https://rec.example.org --recording requests.jsonl[/bold]:
      send recorded requests; each line is a JSON object with at_s (seconds
      from the start), path and body.

    Without --recording, requests are synthetic: users and histories are random,
    and items are ids that the server lists, or those of --items FILE (one id
    per line). If the system does not trust the certificate of a server with
    TLS, set SSL_CERT_FILE. The API key is read from NESTREC_KEY.
    [bold]nestrec options load-test[/bold] lists all options.
    """
    from nestrec.base.config_overrides import apply_overrides
    from nestrec.report import print_rows, progress_for
    from nestrec.report.result_file import write_frame
    from nestrec_bench.load_test.load_test import LoadTestConfig, run_load_test

    cfg = apply_overrides(LoadTestConfig(), parse_overrides(context.args, ("json",)))
    with progress_for(f"load-test {url}"):
        rows = run_load_test(url, cfg, lambda text: typer.echo(text, err=True))
    print_rows(rows, title="load test")
    if json is not None:
        write_frame(json, bench="load-test", command=" ".join(["nestrec", *sys.argv[1:]]), rows=rows)


def _options_of(words: list[str]) -> tuple[Any, str]:
    from nestrec_bench.load_test.load_test import LoadTestConfig

    return LoadTestConfig(), " ".join(words)


COMMAND = ExternalCommand(app=app, options_of=_options_of)
