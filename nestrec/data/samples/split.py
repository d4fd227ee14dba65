"""Which events of a user train the model and which are held out."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Part = Literal["valid", "test"]


@dataclass(frozen=True, slots=True)
class Split:
    """For each user: events [0, train_end) train, [train_end, valid_end) validate, [valid_end, test_end) test."""

    train_end: NDArray[np.int64]
    valid_end: NDArray[np.int64]
    test_end: NDArray[np.int64]

    def held_out(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first, end) of the held-out events of each user."""
        if part == "valid":
            return self.train_end, self.valid_end
        return self.valid_end, self.test_end

    def users_with(self, part: Part) -> NDArray[np.int64]:
        first, end = self.held_out(part)
        return np.flatnonzero(end > first)


def leave_one_out(lengths: NDArray[np.int32]) -> Split:
    """The last event tests, the one before validates; users with fewer than three events only train."""
    length = lengths.astype(np.int64)
    held = np.where(length >= 3, 1, 0)
    return Split(length - 2 * held, length - held, length)


def by_time(times_ms: NDArray[np.int64], offsets: NDArray[np.int64], *, valid_from_ms: int, test_from_ms: int) -> Split:
    """Events before `valid_from_ms` train, those from `test_from_ms` on test. Times are sorted inside a user."""
    return Split(
        _events_before(times_ms, offsets, valid_from_ms),
        _events_before(times_ms, offsets, test_from_ms),
        np.diff(offsets),
    )


def _events_before(times_ms: NDArray[np.int64], offsets: NDArray[np.int64], cut_ms: int) -> NDArray[np.int64]:
    before = np.concatenate([[0], np.cumsum(times_ms < cut_ms)])
    counts: NDArray[np.int64] = before[offsets[1:]] - before[offsets[:-1]]
    return counts
