"""Commands on trained models (export, publish, recommend, embed), and reports of a run (report) or machine (doctor)."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nestrec.base.config_overrides import PASS_THROUGH, parse_overrides

app = typer.Typer()


@app.command(context_settings=PASS_THROUGH)
def export(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run folder that `nestrec train` wrote.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    last: Annotated[bool, typer.Option("--last", help="Use the last weights instead of the best ones.")] = False,
) -> None:
    """Export a run as a servable model folder: safetensors and JSON with digests, without executable code.

    - [bold]nestrec export runs/mine models/mine[/bold]
    - [bold]nestrec export runs/mine models/mine --defaults.actions click
      --defaults.features.device phone[/bold]: set default values. Without a default, a
      request must contain every input of the model. Responses list the defaults
      used.
    - [bold]nestrec export runs/mine models/mine --defaults.history sku-12,sku-7
      --defaults.times now[/bold]: set a default history of two items for users without
      events.
    - [bold]nestrec export runs/mine models/small --dtype bfloat16 --table_dtype int8[/bold]:
      quantize weights and tables. The loss of quality is measured on the
      validation split, printed, and stored in the manifest. [bold]--kv_cache_dtype
      fp8[/bold] quantizes the KV cache.

    [bold]nestrec options export[/bold] lists all options.
    """
    from nestrec.api import export as export_run
    from nestrec.report import progress_for

    overrides = parse_overrides(context.args, ("last",))
    with progress_for(f"export {output}"):
        manifest = export_run(run, output, overrides, best=not last)
    if (cost := manifest.precision) is not None:
        typer.echo(
            f"quantization: scores change by {cost.mean_difference:.2g} (at most {cost.largest_difference:.2g}) of"
            f" {cost.mean_score:.2g}, {cost.overlap:.1%} of the ten best items are unchanged,"
            f" {cost.metric} {_format_metric(cost.before)} to {_format_metric(cost.after)}"
            f" ({cost.num_requests} requests)"
        )
    typer.echo(f"model {manifest.version[:12]}: {output} ({sum(f.bytes for f in manifest.files) / 1e6:.1f} MB)")
    typer.echo(f"next: nestrec serve --model {shlex.quote(str(output))}")


def _format_metric(metric: float | None) -> str:
    return "unknown" if metric is None else f"{metric:.4f}"


@app.command(context_settings=PASS_THROUGH)
def publish(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run folder that `nestrec train` wrote.")],
    address: Annotated[str, typer.Argument(help="Folder, or a URL that fsspec supports (s3://..., gs://...).")],
    last: Annotated[bool, typer.Option("--last", help="Use the last weights instead of the best ones.")] = False,
) -> None:
    """Publish a run as the newest version at an address, for servers that follow it (`nestrec serve --follow`).

    - [bold]nestrec publish runs/mine published/mine[/bold]
    - [bold]nestrec publish runs/mine published/mine --max_versions 10[/bold]: retain the
      ten newest versions.
    - [bold]nestrec train demo --publish.address published/demo
      --publish.every_steps 100[/bold]: publish during training. Each version then
      contains only the changes since the previous one.
    """
    from nestrec.api import publish_version
    from nestrec.report import progress_for

    overrides = parse_overrides(context.args, ("last",))
    with progress_for(f"publish {address}"):
        version = publish_version(run, address, overrides, best=not last)
    manifest = version.manifest
    typer.echo(f"version {version.folder} of step {manifest.step}: {manifest.num_bytes / 1e6:.1f} MB")


@app.command(context_settings=PASS_THROUGH)
def recommend(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Run, exported model, or address of published versions.")],
    output: Annotated[Path, typer.Option(help="Parquet file to write: user, items and scores, best first.")],
    *,
    users: Annotated[str, typer.Option(help="all, a text file of ids, or a Parquet file with histories.")] = "all",
    data: Annotated[Path | None, typer.Option(help="Dataset of the users; the dataset of the run by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if available.")] = "auto",
) -> None:
    """Write recommendations for many users (batch inference); if it is killed, the same command resumes it.

    - [bold]nestrec recommend runs/mine --k 100 --output recs.parquet[/bold]
    - [bold]nestrec launch -n 2 recommend runs/mine --k 100 --output recs.parquet[/bold]:
      share the work between ranks.

    The results equal those of /v1/recommend for each user, at the time of the
    last event. A Parquet file of users has the columns user and items (lists of
    ids), and the other inputs of the model, named as in requests: times_ms,
    features.NAME, user_features.NAME, context.NAME. [bold]nestrec options recommend[/bold]
    lists the other options.
    """
    from nestrec.cli.training_output import recommend_users

    recommend_users(model, users, output, data=data, device=device, words=context.args)


@app.command(context_settings=PASS_THROUGH)
def embed(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Run, exported model, or address of published versions.")],
    output: Annotated[Path, typer.Option(help="Parquet file, or .npy file with the ids in a .keys.json next to it.")],
    *,
    entity: Annotated[str, typer.Option(help="users or items.")] = "users",
    users: Annotated[str, typer.Option(help="all, a text file of ids, or a Parquet file with histories.")] = "all",
    data: Annotated[Path | None, typer.Option(help="Dataset of the users; the dataset of the run by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if available.")] = "auto",
) -> None:
    """Write embeddings of users or items; the dot product of a user's and an item's embedding is the item's score.

    - [bold]nestrec embed runs/mine --entity items --output items.npy[/bold]
    - [bold]nestrec embed models/mine --data data/mine --output users.parquet[/bold]

    If it is killed, the same command resumes it. [bold]nestrec options embed[/bold] lists the
    other options.
    """
    from nestrec.cli.training_output import embed_all

    embed_all(model, entity, users, output, data=data, device=device, words=context.args)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder that `nestrec train` wrote.")],
    cluster: Annotated[str | None, typer.Option(help="Add a simulation of the run on this cluster.")] = None,
) -> None:
    """Write a report of a run (RUN/report.html): a self-contained page with curves, metrics, config and versions.

    - [bold]nestrec report runs/mine[/bold]
    - [bold]nestrec report runs/mine --cluster h100-ib400[/bold]: add a simulation of the run
      on a cluster.
    """
    from nestrec.cli.plan_output import sample_recommendations
    from nestrec.report import progress_for, write_report

    with progress_for(f"report {run}"):
        sections = sample_recommendations(run)
        if cluster is not None:
            from nestrec.cli.plan_output import sections_of_run

            sections |= sections_of_run(run, cluster)
        page = write_report(run, sections)
    typer.echo(f"report: {page}")


@app.command()
def doctor() -> None:
    """Check which features this machine supports, and print what the others need.

    - [bold]nestrec doctor[/bold]
    """
    from rich.console import Console

    from nestrec.report.doctor import doctor_table, examine

    Console().print(doctor_table(examine()))
