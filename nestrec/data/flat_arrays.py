"""Compiled loops over flat arrays: gathers, slices and the sort of events.

Loops over flat arrays that numpy would do with large temporaries.

Stable order of events inside a partition: by user, then by the sort keys, then as they came.

Cutting slices out of concatenated rows, vectorised.
"""

from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.base.random import fold, fold_array


def offsets_of_lengths(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """(B,) lengths to (B + 1,) offsets."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@njit(cache=True, nogil=True)
def add_counts(ids: NDArray[Any], counts: NDArray[np.int64]) -> None:
    """Count each id; unlike `bincount`, it costs nothing for ids that do not occur."""
    for i in ids:
        counts[i] += 1


@njit(cache=True, nogil=True)
def copy_segments(  # noqa: PLR0917
    values: NDArray[Any],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
    out: NDArray[Any],
    out_offsets: NDArray[np.int64],
    out_rows: NDArray[np.int64],
) -> None:
    """Segment `rows[i]` of (values, offsets) to segment `out_rows[i]` of (out, out_offsets)."""
    for i in range(rows.size):
        source = offsets[rows[i]]
        target = out_offsets[out_rows[i]]
        for k in range(offsets[rows[i] + 1] - source):
            out[target + k] = values[source + k]


def order_events(users: NDArray[Any], num_users: int, sort_keys: list[NDArray[Any]]) -> NDArray[np.int64]:
    """Positions of the events in sorted order; `users` from 0, the first sort key is the most significant."""
    offsets = offsets_of_lengths(np.bincount(users, minlength=num_users))
    order = _group(users, offsets)
    for key in reversed(sort_keys):
        _sort_groups(np.ascontiguousarray(key), offsets, order)
    return order


def is_duplicate(users: NDArray[Any], num_users: int, signatures: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether an earlier event (in the given order) has the same user and signature; `users` from 0."""
    order = order_events(users, num_users, [signatures.view(np.int64)])  # of equal rows the earliest comes first
    same = (np.diff(users[order]) == 0) & (np.diff(signatures[order]) == 0)
    marked = np.zeros(users.size, dtype=np.bool_)
    marked[order[1:][same]] = True
    return marked


@njit(cache=True, nogil=True)
def _group(users: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counting sort by user, stable."""
    next_place = offsets[:-1].copy()
    order = np.empty(users.size, dtype=np.int64)
    for i in range(users.size):
        order[next_place[users[i]]] = i
        next_place[users[i]] += 1
    return order


@njit(cache=True, nogil=True)
def _sort_groups(key: NDArray[Any], offsets: NDArray[np.int64], order: NDArray[np.int64]) -> None:
    """Stable sort of each group by the key; groups already in order, the common case, are only looked at."""
    for group in range(offsets.size - 1):
        start, end = offsets[group], offsets[group + 1]
        for i in range(start + 1, end):
            if key[order[i]] < key[order[i - 1]]:
                part = order[start:end].copy()
                order[start:end] = part[np.argsort(key[part], kind="mergesort")]
                break


CountT = TypeVar("CountT", int, NDArray[np.int64])


def history_start(num_events: CountT, max_events: int, slide_events: int) -> CountT:
    """Returns the first event of a history that the model reads: a history that is too long slides by whole blocks.

    This is the one definition for evaluation, Python, batch jobs and servers. A slide changes every position and so
    invalidates a cached prefix; with blocks that happens once per `slide_events` events. With blocks of one event the
    model reads exactly the newest `max_events`.

    Args:
        num_events: Events of the user, one number or many.
        max_events: The most events that the model reads.
        slide_events: Size of a block, see `slide_of`.
    """
    excess = num_events - max_events
    return -(-(excess * (excess > 0)) // slide_events) * slide_events


def slide_of(longest: int, slide_events: int | None) -> int:
    """Returns the number of events by which a full history slides; an eighth of the longest one by default."""
    return max(1, longest // 8) if slide_events is None else slide_events


def check_slide(slide_events: int | None, max_events: int, field: str, longest_field: str) -> None:
    """Raises a `UserError` if a slide could remove a whole history."""
    if slide_events is not None and slide_events > max(1, max_events):
        raise UserError(
            f"is more than the {max_events:,} events of a history that {longest_field} allows",
            option=field,
            value=slide_events,
            remedy=f"give a number from 1 to {max(1, max_events)}",
        )


def slice_index(first: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(T,) index of every element of the slices [first, end), one after the other, and (B + 1,) their offsets."""
    lengths = end - first
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], lengths), offsets


def positions(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """(T,) position inside its row, from 0."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def sample_keys(seed: int, epoch: int, sample_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(B,) keys of the counter-based generator for (run seed, epoch, sample id)."""
    return fold_array(fold(seed, epoch), sample_ids)


def token_keys(sample_key: NDArray[np.uint64], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(T,) keys of the tokens: the sample's key folded with the position of the token."""
    return fold_array(np.repeat(sample_key, np.diff(offsets)), positions(offsets))
