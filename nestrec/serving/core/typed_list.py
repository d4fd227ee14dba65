"""Lists of requests whose values all have one simple type, stored as a NumPy array."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Kind = Literal["numbers", "texts", "words"]
KINDS: tuple[Kind, ...] = ("numbers", "texts", "words")
"""Kinds of lists: integers; strings of integers, as `str` writes them; few distinct strings (or null), repeated."""


class TypedList(Sequence[Any]):
    """Sequence equal to the JSON list; `values` contains its integers, or for words their indices in `words`."""

    __slots__ = ("kind", "values", "words")

    def __init__(self, kind: Kind, values: Ids, words: tuple[str | None, ...] = ()):
        self.kind = kind
        self.values = values
        self.words = words

    @property
    def types(self) -> set[type]:
        """Types of the values."""
        match self.kind:
            case "numbers":
                return {int}
            case "texts":
                return {str}
            case _:
                return set(map(type, self.words))

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Values that satisfy bounds of magnitude or text length if and only if all values do.

        The minimum and the maximum are enough: the longest text of an integer is that of one of the two.
        """
        if self.kind == "words":
            return self.words
        ends = int(self.values.min()), int(self.values.max())
        return ends if self.kind == "numbers" else tuple(map(str, ends))

    def where(self, is_selected: NDArray[np.bool_]) -> "TypedList":
        return TypedList(self.kind, self.values[is_selected], self.words)

    def numbered(self, of: Callable[[Any], int]) -> Ids:
        """Return the number that `of` assigns to each value; `of` is called once per word."""
        if self.kind == "words":
            return np.array([of(word) for word in self.words], np.int64)[self.values]
        return np.array([of(value) for value in self], np.int64)

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "TypedList": ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return TypedList(self.kind, self.values[index], self.words)
        return next(iter(TypedList(self.kind, self.values[index : index + 1], self.words)))

    def __iter__(self) -> Iterator[Any]:
        values = self.values.tolist()
        match self.kind:
            case "numbers":
                return iter(values)
            case "texts":
                return map(str, values)
            case _:
                return map(self.words.__getitem__, values)


def types_of(values: Sequence[Any]) -> set[type]:
    return values.types if isinstance(values, TypedList) else set(map(type, values))
