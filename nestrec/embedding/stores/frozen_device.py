"""Rows in the memory of a device as they were at a moment, read in pieces while training writes on.

The host decides who claims a row, under a lock that is held while work is launched and never while it runs. On a GPU
the reader has a stream of its own: what a writer launches waits there for what the reader has launched before, so that
the host waits for neither. Rows are put aside in pinned memory, copied before the update that is launched after them.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.stores.aside import Aside
from nestrec.embedding.stores.frozen import GONE, WAITS, FrozenRows, State, Words
from nestrec.embedding.stores.store import Slots


class DeviceRows(FrozenRows):
    """Of a store in the memory of a device; on a CPU, where launched is done, the same without streams."""

    _has_memory_aside = True  # pinned

    def __init__(
        self, gather: Callable[[Slots, torch.Tensor], None], device: torch.device, state: State, aside: Aside
    ) -> None:
        """gather: rows of the store into a tensor of the device, launched on the current stream."""
        super().__init__(state, aside)
        self._gather, self._device, self._launching = gather, device, threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            torch.cuda.synchronize(device)  # what was written until now, on whatever stream
        self._read: torch.cuda.Event | None = None
        self._put: torch.cuda.Event | None = None
        self._moved: torch.cuda.Event | None = None

    def take(self, slots: Slots, out: Words) -> Slots:
        with self._on_own_stream():
            with self._launching:
                if self._stream is not None and self._moved is not None:
                    self._stream.wait_event(self._moved)
                kept, rows = self._waiting_rows(slots)
                self._state[kept] = GONE
                self._read = self._launched()
            torch.from_numpy(out[: len(kept)]).copy_(rows)
        return kept

    def held_aside(self) -> tuple[Slots, NDArray[np.int64]]:
        found, put = super().held_aside(), self._put
        if put is not None:
            put.synchronize()
        return found

    def _claim(self, slots: Slots, out: Words) -> Slots:
        kept, rows = self._waiting_rows(slots)
        torch.from_numpy(out[: len(kept)]).copy_(rows, non_blocking=True)
        self._put = self._launched()
        self._state[kept] = GONE  # last: where this fails, the reader must not wait for them
        return kept

    def _waiting_rows(self, slots: Slots) -> tuple[Slots, torch.Tensor]:
        """Those of these slots that nobody has claimed, and their rows."""
        kept = slots[self._state[slots] == WAITS]
        rows = torch.empty(len(kept), self.aside.rows.shape[1], dtype=torch.int32, device=self._device)
        self._gather(kept, rows)
        return kept, rows

    @contextlib.contextmanager
    def _turn(self, *, is_whole: bool) -> Iterator[None]:
        with self._launching:
            if self._read is not None:
                torch.cuda.current_stream(self._device).wait_event(self._read)
            yield
            if is_whole:
                self._moved = self._launched()

    def _on_own_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _launched(self) -> torch.cuda.Event | None:
        """Happens when what is launched on the current stream is done."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event


def pinned_memory(num_rows: int, num_words: int) -> Words:
    """Memory of the host that a GPU writes to by itself; torch keeps it for the next save."""
    return torch.empty(num_rows, num_words, dtype=torch.int32, pin_memory=True).numpy()
