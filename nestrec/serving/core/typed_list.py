"""A list of a request, all of whose values are of one simple kind, as an array."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Kind = Literal["numbers", "texts", "words"]
KINDS: tuple[Kind, ...] = ("numbers", "texts", "words")
"""whole numbers; texts of whole numbers, as `str` writes them; a few words, and null, repeated"""


class TypedList(Sequence[Any]):
    """Reads as the list that JSON has there; `values` are its numbers, or for words their places among `words`."""

    __slots__ = ("kind", "values", "words")

    def __init__(self, kind: Kind, values: Ids, words: tuple[str | None, ...] = ()):
        self.kind = kind
        self.values = values
        self.words = words

    @property
    def types(self) -> set[type]:
        """Of its values."""
        match self.kind:
            case "numbers":
                return {int}
            case "texts":
                return {str}
            case _:
                return set(map(type, self.words))

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Values of which all lie within bounds, of a number or of the length of a text, if every value does: each text
        of a number has a character, and the longest is that of the least or the largest."""
        if self.kind == "words":
            return self.words
        ends = int(self.values.min()), int(self.values.max())
        return ends if self.kind == "numbers" else tuple(map(str, ends))

    def where(self, is_kept: NDArray[np.bool_]) -> "TypedList":
        return TypedList(self.kind, self.values[is_kept], self.words)

    def numbered(self, of: Callable[[Any], int]) -> Ids:
        """A number of each value; asked once for each word."""
        if self.kind == "words":
            return np.array([of(word) for word in self.words], np.int64)[self.values]
        return np.array([of(value) for value in self], np.int64)

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> "TypedList": ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return TypedList(self.kind, self.values[place], self.words)
        return next(iter(TypedList(self.kind, self.values[place : place + 1], self.words)))

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
