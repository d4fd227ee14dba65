"""The commands on data: prepare, append, compact, restore, follow, describe, formats."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nestrec.base.config_overrides import PASSED_ON, parse_overrides
from nestrec.base.errors import UserError
from nestrec.base.process import loading
from nestrec.cli.console import TYPED_WORDS

app = typer.Typer()


def _check_format(context: typer.Context, format: str) -> str:
    """Run before the other arguments are read: if the format is left out, each of them is in the place of another."""
    from nestrec.data.formats.format_registry import FORMATS, find_format

    is_path = Path(format).exists() or any(character in format for character in "/.*")
    if is_path and format not in FORMATS:
        remedy = shlex.join(["nestrec", "prepare", "log", *context.meta[TYPED_WORDS]])
        problem = "is a path; the format before it is missing (`log` for files of your own)"
        raise UserError(problem, option="format", value=format, remedy=remedy)
    find_format(format)
    return format


@app.command(context_settings=PASSED_ON)
def prepare(
    context: typer.Context,
    format: Annotated[
        str,
        typer.Argument(help="`log` for files of your own; `nestrec formats` lists all.", callback=_check_format),
    ],
    input: Annotated[
        str, typer.Argument(help="A file, a folder, a pattern in quotes, or (synthetic) the name of a preset.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing dataset.")] = False,
) -> None:
    """Turn interaction logs into a dataset: Parquet with one row a user, an items table and a card.

    - [bold]nestrec prepare log events.csv data/mine --log.user uid --log.item iid
      --log.time ts --log.time_unit iso[/bold]: a log of CSV, Parquet or JSON lines, and
      the names of its columns.
    - [bold]nestrec prepare log 'events/*.jsonl.gz' data/mine --log.user uid
      --log.item iid --log.time ts --log.actions click=clicked,buy=event:buy
      --items items.csv --users users.parquet[/bold]: several files, what users did, and
      tables of features.
    - [bold]nestrec prepare synthetic tiny data/tiny --num_users 500[/bold]: a synthetic
      set.

    [bold]nestrec options prepare log[/bold] lists all options. Bad rows are set aside in
    quarantine.csv with their line and reason.
    """
    from nestrec.cli.data_output import show_card, show_inferred, show_task
    from nestrec.data.formats.format_registry import prepare as prepare_dataset
    from nestrec.data.formats.format_registry import typed_options
    from nestrec.report import progress_for

    overrides = parse_overrides(context.args, ("force",)) | ({"force": "true"} if force else {})
    options = typed_options(format, overrides)
    with progress_for(f"prepare {output}") as progress:
        card = prepare_dataset(format, input, output, options=options, progress=progress)
    show_card(card, output)
    show_inferred(options, card)
    show_task(output)


@app.command(context_settings=PASSED_ON)
def append(
    context: typer.Context,
    events: Annotated[Path, typer.Argument(help="A file, a folder or a pattern in quotes, as for `prepare`.")],
    dataset: Annotated[Path, typer.Argument(help="A folder that `nestrec prepare` wrote.")],
    format: Annotated[
        str | None, typer.Option(help="Of the events, where it is another than the dataset was prepared from.")
    ] = None,
) -> None:
    """Add events to a dataset: ids keep their numbers, late events land in their place, a kill leaves it as it was.

    - [bold]nestrec append today.parquet data/mine --items new-items.csv[/bold]

    Columns mean what they meant to `prepare`; options of its format change that,
    and name tables of what is new. A file that is in the dataset already is
    refused.
    """
    from nestrec.cli.data_output import show_card
    from nestrec.data.dataset_card import DatasetCard
    from nestrec.data.incremental.append import append as append_to
    from nestrec.data.incremental.append import items_without_features
    from nestrec.report import progress_for

    overrides = parse_overrides(context.args, ("format",))
    before = DatasetCard.load(dataset)
    with progress_for(f"append to {dataset}") as progress:
        card = append_to(events, dataset, format=format, overrides=overrides, progress=progress)
    show_card(card, dataset)
    if warning := items_without_features(dataset, before, card):
        typer.echo(f"WARNING: {warning}")
    typer.echo(f"generation {card.generation}, {len(card.all_layers)} layers")


@app.command("compact")
def compact_dataset(dataset: Annotated[Path, typer.Argument(help="A folder that `nestrec append` has grown.")]) -> None:
    """Put what was appended to a dataset together with the rest, so that rows are read from one place again.

    - [bold]nestrec compact data/mine[/bold]
    """
    from nestrec.data.incremental.compaction import compact
    from nestrec.report import progress_for

    with progress_for(f"compact {dataset}"):
        card = compact(dataset)
    typer.echo(f"{dataset}: generation {card.generation}, {card.counts.events:,} events in one layer")


@app.command("restore")
def restore_dataset(
    dataset: Annotated[Path, typer.Argument(help="A folder that `nestrec append` or `nestrec follow` has grown.")],
    generation: Annotated[int, typer.Option(help="Its number, from 0; the last ones are kept.")],
) -> None:
    """Put an earlier generation of a dataset in force again; what came after it goes with the next append.

    - [bold]nestrec restore data/mine --generation 3[/bold]: its number, as `append` told it.
    """
    from nestrec.data.incremental.generations import restore

    card = restore(dataset, generation)
    typer.echo(f"{dataset}: generation {card.generation}, {card.counts.events:,} events")


@app.command(context_settings=PASSED_ON)
def follow(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="A folder into which files are dropped, or kafka://BROKERS/TOPIC.")],
    run: Annotated[Path, typer.Option(help="A folder that `nestrec train` wrote; its data grows.")],
) -> None:
    """Go on training with what a stream brings: window by window, each predicted before it is trained on.

    - [bold]nestrec follow incoming --run runs/mine --window.events 10000[/bold]: a window
      closes by count.
    - [bold]nestrec follow kafka://localhost:9092/events --run runs/mine
      --window.events none --window.hours 1 --window.lateness_s 60[/bold]: by event time.

    The events of a window are appended to the run's data; it is trained on and
    saved. Killed at any moment and started again, it comes to the same bits.
    Fields of the run can be changed with [bold]--run.NAME[/bold], such as
    --run.publish.address; [bold]nestrec options follow[/bold] lists the others.
    """
    with loading():
        from nestrec.cli.training_output import follow_run

    follow_run(source, run, parse_overrides(context.args, ("run",)))


@app.command()
def describe(dataset: Annotated[Path, typer.Argument(help="A folder that `nestrec prepare` wrote.")]) -> None:
    """Show what a dataset holds: coverage, cardinality and examples of its features, and what looks like a leak.

    - [bold]nestrec describe data/mine[/bold]
    """
    from nestrec.cli.data_output import show_dataset

    show_dataset(dataset)


@app.command()
def formats() -> None:
    """List the formats that `prepare` reads; packages can add more by entry points of the group nestrec.formats.

    - [bold]nestrec formats[/bold]
    """
    from rich.console import Console
    from rich.table import Table

    from nestrec.data.formats.format_registry import FORMATS

    table = Table("format", "what it is", box=None)
    for name in FORMATS:
        table.add_row(name, FORMATS.find(name).description)
    Console().print(table)
