"""Model inputs of a request: the history and the candidates, in the ids of the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.data.transform import Transform

Ints = NDArray[np.int64]
LARGEST_NUMBER = 1e18
"""Largest absolute number that a request can contain; in float32, the square of 1.8e19 overflows."""
_MAX_ROW_DIGITS = 18
"""Maximum number of digits of an integer category, so that it fits into 64 bits."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Events of a user, oldest first."""

    items: Ints
    times_ms: Ints
    """Times of the events in Unix milliseconds; zeros if the model does not read times."""
    actions: Ints
    """Action bits of the events; zeros if the model does not read actions."""
    features: Mapping[str, Ints] = field(default_factory=dict)
    """Event and user features that the model reads, by `ColumnSpec.fields`, one value per event: categories as ids,
    numbers and vector elements as `number_bits`, lists and texts as `pad_ids`. A value that is equal for all events can
    be a broadcast view, which saves memory for long user vectors."""
    query_features: Mapping[str, int] = field(default_factory=dict)
    """Features of the query event (the event to be predicted), for models that read them with the history."""

    def __len__(self) -> int:
        return len(self.items)

    def copied(self, first: int = 0) -> "History":
        """Return a copy without the first `first` events, so that later changes of the arrays have no effect."""
        features = {name: _copied(values[first:]) for name, values in self.features.items()}
        return replace(
            self,
            items=self.items[first:].copy(),
            times_ms=self.times_ms[first:].copy(),
            actions=self.actions[first:].copy(),
            features=features,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidate items of a ranking request, or the filters of a retrieval request."""

    items: Ints
    now_ms: int
    features: Mapping[str, Ints] = field(default_factory=dict)
    """Features that the model reads, encoded like `History.features`, one value per candidate."""
    num_best: int = 0
    """Number of best catalog items to retrieve, instead of scoring `items`."""
    excluded: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Items that are not retrieved."""
    allowed: Ints | None = None
    """The only items that can be retrieved; None means the complete catalog."""

    def __len__(self) -> int:
        return len(self.items)

    def part(self, first: int, end: int) -> "Candidates":
        """Return candidates `first` to `end`."""
        features = {name: values[first:end] for name, values in self.features.items()}
        return replace(self, items=self.items[first:end], features=features)

    def copied(self) -> "Candidates":
        """Return a copy, so that later changes of the arrays have no effect."""
        features = {name: _copied(values) for name, values in self.features.items()}
        allowed = None if self.allowed is None else self.allowed.copy()
        return replace(self, items=self.items.copy(), features=features, excluded=self.excluded.copy(), allowed=allowed)


def is_broadcast(values: Ints) -> bool:
    """Return whether the array is a broadcast view of one value."""
    return len(values) > 1 and values.strides == (0,)


def select(values: Ints, is_selected: NDArray[np.bool_]) -> Ints:
    """Return the selected values; a broadcast view stays a view."""
    return values[: np.count_nonzero(is_selected)] if is_broadcast(values) else values[is_selected]


def _copied(values: Ints) -> Ints:
    return np.broadcast_to(values[:1].copy(), len(values)) if is_broadcast(values) else values.copy()


def sorted_unique(ids: Ints) -> Ints:
    """Return the unique ids in ascending order; five times as fast as `np.unique`, which has overhead per call."""
    ordered = np.sort(ids)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def number_bits(values: NDArray[np.float32]) -> Ints:
    """Return the 32 bits of float32 numbers as integers, so that id arrays can hold them."""
    return values.astype(np.float32).view(np.int32).astype(np.int64)


def pad_ids(ids: Ints, counts: Ints, width: int) -> Ints:
    """Pad lists of ids with zeros.

    Args:
        ids: Concatenated lists.
        counts: Length of each list.
        width: Length of the padded lists.

    Returns:
        Array of shape (lists, width).
    """
    padded = np.zeros((len(counts), width), np.int64)
    padded[np.arange(width) < counts[:, None]] = ids
    return padded


def category_key(value: Any) -> str:
    """Return the vocabulary key of a category; booleans have the keys 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def category_row(category: Any, num_rows: int) -> int:
    """Return the table row of an integer category; 0 if the table does not have that row."""
    if isinstance(category, str):
        category = int(category) if category.isdecimal() and len(category) <= _MAX_ROW_DIGITS else None
    return int(category) if category is not None and 0 <= category < num_rows else 0


def bucket_values(values: Sequence[Any], transform: Transform, names: Mapping[str, int]) -> Ints:
    """Return the bucket ids of raw values, each a number (also as text) or the name of a bucket.

    Null and other texts get 0.
    """
    buckets = transform.bucket_ids(np.array([parse_number(value) for value in values]))
    for i, value in enumerate(values):
        if isinstance(value, str) and value in names:
            buckets[i] = names[value]
    return buckets


def parse_number(value: Any) -> float:
    """Convert a value to a number; NaN for null, for other text, and for numbers that overflow float32."""
    try:
        number = math.nan if value is None else float(value)
    except (ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= _MAX_FLOAT32 else math.nan


def parse_vector(values: Sequence[float]) -> NDArray[np.float64]:
    """Convert a list of numbers as `parse_number` does."""
    try:
        numbers = np.array(values, np.float64)
    except OverflowError:
        return np.array([parse_number(value) for value in values])
    return np.where(np.abs(numbers) <= _MAX_FLOAT32, numbers, np.nan)


def floats_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers from their bits; the inverse of `number_bits`."""
    return bits.to(torch.int32).contiguous().view(torch.float32)


def number_features(bits: torch.Tensor) -> torch.Tensor:
    """Return the input features of numbers from their bits, of shape (..., 2): the number (0 if missing) and a missing
    indicator."""
    values = floats_from_bits(bits)
    return torch.stack([values.nan_to_num(0.0), values.isnan().float()], dim=-1)
