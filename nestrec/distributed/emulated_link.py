"""A link that is only timed: after the real exchange its lane waits as long as the bytes would take. For benchmarks.

Whatever prints figures measured with it says "emulated".
"""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """Bandwidth of a rank's link, each way."""

    mbit: float
    """megabits a second"""

    def hold(self, num_bytes: int) -> None:
        """Wait for the time that these bytes take, without the GIL."""
        time.sleep(num_bytes * 8e-6 / self.mbit)
