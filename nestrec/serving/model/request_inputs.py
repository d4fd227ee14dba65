"""What is known of a user when a request comes, in the ids of the model."""

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
"""that a model is given to read: in 32 bits, where the square of 1.8e19 is infinite"""
_LONGEST_ROW = 18
"""digits of a category's number; 64 bits hold all of them"""
_MOST_OF_32_BITS = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Events of a user, oldest first."""

    items: Ints
    times_ms: Ints
    """Unix milliseconds; zeros where the model does not look at them"""
    actions: Ints
    """action bits; zeros where the model does not look at them"""
    features: Mapping[str, Ints] = field(default_factory=dict)
    """event and user features the model asks for, by `ColumnSpec.fields`, one value an event: categories by id, numbers
    and those of vectors by `number_bits`, lists and texts by `packed_ids`. What is the same at all events may be a view
    of one value: a vector of a user has many numbers"""
    asked: Mapping[str, int] = field(default_factory=dict)
    """the same of the event that is asked for, as far as histories read them"""

    def __len__(self) -> int:
        return len(self.items)

    def copied(self, first: int = 0) -> "History":
        """A copy without the first events: whatever its owner does with the arrays, a prefix is kept as it was read."""
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
    """Items to be scored at one moment."""

    items: Ints
    now_ms: int
    features: Mapping[str, Ints] = field(default_factory=dict)
    """the same of what the model asks for, one value a candidate"""
    num_best: int = 0
    """instead of `items`: so many best of the whole catalogue (retrieval)"""
    excluded: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """items that may not be among the best"""
    allowed: Ints | None = None
    """only these may be among the best; none: all of the catalogue"""

    def __len__(self) -> int:
        return len(self.items)

    def part(self, first: int, end: int) -> "Candidates":
        """Those from `first` on, before `end`."""
        features = {name: values[first:end] for name, values in self.features.items()}
        return replace(self, items=self.items[first:end], features=features)

    def copied(self) -> "Candidates":
        """A copy, which its owner cannot change."""
        features = {name: _copied(values) for name, values in self.features.items()}
        allowed = None if self.allowed is None else self.allowed.copy()
        return replace(self, items=self.items.copy(), features=features, excluded=self.excluded.copy(), allowed=allowed)


def is_shared(values: Ints) -> bool:
    """They are a view of one value."""
    return len(values) > 1 and values.strides == (0,)


def marked(values: Ints, is_marked: NDArray[np.bool_]) -> Ints:
    """Those that are marked."""
    return values[: np.count_nonzero(is_marked)] if is_shared(values) else values[is_marked]


def _copied(values: Ints) -> Ints:
    return np.broadcast_to(values[:1].copy(), len(values)) if is_shared(values) else values.copy()


def distinct(ids: Ints) -> Ints:
    """Each of them once, ascending: `np.unique` in a fifth of its time, most of which is not spent on values."""
    ordered = np.sort(ids)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def number_bits(values: NDArray[np.float32]) -> Ints:
    """Numbers where ids stand otherwise: their 32 bits."""
    return values.astype(np.float32).view(np.int32).astype(np.int64)


def packed_ids(ids: Ints, counts: Ints, most: int) -> Ints:
    """(places, most) of lists of ids one after the other, so many of each place; 0 behind the last one."""
    found = np.zeros((len(counts), most), np.int64)
    found[np.arange(most) < counts[:, None]] = ids
    return found


def key_of(value: Any) -> str:
    """A category as vocabularies have it: Booleans of a log are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def row_of(category: Any, num_rows: int) -> int:
    """Return the row of a category that has a number and no name; 0 if the table has no such row."""
    if isinstance(category, str):
        category = int(category) if category.isdecimal() and len(category) <= _LONGEST_ROW else None
    return int(category) if category is not None and 0 <= category < num_rows else 0


def buckets_of(values: Sequence[Any], transform: Transform, names: Mapping[str, int]) -> Ints:
    """Buckets of raw values, each a number, also as text, or the name of a bucket; 0 of a null and of other texts."""
    found = transform.bucket_ids(np.array([number_of(value) for value in values]))
    for place, value in enumerate(values):
        if isinstance(value, str) and value in names:
            found[place] = names[value]
    return found


def number_of(value: Any) -> float:
    """NaN of a null, of a text that is none, and of what 32 bits cannot hold, as models read it."""
    try:
        number = math.nan if value is None else float(value)
    except (ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= _MOST_OF_32_BITS else math.nan


def vector_of(values: Sequence[float]) -> NDArray[np.float64]:
    """`number_of` each of many numbers."""
    try:
        numbers = np.array(values, np.float64)
    except OverflowError:
        return np.array([number_of(value) for value in values])
    return np.where(np.abs(numbers) <= _MOST_OF_32_BITS, numbers, np.nan)


def values_of(bits: torch.Tensor) -> torch.Tensor:
    """Numbers of their bits."""
    return bits.to(torch.int32).contiguous().view(torch.float32)


def numbers_of(bits: torch.Tensor) -> torch.Tensor:
    """(..., 2) numbers of their bits, 0 where one is not known, and whether it is not."""
    values = values_of(bits)
    return torch.stack([values.nan_to_num(0.0), values.isnan().float()], dim=-1)
