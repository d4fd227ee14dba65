"""Appends events and items to a prepared dataset, with time and memory proportional to the appended data.

Existing users, items and category values keep their ids; new ones get the next ids. The events are written to a new
layer (nestrec.data.event_layers), so no existing file is rewritten. Fitted transforms of numbers do not change.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.config_overrides import apply_overrides, override_texts
from nestrec.base.config_values import from_plain
from nestrec.base.errors import DataError
from nestrec.base.failpoints import fail_point
from nestrec.base.files import parse_path
from nestrec.base.renamed_fields import with_present_names
from nestrec.data import dataset_schema
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import (
    Counts,
    DataFile,
    DatasetCard,
    Feature,
    Generation,
    LayerEntry,
    describe_file,
    length_statistics,
    log_histogram,
    popularity_statistics,
)
from nestrec.data.event_layers import COUNTS_FILE, ITEMS_FILE
from nestrec.data.flat_arrays import add_counts
from nestrec.data.formats.format_registry import FORMATS, find_format
from nestrec.data.formats.format_spec import checked_source
from nestrec.data.incremental.compaction import is_repeated_event, merge_small_layers
from nestrec.data.incremental.generations import (
    append_generation,
    commit,
    first_generation,
    install_layer,
    layer_files,
    locked_dataset,
    partial_folder,
    pending_stream_rows,
    unknown_values,
)
from nestrec.data.prepare.dataset_writer import UsersWriter
from nestrec.data.prepare.event_parser import EventColumns, EventParser
from nestrec.data.prepare.log_source import ArrowTable, LogSource, input_as_path
from nestrec.data.prepare.prepare_options import PrepareOptions, Progress, silent
from nestrec.data.prepare.prepare_sequences import (
    PreparationJob,
    event_fields,
    read_events,
    read_side_table,
    sort_events,
    split_events,
    user_block,
)
from nestrec.data.prepare.raw_rows import QUARANTINE_FILE, Quarantine
from nestrec.data.prepare.side_tables import SideSource, SideTable, SideTableOwner
from nestrec.data.prepare.spill_files import KeyPartitions, even_bounds

_NOT_INHERITED = (
    "min_events_per_user", "min_events_per_item", "final_min_events_per_user", "simulated_new_items", "force",
    "items", "users", "item_vectors", "user_vectors",
)  # fmt: skip
"""Options of the preparation that do not apply to appended events: new users and items are not filtered by their number
of events, and the side tables that were prepared do not describe new users and items."""
_MAX_NOTES = 20
"""Maximum number of notes in a dataset card; the newest are retained."""


def append(
    events: Path | str | ArrowTable,
    dataset: Path | str,
    *,
    format: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> DatasetCard:
    """Append events to a dataset, and return its new card.

    Columns have the same meaning as when the dataset was prepared, unless they are overridden. The new generation is
    committed atomically.

    Args:
        events: A path or an in-memory table, as for `prepare`.
        dataset: Folder of the dataset.
        format: Format of the events if it differs from the dataset's format.
        overrides: Options as values, or as text as on the command line; `{"items": "more.csv"}` sets a table of new
            items.
        progress: Callback for progress.

    Returns:
        The card of the new generation.

    Raises:
        DataError: The events are invalid, or do not match the dataset.
        DatasetLockedError: Another process is changing the dataset.
    """
    folder = parse_path(dataset, "dataset")
    card = DatasetCard.load(folder)
    name = format or card.source_format
    spec = find_format(name)
    if spec.open is None:
        remedy = "set the format of the events, for example --format log"
        raise DataError("not an event log format", option="format", value=name, remedy=remedy)
    options = FORMATS.default_config(name, "options")
    if name == card.source_format:
        options = from_plain(spec.options, inherited_options(with_present_names(spec.options, card.options)))
    options = apply_overrides(options, override_texts(overrides))
    with input_as_path(events, "events") as path:
        return append_source(folder, checked_source(spec.open(path, options), name), options, progress=progress)


def append_source(
    folder: Path,
    source: LogSource,
    options: PrepareOptions,
    *,
    inputs: Mapping[str, str] | None = None,
    stream: Mapping[str, Any] | None = None,
    write_extra_files: Callable[[Path], list[DataFile]] | None = None,
    progress: Progress = silent,
) -> DatasetCard:
    """Append the events of any source to a dataset, and return its new card.

    Args:
        folder: Folder of the dataset.
        source: The events.
        options: Options of the format.
        inputs: Names and digests of the input; by default those of the source's files.
        stream: Stream offset to commit together with the events (exactly once); None if the source is not a stream.
        write_extra_files: Writes additional files to the layer's folder, and returns their entries.
        progress: Callback for progress.

    Raises:
        DataError: The events are invalid, do not match the dataset, or were appended before.
        DatasetLockedError: Another process is changing the dataset.
    """
    with locked_dataset(folder) as card:
        _check_kind(card, source, folder)
        digests = source.digests(of_rows=True) if inputs is None else dict(inputs)
        _check_new_inputs(card, digests)
        number = card.generation + 1
        entry = LayerEntry(name=f"{number:06d}", events=0)
        partial = partial_folder(folder, entry.name)
        growth = _AppendJob(folder, card, source, options, partial, progress)
        files, grown = growth.write(may_be_empty=stream is not None)
        files += pending_stream_rows(folder, card, partial) if write_extra_files is None else write_extra_files(partial)
        fail_point("data.append.before_layer")
        install_layer(folder, partial, entry.name)
        entry = dataclasses.replace(entry, events=grown.counts.events - card.counts.events)
        quarantined = _move_quarantine(folder, entry, growth.quarantine)
        below, below_files = merge_small_layers(folder, card, entry.events)
        all_files = (*below_files, *layer_files(files, entry), *quarantined)
        after = dataclasses.replace(grown, layers=(*below, entry), files=all_files)
        generations = first_generation(card, growth.last_ms_before)
        new = Generation(
            number=number,
            digest=after.digest_of_files,
            events=after.counts.events,
            users=after.counts.users,
            items=after.counts.items,
            last_ms=max(generations[-1].last_ms, growth.last_ms),
            inputs=digests,
            stream=generations[-1].stream if stream is None else dict(stream),
        )
        return commit(folder, card, dataclasses.replace(after, generations=append_generation(generations, new)))


class _AppendJob:
    """State of one append, which writes to its own temporary folder."""

    def __init__(  # noqa: PLR0917
        self,
        folder: Path,
        card: DatasetCard,
        source: LogSource,
        options: PrepareOptions,
        partial: Path,
        progress: Progress,
    ):
        self.card = card
        self.dataset = Dataset.open(folder, cache_bytes=256 << 20)
        self.quarantine = Quarantine(partial)
        _check_same_events(card, source.columns)
        source = dataclasses.replace(
            source, columns=dataclasses.replace(source.columns, action_bits=dict(card.action_bits))
        )
        parser = EventParser(source.columns)
        self._partial = partial
        self._source = source
        parser.users.encode(self.dataset.all_user_keys())
        items = self.dataset.items()
        parser.items.encode(_texts(items.column("item_key")))
        for name, table in parser.vocabularies.items():
            table.encode(self._vocabulary(f"{dataset_schema.EVENT_PREFIX}{name}"))
        parser.transforms = {f.name: f.transform for f in card.event_features if f.name in source.columns.log.numbers}
        self._item_counts = items.column("count").to_numpy().astype(np.int64)
        self._work = PreparationJob(
            partial, source, options, progress, parser, self.quarantine, notes=list(source.notes)
        )
        self.last_ms_before = self.dataset.last_ms() if not card.generations else 0
        self.last_ms = 0

    def write(self, *, may_be_empty: bool = False) -> tuple[list[DataFile], DatasetCard]:
        """Write the files of the layer.

        Args:
            may_be_empty: Whether a layer without events is allowed; a stream must continue after rows that are all bad.

        Returns:
            The entries of the files, and the card of the grown dataset without its layers and files.
        """
        work = self._work
        parser = self._work.parser
        sizes = {column: len(self._vocabulary(column)) for column in self._category_columns()}
        spilled, user_counts = read_events(work)
        work.quarantine.check(work.num_rows_read, work.options.max_bad_fraction, time_hint=parser.time_hint)
        work.num_bad_events = work.quarantine.num_rows
        if not user_counts.sum() and not may_be_empty:
            remedy = "check the columns and filters"
            raise DataError("no usable events", option="input", value=self._source.name, remedy=remedy)
        partitions = split_events(work, spilled, user_counts)
        fail_point("data.append.after_split")
        sort_events(work, partitions)
        if work.drops_duplicates:
            self._drop_repeated_events(partitions)
        user_sides = self._side_tables("user", parser.users, self.card.counts.users, partitions.bounds)
        lengths = self.dataset.lengths.astype(np.int64)
        counts = np.zeros(len(parser.items), np.int64)
        files, grown = self._write_users(partitions, user_sides, lengths, counts)
        item_bounds = even_bounds(len(parser.items), 1 << 17)
        item_sides = self._side_tables("item", parser.items, self.card.counts.items, item_bounds)
        files += self._write_items(item_bounds, item_sides, counts)
        files += self._write_vocabularies(sizes, user_sides, item_sides)
        for side in (*user_sides, *item_sides):
            files += side.files()
            side.delete()
        partitions.delete()
        return files, self._card(grown, counts, user_sides, item_sides)

    def _vocabulary(self, column: str) -> pa.Array:
        """Return the values of a category in order of id; empty if it has none, or if the dataset is synthetic."""
        if not self.dataset.has_vocabulary(column):
            return pa.array([], pa.string())
        return _texts(self.dataset.vocabulary(column).column("key"))

    def _category_columns(self) -> list[str]:
        return [f.column for f in self.card.features if f.kind in ("category", "categories")]

    def _side_tables(self, owner: Any, keys: Any, num_old: int, bounds: NDArray[np.int64]) -> list[SideTable]:
        """Read the side tables of new users or items."""
        codes = np.arange(len(keys), dtype=np.int64)
        features = self.card.user_features if owner == "user" else self.card.item_features
        known = {f.name: f for f in features}
        of = SideTableOwner(
            owner,
            keys,
            np.where(codes >= num_old, codes - num_old, -1),
            np.zeros(len(keys), np.bool_),
            len(keys) - num_old,
            {f.name: self._vocabulary(f.column) for f in features if f.kind in ("category", "categories")},
            known,
        )
        source_tables = self._source.users if owner == "user" else self._source.items
        sources = [_as_prepared(source, known) for source in source_tables]
        tables = [read_side_table(self._work, s, of, f"{owner}{i}", bounds) for i, s in enumerate(sources)]
        for table in tables:
            for feature in table.features():
                stored = known.get(feature.name)
                if stored is not None and stored.kind != feature.kind:
                    raise DataError(
                        f"the column has the kind {feature.kind} in this table, but {stored.kind} in the dataset",
                        option=f"{owner}_columns",
                        value=feature.name,
                        remedy="set the kind that the dataset has with "
                        f"--{owner}_columns.categories, lists, numbers, texts or vectors",
                    )
        return tables

    def _drop_repeated_events(self, partitions: KeyPartitions) -> None:
        """Drop events that the dataset already contains, compared by all stored columns."""
        num_old = self.card.counts.users
        for p in range(len(partitions)):
            records = partitions[p].load()
            users = np.unique(records.rows["user"])
            old = users[users < num_old]
            if not old.size:
                continue
            repeated = is_repeated_event(records, self._work.parser, self.dataset.rows(old.astype(np.int64)))
            self._work.num_duplicates += int(repeated.sum())
            partitions[p].replace(records.take(~repeated))

    def _write_users(
        self,
        partitions: KeyPartitions,
        sides: list[SideTable],
        lengths: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> tuple[list[DataFile], NDArray[np.int64]]:
        """Write the rows of the users with new events.

        Args:
            partitions: Sorted records of the new events.
            sides: Side tables of users.
            lengths: Number of existing events per user.
            counts: Number of new events per item; updated in place.

        Returns:
            The entries of the files, and the number of events per user including the new ones.
        """
        parser = self._work.parser
        kinds = {f.column: f for f in self.card.user_features if f.kind != "vector"}
        types = {field.name: field.type for field in self.dataset.schema() if field.name in kinds}
        fields = event_fields(parser) + [pa.field(name, kind) for name, kind in types.items()]
        writer = UsersWriter(self._partial, fields)
        id_of_item = np.arange(1, len(parser.items) + 1, dtype=np.int64)
        grown = np.concatenate([lengths, np.zeros(len(parser.users) - lengths.size, np.int64)])
        for p in range(len(partitions)):
            start = int(partitions.bounds[p])
            records = partitions[p].load()
            codes, num_events = np.unique(records.rows["user"], return_counts=True)
            codes = codes.astype(np.int64)
            loaded = {dataset_schema.USER_PREFIX + n: c for side in sides for n, c in side.load(p).items()}
            features = {}
            for name, kind in types.items():
                values = loaded[name].take(pa.array(codes - start)) if name in loaded else None
                features[name.removeprefix(dataset_schema.USER_PREFIX)] = (
                    unknown_values(kinds[name], kind, codes.size) if values is None else values
                )
            if codes.size:
                writer.append(user_block(parser, records, codes, codes, num_events, id_of_item, features))
            grown[codes] += num_events
            add_counts(records.rows["item"], counts)
            if "time" in parser.field_names and records.size:
                self.last_ms = max(self.last_ms, int(records.rows["time"].max()))
            self._work.progress("write", (p + 1) / len(partitions))
        return writer.close(), grown

    def _write_items(
        self, bounds: NDArray[np.int64], sides: list[SideTable], counts: NDArray[np.int64]
    ) -> list[DataFile]:
        """Write the rows of new items, and the numbers of new events of existing items."""
        num_old = self.card.counts.items
        touched = np.flatnonzero(counts[:num_old])
        files = []
        if touched.size:
            path = self._partial / COUNTS_FILE
            table = pa.table({"item_id": pa.array(touched + 1), "count": pa.array(counts[touched])})
            pq.write_table(table, path, compression="zstd")
            files.append(describe_file(self._partial, path, touched.size))
        if counts.size > num_old:
            path = self._partial / ITEMS_FILE
            with pq.ParquetWriter(path, self.dataset.items().schema, compression="zstd") as writer:
                for table in self._item_tables(bounds, sides, counts):
                    writer.write_table(table)
            files.append(describe_file(self._partial, path, counts.size - num_old))
        return files

    def _item_tables(
        self, bounds: NDArray[np.int64], sides: list[SideTable], counts: NDArray[np.int64]
    ) -> Iterator[pa.Table]:
        num_old = self.card.counts.items
        types = self.dataset.items().schema
        kinds = {f.column: f for f in self.card.item_features}
        for p in range(bounds.size - 1):
            codes = np.arange(max(num_old, bounds[p]), max(num_old, bounds[p + 1]), dtype=np.int64)
            if not codes.size:
                continue
            columns: dict[str, Any] = {
                "item_id": pa.array(codes + 1),
                "item_key": self._work.parser.items.keys(codes),
                "count": pa.array(counts[codes]),
            }
            for side in sides:
                loaded = side.load(p)
                columns |= {
                    dataset_schema.ITEM_PREFIX + n: c.take(pa.array(codes - bounds[p])) for n, c in loaded.items()
                }
            for field in types:
                if field.name not in columns:
                    columns[field.name] = unknown_values(kinds[field.name], field.type, codes.size)
            yield pa.table([columns[field.name].cast(field.type) for field in types], schema=types)

    def _write_vocabularies(
        self, sizes: Mapping[str, int], user_sides: list[SideTable], item_sides: list[SideTable]
    ) -> list[DataFile]:
        """Write the new values of each category."""
        tables = {dataset_schema.EVENT_PREFIX + n: keys for n, keys in self._work.parser.category_keys().items()}
        for prefix, sides in ((dataset_schema.USER_PREFIX, user_sides), (dataset_schema.ITEM_PREFIX, item_sides)):
            tables |= {prefix + name: keys for side in sides for name, keys in side.vocabularies().items()}
        files = []
        for column, keys in tables.items():
            size = sizes.get(column)
            if size is None or len(keys) <= size:
                continue
            (self._partial / "vocabularies").mkdir(exist_ok=True)
            path = self._partial / "vocabularies" / f"{column}.parquet"
            ids = pa.array(np.arange(size + 1, len(keys) + 1, dtype=np.int64))
            pq.write_table(pa.table({"id": ids, "key": keys.slice(size)}), path, compression="zstd")
            files.append(describe_file(self._partial, path, len(keys) - size))
        return files

    def _card(
        self,
        lengths: NDArray[np.int64],
        counts: NDArray[np.int64],
        user_sides: list[SideTable],
        item_sides: list[SideTable],
    ) -> DatasetCard:
        card = self.card
        work = self._work
        before = card.counts
        num_new = int(counts.sum())
        dropped = work.num_duplicates if work.drops_duplicates else 0
        below = work.parser.num_below_rating
        filtered = Counter(before.filtered) + Counter({"min_rating": below})
        all_counts = counts.copy()
        all_counts[: self._item_counts.size] += self._item_counts
        return dataclasses.replace(
            card,
            notes=tuple(dict.fromkeys((*card.notes, *work.notes)))[-_MAX_NOTES:],
            counts=Counts(
                users=int(lengths.size),
                items=int(counts.size),
                events=before.events + num_new,
                rows_read=before.rows_read + work.num_rows_read,
                duplicates_dropped=before.duplicates_dropped + dropped,
                duplicates_kept=before.duplicates_kept + work.num_duplicates - dropped,
                filtered=dict(filtered),
                quarantined=dict(sorted((Counter(before.quarantined) + work.quarantine.reasons).items())),
            ),
            event_features=_with_larger_vocabularies(card.event_features, work.parser.features()),
            user_features=_with_larger_vocabularies(card.user_features, [f for s in user_sides for f in s.features()]),
            item_features=_with_larger_vocabularies(card.item_features, [f for s in item_sides for f in s.features()]),
            lengths=length_statistics(lengths),
            popularity=popularity_statistics(all_counts),
            length_histogram=log_histogram(lengths),
            popularity_histogram=log_histogram(all_counts),
        )


def _as_prepared(source: SideSource, known: Mapping[str, Feature]) -> SideSource:
    """Return the source with the column kinds of the dataset.

    Kinds are inferred from the rows of a table (numbers may be numbers, buckets or ids), and the inferred kinds of a
    table of new items may differ.
    """
    columns = []
    for column in source.columns:
        feature = known.get(column.feature)
        kind = column.kind
        if feature is not None and kind in ("category", "range", "number"):
            if feature.kind == "category":
                kind = "range" if feature.transform.kind == "quantiles" else "category"
            elif feature.kind == "number":
                kind = "number"
        columns.append(dataclasses.replace(column, kind=kind))
    return dataclasses.replace(source, columns=tuple(columns))


def items_without_features(folder: Path, before: DatasetCard, after: DatasetCard) -> str:
    """Return a warning if new items of the latest append have no features, although items of the dataset have.

    Args:
        folder: Folder of the dataset.
        before: Card of the dataset before the append.
        after: Card of the dataset after the append.

    Returns:
        The warning; empty if there is none.
    """
    file = folder / after.all_layers[-1].folder / ITEMS_FILE
    names = [feature.name for feature in after.item_features]
    if not names or after.counts.items == before.counts.items or not file.exists():
        return ""
    items = pq.read_table(file)
    has_any = np.zeros(len(items), np.bool_)
    for feature in after.item_features:
        if feature.column in items.column_names:
            column = items.column(feature.column)
            [unknown] = map(str, unknown_values(feature, column.type, 1).to_pylist())  # as text, NaN equals itself
            has_any |= [str(value) != unknown for value in column.to_pylist()]
    if has_any.all():
        return ""
    problem = f"{np.count_nonzero(~has_any):,} of {len(items):,} new items have no features ({', '.join(names)})"
    return f"{problem}: set a table with their features with --items FILE"


def inherited_options(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the preparation that apply to appended events; columns of a side table need the table."""
    dropped = {f"{table.removesuffix('s')}_columns" for table in ("items", "users") if before.get(table) is not None}
    return {name: value for name, value in before.items() if name not in {*_NOT_INHERITED, *dropped}}


def _with_larger_vocabularies(before: tuple[Feature, ...], now: Any) -> tuple[Feature, ...]:
    """Return the features with the new vocabulary sizes; nothing else of a feature changes."""
    sizes = {feature.name: feature.vocabulary_size for feature in now}
    return tuple(dataclasses.replace(f, vocabulary_size=max(f.vocabulary_size, sizes.get(f.name, 0))) for f in before)


def _check_kind(card: DatasetCard, source: LogSource, folder: Path) -> None:
    if card.kind != "sequences":
        remedy = "prepare all rows again, because labeled rows have no users to append events to"
        raise DataError("the dataset contains labeled rows", option="dataset", value=str(folder), remedy=remedy)
    if ("time" in source.columns.sort_fields()) != card.has_timestamps:
        has = "has times, but the events have none" if card.has_timestamps else "has no times, but the events have"
        remedy = "set --log.time to the column of times if the dataset has times, otherwise remove it"
        raise DataError(f"the dataset {has}", option="log.time", value="", remedy=remedy)


def _check_same_events(card: DatasetCard, columns: EventColumns) -> None:
    if set(card.action_bits) != set(columns.action_bits):
        raise DataError(
            f"the dataset has different actions: {', '.join(card.action_bits) or 'none'}",
            option="log.actions",
            value=", ".join(columns.action_bits),
            remedy="set --log.actions to the actions of the dataset",
        )
    names = {f.name: f.kind for f in card.event_features}
    log = columns.log
    now = {*columns.number_features(), *log.categories, *log.lists, *log.texts}
    if set(names) != now:
        raise DataError(
            f"the dataset has different event features: {', '.join(names) or 'none'}",
            option="features of events",
            value=", ".join(sorted(now)),
            remedy="name the same columns in log.categories, lists, numbers, texts and outcome_features",
        )


def _check_new_inputs(card: DatasetCard, digests: Mapping[str, str]) -> None:
    known = card.all_inputs
    for name, digest in digests.items():
        if digest in known:
            raise DataError(
                f"the dataset already contains this file as {known[digest]}; nothing was appended",
                option="input",
                value=name,
                remedy="append only new files",
            )
    if len(set(digests.values())) < len(digests):
        raise DataError(
            "two files have the same content", option="input", value=sorted(digests), remedy="append only one of them"
        )


def _move_quarantine(folder: Path, layer: LayerEntry, quarantine: Quarantine) -> list[DataFile]:
    """Move the quarantine file out of the layer, so that it is retained when layers are merged."""
    if not quarantine.num_rows:
        return []
    (folder / "quarantine").mkdir(exist_ok=True)
    path = folder / "quarantine" / f"{layer.name}.csv"
    (folder / layer.folder / QUARANTINE_FILE).replace(path)
    return [describe_file(folder, path, quarantine.num_rows)]


def _texts(keys: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays([*keys.chunks, pa.array([], keys.type)])
