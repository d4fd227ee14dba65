"""Console output of the data commands: summaries of datasets."""

from pathlib import Path

from nestrec.base.config_values import format_iso_time
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.prepare.parse import UNIT_NAMES
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.report.console_tables import print_rows
from nestrec.report.dataset_description import describe, measure_actions

_PLAUSIBLE_SINCE_MS = 315_532_800_000
"""Start of the year 1980; earlier event times indicate a wrong time unit."""


def show_card(card: DatasetCard, folder: Path) -> None:
    """Print the summary of a dataset card: counts, features, quarantined rows and warnings."""
    counts = card.counts
    summary = f"{counts.users:,} users, {counts.items:,} items, {counts.events:,} events"
    print(f"{folder}: {summary} of {counts.rows_read:,} rows read")
    if counts.duplicates_dropped:
        print(f"exact duplicates: {counts.duplicates_dropped:,} dropped (--duplicates keep keeps them)")
    if counts.duplicates_kept:
        print(f"exact duplicates: {counts.duplicates_kept:,} kept (--duplicates drop drops them)")
    for name, number in counts.filtered.items():
        print(f"removed by a filter: {number:,} events, {name}")
    for owners, features in (
        ("events", card.event_features),
        ("items", card.item_features),
        ("users", card.user_features),
    ):
        if features:
            print(f"features of {owners}: {', '.join(f'{feature.name} ({feature.kind})' for feature in features)}")
    for reason, number in counts.quarantined.items():
        print(f"quarantined: {number:,} row{'s' if number != 1 else ''}, {reason}; see {folder / 'quarantine.csv'}")
    for note in card.notes:
        print(f"WARNING: {note}")
    if card.kind == "sequences":
        lengths = card.lengths
        spread = f"median {lengths.p50:.0f}, 99% {lengths.p99:.0f}, longest {lengths.max:,}"
        print(f"events per user: mean {lengths.mean:.1f}, {spread}")
    if card.has_timestamps:
        _show_times(Dataset.open(folder))


def show_actions(folder: Path) -> None:
    """Print the fraction of the events with each action of a dataset of sequences."""
    dataset = Dataset.open(folder)
    if dataset.card.kind != "sequences":
        return
    fractions, num_events = measure_actions(dataset)
    if fractions:
        listed = ", ".join(f"{name} {fraction:.1%}" for name, fraction in fractions.items())
        is_sample = num_events < dataset.card.counts.events
        print(f"actions{f' of {num_events:,} sampled events' if is_sample else ''}: {listed}")


def show_task(folder: Path) -> None:
    """Print the task that `train auto` chooses for a dataset, and the reason."""
    from nestrec.training.recipes.auto_recipe import describe_task_choice

    if (choice := describe_task_choice(Dataset.open(folder))) is not None:
        print(f"nestrec train auto --data.folder {folder} chooses {choice}")


def show_inferred(options: object, card: DatasetCard) -> None:
    """Print the time unit if it was inferred; `options` are the options of `prepare`."""
    log = getattr(options, "log", None)
    if isinstance(log, LogColumns) and log.time is not None and log.time_unit == "auto":
        unit = card.options["log"]["time_unit"]
        print(f"time unit: {unit} ({UNIT_NAMES[unit]}), inferred from the values; --log.time_unit sets it")


def _show_times(dataset: Dataset) -> None:
    first_ms = dataset.first_ms()
    last_ms = dataset.last_ms()
    print(f"times: {format_iso_time(first_ms)} to {format_iso_time(last_ms)}")
    if first_ms < _PLAUSIBLE_SINCE_MS:
        print("WARNING: some times are before 1980, as if seconds were read as milliseconds: check --log.time_unit")


def show_dataset(folder: Path) -> None:
    """Print the card of a dataset, statistics of its features, and possible leaks of the label."""
    dataset = Dataset.open(folder)
    show_card(dataset.card, folder)
    if dataset.card.kind != "sequences":
        return
    description = describe(dataset)
    if dataset.card.has_timestamps:
        print(f"statistics of {description.num_events:,} of {dataset.card.counts.events:,} events")
    for name, fraction in description.actions.items():
        print(f"action {name}: {fraction:.2%} of events")
    if description.features:
        print_rows([feature.row() for feature in description.features])
    else:
        print("features: none")
    if dataset.card.fit.events:
        until = f" before {format_iso_time(dataset.card.fit.until_ms)}" if dataset.card.fit.until_ms else ""
        print(f"feature transforms were fitted on {dataset.card.fit.events:,} events{until}")
    for feature in dataset.card.features:
        if feature.known == "after":
            print(f"{feature.column} is known only after its event: models do not read it from the predicted event")
    for warning in description.warnings:
        print(f"WARNING: {warning}")
