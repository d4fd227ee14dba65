"""Events that a dataset has already, found by all that it keeps of an event."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.random import fold_array
from nestrec.data.dataset import Rows
from nestrec.data.gather import offsets_of_lengths
from nestrec.data.prepare.events import EventParser
from nestrec.data.prepare.sequences import event_types
from nestrec.data.prepare.spill import Records
from nestrec.data.schema import ACTIONS, COUNTS_SUFFIX, ITEM_IDS, TIMESTAMPS_MS

Hashes = NDArray[np.uint64]


def is_repeated(records: Records, parser: EventParser, old: Rows) -> NDArray[np.bool_]:
    """Which of the records are events of the same user in `old`."""
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
    kept = {name: old.lists[name][0] for name in columns}
    for name in records.lists:
        kept[name] = _hashes_of_lists(kept[name], old.lists[name + COUNTS_SUFFIX][0])
    mine = _hashes(rows["user"].astype(np.int64), columns)
    theirs = _hashes(np.repeat(old.indices, np.diff(offsets)), kept)
    return np.isin(mine, theirs)


def _hashes(users: NDArray[np.int64], columns: dict[str, NDArray[Any]]) -> Hashes:
    """64 bits for each event: two that are equal are taken for one."""
    found = fold_array(0, users)
    for name in sorted(columns):
        found = fold_array(found, _as_integers(columns[name]))
    return found


def _as_integers(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind != "f":
        return values
    plain = values.astype(np.float32)
    plain[np.isnan(plain)] = np.nan  # all of them alike
    return np.ascontiguousarray(plain).view(np.int32)


def _hashes_of_lists(values: NDArray[Any], counts: NDArray[Any]) -> Hashes:
    """One number for the list of each event."""
    offsets = offsets_of_lengths(counts)
    place = np.arange(values.size) - np.repeat(offsets[:-1], counts)
    each = fold_array(fold_array(1, place), values)
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)])
    sums: Hashes = total[offsets[1:]] - total[offsets[:-1]]
    return sums
