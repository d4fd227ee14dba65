"""Unique keys of a batch with their inverse indices, on the host or the device.

Deduplication of a batch's keys on the engine's device, for batches that would keep the host's loop too long.

The keys go over in one copy; what comes back is their number and then the distinct keys, for which the host has to
wait. It waits for a stream of its own, never for the training that is under way.

The keys of a batch on the rank that asks for them: checked, deduplicated and grouped by owner, before any exchange.

Without the window cache each micro-batch asks for all of its distinct keys. With it, a micro-batch asks only for the
keys that no earlier micro-batch has asked for, and the gradient of a key leaves after the last micro-batch that uses
it.

The keys of all micro-batches and tables lie in flat arrays, one segment behind the other: what is done with them is
done for all at once, however many tables there are. They travel as records, and then stand for rows that cross with
micro-batches.
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
from nestrec.embedding.routing.row_exchange import ExchangeSide, Flags, by_micro_batch, flags_of_cache, flags_of_segment
from nestrec.embedding.routing.window_cache_plan import WindowPlan, plan_window
from nestrec.embedding.table_config import TableSpecs
from nestrec.ops.embedding.dedup_host import Segments, UniqueKeys, dedup_segments
from nestrec.ops.embedding.dedup_keys import dedup_keys
from nestrec.ops.embedding.row_copy import Int32, Int64

MIN_KEYS = 1 << 16
"""Fewer keys are deduplicated sooner on the host."""
_INT32_KEYS = 1 << 31


def dedup_on_device(
    pieces: Sequence[NDArray[np.int64]],
    num_shards: int,
    device: torch.device,
    num_rows: int | None,
    *,
    num_on_host: int = 0,
) -> UniqueKeys | None:
    """Distinct keys of all pieces, one after the other, as `dedup` of them; `index` takes the place of `inverse`.

    num_rows: keys are 0 to num_rows - 1, and none is returned where one is not; none: any key. num_on_host: of so many
    keys, the first ones, the host is told `inverse` too.
    """
    with _own_stream(device):
        sent = _send(pieces, device)
        is_narrow = num_rows is not None and num_rows <= _INT32_KEYS
        found = dedup_keys(sent.to(torch.int32) if is_narrow else sent)
        index = found.inverse()
        count, low, high = to_host(torch.cat([found.count, torch.stack(torch.aminmax(sent))])).wait().tolist()
        if num_rows is not None and (low < 0 or high >= num_rows):
            return None
        keys = to_host(found.keys_P[:count].long()).wait().numpy()
        inverse = to_host(index[:num_on_host].int()).wait().numpy() if num_on_host else np.empty(0, np.int32)
        if num_shards == 1:
            return UniqueKeys(keys, inverse, np.array([count]), index)
        return _by_owner(keys, inverse, index, num_shards)


def _by_owner(keys: NDArray[np.int64], inverse: NDArray[np.int32], index: torch.Tensor, num_shards: int) -> UniqueKeys:
    owner = owner_of(keys, num_shards)
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(keys), np.int32)
    place[order] = np.arange(len(keys), dtype=np.int32)
    counts = np.bincount(owner, minlength=num_shards).astype(np.int64)
    return UniqueKeys(keys[order], place[inverse], counts, to_device(place, index.device)[index])


def _send(pieces: Sequence[NDArray[np.int64]], device: torch.device) -> torch.Tensor:
    """The pieces in one tensor of the device, joined on their way into pinned memory."""
    joined = pinned_empty([sum(len(p) for p in pieces)], torch.int64, device)
    np.concatenate(pieces, out=joined.numpy())
    return joined.to(device, non_blocking=True)


class _Streams(threading.local):
    """A stream for each thread and device."""

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
    """The keys of a batch before the exchange. Segment p * num_tables + t: micro-batch p, table t."""

    shapes: list[dict[str, tuple[int, ...]]]
    """For each micro-batch, feature to the shape of its keys."""
    num_tables: int
    asked: Segments
    """Keys to ask for, grouped by owner inside a segment; `inverse` of the positions of all features, segment by
    segment: the place among the micro-batch's distinct keys."""
    owners: NDArray[np.int32]
    """Of each of them."""
    index: dict[int, torch.Tensor]
    """Segment to its part of `inverse`, on the device, where it was deduplicated there; `inverse` then has none."""
    windows: list[WindowPlan] | None
    """For each table, where the window cache is on."""
    half: Flags | None
    """Which of the keys to ask for cross in half precision; none: no table has such features."""
    error: list[int]
    """[1, number of the feature, key] of a key outside its static table, or zeros."""
    everywhere: NDArray[np.bool_] | None = None
    """Which of the keys to ask for are told to every rank: those of replicated tables. None: there are none."""

    @property
    def num_micro_batches(self) -> int:
        return len(self.shapes)

    @property
    def segments(self) -> NDArray[np.int32]:
        """Of each key to ask for."""
        return np.repeat(np.arange(len(self.asked.bounds) - 1, dtype=np.int32), np.diff(self.asked.bounds))

    @property
    def last_micro_batch(self) -> NDArray[np.int16] | None:
        """The micro-batch that uses each key last, where the window cache is on."""
        if self.windows is None:
            return None
        return np.concatenate([plan.last_of(p) for p in range(self.num_micro_batches) for plan in self.windows])


def deduplicate(
    micro_batches: Sequence[FeatureKeys],
    specs: TableSpecs,
    num_shards: int,
    device: torch.device,
    *,
    window_cache: bool,
) -> DeduplicatedKeys:
    """Local; a mistake is not raised here but told to all ranks by the exchange.

    device: where the index of the keys will be used; large batches are deduplicated there, without the window cache.
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
    num_whole = _num_whole(sizes, specs)
    if window_cache:
        asked, plans = planned(keys, bounds, num_tables, num_shards)
        half = None if num_whole is None else flags_of_cache(specs, plans, num_whole)
        everywhere = _everywhere(asked, specs, num_shards)
        return DeduplicatedKeys(shapes, num_tables, asked, asked.owners(num_shards), {}, plans, half, error, everywhere)
    asked, index = _distinct(keys, bounds, num_whole, specs, num_shards, device)
    half = None
    if num_whole is not None:
        half = np.concatenate([flags_of_segment(specs, asked, s, int(n)) for s, n in enumerate(num_whole.reshape(-1))])
    everywhere = _everywhere(asked, specs, num_shards)
    return DeduplicatedKeys(shapes, num_tables, asked, asked.owners(num_shards), index, None, half, error, everywhere)


def _everywhere(asked: Segments, specs: TableSpecs, num_shards: int) -> NDArray[np.bool_] | None:
    if num_shards == 1 or not specs.is_replicated_T.any():
        return None
    counts = np.diff(asked.bounds)
    return np.repeat(np.tile(specs.is_replicated_T, len(counts) // specs.num_tables), counts)


def _nothing(shapes: list[dict[str, tuple[int, ...]]], num_tables: int, error: list[int]) -> DeduplicatedKeys:
    """A batch with a mistake, which the exchange will raise, asks for nothing."""
    nobody = np.empty(0, np.int32)
    bounds = np.zeros(len(shapes) * num_tables + 1, np.int64)
    none = Segments(np.empty(0, np.int64), bounds, nobody, bounds)
    return DeduplicatedKeys(shapes, num_tables, none, nobody, {}, None, None, error)


def _distinct(  # noqa: PLR0917
    keys: NDArray[np.int64],
    bounds: NDArray[np.int64],
    num_whole: NDArray[np.int64] | None,
    specs: TableSpecs,
    num_shards: int,
    device: torch.device,
) -> tuple[Segments, dict[int, torch.Tensor]]:
    """Of each segment, on the host or, where it is large, on the device."""
    large = np.flatnonzero(np.diff(bounds) >= MIN_KEYS) if device.type == "cuda" else np.empty(0, np.int64)
    if not len(large):
        return dedup_segments(keys, bounds, num_shards), {}
    index, found, starts = {}, [], [0]
    for s in range(len(bounds) - 1):
        own = keys[bounds[s] : bounds[s + 1]]
        table = s % specs.num_tables
        if s in large:
            on_host = int(num_whole.reshape(-1)[s]) if num_whole is not None and specs.has_half_T[table] else 0
            there = dedup_on_device([own], num_shards, device, specs.num_rows_T[table], num_on_host=on_host)
            assert there is not None, "keys were found to be in range"
            assert there.index is not None
            index[s] = there.index
            found.append((there.keys, there.inverse))
        else:
            here = dedup_segments(own, np.array([0, len(own)]), num_shards)
            found.append((here.keys, here.inverse))
        starts.append(starts[-1] + len(found[-1][0]))
    distinct, inverse = (np.concatenate(parts) for parts in zip(*found, strict=True))
    positions = np.concatenate([[0], np.cumsum([len(i) for _, i in found])])
    return Segments(distinct, np.array(starts), inverse, positions), index


def planned(
    keys: NDArray[np.int64], bounds: NDArray[np.int64], num_tables: int, num_shards: int
) -> tuple[Segments, list[WindowPlan]]:
    """With the window cache: what each micro-batch uses first, and the plan of each table. keys, bounds: by segment."""
    num_segments = len(bounds) - 1
    own = [keys[bounds[s] : bounds[s + 1]] for s in range(num_segments)]
    plans = [plan_window(own[t::num_tables], num_shards) for t in range(num_tables)]
    num_micro_batches = num_segments // num_tables
    new = [plan.new_of(p) for p in range(num_micro_batches) for plan in plans]
    index = [plan.index[p] for p in range(num_micro_batches) for plan in plans]
    starts = np.concatenate([[0], np.cumsum([len(n) for n in new])])
    return Segments(np.concatenate(new), starts, np.concatenate(index), bounds), plans


def _num_whole(sizes: NDArray[np.int64], specs: TableSpecs) -> NDArray[np.int64] | None:
    """(micro-batch, table) keys of the features whose rows cross whole, which come first; none: all of them."""
    if not any(specs.has_half_T):
        return None
    return np.add.reduceat(sizes * specs.is_whole_F, specs.first_feature_T, axis=1)


def _flat(values: NDArray[np.int64] | torch.Tensor) -> NDArray[np.int64]:
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == np.int64:
        return values  # as nearly always: a call for each feature of each micro-batch
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    return np.ascontiguousarray(array.reshape(-1), np.int64)


def _range_error(keys: NDArray[np.int64], sizes: NDArray[np.int64], specs: TableSpecs) -> list[int]:
    """[1, number of the feature, key] of a key outside its static table, or zeros. sizes: (micro-batch, feature)."""
    found = _first_outside(keys, sizes.reshape(-1), specs.num_rows_F)
    return [0] * ERROR_WORDS if found < 0 else [1, *_feature_of(found, sizes), int(keys[found])]


def _feature_of(position: int, sizes: NDArray[np.int64]) -> list[int]:
    piece = int(np.searchsorted(np.cumsum(sizes.reshape(-1)), position, side="right"))
    return [piece % sizes.shape[1]]


@njit(cache=True, nogil=True)
def _first_outside(keys, sizes, rows):  # type: ignore[no-untyped-def]
    """Position of the first key outside 0 to rows - 1 of its feature, where that is not negative; -1: none."""
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
    """Keys of one exchange, before they cross."""

    order: Int64
    """Own keys in the order in which they are sent: by rank, then by segment."""
    sent: Int64
    """To each rank."""
    comes: Int64
    """From each rank."""


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Keys of all micro-batches on one side, in order of the rank on the other."""

    micro_batches: NDArray[np.int16]
    """In which its vector crosses."""
    lasts: NDArray[np.int16]
    """After which its gradient does."""
    tables: Int32
    places: Int32
    """Among the rows of its table: in the working set; on the source in the micro-batch, or in the window cache."""
    half: NDArray[np.uint8] | None
    """Whether its vector crosses in half precision."""
    counts: Int64
    """Keys of each rank."""

    def only(self, chosen: NDArray[np.bool_]) -> "KeyRows":
        """Those that are chosen, in the same order."""
        before = np.concatenate([[0], np.cumsum(chosen)])
        counts = np.diff(before[np.concatenate([[0], np.cumsum(self.counts)])])
        half = None if self.half is None else self.half[chosen]
        arrays = self.micro_batches[chosen], self.lasts[chosen], self.tables[chosen], self.places[chosen]
        return KeyRows(*arrays, half, counts)

    def sides(self, num_micro_batches: int, *, by_last: bool) -> list[ExchangeSide]:
        """For each micro-batch those that cross with it."""
        steps = self.lasts if by_last else self.micro_batches
        order, bounds, of_ranks = by_micro_batch(steps, self.counts, num_micro_batches)
        tables = self.tables[order]
        places = self.places[order]
        half = None if self.half is None else self.half[order]
        found = []
        for p in range(num_micro_batches):
            here = slice(bounds[p], bounds[p + 1])
            found.append(ExchangeSide(tables[here], places[here], of_ranks[p], None if half is None else half[here]))
        return found


def key_records(source: DeduplicatedKeys, order: Int64) -> NDArray[Any]:
    """What is sent of the keys, in this order; only what a batch of this kind needs, the same on every rank."""
    num_segments = len(source.asked.bounds) - 1
    columns: list[tuple[str, str, NDArray[Any]]] = [("key", "<i8", source.asked.keys)]
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
    """Of each record; none where a batch of this kind needs no such field."""
    return np.ascontiguousarray(records[name]) if name in (records.dtype.names or ()) else None


def segments_of(records: NDArray[Any]) -> NDArray[np.int32]:
    """Micro-batch and table of each record, in one number."""
    found = field_of(records, "segment")
    return np.zeros(len(records), np.int32) if found is None else found.astype(np.int32)


def own_rows(source: DeduplicatedKeys, counted: KeyCounts) -> KeyRows:
    """Keys that a rank asks for. Places: among the distinct keys of the micro-batch, or in the window cache."""
    bounds = source.asked.bounds
    num_tables = source.num_tables
    first = bounds[:-1].copy()
    if source.windows is not None:
        starts = np.stack([plan.starts[:-1] for plan in source.windows], axis=1).reshape(-1)
        first -= starts
    segments = source.segments
    places = (np.arange(len(segments)) - np.repeat(first, np.diff(bounds))).astype(np.int32)
    last = source.last_micro_batch
    order = counted.order
    sent = segments[order]
    micro_batches = (sent // num_tables).astype(np.int16)
    return KeyRows(
        micro_batches,
        micro_batches if last is None else last[order],
        sent % num_tables,
        places[order],
        None if source.half is None else source.half[order],
        counted.sent,
    )


def asked_rows(records: NDArray[Any], places: Int32, counts: Int64, num_tables: int) -> KeyRows:
    """Keys that others ask for. Places: of each record."""
    segments = segments_of(records)
    last = field_of(records, "last")
    micro_batches = (segments // num_tables).astype(np.int16)
    lasts = micro_batches if last is None else last
    return KeyRows(micro_batches, lasts, segments % num_tables, places, field_of(records, "half"), counts)


def num_rows_of(source: DeduplicatedKeys) -> NDArray[np.int64]:
    """(micro-batch, table) distinct keys."""
    if source.windows is None:
        return np.diff(source.asked.bounds).reshape(-1, source.num_tables)
    return np.array(
        [[len(plan.places[p]) for plan in source.windows] for p in range(source.num_micro_batches)], np.int64
    )
