"""Copies host rows to and from a GPU through pinned buffers; the copy of a chunk overlaps the next host loop.

Rows are divided over lanes, one thread each, with two pinned buffers per lane (double buffering). A lane fills one
buffer while the other is being copied, and lanes do not wait for each other. Chunks are large because each of them
passes the GIL between threads several times, which took 0.25 ms in total on a host with 16 cores and cannot be done by
two lanes at once. The buffers belong to the process, not to a table. docs/results/stores.md shows how much of the copy
time is hidden.
"""

import threading
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.cuda import pinned_empty
from nestrec.base.thread_team import parallel_for

CHUNK_BYTES = 8 << 20
HostLoop = Callable[[slice, NDArray[np.int32]], None]


class _Lane:
    """Two pinned buffers, each with an event that is recorded after its last copy."""

    def __init__(self, chunk_bytes: int) -> None:
        self._buffers = [pinned_empty([chunk_bytes // 4], torch.int32, torch.device("cuda")) for _ in range(2)]
        # Blocking events: a waiting lane sleeps and leaves its core to the working threads.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(2)]

    def to_device(self, out: torch.Tensor, parts: list[slice], fill: HostLoop) -> None:
        for turn, part in enumerate(parts):
            self._events[turn % 2].synchronize()
            buffer = self._rows(turn, part, out)
            fill(part, buffer.numpy())
            out[part].copy_(buffer, non_blocking=True)
            self._events[turn % 2].record()

    def to_host(self, rows: torch.Tensor, parts: list[slice], take: HostLoop) -> None:
        for turn in range(len(parts) + 1):
            if turn < len(parts):
                self._events[turn % 2].synchronize()
                self._rows(turn, parts[turn], rows).copy_(rows[parts[turn]], non_blocking=True)
                self._events[turn % 2].record()
            if turn > 0:
                self._events[(turn - 1) % 2].synchronize()
                take(parts[turn - 1], self._rows(turn - 1, parts[turn - 1], rows).numpy())

    def _rows(self, turn: int, part: slice, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer of this turn as rows of the width of `like`."""
        num_rows = part.stop - part.start
        num_words = like.shape[1]
        return self._buffers[turn % 2][: num_rows * num_words].view(num_rows, num_words)


class PinnedStaging:
    """Pinned staging buffers that copy rows in chunks on one or more lanes, one call at a time."""

    def __init__(self, num_lanes: int, chunk_bytes: int) -> None:
        """Allocate the buffers.

        Args:
            num_lanes: Number of threads that may run the host loop at the same time.
            chunk_bytes: Size of one pinned buffer.
        """
        self._chunk_bytes = chunk_bytes
        self._lanes = [_Lane(chunk_bytes) for _ in range(num_lanes)]
        self._in_use = threading.Lock()

    def to_device(self, out: torch.Tensor, fill: HostLoop) -> None:
        """Copy rows to the device: `fill` writes a chunk of host rows while the previous chunk is copied to `out`."""
        self._on_lanes(out, lambda lane, parts: lane.to_device(out, parts, fill))

    def to_host(self, rows: torch.Tensor, take: HostLoop) -> None:
        """Copy rows to the host: `take` reads one chunk while the next one is copied."""
        self._on_lanes(rows, lambda lane, parts: lane.to_host(rows, parts, take))

    def _on_lanes(self, rows: torch.Tensor, move: Callable[[_Lane, list[slice]], None]) -> None:
        stream = torch.cuda.current_stream()
        lanes = self._lanes
        num_rows = len(rows)
        chunk_rows = max(1, self._chunk_bytes // (4 * rows.shape[1]))

        def run(first: int, end: int) -> None:
            with torch.cuda.stream(stream):  # the current stream is a thread-local setting
                for lane in range(first, end):
                    low = num_rows * lane // len(lanes)
                    high = num_rows * (lane + 1) // len(lanes)
                    move(lanes[lane], [slice(a, min(a + chunk_rows, high)) for a in range(low, high, chunk_rows)])

        with self._in_use:
            parallel_for(len(lanes), num_rows, run, len(lanes))


@lru_cache(maxsize=8)
def staging_of_process(num_lanes: int) -> PinnedStaging:
    """Return the buffers that all stores share, so that many tables need no more pinned memory than one."""
    return PinnedStaging(num_lanes, CHUNK_BYTES)
