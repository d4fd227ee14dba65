"""Cutting slices out of concatenated rows, vectorised."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.base.random import fold, fold_array

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
            field=field,
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
