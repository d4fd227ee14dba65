"""Numbers as categories: ranges that hold about equally many of the values seen, named by their bounds."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestrec.data.prepare.keys import KeyTable


class Ranges:
    """Add all values, settle, then ask for the id of a value: from 1 in order of size, 0 for NaN."""

    def __init__(self, most: int):
        self._most = most
        self._values: list[NDArray[np.float32]] = []
        self._upper = np.zeros(0, np.float32)
        self.labels = KeyTable()
        """`id - 1` to the text of a range, such as `1.5 to 3`"""

    def add(self, values: NDArray[Any]) -> None:
        self._values.append(values[np.isfinite(values)].astype(np.float32))

    def settle(self) -> None:
        """Each range ends at a value that was seen, so that equal values are never parted."""
        values = np.sort(np.concatenate([*self._values, np.zeros(0, np.float32)]))
        self._values.clear()
        if not values.size:
            return
        last = np.ceil(np.arange(1, self._most + 1) * values.size / self._most).astype(np.int64) - 1
        self._upper = np.unique(values[last])
        lower = np.concatenate([values[:1], values[np.searchsorted(values, self._upper[:-1], side="right")]])
        bounds = zip(lower.tolist(), self._upper.tolist(), strict=True)
        self.labels.encode(pa.array([f"{a:.6g}" if a == b else f"{a:.6g} to {b:.6g}" for a, b in bounds], pa.string()))

    def of(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Ids; a value beyond all that were seen lies in the nearest range."""
        ids = np.minimum(np.searchsorted(self._upper, values, side="left"), self._upper.size - 1) + 1
        return np.where(np.isnan(values), 0, ids).astype(np.int64)
