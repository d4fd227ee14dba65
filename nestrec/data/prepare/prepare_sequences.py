"""Prepares a dataset of event sequences from raw rows with an external sort.

Memory use does not grow with the number of events, only by a few bytes per distinct user, item and category value.

1. Parse the input in batches, append the event records to one file, and count the events of each user.
2. Split the records into partitions by ranges of users, sized to the memory budget, in the order of the input.
3. Sort each partition by (user, time, position, input order), and mark exact duplicates.
4. Count the events of users and items, and remove rare ones if configured, in passes over the partitions.
5. Fit the transforms of numbers on the events that are training data under any split.
6. Write users in order of first appearance; item ids start at 1, in order of first appearance among remaining items.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.config import to_plain
from nestrec.base.errors import DataError, require
from nestrec.base.failpoints import fail_point
from nestrec.base.random import fold_array
from nestrec.data import dataset_schema
from nestrec.data.dataset_card import Counts, DataFile, DatasetCard, Feature, TransformFit, describe_file
from nestrec.data.flat_arrays import add_counts, is_duplicate, order_events
from nestrec.data.prepare.dataset_writer import UserBlock, UsersWriter, finish_sequences, write_items
from nestrec.data.prepare.event_parser import EventParser, TrainingSubset, find_training_subset
from nestrec.data.prepare.id_encoder import CoreFilter, FilterResult, apply_filter
from nestrec.data.prepare.log_source import LogSource
from nestrec.data.prepare.parse import BLANK_WORDS
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions, Progress
from nestrec.data.prepare.raw_rows import Quarantine
from nestrec.data.prepare.side_tables import SideSource, SideTable, SideTableOwner
from nestrec.data.prepare.spill_files import KeyPartitions, RaggedRecordFile, Records, balanced_bounds, even_bounds

ITEMS_PER_PARTITION = 1 << 17
MAX_PARTITIONS = 512
WORK_FACTOR = 5
"""Memory for sorting and writing a partition, as a multiple of the size of its records."""
_SIMULATED_NEW_KEY = 0x4E
"""Hash key for the choice of simulated cold-start items."""


@dataclass(slots=True)
class PreparationJob:
    """State of one preparation, which writes to its own temporary folder."""

    folder: Path
    source: LogSource
    options: PrepareOptions
    progress: Progress
    parser: EventParser
    quarantine: Quarantine
    num_rows_read: int = 0
    num_bad_events: int = 0
    num_duplicates: int = 0
    num_simulated_new_events: int = 0
    """Number of events that were dropped to simulate cold-start items."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Remarks on the input that are shown to the user and stored in the dataset card."""

    @property
    def drops_duplicates(self) -> bool:
        return (
            self.source.drops_duplicates if self.options.duplicates == "default" else self.options.duplicates == "drop"
        )


def write_dataset(folder: Path, source: LogSource, options: PrepareOptions, progress: Progress) -> DatasetCard:
    """Write the dataset of an event log.

    Args:
        folder: Existing empty folder.
        source: The event log.
        options: Filters and transforms.
        progress: Callback for progress.

    Returns:
        The card of the dataset.

    Raises:
        DataError: The input has no usable events, too many bad rows, or the filters remove all events.
    """
    options.fit_until_ms()  # raises before anything is read if the date is invalid
    parser = EventParser(source.columns)
    job = PreparationJob(folder, source, options, progress, parser, Quarantine(folder), notes=list(source.notes))
    spilled, user_counts = read_events(job)
    job.quarantine.check(job.num_rows_read, options.max_bad_fraction, time_hint=parser.time_hint)
    job.num_bad_events = job.quarantine.num_rows
    remedy = "check the columns and filters"
    require(len(parser.users), "no usable events", option="input", value=source.name, remedy=remedy, error=DataError)
    parser.check_actions()
    partitions = split_events(job, spilled, user_counts)
    fail_point("data.after_split")
    sort_events(job, partitions)
    selected = _filter_rare(job, partitions)
    has_fitted_features = any(side.has_fitted_transforms() for side in (*source.users, *source.items))
    subset = find_training_subset(job.parser, partitions, selected, options, has_fitted_features=has_fitted_features)
    return _write(job, partitions, selected, subset)


def read_events(job: PreparationJob) -> tuple[RaggedRecordFile, NDArray[np.int64]]:
    """Parse all events; return a file with their records, and the number of events per user."""
    spilled = RaggedRecordFile(job.folder / "events.bin", job.parser.dtype, job.source.columns.list_dtypes())
    user_counts = np.zeros(1024, dtype=np.int64)
    for batch, done in job.source.checked_batches():
        records, bad = job.parser.parse(batch)
        job.quarantine.add(batch.file, [*batch.bad, *bad])
        job.num_rows_read += batch.num_rows + len(batch.bad)
        spilled.append(records)
        user_counts = _resize(user_counts, len(job.parser.users))
        add_counts(records.rows["user"], user_counts)
        job.progress("read", done)
    return spilled, user_counts[: len(job.parser.users)]


def split_events(job: PreparationJob, spilled: RaggedRecordFile, user_counts: NDArray[np.int64]) -> KeyPartitions:
    """Split the records into partitions by ranges of users, in the order of the input."""
    by_memory = job.options.sort_memory_bytes * spilled.num_records // (WORK_FACTOR * max(1, spilled.num_bytes))
    max_events = max(1, by_memory, spilled.num_records // MAX_PARTITIONS)
    bounds = balanced_bounds(user_counts, max_events)
    lists = job.source.columns.list_dtypes()
    partitions = KeyPartitions(job.folder, "events", job.parser.dtype, "user", bounds, lists)
    num_done = 0
    for chunk in spilled.chunks():
        partitions.append(chunk)
        num_done += chunk.size
        job.progress("split", num_done / spilled.num_records)
    spilled.delete()
    return partitions


def sort_events(job: PreparationJob, partitions: KeyPartitions) -> None:
    """Sort each partition in place; exact duplicates are counted, and dropped if configured."""
    for p in range(len(partitions)):
        records = partitions[p].load()
        start, end = partitions.bounds[p : p + 2]
        rows = records.rows
        users = rows["user"] - start
        is_repeat = is_duplicate(users, int(end - start), rows["signature"])
        job.num_duplicates += int(is_repeat.sum())
        order = order_events(users, int(end - start), [rows[name] for name in job.source.columns.sort_fields()])
        if job.drops_duplicates:
            order = order[~is_repeat[order]]
        if job.options.simulated_new_items:
            is_hidden = _is_before_last(users[order]) & is_simulated_new(
                rows["item"][order], job.options.simulated_new_items
            )
            job.num_simulated_new_events += int(is_hidden.sum())
            order = order[~is_hidden]
        partitions[p].replace(records.take(order))
        job.progress("sort", (p + 1) / len(partitions))


def _is_before_last(users: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the events that are not the last event of their user."""
    return np.append(users[1:] == users[:-1], False)


def is_simulated_new(items: NDArray[Any], fraction: float) -> NDArray[np.bool_]:
    """Return a mask of the items that are chosen as simulated cold-start items.

    Args:
        items: Item codes.
        fraction: Fraction of the items to choose.
    """
    chosen: NDArray[np.bool_] = (fold_array(_SIMULATED_NEW_KEY, items) >> np.uint64(40)) < np.uint64(
        round(fraction * 2**24)
    )
    return chosen


def _filter_rare(job: PreparationJob, partitions: KeyPartitions) -> FilterResult:
    def pairs() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for p in range(len(partitions)):
            for chunk in partitions[p].rows():
                yield chunk["user"], chunk["item"]

    o = job.options
    rule = CoreFilter(
        user_core=o.min_events_per_user,
        item_core=o.min_events_per_item,
        is_iterated=o.core_filter == "iterated",
        min_user_events=o.final_min_events_per_user,
    )
    selected = apply_filter(rule, pairs, len(job.parser.users), len(job.parser.items))
    if not selected.users.any():
        raise _all_removed_error(o)
    return selected


def _all_removed_error(options: PrepareOptions) -> DataError:
    names = ("min_events_per_user", "min_events_per_item", "final_min_events_per_user")
    filters = {name: getattr(options, name) for name in names if getattr(options, name)}
    typed = " and ".join(f"--{name} {value}" for name, value in filters.items())
    first = next(iter(filters))
    is_single = len(filters) == 1
    problem = "the filter removes all events" if is_single else f"the filters {typed} remove all events"
    return DataError(
        problem, option=first, value=filters[first], remedy=f"lower --{first}" if is_single else "lower the filters"
    )


def _write(
    job: PreparationJob, partitions: KeyPartitions, selected: FilterResult, subset: TrainingSubset
) -> DatasetCard:
    parser = job.parser
    num_users = int(selected.users.sum())
    num_items = int(selected.items.sum())
    user_rows = np.where(selected.users, np.cumsum(selected.users) - 1, -1)
    item_rows = np.where(selected.items, np.cumsum(selected.items), -1)
    users = SideTableOwner("user", parser.users, user_rows, subset.users, num_users)
    items = SideTableOwner("item", parser.items, item_rows, subset.items, num_items + 1)
    user_sides = [read_side_table(job, s, users, f"user{i}", partitions.bounds) for i, s in enumerate(job.source.users)]
    files = _write_users(job, partitions, selected, user_sides)
    item_bounds = even_bounds(len(parser.items), ITEMS_PER_PARTITION)
    item_sides = [read_side_table(job, s, items, f"item{i}", item_bounds) for i, s in enumerate(job.source.items)]
    files.append(write_items(job.folder, _item_tables(job, selected, item_bounds, item_sides)))
    files += write_vocabularies(job, user_sides, item_sides)
    for side in (*user_sides, *item_sides):
        files += side.files()
        side.delete()
    files += job.quarantine.files()
    partitions.delete()
    card = _card(job, selected, subset.fit, _features(user_sides), _features(item_sides))
    return finish_sequences(
        job.folder, card, selected.user_counts[selected.users], selected.item_counts[selected.items], files
    )


def _write_users(
    job: PreparationJob, partitions: KeyPartitions, selected: FilterResult, sides: list[SideTable]
) -> list[DataFile]:
    id_of_item = np.cumsum(selected.items, dtype=np.int64)
    user_types = {name: column.type for side in sides for name, column in side.load(0).items()}
    fields = event_fields(job.parser) + [pa.field(dataset_schema.USER_PREFIX + n, t) for n, t in user_types.items()]
    writer = UsersWriter(job.folder, fields)
    next_id = 0
    for p in range(len(partitions)):
        start, end = partitions.bounds[p : p + 2]
        records = partitions[p].load()
        records = records.take(selected.users[records.rows["user"]] & selected.items[records.rows["item"]])
        codes = start + np.flatnonzero(selected.users[start:end])
        features = {n: c.take(pa.array(codes - start)) for side in sides for n, c in side.load(p).items()}
        ids = np.arange(next_id, next_id + codes.size, dtype=np.int64)
        writer.append(user_block(job.parser, records, codes, ids, selected.user_counts[codes], id_of_item, features))
        next_id += codes.size
        job.progress("write", (p + 1) / len(partitions))
    return writer.close()


def user_block(  # noqa: PLR0917
    parser: EventParser,
    records: Records,
    codes: NDArray[np.int64],
    ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    id_of_item: NDArray[np.int64],
    features: dict[str, pa.Array],
) -> UserBlock:
    """Return the rows of users.

    Args:
        parser: Parser that produced the records.
        records: Events of the users, sorted by user.
        codes: Code of each user in the parser.
        ids: Id of each user in the dataset.
        counts: Number of records of each user.
        id_of_item: Id of each item in the dataset, by code.
        features: Feature values of the users, by name.
    """
    lengths = counts.astype(np.int32)
    rows = records.rows
    assert records.size == int(lengths.sum())
    scalars = {
        dataset_schema.USER_ID: pa.array(ids),
        dataset_schema.USER_KEY: parser.users.keys(codes),
        dataset_schema.LENGTH: pa.array(lengths),
        **{dataset_schema.USER_PREFIX + name: column for name, column in features.items()},
    }
    lists: dict[str, NDArray[Any]] = {dataset_schema.ITEM_IDS: id_of_item[rows["item"]]}
    if "time" in parser.field_names:
        lists[dataset_schema.TIMESTAMPS_MS] = np.ascontiguousarray(rows["time"])
    if "actions" in parser.field_names:
        lists[dataset_schema.ACTIONS] = np.ascontiguousarray(rows["actions"])
    for name, kind in event_types(parser).items():
        if name not in records.lists:
            buckets = parser.bucket_ids(name, rows[name])
            lists[name] = rows[name].astype(kind.to_pandas_dtype()) if buckets is None else buckets
    ragged = {name: values.astype(np.int64) for name, values in records.lists.items()}
    return UserBlock(lengths, scalars, lists, ragged)


def event_types(parser: EventParser) -> dict[str, pa.DataType]:
    """Return the type of the values of each event column."""
    types: dict[str, pa.DataType] = {}
    for name in parser.field_names:
        if (
            name.endswith(dataset_schema.COUNTS_SUFFIX)
            and name.removesuffix(dataset_schema.COUNTS_SUFFIX) in parser.columns.list_dtypes()
        ):
            types |= {name.removesuffix(dataset_schema.COUNTS_SUFFIX): pa.int64(), name: pa.int32()}
        elif name.startswith(dataset_schema.EVENT_PREFIX):
            is_number = parser.dtype[name].kind == "f" and not parser.is_bucketed(name)
            types[name] = pa.float32() if is_number else pa.int64()
    return types


def event_fields(parser: EventParser) -> list[pa.Field]:
    """Return the columns of the users table without the features of users."""
    kinds = {name.removeprefix(dataset_schema.EVENT_PREFIX): kind for name, kind in event_types(parser).items()}
    return dataset_schema.sequence_fields(
        has_timestamps="time" in parser.field_names, has_actions="actions" in parser.field_names, features=kinds
    )


def _item_tables(
    job: PreparationJob, selected: FilterResult, bounds: NDArray[np.int64], sides: list[SideTable]
) -> Iterator[pa.Table]:
    next_id = 1
    for p in range(bounds.size - 1):
        codes = bounds[p] + np.flatnonzero(selected.items[bounds[p] : bounds[p + 1]])
        columns = {
            "item_id": pa.array(np.arange(next_id, next_id + codes.size, dtype=np.int64)),
            "item_key": job.parser.items.keys(codes),
            "count": pa.array(selected.item_counts[codes]),
        }
        for side in sides:
            loaded = side.load(p)
            columns |= {dataset_schema.ITEM_PREFIX + n: c.take(pa.array(codes - bounds[p])) for n, c in loaded.items()}
        next_id += codes.size
        yield pa.table(columns)


def read_side_table(
    job: PreparationJob, source: SideSource, owner: SideTableOwner, name: str, bounds: NDArray[np.int64]
) -> SideTable:
    """Read a side table with features of users or items."""
    table = SideTable(source, owner, job.folder, name, bounds)
    table.read(job.quarantine, job.options.max_bad_fraction)
    job.notes += table.notes()
    return table


def _features(sides: list[SideTable]) -> tuple[Feature, ...]:
    return tuple(feature for side in sides for feature in side.features())


def write_vocabularies(job: PreparationJob, user_sides: list[SideTable], item_sides: list[SideTable]) -> list[DataFile]:
    """Write one file per categorical column, with the columns `id` (from 1) and `key`."""
    tables = {dataset_schema.EVENT_PREFIX + name: keys for name, keys in job.parser.category_keys().items()}
    for prefix, sides in ((dataset_schema.USER_PREFIX, user_sides), (dataset_schema.ITEM_PREFIX, item_sides)):
        tables |= {prefix + name: keys for side in sides for name, keys in side.vocabularies().items()}
    folder = job.folder / "vocabularies"
    files = []
    for column, keys in tables.items():
        folder.mkdir(exist_ok=True)
        path = folder / f"{column}.parquet"
        ids = np.arange(1, len(keys) + 1, dtype=np.int64)
        pq.write_table(pa.table({"id": pa.array(ids), "key": keys}), path, compression="zstd")
        files.append(describe_file(job.folder, path, len(keys)))
    return files


def _card(
    job: PreparationJob,
    selected: FilterResult,
    fit: TransformFit,
    user_features: tuple[Feature, ...],
    item_features: tuple[Feature, ...],
) -> DatasetCard:
    num_events = int(selected.user_counts[selected.users].sum())
    num_dropped = job.num_duplicates if job.drops_duplicates else 0
    num_below = job.parser.num_below_rating
    num_new = job.num_simulated_new_events
    num_rare = job.num_rows_read - job.num_bad_events - num_below - num_dropped - num_new - num_events
    filtered = {"min_rating": num_below, "made new": num_new, "rare users and items": num_rare}
    return DatasetCard(
        kind="sequences",
        name=job.source.name,
        source_format=job.source.format,
        counts=Counts(
            users=int(selected.users.sum()),
            items=int(selected.items.sum()),
            events=num_events,
            rows_read=job.num_rows_read,
            duplicates_dropped=num_dropped,
            duplicates_kept=job.num_duplicates - num_dropped,
            filtered={name: count for name, count in filtered.items() if count},
            quarantined=dict(sorted(job.quarantine.reasons.items())),
        ),
        has_timestamps="time" in job.parser.field_names,
        action_bits=job.parser.columns.action_bits,
        event_features=job.parser.features(),
        user_features=user_features,
        item_features=item_features,
        notes=(*notes_on_ids(job.parser, selected), *job.notes),
        fit=fit,
        options=to_plain(_with_time_unit(job.options, job.parser)),
        inputs=job.source.digests(),
    )


def _with_time_unit(options: PrepareOptions, parser: EventParser) -> PrepareOptions:
    """Replace the time unit `auto` by the inferred unit, so that appended events are read with the same unit."""
    log = getattr(options, "log", None)
    if not isinstance(log, LogColumns) or log.time is None or log.time_unit != "auto":
        return options
    changed: Any = {"log": dataclasses.replace(log, time_unit=parser.time_unit)}
    return dataclasses.replace(options, **changed)


def notes_on_ids(parser: EventParser, selected: FilterResult) -> Iterator[str]:
    """Yield a warning for each id that looks like a missing value: it may merge the events of many users or items."""
    words = pa.array([word for word in BLANK_WORDS if word])
    for what, table, counts in (
        ("user", parser.users, selected.user_counts),
        ("item", parser.items, selected.item_counts),
    ):
        for word, code in zip(words.to_pylist(), table.find(words).tolist(), strict=True):
            if code >= 0 and counts[code]:
                num_events = "1 event has" if counts[code] == 1 else f"{counts[code]:,} events have"
                yield (
                    f"{num_events} the {what} {word!r}: if this means a missing id, leave the cell "
                    "empty, so that the rows are rejected as bad rows"
                )


def _resize(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    if size <= counts.size:
        return counts
    return np.concatenate([counts, np.zeros(max(size, 2 * counts.size) - counts.size, dtype=np.int64)])
