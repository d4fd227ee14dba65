"""Rows in host memory: one slab that grows in place, copied by several threads without the GIL."""

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.stores.aside import Aside
from nestrec.embedding.stores.frozen import FrozenRows, MemoryRows, State, host_memory
from nestrec.embedding.stores.host import HostStore
from nestrec.embedding.stores.slab import Slab
from nestrec.embedding.stores.store import Slots
from nestrec.ops.rows.host_copy import gather_rows_host, scatter_rows_host

_MAX_LANES = 12


class DramStore(HostStore):
    """A slab of rows; memory is taken from the system when a row is first written."""

    def __init__(self, num_words: int, device: torch.device, num_threads: int = 0) -> None:
        threads = num_threads or torch.get_num_threads()
        # A quarter of the cores is left to the driver and to whoever waits for the interpreter.
        super().__init__(device, num_lanes=min(_MAX_LANES, max(1, threads * 3 // 4)))
        self._slab = Slab(num_words)
        self._num_threads = num_threads

    def reserve(self, num_slots: int) -> None:
        if num_slots > len(self._slab.rows):
            with self._changing():
                self._slab.reserve(num_slots)

    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        gather_rows_host(self._slab.rows, slots, out, self._num_threads)

    def write(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        scatter_rows_host(self._slab.rows, slots, rows, self._num_threads)

    def read_chunk(self, slots: Slots, out: NDArray[np.int32]) -> None:
        gather_rows_host(self._slab.rows, slots, out, num_threads=1)

    def write_chunk(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        scatter_rows_host(self._slab.rows, slots, rows, num_threads=1)

    def _freeze(self, state: State, num_words: int, max_bytes: int) -> FrozenRows:
        return MemoryRows(lambda: self._slab.rows, state, Aside(num_words, max_bytes, host_memory))

    def statistics(self) -> dict[str, int]:
        return {"host_bytes": self._slab.num_bytes, "device_bytes": 0}

    def close(self) -> None:
        self._slab.close()
