"""`append`: events and items are added to a prepared dataset, in time and memory that follow what is added.

Users, items and category values keep their numbers; new ones get the next. The events go into a layer of their own
(nestrec.data.layers), so nothing that is there is written again. Transforms of numbers stay as they were learnt.
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

from nestrec.base.config_overrides import override_texts, with_overrides
from nestrec.base.config_values import from_plain
from nestrec.base.errors import DataError
from nestrec.base.failpoints import fail_point
from nestrec.base.files import given_path
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
from nestrec.data.incremental.compaction import is_repeated, merge_small_layers
from nestrec.data.incremental.generations import (
    carried_on,
    commit,
    first_generation,
    followed_by,
    growing,
    moved,
    partial_folder,
    place_layer,
    unknown_values,
)
from nestrec.data.prepare.dataset_writer import UsersWriter
from nestrec.data.prepare.event_parser import EventColumns, EventParser
from nestrec.data.prepare.log_source import ArrowTable, LogSource, given_input
from nestrec.data.prepare.prepare_options import PrepareOptions, Progress, silent
from nestrec.data.prepare.prepare_sequences import (
    PreparationJob,
    event_fields,
    read_events,
    side_table,
    sort_events,
    split_events,
    user_block,
)
from nestrec.data.prepare.raw_rows import QUARANTINE_FILE, Quarantine
from nestrec.data.prepare.side_tables import Keyed, SideSource, SideTable
from nestrec.data.prepare.spill_files import KeyPartitions, even_bounds

_NOT_AGAIN = (
    "user_core", "item_core", "min_user_events", "new_items", "force", "items", "users", "item_vectors", "user_vectors",
)  # fmt: skip
"""Options that do not hold for what is appended: events are not filtered by how many there are, and files of features
of what was prepared say nothing of what is new."""
_MAX_NOTES = 20
"""Notes that the card of a dataset keeps, the newest ones, however often it grows."""


def append(
    events: Path | str | ArrowTable,
    dataset: Path | str,
    *,
    format: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> DatasetCard:
    """Add the events of `events`, a path or a table as for `prepare`, to a dataset; its new card.

    Columns mean what they meant when it was prepared, unless `overrides` say otherwise (`{"items": "more.csv"}` names a
    table of new items), by values or text as on the command line. format: of the events, where it is another than the
    dataset was prepared from.
    """
    folder = given_path(dataset, "dataset")
    card = DatasetCard.load(folder)
    name = format or card.source_format
    found = find_format(name)
    if found.open is None:
        remedy = "name the format of the events (--format log)"
        raise DataError("is no format of event logs", option="format", value=name, remedy=remedy)
    options = FORMATS.by_default(name, "options")
    if name == card.source_format:
        options = from_plain(found.options, kept_options(card.options))
    options = with_overrides(options, override_texts(overrides))
    with given_input(events, "events") as path:
        return append_source(folder, checked_source(found.open(path, options), name), options, progress=progress)


def append_source(
    folder: Path,
    source: LogSource,
    options: PrepareOptions,
    *,
    inputs: Mapping[str, str] | None = None,
    stream: Mapping[str, Any] | None = None,
    beside: Callable[[Path], list[DataFile]] | None = None,
    progress: Progress = silent,
) -> DatasetCard:
    """The same for events from anywhere. inputs: names and digests of what they came from; none: of the files.

    stream: how far a stream was read, to be kept with the events. beside: writes further files into the layer's folder.
    """
    with growing(folder) as card:
        _check_kind(card, source, folder)
        digests = source.digests(of_rows=True) if inputs is None else dict(inputs)
        _check_new(card, digests)
        number = card.generation + 1
        entry = LayerEntry(name=f"{number:06d}", events=0)
        partial = partial_folder(folder, entry.name)
        growth = _Growth(folder, card, source, options, partial, progress)
        files, grown = growth.write(may_be_empty=stream is not None)
        files += carried_on(folder, card, partial) if beside is None else beside(partial)
        fail_point("data.append.before_layer")
        place_layer(folder, partial, entry.name)
        entry = dataclasses.replace(entry, events=grown.counts.events - card.counts.events)
        quarantined = _place_quarantine(folder, entry, growth.quarantine)
        below, below_files = merge_small_layers(folder, card, entry.events)
        all_files = (*below_files, *moved(files, entry), *quarantined)
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
        return commit(folder, card, dataclasses.replace(after, generations=followed_by(generations, new)))


class _Growth:
    """The state of one append, in a folder of its own."""

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
        """The files of the layer, and the card of the dataset with them, but for its layers and files. may_be_empty:
        a stream goes on behind rows that are all bad."""
        work = self._work
        parser = self._work.parser
        sizes = {column: len(self._vocabulary(column)) for column in self._category_columns()}
        spilled, user_counts = read_events(work)
        work.quarantine.check(work.num_rows_read, work.options.max_bad_share, time_hint=parser.time_hint)
        work.num_bad_events = work.quarantine.num_rows
        if not user_counts.sum() and not may_be_empty:
            remedy = "check the columns and filters"
            raise DataError("has no usable events", option="input", value=self._source.name, remedy=remedy)
        partitions = split_events(work, spilled, user_counts)
        fail_point("data.append.after_split")
        sort_events(work, partitions)
        if work.drops_duplicates:
            self._drop_repeats(partitions)
        user_sides = self._sides("user", parser.users, self.card.counts.users, partitions.bounds)
        lengths = self.dataset.lengths.astype(np.int64)
        counts = np.zeros(len(parser.items), np.int64)
        files, grown = self._write_users(partitions, user_sides, lengths, counts)
        item_bounds = even_bounds(len(parser.items), 1 << 17)
        item_sides = self._sides("item", parser.items, self.card.counts.items, item_bounds)
        files += self._write_items(item_bounds, item_sides, counts)
        files += self._write_vocabularies(sizes, user_sides, item_sides)
        for side in (*user_sides, *item_sides):
            files += side.files()
            side.delete()
        partitions.delete()
        return files, self._card(grown, counts, user_sides, item_sides)

    def _vocabulary(self, column: str) -> pa.Array:
        """Keys of a category in order of id; none where it has had no value yet, or was drawn and not read."""
        if not self.dataset.has_vocabulary(column):
            return pa.array([], pa.string())
        return _texts(self.dataset.vocabulary(column).column("key"))

    def _category_columns(self) -> list[str]:
        return [f.column for f in self.card.features if f.kind in ("category", "categories")]

    def _sides(self, owner: Any, keys: Any, num_old: int, bounds: NDArray[np.int64]) -> list[SideTable]:
        """Tables of the features of new users or items."""
        codes = np.arange(len(keys), dtype=np.int64)
        features = self.card.user_features if owner == "user" else self.card.item_features
        known = {f.name: f for f in features}
        of = Keyed(
            owner,
            keys,
            np.where(codes >= num_old, codes - num_old, -1),
            np.zeros(len(keys), np.bool_),
            len(keys) - num_old,
            {f.name: self._vocabulary(f.column) for f in features if f.kind in ("category", "categories")},
            known,
        )
        given = self._source.users if owner == "user" else self._source.items
        sources = [_as_prepared(source, known) for source in given]
        tables = [side_table(self._work, s, of, f"{owner}{i}", bounds) for i, s in enumerate(sources)]
        for table in tables:
            for feature in table.features():
                mine = known.get(feature.name)
                if mine is not None and mine.kind != feature.kind:
                    raise DataError(
                        f"is a {feature.kind} in this table, and was a {mine.kind} when the dataset was prepared",
                        option=f"{owner}_columns",
                        value=feature.name,
                        remedy=f"name it as it was: --{owner}_columns.categories, lists, numbers, texts or bags",
                    )
        return tables

    def _drop_repeats(self, partitions: KeyPartitions) -> None:
        """Events that the dataset has already; compared by all that it keeps of an event."""
        num_old = self.card.counts.users
        for p in range(len(partitions)):
            records = partitions[p].load()
            users = np.unique(records.rows["user"])
            old = users[users < num_old]
            if not old.size:
                continue
            repeated = is_repeated(records, self._work.parser, self.dataset.rows(old.astype(np.int64)))
            self._work.num_duplicates += int(repeated.sum())
            partitions[p].replace(records.take(~repeated))

    def _write_users(
        self,
        partitions: KeyPartitions,
        sides: list[SideTable],
        lengths: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> tuple[list[DataFile], NDArray[np.int64]]:
        """The rows of the users with new events; the lengths of all users with them. counts: of items, added to."""
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
        """Rows of new items, and how many events old ones got."""
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
        """Values that no category had before."""
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
            event_features=_grown_features(card.event_features, work.parser.features()),
            user_features=_grown_features(card.user_features, [f for s in user_sides for f in s.features()]),
            item_features=_grown_features(card.item_features, [f for s in item_sides for f in s.features()]),
            lengths=length_statistics(lengths),
            popularity=popularity_statistics(all_counts),
            length_histogram=log_histogram(lengths),
            popularity_histogram=log_histogram(all_counts),
        )


def _as_prepared(source: SideSource, known: Mapping[str, Feature]) -> SideSource:
    """Read columns of plain values as the dataset has them: whether numbers are numbers, buckets of numbers or ids is
    guessed from the rows of a table, and a table of new items may have other rows."""
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
    """Return a warning if items that came with the newest events have no features, though items of the dataset do.

    Args:
        folder: Folder of the dataset.
        before: Its card before the events were appended.
        after: Its card with them.
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
    number = f"{np.count_nonzero(~has_any):,} of {len(items):,} new items came without features ({', '.join(names)})"
    return f"{number}: name a table of them with --items FILE"


def kept_options(before: Mapping[str, Any]) -> dict[str, Any]:
    """What holds of the options that a dataset was prepared with; columns of a file go with the file."""
    gone = {f"{table.removesuffix('s')}_columns" for table in ("items", "users") if before.get(table) is not None}
    return {name: value for name, value in before.items() if name not in {*_NOT_AGAIN, *gone}}


def _grown_features(before: tuple[Feature, ...], now: Any) -> tuple[Feature, ...]:
    """Vocabularies grow; nothing else of a feature changes."""
    sizes = {feature.name: feature.vocabulary_size for feature in now}
    return tuple(dataclasses.replace(f, vocabulary_size=max(f.vocabulary_size, sizes.get(f.name, 0))) for f in before)


def _check_kind(card: DatasetCard, source: LogSource, folder: Path) -> None:
    if card.kind != "sequences":
        remedy = "prepare all rows again: labelled examples have no users to append to"
        raise DataError("holds labelled rows", option="dataset", value=str(folder), remedy=remedy)
    if ("time" in source.columns.sort_fields()) != card.has_timestamps:
        has = "has times" if card.has_timestamps else "has no times"
        remedy = "name the column of times with --log.time, or leave it out where there are none"
        raise DataError(f"the dataset {has}, the events do not agree", option="log.time", value="", remedy=remedy)


def _check_same_events(card: DatasetCard, columns: EventColumns) -> None:
    if set(card.action_bits) != set(columns.action_bits):
        raise DataError(
            f"the dataset has actions {', '.join(card.action_bits) or 'none'}",
            option="log.actions",
            value=", ".join(columns.action_bits),
            remedy="name the same actions",
        )
    names = {f.name: f.kind for f in card.event_features}
    log = columns.log
    now = {*columns.number_features(), *log.categories, *log.lists, *log.texts}
    if set(names) != now:
        raise DataError(
            f"the dataset has {', '.join(names) or 'none'}",
            option="features of events",
            value=", ".join(sorted(now)),
            remedy="name the same columns in log.categories, lists, numbers, texts and values",
        )


def _check_new(card: DatasetCard, digests: Mapping[str, str]) -> None:
    known = card.all_inputs
    for name, digest in digests.items():
        if digest in known:
            raise DataError(
                f"is in the dataset already, as {known[digest]}: nothing was appended",
                option="input",
                value=name,
                remedy="name files that are new",
            )
    if len(set(digests.values())) < len(digests):
        raise DataError("two files have the same content", option="input", value=sorted(digests), remedy="give one")


def _place_quarantine(folder: Path, layer: LayerEntry, quarantine: Quarantine) -> list[DataFile]:
    """Bad rows of a generation stay by its name, whatever becomes of its layer."""
    if not quarantine.num_rows:
        return []
    (folder / "quarantine").mkdir(exist_ok=True)
    path = folder / "quarantine" / f"{layer.name}.csv"
    (folder / layer.folder / QUARANTINE_FILE).replace(path)
    return [describe_file(folder, path, quarantine.num_rows)]


def _texts(keys: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays([*keys.chunks, pa.array([], keys.type)])
