"""What the stores in host memory share: rows move by host loops, through pinned staging where the engine has a GPU."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.stores.frozen import Freezable
from nestrec.embedding.stores.staging import staging_of_process
from nestrec.embedding.stores.store import Slots


class HostStore(Freezable, ABC):
    """A store that reads and writes host arrays."""

    def __init__(self, device: torch.device, *, num_lanes: int) -> None:
        """num_lanes: how many threads may read or write chunks at the same time, on the way to and from a GPU."""
        self._staging = staging_of_process(num_lanes) if device.type == "cuda" else None

    def gather(self, slots: Slots, out: torch.Tensor) -> None:
        if self._staging is None:
            self.read(slots, out.numpy())
        else:
            self._staging.to_device(out, lambda part, rows: self.read_chunk(slots[part], rows))

    def scatter(self, slots: Slots, rows: torch.Tensor) -> None:
        with self._changing(slots):
            if self._staging is None:
                self.write(slots, rows.numpy())
            else:
                self._staging.to_host(rows, lambda part, host: self.write_chunk(slots[part], host))

    @abstractmethod
    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        """Copy rows into a host array."""

    @abstractmethod
    def write(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        """Copy rows out of a host array."""

    def read_chunk(self, slots: Slots, out: NDArray[np.int32]) -> None:
        """`read` as a lane of the staging calls it."""
        self.read(slots, out)

    def write_chunk(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        """`write` as a lane of the staging calls it."""
        self.write(slots, rows)
