"""From raw rows to a dataset of sequences, with memory that does not grow with the number of events.

1. Parse the input in batches; append event records to one file, counting the events of each user.
2. Split the records by ranges of users, sized to the memory budget; inside a range they keep the input's order.
3. Sort each range by (user, time, position, input order), marking exact duplicates.
4. Count users and items, removing rare ones if asked, in passes over the ranges.
5. Learn the transforms of numbers from the events that train under any split.
6. Write users in order of first appearance, item ids from 1 in order of first appearance among those that stay.

What grows is a few bytes for each distinct user, item and category value.
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
from nestrec.data.prepare.event_parser import EventParser, TrainingSubset, find_training_part
from nestrec.data.prepare.id_encoder import CoreFilter, FilterResult, apply_filter
from nestrec.data.prepare.log_source import LogSource
from nestrec.data.prepare.parse import BLANK_WORDS
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions, Progress
from nestrec.data.prepare.raw_rows import Quarantine
from nestrec.data.prepare.side_tables import Keyed, SideSource, SideTable
from nestrec.data.prepare.spill_files import KeyPartitions, RaggedRecordFile, Records, balanced_bounds, even_bounds

ITEMS_A_PARTITION = 1 << 17
MAX_PARTITIONS = 512
WORK_FACTOR = 5
"""Memory of sorting and writing a partition, as a multiple of its records."""
_MADE_NEW = 0x4E
"""Tells apart the draws that choose items."""


@dataclass(slots=True)
class PreparationJob:
    """The state of one preparation, in a folder of its own."""

    folder: Path
    source: LogSource
    options: PrepareOptions
    progress: Progress
    parser: EventParser
    quarantine: Quarantine
    num_rows_read: int = 0
    num_bad_events: int = 0
    num_duplicates: int = 0
    num_of_new_items: int = 0
    """events that were dropped so that their items are new"""
    notes: list[str] = dataclasses.field(default_factory=list)
    """what a person should know of the input"""

    @property
    def drops_duplicates(self) -> bool:
        return (
            self.source.drops_duplicates if self.options.duplicates == "default" else self.options.duplicates == "drop"
        )


def write_dataset(folder: Path, source: LogSource, options: PrepareOptions, progress: Progress) -> DatasetCard:
    """Write the dataset of a log into `folder`."""
    parser = EventParser(source.columns)
    work = PreparationJob(folder, source, options, progress, parser, Quarantine(folder), notes=list(source.notes))
    spilled, user_counts = read_events(work)
    work.quarantine.check(work.num_rows_read, options.max_bad_share, time_hint=parser.time_hint)
    work.num_bad_events = work.quarantine.num_rows
    remedy = "check the columns and filters"
    require(len(parser.users), "has no usable events", option="input", value=source.name, remedy=remedy, error=DataError)
    parser.check_actions()
    partitions = split_events(work, spilled, user_counts)
    fail_point("data.after_split")
    sort_events(work, partitions)
    kept = _filter(work, partitions)
    is_asked = any(side.learns() for side in (*source.users, *source.items))
    part = find_training_part(work.parser, partitions, kept, options, is_asked=is_asked)
    return _write(work, partitions, kept, part)


def read_events(work: PreparationJob) -> tuple[RaggedRecordFile, NDArray[np.int64]]:
    """Records of all events in a file, and the number of each user's."""
    spilled = RaggedRecordFile(work.folder / "events.bin", work.parser.dtype, work.source.columns.lists())
    user_counts = np.zeros(1024, dtype=np.int64)
    for batch, done in work.source.checked_batches():
        records, bad = work.parser.parse(batch)
        work.quarantine.add(batch.file, [*batch.bad, *bad])
        work.num_rows_read += batch.num_rows + len(batch.bad)
        spilled.append(records)
        user_counts = _grown(user_counts, len(work.parser.users))
        add_counts(records.rows["user"], user_counts)
        work.progress("read", done)
    return spilled, user_counts[: len(work.parser.users)]


def split_events(work: PreparationJob, spilled: RaggedRecordFile, user_counts: NDArray[np.int64]) -> KeyPartitions:
    """The records by ranges of users, in the order of the input."""
    by_memory = work.options.memory_bytes * spilled.num_records // (WORK_FACTOR * max(1, spilled.num_bytes))
    max_events = max(1, by_memory, spilled.num_records // MAX_PARTITIONS)
    bounds = balanced_bounds(user_counts, max_events)
    lists = work.source.columns.lists()
    partitions = KeyPartitions(work.folder, "events", work.parser.dtype, "user", bounds, lists)
    num_done = 0
    for chunk in spilled.chunks():
        partitions.append(chunk)
        num_done += chunk.size
        work.progress("split", num_done / spilled.num_records)
    spilled.delete()
    return partitions


def sort_events(work: PreparationJob, partitions: KeyPartitions) -> None:
    """Put each range into order, in place; exact duplicates are counted, and dropped where that is asked for."""
    for p in range(len(partitions)):
        records = partitions[p].load()
        start, end = partitions.bounds[p : p + 2]
        rows = records.rows
        users = rows["user"] - start
        is_repeat = is_duplicate(users, int(end - start), rows["signature"])
        work.num_duplicates += int(is_repeat.sum())
        order = order_events(users, int(end - start), [rows[name] for name in work.source.columns.sort_fields()])
        if work.drops_duplicates:
            order = order[~is_repeat[order]]
        if work.options.new_items:
            is_hidden = _is_before_last(users[order]) & is_made_new(rows["item"][order], work.options.new_items)
            work.num_of_new_items += int(is_hidden.sum())
            order = order[~is_hidden]
        partitions[p].replace(records.take(order))
        work.progress("sort", (p + 1) / len(partitions))


def _is_before_last(users: NDArray[Any]) -> NDArray[np.bool_]:
    """Of each event, whether the same user has a later one."""
    return np.append(users[1:] == users[:-1], False)


def is_made_new(items: NDArray[Any], share: float) -> NDArray[np.bool_]:
    """Whether each of these items is among those that are to look new."""
    chosen: NDArray[np.bool_] = (fold_array(_MADE_NEW, items) >> np.uint64(40)) < np.uint64(round(share * 2**24))
    return chosen


def _filter(work: PreparationJob, partitions: KeyPartitions) -> FilterResult:
    def pairs() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for p in range(len(partitions)):
            for chunk in partitions[p].rows():
                yield chunk["user"], chunk["item"]

    o = work.options
    rule = CoreFilter(
        user_core=o.user_core,
        item_core=o.item_core,
        is_iterated=o.core_passes == "iterated",
        min_user_events=o.min_user_events,
    )
    kept = apply_filter(rule, pairs, len(work.parser.users), len(work.parser.items))
    if not kept.users.any():
        remedy = "lower user_core, item_core or min_user_events"
        raise DataError("removes every event", option="filters", value=to_plain(rule), remedy=remedy)
    return kept


def _write(work: PreparationJob, partitions: KeyPartitions, kept: FilterResult, part: TrainingSubset) -> DatasetCard:
    parser = work.parser
    num_users = int(kept.users.sum())
    num_items = int(kept.items.sum())
    user_rows = np.where(kept.users, np.cumsum(kept.users) - 1, -1)
    item_rows = np.where(kept.items, np.cumsum(kept.items), -1)
    users = Keyed("user", parser.users, user_rows, part.users, num_users)
    items = Keyed("item", parser.items, item_rows, part.items, num_items + 1)
    user_sides = [side_table(work, s, users, f"user{i}", partitions.bounds) for i, s in enumerate(work.source.users)]
    files = _write_users(work, partitions, kept, user_sides)
    item_bounds = even_bounds(len(parser.items), ITEMS_A_PARTITION)
    item_sides = [side_table(work, s, items, f"item{i}", item_bounds) for i, s in enumerate(work.source.items)]
    files.append(write_items(work.folder, _item_tables(work, kept, item_bounds, item_sides)))
    files += write_vocabularies(work, user_sides, item_sides)
    for side in (*user_sides, *item_sides):
        files += side.files()
        side.delete()
    files += work.quarantine.files()
    partitions.delete()
    card = _card(work, kept, part.fit, _features(user_sides), _features(item_sides))
    return finish_sequences(work.folder, card, kept.user_counts[kept.users], kept.item_counts[kept.items], files)


def _write_users(
    work: PreparationJob, partitions: KeyPartitions, kept: FilterResult, sides: list[SideTable]
) -> list[DataFile]:
    id_of_item = np.cumsum(kept.items, dtype=np.int64)
    user_types = {name: column.type for side in sides for name, column in side.load(0).items()}
    fields = event_fields(work.parser) + [pa.field(dataset_schema.USER_PREFIX + n, t) for n, t in user_types.items()]
    writer = UsersWriter(work.folder, fields)
    next_id = 0
    for p in range(len(partitions)):
        start, end = partitions.bounds[p : p + 2]
        records = partitions[p].load()
        records = records.take(kept.users[records.rows["user"]] & kept.items[records.rows["item"]])
        codes = start + np.flatnonzero(kept.users[start:end])
        features = {n: c.take(pa.array(codes - start)) for side in sides for n, c in side.load(p).items()}
        ids = np.arange(next_id, next_id + codes.size, dtype=np.int64)
        writer.append(user_block(work.parser, records, codes, ids, kept.user_counts[codes], id_of_item, features))
        next_id += codes.size
        work.progress("write", (p + 1) / len(partitions))
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
    """Rows of users. codes, ids, counts: of each, in the parser and in the dataset, and how many records it has."""
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
    """Type of a value of each event column."""
    types: dict[str, pa.DataType] = {}
    for name in parser.field_names:
        if (
            name.endswith(dataset_schema.COUNTS_SUFFIX)
            and name.removesuffix(dataset_schema.COUNTS_SUFFIX) in parser.columns.lists()
        ):
            types |= {name.removesuffix(dataset_schema.COUNTS_SUFFIX): pa.int64(), name: pa.int32()}
        elif name.startswith(dataset_schema.EVENT_PREFIX):
            is_number = parser.dtype[name].kind == "f" and not parser.is_cut(name)
            types[name] = pa.float32() if is_number else pa.int64()
    return types


def event_fields(parser: EventParser) -> list[pa.Field]:
    """Columns of a user's row, without features of the user."""
    kinds = {name.removeprefix(dataset_schema.EVENT_PREFIX): kind for name, kind in event_types(parser).items()}
    return dataset_schema.sequence_fields(
        has_timestamps="time" in parser.field_names, has_actions="actions" in parser.field_names, features=kinds
    )


def _item_tables(
    work: PreparationJob, kept: FilterResult, bounds: NDArray[np.int64], sides: list[SideTable]
) -> Iterator[pa.Table]:
    next_id = 1
    for p in range(bounds.size - 1):
        codes = bounds[p] + np.flatnonzero(kept.items[bounds[p] : bounds[p + 1]])
        columns = {
            "item_id": pa.array(np.arange(next_id, next_id + codes.size, dtype=np.int64)),
            "item_key": work.parser.items.keys(codes),
            "count": pa.array(kept.item_counts[codes]),
        }
        for side in sides:
            loaded = side.load(p)
            columns |= {dataset_schema.ITEM_PREFIX + n: c.take(pa.array(codes - bounds[p])) for n, c in loaded.items()}
        next_id += codes.size
        yield pa.table(columns)


def side_table(work: PreparationJob, source: SideSource, of: Keyed, name: str, bounds: NDArray[np.int64]) -> SideTable:
    """Features of users or items, read."""
    table = SideTable(source, of, work.folder, name, bounds)
    table.read(work.quarantine, work.options.max_bad_share)
    work.notes += table.notes()
    return table


def _features(sides: list[SideTable]) -> tuple[Feature, ...]:
    return tuple(feature for side in sides for feature in side.features())


def write_vocabularies(
    work: PreparationJob, user_sides: list[SideTable], item_sides: list[SideTable]
) -> list[DataFile]:
    """One file for each category column: `id` from 1 and `key`."""
    tables = {dataset_schema.EVENT_PREFIX + name: keys for name, keys in work.parser.category_keys().items()}
    for prefix, sides in ((dataset_schema.USER_PREFIX, user_sides), (dataset_schema.ITEM_PREFIX, item_sides)):
        tables |= {prefix + name: keys for side in sides for name, keys in side.vocabularies().items()}
    folder = work.folder / "vocabularies"
    files = []
    for column, keys in tables.items():
        folder.mkdir(exist_ok=True)
        path = folder / f"{column}.parquet"
        ids = np.arange(1, len(keys) + 1, dtype=np.int64)
        pq.write_table(pa.table({"id": pa.array(ids), "key": keys}), path, compression="zstd")
        files.append(describe_file(work.folder, path, len(keys)))
    return files


def _card(
    work: PreparationJob,
    kept: FilterResult,
    fit: TransformFit,
    user_features: tuple[Feature, ...],
    item_features: tuple[Feature, ...],
) -> DatasetCard:
    num_events = int(kept.user_counts[kept.users].sum())
    num_dropped = work.num_duplicates if work.drops_duplicates else 0
    num_below = work.parser.num_below_rating
    num_new = work.num_of_new_items
    num_rare = work.num_rows_read - work.num_bad_events - num_below - num_dropped - num_new - num_events
    filtered = {"min_rating": num_below, "made new": num_new, "rare users and items": num_rare}
    return DatasetCard(
        kind="sequences",
        name=work.source.name,
        source_format=work.source.format,
        counts=Counts(
            users=int(kept.users.sum()),
            items=int(kept.items.sum()),
            events=num_events,
            rows_read=work.num_rows_read,
            duplicates_dropped=num_dropped,
            duplicates_kept=work.num_duplicates - num_dropped,
            filtered={name: count for name, count in filtered.items() if count},
            quarantined=dict(sorted(work.quarantine.reasons.items())),
        ),
        has_timestamps="time" in work.parser.field_names,
        action_bits=work.parser.columns.action_bits,
        event_features=work.parser.features(),
        user_features=user_features,
        item_features=item_features,
        notes=(*notes_on_ids(work.parser, kept), *work.notes),
        fit=fit,
        options=to_plain(_with_time_unit(work.options, work.parser)),
        inputs=work.source.digests(),
    )


def _with_time_unit(options: PrepareOptions, parser: EventParser) -> PrepareOptions:
    """Puts the unit that was inferred into the options, so that what is appended later is read in the same one."""
    log = getattr(options, "log", None)
    if not isinstance(log, LogColumns) or log.time is None or log.time_unit != "auto":
        return options
    changed: Any = {"log": dataclasses.replace(log, time_unit=parser.time_unit)}
    return dataclasses.replace(options, **changed)


def notes_on_ids(parser: EventParser, kept: FilterResult) -> Iterator[str]:
    """Ids that are what programs write where there is none: their events are those of many."""
    words = pa.array([word for word in BLANK_WORDS if word])
    for what, table, counts in (("user", parser.users, kept.user_counts), ("item", parser.items, kept.item_counts)):
        for word, code in zip(words.to_pylist(), table.find(words).tolist(), strict=True):
            if code >= 0 and counts[code]:
                yield (
                    f"{counts[code]:,} events have the {what} {word!r}: if that stands for a missing id, leave the "
                    "cell empty, and its rows are set aside"
                )


def _grown(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    if size <= counts.size:
        return counts
    return np.concatenate([counts, np.zeros(max(size, 2 * counts.size) - counts.size, dtype=np.int64)])
