"""Compiled loops (numba) and vectorized functions on jagged arrays stored as values and offsets.

Provides gathers, slices and stable sorts of events that would need large temporary arrays in plain numpy, the sliding
window of a model's history, and keys of the counter-based random generator.
"""

from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.base.random import fold, fold_array


def offsets_of_lengths(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Convert (B,) lengths to (B + 1,) offsets."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@njit(cache=True, nogil=True)
def add_counts(ids: NDArray[Any], counts: NDArray[np.int64]) -> None:
    """Add the number of occurrences of each id to `counts`.

    Unlike `bincount`, the cost does not grow with the largest id.
    """
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
    """Copy segment `rows[i]` of (values, offsets) to segment `out_rows[i]` of (out, out_offsets), for each i."""
    for i in range(rows.size):
        source = offsets[rows[i]]
        target = out_offsets[out_rows[i]]
        for k in range(offsets[rows[i] + 1] - source):
            out[target + k] = values[source + k]


def order_events(users: NDArray[Any], num_users: int, sort_keys: list[NDArray[Any]]) -> NDArray[np.int64]:
    """Return the stable sort order of events by user, then by sort keys, then by input order.

    Args:
        users: User of each event, from 0.
        num_users: Number of users.
        sort_keys: Sort keys, the most significant first.
    """
    offsets = offsets_of_lengths(np.bincount(users, minlength=num_users))
    order = _group(users, offsets)
    for key in reversed(sort_keys):
        _sort_groups(np.ascontiguousarray(key), offsets, order)
    return order


def is_duplicate(users: NDArray[Any], num_users: int, signatures: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return whether an earlier event (in input order) has the same user and signature; users are numbered from 0."""
    order = order_events(users, num_users, [signatures.view(np.int64)])  # stable: the earliest of equal rows is first
    same = (np.diff(users[order]) == 0) & (np.diff(signatures[order]) == 0)
    marked = np.zeros(users.size, dtype=np.bool_)
    marked[order[1:][same]] = True
    return marked


@njit(cache=True, nogil=True)
def _group(users: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the stable counting sort of events by user."""
    next_index = offsets[:-1].copy()
    order = np.empty(users.size, dtype=np.int64)
    for i in range(users.size):
        order[next_index[users[i]]] = i
        next_index[users[i]] += 1
    return order


@njit(cache=True, nogil=True)
def _sort_groups(key: NDArray[Any], offsets: NDArray[np.int64], order: NDArray[np.int64]) -> None:
    """Sort each group by the key, stably. Groups that are already sorted, the common case, are only scanned."""
    for group in range(offsets.size - 1):
        start, end = offsets[group], offsets[group + 1]
        for i in range(start + 1, end):
            if key[order[i]] < key[order[i - 1]]:
                group_order = order[start:end].copy()
                order[start:end] = group_order[np.argsort(key[group_order], kind="mergesort")]
                break


CountT = TypeVar("CountT", int, NDArray[np.int64])


def history_start(num_events: CountT, max_events: int, slide_events: int) -> CountT:
    """Return the index of the first event of a history that the model reads; a longer history slides by blocks.

    This is the single definition for evaluation, the Python API, batch inference and servers. A slide changes every
    position and so invalidates a cached prefix; with blocks, that happens once per `slide_events` events. With blocks
    of one event, the model reads exactly the newest `max_events`.

    Args:
        num_events: Number of events of a user, or an array of such numbers.
        max_events: Maximum number of events that the model reads.
        slide_events: Block size in events, see `resolve_slide_events`.
    """
    excess = num_events - max_events
    return -(-(excess * (excess > 0)) // slide_events) * slide_events


def resolve_slide_events(longest: int, slide_events: int | None) -> int:
    """Return the number of events by which a full history slides; the default is an eighth of the maximum length."""
    return max(1, longest // 8) if slide_events is None else slide_events


def check_slide(slide_events: int | None, max_events: int, option: str, max_option: str) -> None:
    """Raise a `UserError` if one slide could remove the complete history."""
    if slide_events is not None and slide_events > max(1, max_events):
        raise UserError(
            f"exceeds the {max_events:,} events of a history that {max_option} allows",
            option=option,
            value=slide_events,
            remedy=f"set a number from 1 to {max(1, max_events)}",
        )


def slice_index(first: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (T,) indices of the elements of the slices [first, end), and (B + 1,) offsets of the slices."""
    lengths = end - first
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], lengths), offsets


def positions(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the (T,) position of each element inside its row, from 0."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def sample_keys(seed: int, epoch: int, sample_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return (B,) keys of the counter-based random generator for (run seed, epoch, sample id)."""
    return fold_array(fold(seed, epoch), sample_ids)


def token_keys(sample_key: NDArray[np.uint64], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return (T,) random generator keys of tokens: the sample's key folded with the position of the token."""
    return fold_array(np.repeat(sample_key, np.diff(offsets)), positions(offsets))
