"""The commands on trained models: export, publish, recommend, embed.

The commands that tell: of a run (report), and of this machine (doctor).
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nestrec.base.config_overrides import PASSED_ON, parse_overrides

app = typer.Typer()


@app.command(context_settings=PASSED_ON)
def export(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A folder that `nestrec train` wrote.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    last: Annotated[bool, typer.Option("--last", help="The last weights instead of the best ones.")] = False,
) -> None:
    """Write a run as a servable folder: safetensors and JSON with digests, nothing executable.

    - [bold]nestrec export runs/mine models/mine[/bold]
    - [bold]nestrec export runs/mine models/mine --defaults.actions click
      --defaults.features.device phone[/bold]: a request must tell what the model
      reads, unless the export names a default. Answers say where one was taken.
    - [bold]nestrec export runs/mine models/mine --defaults.history sku-12,sku-7
      --defaults.times now[/bold]: users without events are answered as if they had
      these two.
    - [bold]nestrec export runs/mine models/small --dtype bfloat16 --tables int8[/bold]:
      weights and tables in fewer bits. What that costs is measured on the run's
      validation part, shown, and kept in the manifest; with [bold]--prefixes fp8[/bold]
      for prefixes of 8 bits.

    [bold]nestrec options export[/bold] lists all options.
    """
    from nestrec.api import export as export_run
    from nestrec.report import progress_for

    overrides = parse_overrides(context.args, ("last",))
    with progress_for(f"export {output}"):
        manifest = export_run(run, output, overrides, best=not last)
    if (cost := manifest.precision) is not None:
        typer.echo(
            f"fewer bits: scores move by {cost.mean_difference:.2g} (at most {cost.largest_difference:.2g}) of"
            f" {cost.mean_score:.2g}, {cost.overlap:.1%} of the ten best stay, {cost.metric} {_told(cost.before)} to"
            f" {_told(cost.after)} ({cost.num_requests} requests)"
        )
    typer.echo(f"model {manifest.version[:12]}: {output} ({sum(f.bytes for f in manifest.files) / 1e6:.1f} MB)")
    typer.echo(f"next: nestrec serve --model {shlex.quote(str(output))}")


def _told(metric: float | None) -> str:
    return "not known" if metric is None else f"{metric:.4f}"


@app.command(context_settings=PASSED_ON)
def publish(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A folder that `nestrec train` wrote.")],
    address: Annotated[str, typer.Argument(help="A folder, or an address that fsspec knows (s3://..., gs://...).")],
    last: Annotated[bool, typer.Option("--last", help="The last weights instead of the best ones.")] = False,
) -> None:
    """Publish a run as the newest version at an address, for servers that follow it (`nestrec serve --follow`).

    - [bold]nestrec publish runs/mine published/mine[/bold]
    - [bold]nestrec publish runs/mine published/mine --keep 10[/bold]: of the versions
      there, the ten newest stay.
    - [bold]nestrec train demo --publish.address published/demo
      --publish.every_steps 100[/bold]: a run publishes by itself as it goes on. Then
      each version holds only what has changed since the one before.
    """
    from nestrec.api import publish_version
    from nestrec.report import progress_for

    overrides = parse_overrides(context.args, ("last",))
    with progress_for(f"publish {address}"):
        version = publish_version(run, address, overrides, best=not last)
    manifest = version.manifest
    typer.echo(f"version {version.folder} of step {manifest.step}: {manifest.num_bytes / 1e6:.1f} MB")


@app.command(context_settings=PASSED_ON)
def recommend(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A run, an exported model, or an address of published versions.")],
    output: Annotated[Path, typer.Option(help="Parquet file: user, items and scores, best first.")],
    *,
    users: Annotated[str, typer.Option(help="all, a text file of keys, or a Parquet file with histories.")] = "all",
    data: Annotated[Path | None, typer.Option(help="Dataset of the users; of a run its own.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes a GPU where there is one.")] = "auto",
) -> None:
    """Write the best items of very many users; the same command goes on after a kill.

    - [bold]nestrec recommend runs/mine --k 100 --output recs.parquet[/bold]
    - [bold]nestrec launch -n 2 recommend runs/mine --k 100 --output recs.parquet[/bold]:
      several ranks share the work.

    Equal to /v1/recommend for each user, asked at the moment of the last event.
    A Parquet file of users has the columns user, items (lists of ids) and what
    else the model reads, by the names of requests: times_ms, features.NAME,
    user_features.NAME, context.NAME. [bold]nestrec options recommend[/bold] lists the
    other options.
    """
    from nestrec.cli.training_output import recommend_users

    recommend_users(model, users, output, data=data, device=device, words=context.args)


@app.command(context_settings=PASSED_ON)
def embed(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A run, an exported model, or an address of published versions.")],
    output: Annotated[Path, typer.Option(help="Parquet file, or .npy with the keys in a .keys.json beside it.")],
    *,
    what: Annotated[str, typer.Option(help="users or items.")] = "users",
    users: Annotated[str, typer.Option(help="all, a text file of keys, or a Parquet file with histories.")] = "all",
    data: Annotated[Path | None, typer.Option(help="Dataset of the users; of a run its own.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes a GPU where there is one.")] = "auto",
) -> None:
    """Write vectors of users or items: the product of a user's and an item's is the item's score.

    - [bold]nestrec embed runs/mine --what items --output items.npy[/bold]
    - [bold]nestrec embed models/mine --data data/mine --output users.parquet[/bold]

    The same command goes on after a kill. [bold]nestrec options embed[/bold] lists the other
    options.
    """
    from nestrec.cli.training_output import embed_all

    embed_all(model, what, users, output, data=data, device=device, words=context.args)


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
    from nestrec.cli.plan_output import sample_recommendations
    from nestrec.report import progress_for, write_report

    with progress_for(f"report {run}"):
        more = sample_recommendations(run)
        if cluster is not None:
            from nestrec.cli.plan_output import sections_of_run

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
