"""Id mappings of served models: source ids of items to item ids, and 64-bit keys to rows of an embedding table.

`ItemIds` looks up batches of source ids. If most source ids are small integers, an array lookup resolves all items of a
request at once; a dictionary handles text and sparse ids, one item at a time.

`KeyedTable` is a table whose rows are addressed by keys, like the dynamic embedding tables of training. A key without a
row gets the initial vector that training would give it, as in evaluation.
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

_MAX_ENTRIES_PER_ITEM = 8
"""Maximum size of the lookup array relative to the number of integer ids; sparser ids use the dictionary."""
_MAX_DIGITS = 19
"""Maximum number of characters of an integer id; a longer id is text."""


class ItemIds:
    """Mapping of source ids to item ids: `keys[i]` has item id i + 1, and unknown source ids have item id 0.

    Requests can write an integer source id as a number or as text.
    """

    def __init__(self, keys: Sequence[str]):
        numbers = {int(key): i + 1 for i, key in enumerate(keys) if _is_number(key)}
        self._ids: dict[str | int, int] = {key: i + 1 for i, key in enumerate(keys)}
        self._ids.update(numbers.items())
        self._table = np.zeros(0, np.int64)
        if numbers and min(numbers) >= 0 and max(numbers) < _MAX_ENTRIES_PER_ITEM * len(numbers):
            self._table = np.zeros(max(numbers) + 2, np.int64)  # the last entry is 0, for ids out of range
            self._table[list(numbers)] = list(numbers.values())

    def grow(self, keys: Sequence[str], num_known: int) -> None:
        """Add items after the first `num_known` ones.

        Concurrent lookups are safe: they either see the new items or do not see them yet.
        """
        numbers = {int(key): num_known + i + 1 for i, key in enumerate(keys) if _is_number(key)}
        table = self._table
        if numbers and len(table):
            low = min(numbers)
            high = max(numbers)
            if low >= 0 and high < _MAX_ENTRIES_PER_ITEM * (num_known + len(keys)):
                if high + 2 > len(table):  # with spare capacity, because requests wait while the array is copied
                    table = np.zeros((high + 2) * 9 // 8, np.int64)
                    table[: len(self._table) - 1] = self._table[:-1]
                table[list(numbers)] = list(numbers.values())
            else:
                table = np.zeros(0, np.int64)
        self._ids.update({key: num_known + i + 1 for i, key in enumerate(keys)})
        self._ids.update(numbers.items())
        self._table = table

    def of(self, keys: Sequence[str | int]) -> NDArray[np.int64]:
        """Return the item ids of source ids; unknown ones get 0.

        Raises:
            TypeError: A key is neither text nor an integer.
        """
        types = types_of(keys)
        if not types <= {str, int}:
            raise TypeError
        table = self._table  # read once: `grow` can replace the array concurrently
        if len(table) and isinstance(keys, TypedList) and keys.kind != "words":
            return _look_up(table, keys.values)
        if types == {int} and len(table):
            try:
                numbers = np.array(keys, np.int64)
            except OverflowError:  # an id of more than 64 bits is unknown; the dictionary handles it
                pass
            else:
                return _look_up(table, numbers)
        return np.fromiter(map(self._ids.get, keys, repeat(0)), np.int64, len(keys))


def _look_up(table: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Look up ids with one bounds check: viewed as unsigned, negative ids are large and map to the last entry, 0."""
    return table.take(np.minimum(numbers.view(np.uint64), len(table) - 1).view(np.int64))


def _is_number(key: str) -> bool:
    """Return whether converting the key to int and back gives the same text."""
    digits = key.removeprefix("-")
    return len(key) <= _MAX_DIGITS and digits.isascii() and digits.isdecimal() and str(int(key)) == key


@config
class KeyedTableSpec:
    """Spec of a table whose rows are addressed by keys: how keys are hashed and how missing rows are initialized."""

    table: str
    """Name of the table in training."""
    dim: int
    """Number of elements of a row."""
    seed: int
    """Seed of the initial rows, which are a function of the seed and the key."""
    init: InitConfig
    """Distribution of the initial rows."""
    hash_key: int | None = None
    """Key of the hash function that maps texts of the column to keys; none if requests contain the keys."""

    def initial_rows(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """Return the initial rows of keys, float32 of shape (keys, dim)."""
        return initial_vectors(keys, TableConfig(name=self.table, dim=self.dim, seed=self.seed, init=self.init))


class KeyedTable:
    """Embedding table of a served model whose ids are 64-bit keys.

    Args:
        rows: Table that stores the rows.
        keys: Key of each row, in ascending order.
        spec: Spec of the table, which defines the rows of other keys.
    """

    def __init__(self, rows: ServedTable, keys: NDArray[np.int64], spec: KeyedTableSpec):

        self.row_table = rows
        self.keys = keys
        self.spec = spec
        self.num_rows = rows.num_rows

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        keys = ids.cpu().numpy()
        index = np.minimum(np.searchsorted(self.keys, keys), max(0, len(self.keys) - 1))
        is_stored = self.keys[index] == keys if len(self.keys) else np.zeros(len(keys), np.bool_)
        stored = self.row_table.rows(torch.from_numpy(index[is_stored]))
        if is_stored.all():
            return stored
        out = torch.empty(len(keys), stored.shape[1], dtype=stored.dtype, device=stored.device)
        out[torch.from_numpy(is_stored).to(stored.device)] = stored
        out[torch.from_numpy(~is_stored).to(stored.device)] = self.spec.initial_rows(keys[~is_stored]).to(stored)
        return out

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from self.row_table.parts()

    def statistics(self) -> dict[str, int]:
        return self.row_table.statistics()

    @property
    def capacity(self) -> int:
        return self.row_table.capacity

    @property
    def row_device(self) -> torch.device:
        return self.row_table.row_device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite rows of stored keys; the set of keys does not change."""
        self.row_table.put(torch.from_numpy(np.searchsorted(self.keys, ids.cpu().numpy())), rows)
