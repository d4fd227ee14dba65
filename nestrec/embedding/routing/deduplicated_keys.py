"""Deduplication of the keys of a batch: unique keys with inverse indices, computed on the host or the device.

The requesting rank validates its keys, deduplicates them and groups them by owner (bucketize) before any exchange.

Without the window cache, each micro-batch requests all of its unique keys. With it, a micro-batch requests only the
keys that no earlier micro-batch has requested, and the gradient of a key is sent after the last micro-batch that uses
it.

The keys of all micro-batches and tables are stored in flat arrays, one segment per (micro-batch, table), so that every
operation processes all tables at once. Keys are sent as records; later the same arrays describe the rows that are
exchanged with each micro-batch.

Large segments are deduplicated on the device of the engine, because the host loop would take too long. The keys are
copied to the device in one transfer; the host then waits for the number of unique keys and for the keys themselves. It
waits on a separate stream, never on the running training.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import on_stream, pinned_empty, side_stream, to_device, to_host
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.routing.row_exchange import (
    ExchangeSide,
    Flags,
    by_micro_batch,
    segment_half_flags,
    window_cache_half_flags,
)
from nestrec.embedding.routing.window_cache_plan import WindowPlan, plan_window
from nestrec.embedding.table_config import TableSpecs
from nestrec.ops.embedding.dedup_host import Segments, UniqueKeys, dedup_segments
from nestrec.ops.embedding.dedup_keys import dedup_keys
from nestrec.ops.embedding.row_copy import Int32, Int64

MIN_KEYS = 1 << 16
"""Minimum number of keys for deduplication on the device; the host is faster below it."""
_INT32_KEYS = 1 << 31


def dedup_on_device(
    pieces: Sequence[NDArray[np.int64]],
    num_shards: int,
    device: torch.device,
    num_rows: int | None,
    *,
    num_on_host: int = 0,
) -> UniqueKeys | None:
    """Deduplicate keys on a device; the result equals that of `dedup`, with `index` instead of `inverse`.

    Args:
        pieces: Arrays of keys, which are concatenated.
        num_shards: Number of shards; unique keys are grouped by owner.
        device: Device of the computation and of `index`.
        num_rows: Valid keys are 0 to num_rows - 1; None allows any key.
        num_on_host: Number of leading keys whose `inverse` is also copied to the host.

    Returns:
        The unique keys, or None if a key is out of range.
    """
    with _own_stream(device):
        sent = _send(pieces, device)
        is_narrow = num_rows is not None and num_rows <= _INT32_KEYS
        result = dedup_keys(sent.to(torch.int32) if is_narrow else sent)
        index = result.inverse()
        count, low, high = to_host(torch.cat([result.count, torch.stack(torch.aminmax(sent))])).wait().tolist()
        if num_rows is not None and (low < 0 or high >= num_rows):
            return None
        keys = to_host(result.keys_P[:count].long()).wait().numpy()
        inverse = to_host(index[:num_on_host].int()).wait().numpy() if num_on_host else np.empty(0, np.int32)
        if num_shards == 1:
            return UniqueKeys(keys, inverse, np.array([count]), index)
        return _by_owner(keys, inverse, index, num_shards)


def _by_owner(keys: NDArray[np.int64], inverse: NDArray[np.int32], index: torch.Tensor, num_shards: int) -> UniqueKeys:
    owner = owner_of(keys, num_shards)
    order = np.argsort(owner, kind="stable")
    new_index = np.empty(len(keys), np.int32)
    new_index[order] = np.arange(len(keys), dtype=np.int32)
    counts = np.bincount(owner, minlength=num_shards).astype(np.int64)
    return UniqueKeys(keys[order], new_index[inverse], counts, to_device(new_index, index.device)[index])


def _send(pieces: Sequence[NDArray[np.int64]], device: torch.device) -> torch.Tensor:
    """Concatenate the pieces in pinned memory and copy them to the device."""
    joined = pinned_empty([sum(len(p) for p in pieces)], torch.int64, device)
    np.concatenate(pieces, out=joined.numpy())
    return joined.to(device, non_blocking=True)


class _Streams(threading.local):
    """CUDA streams, one per thread and device."""

    def __init__(self) -> None:
        self.of: dict[torch.device, torch.cuda.Stream | None] = {}


_streams = _Streams()


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    if device not in _streams.of:
        _streams.of[device] = side_stream(device)
    with on_stream(_streams.of[device]):
        yield


FeatureKeys = Mapping[str, NDArray[np.int64] | torch.Tensor]
ERROR_WORDS = 3


@dataclass(frozen=True, slots=True)
class DeduplicatedKeys:
    """Unique keys of a batch before the exchange; segment p * num_tables + t is micro-batch p, table t."""

    shapes: list[dict[str, tuple[int, ...]]]
    """Per micro-batch, feature name to the shape of its keys."""
    num_tables: int
    requested: Segments
    """Requested keys, grouped by owner inside each segment. `inverse` contains, segment by segment, the index of each
    key of the batch among the unique keys of its micro-batch."""
    owners: NDArray[np.int32]
    """Owner of each requested key."""
    index: dict[int, torch.Tensor]
    """Segment to its inverse indices on the device, for segments deduplicated there; not included in `inverse`."""
    windows: list[WindowPlan] | None
    """Window cache plan per table; None without the window cache."""
    half: Flags | None
    """Flags of requested keys whose vectors are sent in half precision; None if no table has such features."""
    error: list[int]
    """[1, index of the feature, key] of a key outside its static table, or zeros."""
    is_replicated: NDArray[np.bool_] | None = None
    """Flags of requested keys of replicated tables, which are sent to every rank; None if there are none."""

    @property
    def num_micro_batches(self) -> int:
        return len(self.shapes)

    @property
    def segments(self) -> NDArray[np.int32]:
        """Segment of each requested key."""
        return np.repeat(np.arange(len(self.requested.bounds) - 1, dtype=np.int32), np.diff(self.requested.bounds))

    @property
    def last_micro_batch(self) -> NDArray[np.int16] | None:
        """Last micro-batch that uses each requested key; None without the window cache."""
        if self.windows is None:
            return None
        return np.concatenate(
            [plan.last_micro_batches(p) for p in range(self.num_micro_batches) for plan in self.windows]
        )


def deduplicate(
    micro_batches: Sequence[FeatureKeys],
    specs: TableSpecs,
    num_shards: int,
    device: torch.device,
    *,
    window_cache: bool,
) -> DeduplicatedKeys:
    """Validate, deduplicate and group the keys of a batch. Local.

    An invalid key does not raise an error here: the key exchange reports it, so that all ranks raise the same error.

    Args:
        micro_batches: Per micro-batch, feature name to keys.
        specs: Specs of the tables.
        num_shards: Number of shards.
        device: Device on which the inverse indices are used; without the window cache, large segments are deduplicated
            there.
        window_cache: Whether keys shared by micro-batches are requested only once.
    """
    num_tables = specs.num_tables
    shapes = [{name: tuple(values.shape) for name, values in keys.items()} for keys in micro_batches]
    pieces = [_flat(keys[f]) for keys in micro_batches for f in specs.features_F]
    sizes = np.array([len(piece) for piece in pieces], np.int64).reshape(len(micro_batches), -1)
    keys = np.concatenate(pieces)
    error = _range_error(keys, sizes, specs)
    if error[0]:
        return _nothing(shapes, num_tables, error)
    bounds = np.concatenate([[0], np.cumsum(np.add.reduceat(sizes, specs.first_feature_T, axis=1).reshape(-1))])
    num_full_precision = _num_full_precision(sizes, specs)
    if window_cache:
        requested, plans = plan_window_cache(keys, bounds, num_tables, num_shards)
        half = None if num_full_precision is None else window_cache_half_flags(specs, plans, num_full_precision)
        is_replicated = _everywhere(requested, specs, num_shards)
        return DeduplicatedKeys(
            shapes, num_tables, requested, requested.owners(num_shards), {}, plans, half, error, is_replicated
        )
    requested, index = _distinct(keys, bounds, num_full_precision, specs, num_shards, device)
    half = None
    if num_full_precision is not None:
        half = np.concatenate(
            [segment_half_flags(specs, requested, s, int(n)) for s, n in enumerate(num_full_precision.reshape(-1))]
        )
    is_replicated = _everywhere(requested, specs, num_shards)
    return DeduplicatedKeys(
        shapes, num_tables, requested, requested.owners(num_shards), index, None, half, error, is_replicated
    )


def _everywhere(requested: Segments, specs: TableSpecs, num_shards: int) -> NDArray[np.bool_] | None:
    if num_shards == 1 or not specs.is_replicated_T.any():
        return None
    counts = np.diff(requested.bounds)
    return np.repeat(np.tile(specs.is_replicated_T, len(counts) // specs.num_tables), counts)


def _nothing(shapes: list[dict[str, tuple[int, ...]]], num_tables: int, error: list[int]) -> DeduplicatedKeys:
    """Return empty requests for a batch with an invalid key, whose error the key exchange raises."""
    no_keys = np.empty(0, np.int32)
    bounds = np.zeros(len(shapes) * num_tables + 1, np.int64)
    none = Segments(np.empty(0, np.int64), bounds, no_keys, bounds)
    return DeduplicatedKeys(shapes, num_tables, none, no_keys, {}, None, None, error)


def _distinct(  # noqa: PLR0917
    keys: NDArray[np.int64],
    bounds: NDArray[np.int64],
    num_full_precision: NDArray[np.int64] | None,
    specs: TableSpecs,
    num_shards: int,
    device: torch.device,
) -> tuple[Segments, dict[int, torch.Tensor]]:
    """Deduplicate each segment, on the host or, if it is large, on the device."""
    large = np.flatnonzero(np.diff(bounds) >= MIN_KEYS) if device.type == "cuda" else np.empty(0, np.int64)
    if not len(large):
        return dedup_segments(keys, bounds, num_shards), {}
    index, result, starts = {}, [], [0]
    for s in range(len(bounds) - 1):
        segment_keys = keys[bounds[s] : bounds[s + 1]]
        table = s % specs.num_tables
        if s in large:
            on_host = (
                int(num_full_precision.reshape(-1)[s])
                if num_full_precision is not None and specs.has_half_T[table]
                else 0
            )
            on_device_keys = dedup_on_device(
                [segment_keys], num_shards, device, specs.num_rows_T[table], num_on_host=on_host
            )
            assert on_device_keys is not None, "keys were found to be in range"
            assert on_device_keys.index is not None
            index[s] = on_device_keys.index
            result.append((on_device_keys.keys, on_device_keys.inverse))
        else:
            on_host_keys = dedup_segments(segment_keys, np.array([0, len(segment_keys)]), num_shards)
            result.append((on_host_keys.keys, on_host_keys.inverse))
        starts.append(starts[-1] + len(result[-1][0]))
    distinct, inverse = (np.concatenate(parts) for parts in zip(*result, strict=True))
    positions = np.concatenate([[0], np.cumsum([len(i) for _, i in result])])
    return Segments(distinct, np.array(starts), inverse, positions), index


def plan_window_cache(
    keys: NDArray[np.int64], bounds: NDArray[np.int64], num_tables: int, num_shards: int
) -> tuple[Segments, list[WindowPlan]]:
    """Return the keys that each micro-batch requests with the window cache, and the plan of each table.

    Args:
        keys: Keys of all segments.
        bounds: Bounds of the segments in `keys`.
        num_tables: Number of tables.
        num_shards: Number of shards.
    """
    num_segments = len(bounds) - 1
    segment_keys = [keys[bounds[s] : bounds[s + 1]] for s in range(num_segments)]
    plans = [plan_window(segment_keys[t::num_tables], num_shards) for t in range(num_tables)]
    num_micro_batches = num_segments // num_tables
    new = [plan.first_used_keys(p) for p in range(num_micro_batches) for plan in plans]
    index = [plan.inverse[p] for p in range(num_micro_batches) for plan in plans]
    starts = np.concatenate([[0], np.cumsum([len(n) for n in new])])
    return Segments(np.concatenate(new), starts, np.concatenate(index), bounds), plans


def _num_full_precision(sizes: NDArray[np.int64], specs: TableSpecs) -> NDArray[np.int64] | None:
    """Return the (micro-batch, table) number of keys sent in full precision, which come first; None if all are."""
    if not any(specs.has_half_T):
        return None
    return np.add.reduceat(sizes * specs.is_full_precision_F, specs.first_feature_T, axis=1)


def _flat(values: NDArray[np.int64] | torch.Tensor) -> NDArray[np.int64]:
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == np.int64:
        return values  # the common case; this function runs per feature and micro-batch
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    return np.ascontiguousarray(array.reshape(-1), np.int64)


def _range_error(keys: NDArray[np.int64], sizes: NDArray[np.int64], specs: TableSpecs) -> list[int]:
    """Return [1, index of the feature, key] of a key outside its static table, or zeros.

    Args:
        keys: Keys of all features and micro-batches.
        sizes: (micro-batch, feature) number of keys.
        specs: Specs of the tables.
    """
    result = _first_outside(keys, sizes.reshape(-1), specs.num_rows_F)
    return [0] * ERROR_WORDS if result < 0 else [1, *_feature_of(result, sizes), int(keys[result])]


def _feature_of(position: int, sizes: NDArray[np.int64]) -> list[int]:
    piece = int(np.searchsorted(np.cumsum(sizes.reshape(-1)), position, side="right"))
    return [piece % sizes.shape[1]]


@njit(cache=True, nogil=True)
def _first_outside(keys, sizes, rows):  # type: ignore[no-untyped-def]
    """Return the position of the first key outside 0 to rows - 1 of its feature, or -1; negative rows allow any key."""
    at = 0
    for piece in range(len(sizes)):
        num_rows = rows[piece % len(rows)]
        end = at + sizes[piece]
        if num_rows >= 0:
            for i in range(at, end):
                if keys[i] < 0 or keys[i] >= num_rows:
                    return i
        at = end
    return -1


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """Order and splits of the keys of one exchange."""

    order: Int64
    """Own keys in the order in which they are sent: by rank, then by segment."""
    sent: Int64
    """Number of keys sent to each rank."""
    received: Int64
    """Number of keys received from each rank."""


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows of the keys of all micro-batches on one side of the exchange, in order of the rank on the other side."""

    micro_batches: NDArray[np.int16]
    """Micro-batch in which the vector of each key is exchanged."""
    lasts: NDArray[np.int16]
    """Micro-batch after which the gradient of each key is exchanged."""
    tables: Int32
    indices: Int32
    """Row index of each key in its table: on the owner in the working set, on the source among the unique keys of the
    micro-batch or in the window cache."""
    half: NDArray[np.uint8] | None
    """Whether the vector of each key is sent in half precision."""
    counts: Int64
    """Number of keys of each rank on the other side."""

    def select(self, chosen: NDArray[np.bool_]) -> "KeyRows":
        """Return the chosen keys, in the same order."""
        before = np.concatenate([[0], np.cumsum(chosen)])
        counts = np.diff(before[np.concatenate([[0], np.cumsum(self.counts)])])
        half = None if self.half is None else self.half[chosen]
        arrays = self.micro_batches[chosen], self.lasts[chosen], self.tables[chosen], self.indices[chosen]
        return KeyRows(*arrays, half, counts)

    def sides(self, num_micro_batches: int, *, by_last: bool) -> list[ExchangeSide]:
        """Return the rows that are exchanged with each micro-batch."""
        steps = self.lasts if by_last else self.micro_batches
        order, bounds, of_ranks = by_micro_batch(steps, self.counts, num_micro_batches)
        tables = self.tables[order]
        indices = self.indices[order]
        half = None if self.half is None else self.half[order]
        result = []
        for p in range(num_micro_batches):
            on_host_keys = slice(bounds[p], bounds[p + 1])
            result.append(
                ExchangeSide(
                    tables[on_host_keys],
                    indices[on_host_keys],
                    of_ranks[p],
                    None if half is None else half[on_host_keys],
                )
            )
        return result


def encode_key_records(source: DeduplicatedKeys, order: Int64) -> NDArray[Any]:
    """Return the records of keys to send, in the given order, with only the fields that the batch needs.

    The fields are the same on every rank.
    """
    num_segments = len(source.requested.bounds) - 1
    columns: list[tuple[str, str, NDArray[Any]]] = [("key", "<i8", source.requested.keys)]
    if num_segments > 1:
        columns.append(("segment", "<u2" if num_segments <= 1 << 16 else "<i4", source.segments))
    last = source.last_micro_batch
    if last is not None:
        columns.append(("last", "<i2", last))
    if source.half is not None:
        columns.append(("half", "u1", source.half))
    records = np.empty(len(order), np.dtype([(name, kind) for name, kind, _ in columns]))
    for name, _, values in columns:
        records[name] = values[order]
    return records


def field_of(records: NDArray[Any], name: str) -> NDArray[Any] | None:
    """Return a field of all records; None if the batch does not need this field."""
    return np.ascontiguousarray(records[name]) if name in (records.dtype.names or ()) else None


def segments_of(records: NDArray[Any]) -> NDArray[np.int32]:
    """Return the segment, micro-batch * num_tables + table, of each record."""
    result = field_of(records, "segment")
    return np.zeros(len(records), np.int32) if result is None else result.astype(np.int32)


def own_key_rows(source: DeduplicatedKeys, counts: KeyCounts) -> KeyRows:
    """Return the rows of the keys that this rank requests.

    Their indices refer to the unique keys of the micro-batch, or to the window cache.
    """
    bounds = source.requested.bounds
    num_tables = source.num_tables
    first = bounds[:-1].copy()
    if source.windows is not None:
        starts = np.stack([plan.starts[:-1] for plan in source.windows], axis=1).reshape(-1)
        first -= starts
    segments = source.segments
    indices = (np.arange(len(segments)) - np.repeat(first, np.diff(bounds))).astype(np.int32)
    last = source.last_micro_batch
    order = counts.order
    sent = segments[order]
    micro_batches = (sent // num_tables).astype(np.int16)
    return KeyRows(
        micro_batches,
        micro_batches if last is None else last[order],
        sent % num_tables,
        indices[order],
        None if source.half is None else source.half[order],
        counts.sent,
    )


def requested_key_rows(records: NDArray[Any], indices: Int32, counts: Int64, num_tables: int) -> KeyRows:
    """Return the rows of the keys that other ranks request; `indices` is the row index of each record."""
    segments = segments_of(records)
    last = field_of(records, "last")
    micro_batches = (segments // num_tables).astype(np.int16)
    lasts = micro_batches if last is None else last
    return KeyRows(micro_batches, lasts, segments % num_tables, indices, field_of(records, "half"), counts)


def count_unique_keys(source: DeduplicatedKeys) -> NDArray[np.int64]:
    """Return the (micro-batch, table) number of unique keys."""
    if source.windows is None:
        return np.diff(source.requested.bounds).reshape(-1, source.num_tables)
    return np.array(
        [[len(plan.cache_indices[p]) for plan in source.windows] for p in range(source.num_micro_batches)], np.int64
    )
