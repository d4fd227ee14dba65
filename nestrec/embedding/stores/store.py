"""What a store is: rows in slots. Keys are the residency's business."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Slots = NDArray[np.int64]


class Store(Protocol):
    """Rows of int32 words in slots 0 to capacity - 1. A negative slot is skipped: nothing read, nothing written."""

    def reserve(self, num_slots: int) -> None:
        """Have room for this many slots; rows already stored stay."""
        ...

    def gather(self, slots: Slots, out: torch.Tensor) -> None:
        """Copy rows into `out`, (n, num_words), on the engine's device."""
        ...

    def scatter(self, slots: Slots, rows: torch.Tensor) -> None:
        """Copy rows of the engine's device into distinct slots."""
        ...

    def statistics(self) -> dict[str, int]:
        """Bytes of host, device and disk memory in use, and counters of the store's own."""
        ...

    def close(self) -> None:
        """Give back memory and files."""
        ...
