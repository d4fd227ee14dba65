"""What the stores in host memory share: rows move by host loops, through pinned staging where the engine has a GPU."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.stores.staging import PinnedStaging
from nestrec.embedding.stores.store import Slots


class HostStore(ABC):
    """A store that reads and writes host arrays."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._staging = PinnedStaging(num_words) if device.type == "cuda" else None

    def gather(self, slots: Slots, out: torch.Tensor) -> None:
        if self._staging is None:
            self.read(slots, out.numpy())
        else:
            self._staging.to_device(out, lambda part, rows: self.read(slots[part], rows))

    def scatter(self, slots: Slots, rows: torch.Tensor) -> None:
        if self._staging is None:
            self.write(slots, rows.numpy())
        else:
            self._staging.to_host(rows, lambda part, host: self.write(slots[part], host))

    @abstractmethod
    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        """Copy rows into a host array."""

    @abstractmethod
    def write(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        """Copy rows out of a host array."""
