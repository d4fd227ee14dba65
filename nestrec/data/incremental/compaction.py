"""Compacts datasets: merges small layers on append, so that a user's row is read from few files, or all on request.

When a layer is appended, the existing layers that are not larger than all newer layers together are merged
(size-tiered compaction, as in an LSM tree). So an event is rewritten only when the layer that contains it doubles in
size. The prepared base layer is merged only by `compact`.

`is_repeated_event` finds events that a dataset already contains by comparing all stored columns of an event.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.random import fold_array
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.dataset_card import DataFile, DatasetCard, LayerEntry, describe_file
from nestrec.data.dataset_schema import ACTIONS, COUNTS_SUFFIX, ITEM_IDS, TIMESTAMPS_MS, USER_ID
from nestrec.data.event_layers import (
    COUNTS_FILE,
    ITEMS_FILE,
    EventLayer,
    first_row,
    is_event_column,
    merged_items,
    merged_vectors,
    merged_vocabulary,
    ragged_columns,
)
from nestrec.data.flat_arrays import offsets_of_lengths
from nestrec.data.incremental.generations import (
    append_generation,
    commit,
    first_generation,
    install_layer,
    layer_files,
    locked_dataset,
    partial_folder,
    pending_stream_rows,
)
from nestrec.data.prepare.dataset_writer import UserBlock, UsersWriter
from nestrec.data.prepare.event_parser import EventParser
from nestrec.data.prepare.prepare_sequences import event_types
from nestrec.data.prepare.spill_files import Records

_EVENTS_PER_BLOCK = 1 << 19


def merge_small_layers(
    folder: Path, card: DatasetCard, new_events: int
) -> tuple[tuple[LayerEntry, ...], tuple[DataFile, ...]]:
    """Merge the newest existing layers before a new layer is appended.

    Args:
        folder: Folder of the dataset.
        card: Card of the current generation.
        new_events: Number of events of the new layer.

    Returns:
        The layers and files below the new layer.
    """
    layers = card.all_layers
    above = new_events
    first = len(layers)
    while first > 1 and layers[first - 1].events <= above:
        above += layers[first - 1].events
        first -= 1
    if len(layers) - first < 2:
        return layers, card.files
    entry, files = _merged_layer(folder, card, layers[first:])
    merged_paths = {file.path for layer in layers[first:] for file in card.files_of(layer)}
    stored = tuple(file for file in card.files if file.path not in merged_paths)
    return (*layers[:first], entry), (*stored, *files)


def compact(folder: Path | str) -> DatasetCard:
    """Merge all layers of a dataset into one; this creates a new generation with the same events.

    Args:
        folder: Folder of the dataset.

    Returns:
        The new card.
    """
    folder = Path(folder)
    with locked_dataset(folder) as card:
        if len(card.all_layers) == 1:
            return card
        entry, files = _merged_layer(folder, card, card.all_layers)
        files += layer_files(pending_stream_rows(folder, card, folder / entry.folder), entry)
        quarantined = [file for file in card.files if file.path.startswith("quarantine/")]
        after = dataclasses.replace(card, layers=(entry,), files=(*files, *quarantined))
        before = first_generation(card, 0)
        new = dataclasses.replace(before[-1], number=card.generation + 1, digest=after.digest_of_files, inputs={})
        return commit(folder, card, dataclasses.replace(after, generations=append_generation(before, new)))


def _merged_layer(folder: Path, card: DatasetCard, entries: Sequence[LayerEntry]) -> tuple[LayerEntry, list[DataFile]]:
    is_base = entries[0] == card.all_layers[0]
    first, last = entries[0].name.partition("-")[0] or "000000", entries[-1].name.rpartition("-")[2]
    entry = LayerEntry(name=f"{first}-{last}", events=sum(layer.events for layer in entries))
    partial = partial_folder(folder, entry.name)
    layers = [EventLayer(folder, card, e, is_base=is_base and i == 0) for i, e in enumerate(entries)]
    files = [
        *_write_users(partial, folder, card, layers),
        *_write_items(partial, layers),
        *_write_vocabularies(partial, layers),
        *_write_vectors(partial, card, layers, is_base=is_base),
    ]
    install_layer(folder, partial, entry.name)
    return entry, layer_files(files, entry)


def _write_users(partial: Path, folder: Path, card: DatasetCard, layers: list[EventLayer]) -> list[DataFile]:
    columns = [field.name for field in layers[0].parts[0].metadata.schema.to_arrow_schema()]
    fields = list(layers[0].parts[0].metadata.schema.to_arrow_schema())
    reader = Dataset(folder, card, layers, columns, cache_bytes=256 << 20)
    ids = [np.arange(layer.num_rows) if layer.users is None else layer.users for layer in layers]
    users = np.unique(np.concatenate(ids))
    ragged = ragged_columns(card.event_features)
    writer = UsersWriter(partial, fields)
    total = np.cumsum(reader.lengths[users].astype(np.int64))
    start = 0
    while start < users.size:
        base = total[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(total, base + _EVENTS_PER_BLOCK, side="right")))
        writer.append(_block(reader.rows(users[start:end]), ragged))
        start = end
    return writer.close()


def _block(rows: DatasetRows, ragged: frozenset[str]) -> UserBlock:
    """Convert rows that were read to a block of rows to write."""
    offsets = rows.lists[ITEM_IDS][1]
    scalars: dict[str, Any] = {
        name: pa.array(values, pa.string()) if values.dtype == object else pa.array(values)
        for name, values in rows.scalars.items()
    }
    scalars[USER_ID] = pa.array(rows.indices)
    for name, (values, starts) in rows.lists.items():
        if name not in ragged and not is_event_column(name, ragged):
            scalars[name] = pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), pa.array(values))
    lists: dict[str, NDArray[Any]] = {n: v for n, (v, _) in rows.lists.items() if is_event_column(n, ragged)}
    return UserBlock(np.diff(offsets).astype(np.int32), scalars, lists, {name: rows.lists[name][0] for name in ragged})


def _write_items(partial: Path, layers: list[EventLayer]) -> list[DataFile]:
    """Write the new items of the layers, and the numbers of events that the layers add to older items."""
    files = []
    num_new = 0
    first = None
    if any(ITEMS_FILE in layer.names for layer in layers):
        items = merged_items([layer for layer in layers if layer.names & {ITEMS_FILE, COUNTS_FILE}])
        path = partial / ITEMS_FILE
        pq.write_table(items, path, compression="zstd")
        num_new = items.num_rows
        first = items.column("item_id")[0].as_py()
        files.append(describe_file(partial, path, num_new))
    ids, counts = _counts_below(layers, first)
    if ids.size:
        path = partial / COUNTS_FILE
        pq.write_table(pa.table({"item_id": pa.array(ids), "count": pa.array(counts)}), path, compression="zstd")
        files.append(describe_file(partial, path, ids.size))
    return files


def _counts_below(layers: list[EventLayer], first: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of items of lower layers, and the numbers of events that these layers add to them."""
    tables = [table for layer in layers if (table := layer.table(COUNTS_FILE)) is not None]
    ids = np.concatenate([np.zeros(0, np.int64), *(table.column("item_id").to_numpy() for table in tables)])
    counts = np.concatenate([np.zeros(0, np.int64), *(table.column("count").to_numpy() for table in tables)])
    is_below = np.ones(ids.size, np.bool_) if first is None else ids < first
    unique, index = np.unique(ids[is_below], return_inverse=True)
    return unique, np.bincount(index, weights=counts[is_below], minlength=unique.size).astype(np.int64)


def _write_vocabularies(partial: Path, layers: list[EventLayer]) -> list[DataFile]:
    names = sorted({name for layer in layers for name in layer.names if name.startswith("vocabularies/")})
    files = []
    for name in names:
        table = merged_vocabulary(layers, Path(name).stem)
        assert table is not None
        (partial / "vocabularies").mkdir(exist_ok=True)
        pq.write_table(table, partial / name, compression="zstd")
        files.append(describe_file(partial, partial / name, table.num_rows))
    return files


def _write_vectors(partial: Path, card: DatasetCard, layers: list[EventLayer], *, is_base: bool) -> list[DataFile]:
    files = []
    for feature in card.features:
        holding = [layer for layer in layers if feature.file in layer.names]
        if feature.kind != "vector" or not holding:
            continue
        if is_base:
            num_rows = card.counts.items + 1 if feature.owner == "item" else card.counts.users
            rows = merged_vectors(layers, feature.file, num_rows, feature.width)
        else:
            rows = _rows_above(layers, feature.file)
        path = partial / feature.file
        path.parent.mkdir(exist_ok=True)
        np.save(path, rows)
        files.append(describe_file(partial, path, len(rows)))
    return files


def _rows_above(layers: list[EventLayer], file: str) -> NDArray[Any]:
    """Return the vectors of the new items or users of layers above the base; zeros for those without a vector."""
    held = [(first_row(layer, file), np.load(layer.folder / file)) for layer in layers if file in layer.names]
    if file.startswith("vectors/item_"):
        tables = [table for layer in layers if (table := layer.table(ITEMS_FILE)) is not None]
        start = min(int(table.column("item_id")[0].as_py()) for table in tables)
        end = max(first + len(rows) for first, rows in held)
    else:
        start = min(first for first, _ in held)
        end = max(int(layer.users[-1]) + 1 for layer in layers if layer.users is not None and layer.users.size)
    out = np.zeros((end - start, held[0][1].shape[1]), held[0][1].dtype)
    for first, rows in held:
        out[first - start : first - start + len(rows)] = rows
    return out


Hashes = NDArray[np.uint64]


def is_repeated_event(records: Records, parser: EventParser, old: DatasetRows) -> NDArray[np.bool_]:
    """Return a mask of the records that are equal to an event of the same user in the dataset.

    Args:
        records: New records.
        parser: Parser that produced the records.
        old: Rows of the users in the dataset.
    """
    rows = records.rows
    names = list(event_types(parser))
    columns: dict[str, NDArray[Any]] = {ITEM_IDS: rows["item"].astype(np.int64) + 1}
    if "time" in parser.field_names:
        columns[TIMESTAMPS_MS] = rows["time"]
    if "actions" in parser.field_names:
        columns[ACTIONS] = rows["actions"]
    for name in names:
        if name in records.lists:
            columns[name] = _hashes_of_lists(records.lists[name], records.counts(name))
        else:
            buckets = parser.bucket_ids(name, rows[name])
            columns[name] = rows[name] if buckets is None else buckets
    offsets = old.lists[ITEM_IDS][1]
    stored = {name: old.lists[name][0] for name in columns}
    for name in records.lists:
        stored[name] = _hashes_of_lists(stored[name], old.lists[name + COUNTS_SUFFIX][0])
    new_hashes = _hashes(rows["user"].astype(np.int64), columns)
    stored_hashes = _hashes(np.repeat(old.indices, np.diff(offsets)), stored)
    return np.isin(new_hashes, stored_hashes)


def _hashes(users: NDArray[np.int64], columns: dict[str, NDArray[Any]]) -> Hashes:
    """Return a 64-bit hash per event; events with the same hash are treated as equal."""
    found = fold_array(0, users)
    for name in sorted(columns):
        found = fold_array(found, _as_integers(columns[name]))
    return found


def _as_integers(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind != "f":
        return values
    plain = values.astype(np.float32)
    plain[np.isnan(plain)] = np.nan  # NaN has several bit patterns
    return np.ascontiguousarray(plain).view(np.int32)


def _hashes_of_lists(values: NDArray[Any], counts: NDArray[Any]) -> Hashes:
    """Return a hash of the list of each event."""
    offsets = offsets_of_lengths(counts)
    index = np.arange(values.size) - np.repeat(offsets[:-1], counts)
    each = fold_array(fold_array(1, index), values)
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)])
    sums: Hashes = total[offsets[1:]] - total[offsets[:-1]]
    return sums
