"""Rows that two batches in flight share, and their copy from the older working set to the newer one (shared-row copy).

Which rows they are depends on keys alone, so it is found while the older batch still trains; what remains between its
update and the first read of the newer batch is one copy of whole rows, weight and state together.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.compiled_random import mix64
from nestrec.base.parallel import for_parts
from nestrec.base.transfer import to_device
from nestrec.embedding.flight.routing import Routed
from nestrec.embedding.flight.working_set import WorkingSet
from nestrec.embedding.shard import FetchedRows
from nestrec.ops.rows.move import move_rows


@dataclass(frozen=True, slots=True)
class TableOverlap:
    """Shared rows of one table."""

    older: torch.Tensor
    """Places in the older working set."""
    newer: torch.Tensor
    """Places of the same keys in the newer one."""
    unshared_slots: NDArray[np.int64]
    """Slots of the older batch's rows, -1 for the shared ones."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shared rows of two batches, over all tables."""

    tables: dict[str, TableOverlap]

    def num_rows_of(self, table: str) -> int:
        return len(self.tables[table].older)

    @property
    def num_rows(self) -> int:
        return sum(len(table.older) for table in self.tables.values())


def overlap_of(older: WorkingSet, newer: WorkingSet) -> Overlap:
    """The rows in both; a row that began anew with the newer batch is not shared, though its key is in both."""
    pairs = {name: (older.tables[name].fetched, table.fetched) for name, table in newer.tables.items()}
    return Overlap({name: _table_overlap(a, b) for name, (a, b) in pairs.items()})


def copy_shared(older: WorkingSet, newer: WorkingSet, shared: Overlap) -> int:
    """Give the newer working set the rows that the older batch has updated; how many they are."""
    for name, table in shared.tables.items():
        if len(table.older):
            source, target = older.tables[name], newer.tables[name].fetched.rows
            _copy_rows(source.fetched.rows, table.older, target, table.newer)
    return shared.num_rows


def num_common_rows(older: Routed, newer: WorkingSet) -> int:
    """Keys of this shard in both."""
    keys = {name: table.fetched.keys for name, table in newer.tables.items()}
    return sum(int((matching_places(owned, keys[name]) >= 0).sum()) for name, owned in older.owned.items())


def matching_places(
    keys: NDArray[np.int64], others: NDArray[np.int64], is_excluded: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """For each key its place among the others, -1 where it is not there or is excluded. Keys of a list are distinct."""
    places = np.empty(len(keys), np.int64)
    _join(keys, others, np.zeros(len(others), np.bool_) if is_excluded is None else is_excluded, places)
    return places


def _table_overlap(older: FetchedRows, newer: FetchedRows) -> TableOverlap:
    places = matching_places(older.keys, newer.keys, newer.is_new)
    shared = np.flatnonzero(places >= 0)
    device = newer.rows.device
    slots = np.where(places >= 0, -1, older.slots)
    return TableOverlap(to_device(shared, device), to_device(places[shared], device), slots)


def _copy_rows(source: torch.Tensor, older: torch.Tensor, target: torch.Tensor, newer: torch.Tensor) -> None:
    if source.device.type != "cpu":
        move_rows(source, target, older, newer)
        return
    arrays = source.numpy(), older.numpy(), target.numpy(), newer.numpy()
    for_parts(len(older), len(older), lambda a, b: _copy(*arrays, a, b))


@njit(cache=True, nogil=True)
def _copy(source, older, target, newer, first, end):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(first, end):
        for j in range(source.shape[1]):
            target[newer[i], j] = source[older[i], j]


@njit(cache=True, nogil=True)
def _join(keys, others, is_excluded, places):  # type: ignore[no-untyped-def]
    """places[i] = j where keys[i] == others[j] and j is not excluded, else -1. Keys of a list are distinct."""
    size = 16
    while size < 2 * len(others):
        size *= 2
    mask = np.int64(size - 1)
    table = np.full(size, -1, np.int64)
    for j in range(len(others)):
        if not is_excluded[j]:
            place = np.int64(mix64(np.uint64(others[j])) >> np.uint64(4)) & mask
            while table[place] >= 0:
                place = (place + 1) & mask
            table[place] = j
    for i in range(len(keys)):
        place = np.int64(mix64(np.uint64(keys[i])) >> np.uint64(4)) & mask
        while table[place] >= 0 and others[table[place]] != keys[i]:
            place = (place + 1) & mask
        places[i] = table[place]
