"""Where the keys of a batch go: distinct keys at the source, grouped by owner, exchanged, distinct again at the owner.

Collective over the shards of a replica group: every rank routes the same number of micro-batches (parts), empty ones
included. With replica groups, the keys of a training batch are the union over the holders of a shard (rule 11).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.distributed.exchange import all_gather_rows, all_to_all_fixed, all_to_all_rows
from nestrec.distributed.topology import Communicator, Topology
from nestrec.embedding.dedup import Deduplicated, dedup
from nestrec.embedding.table import TableConfig
from nestrec.embedding.transfer import to_device

FeatureKeys = Mapping[str, NDArray[np.int64] | torch.Tensor]
_HEADER = 3


@dataclass(frozen=True, slots=True)
class RoutedTable:
    """One table in one part."""

    keys: NDArray[np.int64]
    """Distinct keys that this rank asks for, grouped by owner: the order of the vectors that come back."""
    send_counts: tuple[int, ...]
    """Keys asked from each shard."""
    receive_counts: tuple[int, ...]
    """Keys that each shard asks from this one."""
    slots: torch.Tensor | None
    """Place in the working set of each key asked from this shard, in order of source; none: 0, 1, 2, ..."""


@dataclass(frozen=True, slots=True)
class RoutedPart:
    """A micro-batch."""

    index: dict[str, torch.Tensor]
    """Feature to int32 tensor of the keys' shape: places among the table's distinct keys."""
    tables: dict[str, RoutedTable]


@dataclass(frozen=True, slots=True)
class Routed:
    """The keys of a batch, in one or more parts."""

    parts: tuple[RoutedPart, ...]
    owned: dict[str, NDArray[np.int64]]
    """Table to the distinct keys of the whole batch that this shard owns: the order of the working set."""

    @property
    def index(self) -> dict[str, torch.Tensor]:
        """`index` of a batch in one part."""
        assert len(self.parts) == 1, "a batch of several parts has an index for each"
        return self.parts[0].index


@dataclass(frozen=True, slots=True)
class _SourcePart:
    """A part before the exchange."""

    shapes: dict[str, tuple[int, ...]]
    tables: list[Deduplicated]


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """All parts after the exchange."""

    sources: list[_SourcePart]
    asked: list[list[NDArray[np.int64]]]
    """[part][table] keys that this shard is asked for, in order of source."""
    counts: NDArray[np.int64]
    """(source, part, table) how many of them."""


def route(
    parts: Sequence[FeatureKeys], tables: Sequence[TableConfig], topology: Topology, device: torch.device, *,
    is_training: bool,
) -> Routed:  # fmt: skip
    """Route the keys of a batch. A mistake in any rank's keys raises the same UserError on every rank of the group."""
    communicator = topology.keys
    error, sources = [0] * _HEADER, []
    for keys in parts:
        flat = {name: _flat(values) for name, values in keys.items()}
        error = max(error, _range_error(flat, tables))
        sources.append(flat)
    is_bad = error[0] > 0
    deduplicated = [_source_part(p, f, tables, communicator.size, is_bad) for p, f in zip(parts, sources, strict=True)]
    counts = _exchange_counts(deduplicated, error, tables, communicator)
    received = _exchange_keys(deduplicated, counts, communicator)
    replicas = topology.replica_keys if is_training else None
    asked = [[_join(keys) for keys in part] for part in received]
    return _assemble(_Exchanged(deduplicated, asked, counts), tables, replicas, device)


def key_bytes_sent(routed: Routed, rank: int) -> int:
    """Bytes of keys that left this rank for others."""
    tables = [table for part in routed.parts for table in part.tables.values()]
    return 8 * sum(sum(t.send_counts) - t.send_counts[rank] for t in tables)


def _flat(values: NDArray[np.int64] | torch.Tensor) -> NDArray[np.int64]:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    return np.ascontiguousarray(array.reshape(-1), np.int64)


def _range_error(flat: dict[str, NDArray[np.int64]], tables: Sequence[TableConfig]) -> list[int]:
    """[1, number of the feature, key] of the first key outside its static table, or zeros."""
    features = [(f, t) for t in tables for f in t.feature_names]
    for number, (feature, table) in enumerate(features):
        keys = flat[feature]
        if table.num_rows is not None and len(keys):
            low, high = int(keys.min()), int(keys.max())
            if low < 0 or high >= table.num_rows:
                return [1, number, low if low < 0 else high]
    return [0] * _HEADER


def _source_part(
    shaped: FeatureKeys,
    flat: dict[str, NDArray[np.int64]],
    tables: Sequence[TableConfig],
    num_shards: int,
    is_bad: bool,
) -> _SourcePart:
    empty = np.empty(0, np.int64)
    found = []
    for table in tables:
        keys = [flat[f] for f in table.feature_names]
        found.append(dedup(empty if is_bad else keys[0] if len(keys) == 1 else np.concatenate(keys), num_shards))
    return _SourcePart({name: tuple(values.shape) for name, values in shaped.items()}, found)


def _exchange_counts(
    parts: list[_SourcePart], error: list[int], tables: Sequence[TableConfig], communicator: Communicator
) -> NDArray[np.int64]:
    """(source, part, table) numbers of keys that this shard is asked for; raises what any source reports."""
    counts = np.stack([[d.counts for d in part.tables] for part in parts])
    message = np.empty((communicator.size, _HEADER + counts.shape[0] * counts.shape[1]), np.int64)
    message[:, :_HEADER] = error
    message[:, _HEADER:] = counts.transpose(2, 0, 1).reshape(communicator.size, -1)
    received = all_to_all_fixed(communicator, torch.from_numpy(message)).numpy()
    for rank, (is_bad, feature, key) in enumerate(received[:, :_HEADER].tolist()):
        if is_bad:
            raise _out_of_range(tables, feature, key, rank)
    return received[:, _HEADER:].reshape(communicator.size, *counts.shape[:2])


def _out_of_range(tables: Sequence[TableConfig], feature_number: int, key: int, rank: int) -> UserError:
    feature, table = [(f, t) for t in tables for f in t.feature_names][feature_number]
    problem = (
        f"is not a key of table {table.name!r}, which holds 0 to {(table.num_rows or 0) - 1} (found on rank {rank})"
    )
    remedy = "enlarge num_rows, correct the data, or make the table dynamic (num_rows=none)"
    return UserError(problem, field=f"feature {feature!r}", value=key, remedy=remedy)


def _exchange_keys(
    parts: list[_SourcePart], counts: NDArray[np.int64], communicator: Communicator
) -> list[list[list[NDArray[np.int64]]]]:
    """[part][table][source] keys that this shard is asked for."""
    if communicator.size == 1:
        return [[[d.keys] for d in part.tables] for part in parts]
    tables = [d for part in parts for d in part.tables]
    starts = [np.concatenate([[0], np.cumsum(d.counts)]) for d in tables]
    pieces = [d.keys[s[r] : s[r + 1]] for r in range(communicator.size) for d, s in zip(tables, starts, strict=True)]
    send_counts = np.sum([d.counts for d in tables], axis=0).tolist()
    receive_counts = counts.sum(axis=(1, 2)).tolist()
    sent = torch.from_numpy(np.concatenate(pieces))
    flat = all_to_all_rows(communicator, sent, send_counts, receive_counts).numpy()
    split = np.split(flat, np.cumsum(counts.reshape(-1))[:-1])
    num_tables = counts.shape[2]
    return [
        [[split[(r * len(parts) + p) * num_tables + t] for r in range(communicator.size)] for t in range(num_tables)]
        for p in range(len(parts))
    ]


def _join(pieces: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _assemble(
    exchanged: _Exchanged, tables: Sequence[TableConfig], replicas: Communicator | None, device: torch.device
) -> Routed:
    sources, counts = exchanged.sources, exchanged.counts
    owned: dict[str, NDArray[np.int64]] = {}
    routed: list[dict[str, RoutedTable]] = [{} for _ in sources]
    for t, table in enumerate(tables):
        owned[table.name], slots = _owner_dedup([part[t] for part in exchanged.asked], counts.shape[0])
        if replicas is not None and replicas.group is not None:
            owned[table.name], slots = _union_over_replicas(owned[table.name], slots, replicas)
        for p, source in enumerate(sources):
            place = None if slots is None else to_device(slots[p], device)
            send, receive = tuple(source.tables[t].counts.tolist()), tuple(counts[:, p, t].tolist())
            routed[p][table.name] = RoutedTable(source.tables[t].keys, send, receive, place)
    parts = [RoutedPart(_indices(s, tables, device), r) for s, r in zip(sources, routed, strict=True)]
    return Routed(tuple(parts), owned)


def _owner_dedup(
    asked: list[NDArray[np.int64]], num_sources: int
) -> tuple[NDArray[np.int64], list[NDArray[np.int32]] | None]:
    """Distinct keys over all parts and sources, and the place of each asked key among them."""
    if len(asked) == 1 and num_sources == 1:
        return asked[0], None
    found = dedup(np.concatenate(asked))
    return found.keys, np.split(found.inverse, np.cumsum([len(a) for a in asked])[:-1])


def _union_over_replicas(
    owned: NDArray[np.int64], slots: list[NDArray[np.int32]] | None, replicas: Communicator
) -> tuple[NDArray[np.int64], list[NDArray[np.int32]]]:
    """The same list of keys on every holder of this shard, and the places of this holder's keys in it."""
    everyone, counts = all_gather_rows(replicas, replicas, torch.from_numpy(owned))
    found = dedup(everyone.numpy())
    start = sum(counts[: replicas.rank])
    mine = found.inverse[start : start + len(owned)]
    return found.keys, [mine] if slots is None else [mine[part] for part in slots]


def _indices(source: _SourcePart, tables: Sequence[TableConfig], device: torch.device) -> dict[str, torch.Tensor]:
    indices = {}
    for table, found in zip(tables, source.tables, strict=True):
        inverse, start = to_device(found.inverse, device), 0
        for feature in table.feature_names:
            shape = source.shapes[feature]
            size = int(np.prod(shape, dtype=np.int64))
            indices[feature] = inverse[start : start + size].view(shape)
            start += size
    return indices
