"""What the commands on data show of a dataset."""

from pathlib import Path

from nestrec.base.config_values import iso_moment
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.prepare.parse import UNIT_NAMES
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.report.console_tables import print_rows
from nestrec.report.dataset_description import describe

_EARLY_MS = 315_532_800_000
"""1980, before which no log was kept that anybody trains on."""


def show_card(card: DatasetCard, folder: Path) -> None:
    """Print what was read and kept: counts, features, what was set aside."""
    counts = card.counts
    kept = f"{counts.users:,} users, {counts.items:,} items, {counts.events:,} events"
    print(f"{folder}: {kept} of {counts.rows_read:,} rows read")
    if counts.duplicates_dropped:
        print(f"exact duplicates: {counts.duplicates_dropped:,} dropped (--duplicates keep keeps them)")
    if counts.duplicates_kept:
        print(f"exact duplicates: {counts.duplicates_kept:,} kept (--duplicates drop drops them)")
    for name, number in counts.filtered.items():
        print(f"removed by a filter: {number:,} events, {name}")
    for whose, features in (
        ("events", card.event_features),
        ("items", card.item_features),
        ("users", card.user_features),
    ):
        if features:
            print(f"features of {whose}: {', '.join(f'{feature.name} ({feature.kind})' for feature in features)}")
    for reason, number in counts.quarantined.items():
        print(f"quarantined: {number:,} rows, {reason}; see {folder / 'quarantine.csv'}")
    for note in card.notes:
        print(f"WARNING: {note}")
    if card.kind == "sequences":
        lengths = card.lengths
        spread = f"median {lengths.p50:.0f}, 99% {lengths.p99:.0f}, longest {lengths.max:,}"
        print(f"events a user: mean {lengths.mean:.1f}, {spread}")
    if card.has_timestamps:
        _show_times(Dataset.open(folder))


def show_task(folder: Path) -> None:
    """Prints which task `train auto` chooses for a dataset, and why."""
    from nestrec.training.recipes.auto_recipe import task_choice

    if (choice := task_choice(Dataset.open(folder))) is not None:
        print(f"nestrec train auto --data.folder {folder} chooses {choice}")


def show_inferred(asked: object, card: DatasetCard) -> None:
    """Print the unit of times if it was inferred. asked: the options of `prepare`."""
    log = getattr(asked, "log", None)
    if isinstance(log, LogColumns) and log.time is not None and log.time_unit == "auto":
        unit = card.options["log"]["time_unit"]
        print(f"unit of times: {unit} ({UNIT_NAMES[unit]}), inferred from the values; --log.time_unit sets it")


def _show_times(dataset: Dataset) -> None:
    first_ms = dataset.first_ms()
    last_ms = dataset.last_ms()
    print(f"times: {iso_moment(first_ms)} to {iso_moment(last_ms)}")
    if first_ms < _EARLY_MS:
        print("WARNING: some times lie before 1980, as seconds read as milliseconds do: check --log.time_unit")


def show_dataset(folder: Path) -> None:
    """Print the card of a dataset, its features and what looks like a leak."""
    dataset = Dataset.open(folder)
    show_card(dataset.card, folder)
    if dataset.card.kind != "sequences":
        return
    found = describe(dataset)
    if dataset.card.has_timestamps:
        print(f"features and actions as {found.num_events:,} of {dataset.card.counts.events:,} events have them")
    for name, share in found.actions.items():
        print(f"action {name}: {share:.2%} of events")
    print_rows([facts.row() for facts in found.features])
    if dataset.card.fit.events:
        until = f" before {iso_moment(dataset.card.fit.until_ms)}" if dataset.card.fit.until_ms else ""
        print(f"transforms were learnt from {dataset.card.fit.events:,} events{until}")
    for feature in dataset.card.features:
        if feature.known == "after":
            print(f"{feature.column} is known only after its event: no model reads it of the event that it predicts")
    for warning in found.warnings:
        print(f"WARNING: {warning}")
