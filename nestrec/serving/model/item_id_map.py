"""Ids of items by what their source calls them, for many at once.

Sources mostly count their items. Then a table answers for all items of a request with a few operations on arrays; a
dictionary, which takes text and anything sparse, is asked item by item.

Models of labelled rows, which know neither histories nor a catalogue.

A table of a model that is served whose rows are found by keys of any size, as dynamic tables have them in training.

A key without a row has the vector that it would begin with, as in evaluation.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.embedding.initial import initial_vectors
from nestrec.embedding.table_config import InitConfig, TableConfig
from nestrec.serving.core.typed_list import TypedList, types_of
from nestrec.serving.model.served_tables import ServedTable

_SPARSE = 8
"""entries of the table an item, at most"""
_LONGEST = 19
"""characters of a whole number; a longer one is text"""


class ItemIds:
    """Item i + 1 is called keys[i]; a request may write a whole number as such or as text. Unknown ones get id 0."""

    def __init__(self, keys: Sequence[str]):
        numbers = {int(key): i + 1 for i, key in enumerate(keys) if _is_number(key)}
        self._ids: dict[str | int, int] = {key: i + 1 for i, key in enumerate(keys)}
        self._ids.update(numbers.items())
        self._table = np.zeros(0, np.int64)
        if numbers and min(numbers) >= 0 and max(numbers) < _SPARSE * len(numbers):
            self._table = np.zeros(max(numbers) + 2, np.int64)  # the last entry is nobody's
            self._table[list(numbers)] = list(numbers.values())

    def grow(self, keys: Sequence[str], known: int) -> None:
        """Names of the items after the `known` first ones. Whoever asks meanwhile finds them, or does not yet."""
        numbers = {int(key): known + i + 1 for i, key in enumerate(keys) if _is_number(key)}
        table = self._table
        if numbers and len(table):
            low = min(numbers)
            high = max(numbers)
            if low >= 0 and high < _SPARSE * (known + len(keys)):
                if high + 2 > len(table):  # with room for those to come: requests wait for a copy
                    table = np.zeros((high + 2) * 9 // 8, np.int64)
                    table[: len(self._table) - 1] = self._table[:-1]
                table[list(numbers)] = list(numbers.values())
            else:
                table = np.zeros(0, np.int64)
        self._ids.update({key: known + i + 1 for i, key in enumerate(keys)})
        self._ids.update(numbers.items())
        self._table = table

    def of(self, keys: Sequence[str | int]) -> NDArray[np.int64]:
        """`TypeError` where a key is neither text nor a whole number."""
        types = types_of(keys)
        if not types <= {str, int}:
            raise TypeError
        table = self._table  # another one may take its place meanwhile
        if len(table) and isinstance(keys, TypedList) and keys.kind != "words":
            return _taken(table, keys.values)
        if types == {int} and len(table):
            try:
                places = np.array(keys, np.int64)
            except OverflowError:  # more than 64 bits, so nobody's
                pass
            else:
                return _taken(table, places)
        return np.fromiter(map(self._ids.get, keys, repeat(0)), np.int64, len(keys))


def _taken(table: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """What is negative is large without its sign, and nobody's."""
    return table.take(np.minimum(places.view(np.uint64), len(table) - 1).view(np.int64))


def _is_number(key: str) -> bool:
    """Written as str writes a whole number."""
    digits = key.removeprefix("-")
    return len(key) <= _LONGEST and digits.isascii() and digits.isdecimal() and str(int(key)) == key


@config
class KeyedTableSpec:
    """What is known of a table by key beside its rows."""

    table: str
    """its name in training"""
    dim: int
    """elements of a row"""
    seed: int
    """rows begin as functions of it and their keys"""
    init: InitConfig
    """how"""
    hash_key: int | None = None
    """texts of the column are hashed under it; none: requests tell keys"""

    def initial(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """(keys, dim) float32"""
        return initial_vectors(keys, TableConfig(name=self.table, dim=self.dim, seed=self.seed, init=self.init))


class KeyedTable:
    """Ids are keys."""

    def __init__(self, rows: ServedTable, keys: NDArray[np.int64], begins: KeyedTableSpec):
        """keys: of the rows, ascending"""
        self.by_row = rows
        self.keys = keys
        self.begins = begins
        self.num_rows = rows.num_rows

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        asked = ids.cpu().numpy()
        place = np.minimum(np.searchsorted(self.keys, asked), max(0, len(self.keys) - 1))
        is_there = self.keys[place] == asked if len(self.keys) else np.zeros(len(asked), np.bool_)
        found = self.by_row.rows(torch.from_numpy(place[is_there]))
        if is_there.all():
            return found
        out = torch.empty(len(asked), found.shape[1], dtype=found.dtype, device=found.device)
        out[torch.from_numpy(is_there).to(found.device)] = found
        out[torch.from_numpy(~is_there).to(found.device)] = self.begins.initial(asked[~is_there]).to(found)
        return out

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from self.by_row.parts()

    def statistics(self) -> dict[str, int]:
        return self.by_row.statistics()

    @property
    def room(self) -> int:
        return self.by_row.room

    @property
    def row_device(self) -> torch.device:
        return self.by_row.row_device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Keys stay those that they are."""
        self.by_row.put(torch.from_numpy(np.searchsorted(self.keys, ids.cpu().numpy())), rows)
