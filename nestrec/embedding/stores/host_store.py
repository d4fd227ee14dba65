"""Row stores in host memory (host offload, comparable to UVM) and the base class that they share with the disk store.

Rows are copied by multithreaded host loops without the GIL, and through pinned staging buffers if the engine uses a
GPU.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.stores.pinned_staging import staging_of_process
from nestrec.embedding.stores.row_snapshot import (
    CopyOnWriteRing,
    MemoryRows,
    RowSnapshot,
    SnapshotStore,
    State,
    host_memory,
)
from nestrec.embedding.stores.row_store import Slab, Slots
from nestrec.ops.embedding.host_loops import gather_rows_host, scatter_rows_host


class HostStore(SnapshotStore, ABC):
    """Base class of stores that read and write host arrays."""

    def __init__(self, device: torch.device, *, num_lanes: int) -> None:
        """Create a store; `num_lanes` threads may copy chunks to and from a GPU at the same time."""
        self._staging = staging_of_process(num_lanes) if device.type == "cuda" else None

    def gather(self, slots: Slots, out: torch.Tensor) -> None:
        if self._staging is None:
            self.read(slots, out.numpy())
        else:
            self._staging.to_device(out, lambda part, rows: self.read_chunk(slots[part], rows))

    def scatter(self, slots: Slots, rows: torch.Tensor) -> None:
        with self._before_write(slots):
            if self._staging is None:
                self.write(slots, rows.numpy())
            else:
                self._staging.to_host(rows, lambda part, host: self.write_chunk(slots[part], host))

    @abstractmethod
    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        """Copy rows of the store to a host array."""

    @abstractmethod
    def write(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        """Copy rows of a host array to the store."""

    def read_chunk(self, slots: Slots, out: NDArray[np.int32]) -> None:
        """Copy rows to a host array; called by a lane of the pinned staging."""
        self.read(slots, out)

    def write_chunk(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        """Copy rows of a host array to the store; called by a lane of the pinned staging."""
        self.write(slots, rows)


_MAX_LANES = 12


class DramStore(HostStore):
    """Row store in host memory; the system allocates the memory of a row when it is first written."""

    def __init__(self, num_words: int, device: torch.device, num_threads: int = 0) -> None:
        threads = num_threads or torch.get_num_threads()
        # A quarter of the cores is left to the driver and to threads that wait for the GIL.
        super().__init__(device, num_lanes=min(_MAX_LANES, max(1, threads * 3 // 4)))
        self._slab = Slab(num_words)
        self._num_threads = num_threads

    def reserve(self, num_slots: int) -> None:
        if num_slots > len(self._slab.rows):
            with self._before_write():
                self._slab.reserve(num_slots)

    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        gather_rows_host(self._slab.rows, slots, out, self._num_threads)

    def write(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        scatter_rows_host(self._slab.rows, slots, rows, self._num_threads)

    def read_chunk(self, slots: Slots, out: NDArray[np.int32]) -> None:
        gather_rows_host(self._slab.rows, slots, out, num_threads=1)

    def write_chunk(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        scatter_rows_host(self._slab.rows, slots, rows, num_threads=1)

    def _make_snapshot(self, state: State, num_words: int, max_bytes: int) -> RowSnapshot:
        return MemoryRows(lambda: self._slab.rows, state, CopyOnWriteRing(num_words, max_bytes, host_memory))

    def statistics(self) -> dict[str, int]:
        return {"host_bytes": self._slab.num_bytes, "device_bytes": 0}

    def close(self) -> None:
        self._slab.close()
