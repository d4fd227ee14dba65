"""A link that is only timed: an exchange takes as long as its bytes would on it. For benchmarks.

Between real ranks the exchange is made and then held back. A process alone may stand for one rank of many that are all
like it: what would come from the others is then a copy of what would leave for them. Whatever prints figures measured
with it says "emulated".
"""

from dataclasses import dataclass

import torch

from nestrec.distributed.timed_wait import wait_in_order


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """A rank's link, each way."""

    mbit: float
    """megabits a second"""
    latency_us: float = 0.0
    """of an exchange, beside its bytes"""
    num_ranks: int = 1
    """ranks that a process alone stands for one of"""

    def hold(self, num_bytes: int, device: torch.device) -> None:
        """Wait for the time that these bytes take."""
        wait_in_order(self.latency_us * 1e-6 + num_bytes * 8e-6 / self.mbit, device)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a process alone, exchanged with ranks that are like it: all but its own part crosses."""
        if self.num_ranks == 1:
            return rows
        self.hold(rows.numel() * rows.element_size() * (self.num_ranks - 1) // self.num_ranks, rows.device)
        return rows.clone()
