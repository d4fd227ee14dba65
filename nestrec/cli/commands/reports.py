"""The commands that tell: of a run (report), and of this machine (doctor)."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A folder that `nestrec train` wrote.")],
    cluster: Annotated[str | None, typer.Option(help="Add what a cluster would make of the run, simulated.")] = None,
) -> None:
    """Write RUN/report.html: one self-contained page with curves, metrics, histograms, config and versions.

    - [bold]nestrec report runs/mine[/bold]
    - [bold]nestrec report runs/mine --cluster h100-ib400[/bold]: also what a cluster would
      make of the run, simulated.
    """
    from nestrec.cli.report import sample_recommendations
    from nestrec.report import progress_for, write_report

    with progress_for(f"report {run}"):
        more = sample_recommendations(run)
        if cluster is not None:
            from nestrec.cli.plan import sections_of_run

            more |= sections_of_run(run, cluster)
        page = write_report(run, more)
    typer.echo(f"report: {page}")


@app.command()
def doctor() -> None:
    """Tell what this machine can do, and what is missing for the rest.

    - [bold]nestrec doctor[/bold]
    """
    from rich.console import Console

    from nestrec.report.doctor import doctor_table, examine

    Console().print(doctor_table(examine()))
