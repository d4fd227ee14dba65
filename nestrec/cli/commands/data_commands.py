"""Data commands: prepare, append, compact, restore, train-stream, describe, formats."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nestrec.base.config_overrides import PASS_THROUGH, parse_overrides
from nestrec.base.errors import UserError
from nestrec.base.process import gc_frozen_import
from nestrec.cli.console import TYPED_WORDS

app = typer.Typer()


def _check_format(context: typer.Context, format: str) -> str:
    """Check the format before the other arguments, because without it each of them is read as the one before it."""
    from nestrec.data.formats.format_registry import FORMATS, find_format

    is_path = Path(format).exists() or any(character in format for character in "/.*")
    if is_path and format not in FORMATS:
        remedy = shlex.join(["nestrec", "prepare", "log", *context.meta[TYPED_WORDS]])
        problem = "the format is missing before the path (`log` for your own files)"
        raise UserError(problem, option="format", value=format, remedy=remedy)
    find_format(format)
    return format


@app.command(context_settings=PASS_THROUGH)
def prepare(
    context: typer.Context,
    format: Annotated[
        str,
        typer.Argument(help="`log` for your own files; `nestrec formats` lists all formats.", callback=_check_format),
    ],
    input: Annotated[str, typer.Argument(help="File, folder, file pattern in quotes, or preset name (synthetic).")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing dataset.")] = False,
) -> None:
    """Convert interaction logs to a dataset: Parquet with one row per user, an items table and a card.

    - [bold]nestrec prepare log events.csv data/mine --log.user uid --log.item iid
      --log.time ts --log.time_unit iso[/bold]: a log in CSV, Parquet or JSON lines, and
      the names of its columns.
    - [bold]nestrec prepare log 'events/*.jsonl.gz' data/mine --log.user uid
      --log.item iid --log.time ts --log.actions click=clicked,buy=event:buy
      --items items.csv --users users.parquet[/bold]: several files, with actions of
      users and tables of features.
    - [bold]nestrec prepare synthetic tiny data/tiny --num_users 500[/bold]: a synthetic
      dataset.

    [bold]nestrec options prepare log[/bold] lists all options. Invalid rows are written to
    quarantine.csv with their line number and reason.
    """
    from nestrec.cli.data_output import show_actions, show_card, show_inferred, show_task
    from nestrec.data.formats.format_registry import options_from_text
    from nestrec.data.formats.format_registry import prepare as prepare_dataset
    from nestrec.report import progress_for

    overrides = parse_overrides(context.args, ("force",)) | ({"force": "true"} if force else {})
    options = options_from_text(format, overrides)
    with progress_for(f"prepare {output}") as progress:
        card = prepare_dataset(format, input, output, options=options, progress=progress)
    show_card(card, output)
    show_actions(output)
    show_inferred(options, card)
    show_task(output)


@app.command(context_settings=PASS_THROUGH)
def append(
    context: typer.Context,
    events: Annotated[Path, typer.Argument(help="File, folder or file pattern in quotes, as for `prepare`.")],
    dataset: Annotated[Path, typer.Argument(help="Dataset folder that `nestrec prepare` wrote.")],
    format: Annotated[
        str | None, typer.Option(help="Format of the events, if it differs from the dataset's format.")
    ] = None,
) -> None:
    """Append events to a dataset atomically; existing ids stay, and late events are sorted into their users' histories.

    - [bold]nestrec append today.parquet data/mine --items new-items.csv[/bold]

    Columns are read as `prepare` read them; options of the format change that,
    and name tables with new items or users. A file that was appended before is
    rejected.
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
def compact_dataset(dataset: Annotated[Path, typer.Argument(help="Dataset folder with appended events.")]) -> None:
    """Merge the appended layers of a dataset into one, so that reads are fast again.

    - [bold]nestrec compact data/mine[/bold]
    """
    from nestrec.data.incremental.compaction import compact
    from nestrec.report import progress_for

    with progress_for(f"compact {dataset}"):
        card = compact(dataset)
    typer.echo(f"{dataset}: generation {card.generation}, {card.counts.events:,} events in one layer")


@app.command("restore")
def restore_dataset(
    dataset: Annotated[Path, typer.Argument(help="Dataset folder with appended events.")],
    generation: Annotated[int, typer.Option(help="Number of the generation, from 0; only the last ones are retained.")],
) -> None:
    """Undo appends: make an earlier generation of a dataset the current one (rollback).

    - [bold]nestrec restore data/mine --generation 3[/bold]: the number that `append` printed.

    The events of this generation and of all earlier ones stay. Later
    generations are no longer part of the dataset: to add their events again,
    append their files again. The last 8 generations can be restored.
    """
    from nestrec.data.incremental.generations import restore

    card = restore(dataset, generation)
    typer.echo(f"{dataset}: generation {card.generation}, {card.counts.events:,} events")


@app.command("train-stream", context_settings=PASS_THROUGH)
def train_stream(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Folder that receives new files, or kafka://BROKERS/TOPIC.")],
    run: Annotated[Path, typer.Option(help="Run folder that `nestrec train` wrote; its dataset is extended.")],
) -> None:
    """Train a run online on a stream of events, in windows; each window is evaluated before it is trained on.

    - [bold]nestrec train-stream incoming --run runs/mine --window.events 10000[/bold]:
      windows by number of events.
    - [bold]nestrec train-stream kafka://localhost:9092/events --run runs/mine
      --window.events none --window.hours 1 --window.allowed_lateness_s 60[/bold]:
      windows by event time.

    The events of a window are appended to the dataset of the run; after
    training on them, a checkpoint is saved. If the process is killed, the same
    command resumes with bitwise identical results. [bold]--run.NAME[/bold] changes an
    option of the run, such as --run.publish.address;
    [bold]nestrec options train-stream[/bold] lists the others.
    """
    with gc_frozen_import():
        from nestrec.cli.training_output import follow_run

    follow_run(source, run, parse_overrides(context.args, ("run",)))


@app.command()
def describe(dataset: Annotated[Path, typer.Argument(help="Dataset folder that `nestrec prepare` wrote.")]) -> None:
    """Show the statistics of a dataset: numbers of events, users and items, actions, features and possible label leaks.

    - [bold]nestrec describe data/mine[/bold]

    Each feature has a row with its coverage, cardinality and examples.
    """
    from nestrec.cli.data_output import show_dataset

    show_dataset(dataset)


@app.command()
def formats() -> None:
    """List the formats that `prepare` reads; plugins can add more (entry points of the group nestrec.formats).

    - [bold]nestrec formats[/bold]
    """
    from rich.console import Console
    from rich.table import Table

    from nestrec.data.formats.format_registry import FORMATS

    table = Table("format", "description", box=None)
    for name in FORMATS:
        table.add_row(name, FORMATS.find(name).description)
    Console().print(table)
