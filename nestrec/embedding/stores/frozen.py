"""Rows of a store as they were at a moment, read in pieces while others write: a row that is about to be overwritten
and was not read yet is first put aside. The memory that it takes is bounded: what is more goes into a file, and where
there is none, the writer waits.
"""

import contextlib
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.stores.slab import Slab
from nestrec.embedding.stores.store import Slots, Store

_WAITS, _DONE = -1, -2
"""A slot whose row is still to be read from the store; one of no interest, or no more. Else its place aside."""
_ROWS_A_TURN = 1 << 12
"""Rows that are read before a writer gets its turn."""
Read = Callable[[Slots, NDArray[np.int32]], None]


class FrozenRows:
    """The rows of some slots of a store. One thread takes them, others write to the store meanwhile."""

    def __init__(
        self, read: Read, wanted: NDArray[np.bool_], num_words: int, max_bytes: int, spill: Path | None = None
    ) -> None:
        """read: rows of the store into a host array. wanted: by slot. max_bytes: of rows that are put aside in memory.

        spill: a folder for a file with those for which there is no room; it has no name, and goes with the process.
        """
        self._read = read
        self._place = np.where(wanted, np.int32(_WAITS), np.int32(_DONE))
        self._aside = Slab(num_words)
        self._aside.reserve(max(1, max_bytes // (4 * num_words)))  # memory is taken as it is written
        self._num_used, self._free = 0, np.empty(0, np.int32)
        self._file, self._num_spilled = None if spill is None else _nameless_file(spill), 0
        self._turn, self._gate, self._num_coming = threading.Condition(threading.RLock()), threading.Lock(), 0
        self.num_aside = 0
        """Rows that were put aside so far."""
        self.waited_s = 0.0
        """What writers have waited for room, and for their turn."""

    @contextlib.contextmanager
    def changing(self, slots: Slots | None = None) -> Iterator[None]:
        """The caller is about to write to these slots of the store, or to change the store itself."""
        slots = np.empty(0, np.int64) if slots is None else slots
        start_s = time.perf_counter()
        self._come(1)  # a lock alone would let the reader, who takes it again at once, go first many times
        with self._turn:
            self._come(-1)
            self._turn.notify_all()
            self._put_aside(slots[(slots >= 0) & (slots < len(self._place))])
            self.waited_s += time.perf_counter() - start_s
            yield

    def _come(self, number: int) -> None:
        with self._gate:
            self._num_coming += number

    def take(self, slots: Slots, out: NDArray[np.int32]) -> None:
        """Rows of wanted slots as they were, each once."""
        for start in range(0, len(slots), _ROWS_A_TURN):
            part, rows = slots[start : start + _ROWS_A_TURN], out[start : start + _ROWS_A_TURN]
            with self._turn:
                self._turn.wait_for(lambda: not self._num_coming)
                place = self._place[part]
                self._read(np.where(place == _WAITS, part, -1), rows)
                aside = np.flatnonzero((place >= 0) & (place < len(self._aside.rows)))
                rows[aside] = self._aside.rows[place[aside]]
                self._free = np.concatenate([self._free, place[aside]])
                self._take_spilled(np.flatnonzero(place >= len(self._aside.rows)), place, rows)
                self._place[part] = _DONE
                self._turn.notify_all()

    def close(self) -> None:
        """Nothing more is read: nobody waits, and nothing is put aside any more."""
        with self._turn:
            self._place[:] = _DONE
            self._aside.close()
            if self._file is not None:
                self._file.close()
                self._file = None
            self._turn.notify_all()

    def _put_aside(self, slots: Slots) -> None:
        while len(waiting := slots[self._place[slots] == _WAITS]):
            places = self._places(len(waiting))
            if not len(places) and not self._put_into_file(waiting):
                self._turn.wait()
            kept = waiting[: len(places)]
            self._aside.rows[places] = self._rows_now(kept)
            self._place[kept] = places
            self.num_aside += len(kept)

    def _rows_now(self, slots: Slots) -> NDArray[np.int32]:
        rows = np.empty((len(slots), self._aside.rows.shape[1]), np.int32)
        self._read(slots, rows)
        return rows

    def _put_into_file(self, slots: Slots) -> bool:
        """Whether it could be done: a disk may be full."""
        if self._file is None:
            return False
        try:
            self._rows_now(slots).tofile(self._file)
        except OSError:
            self._file.seek(4 * self._aside.rows.shape[1] * self._num_spilled)
            return False
        self._place[slots] = len(self._aside.rows) + self._num_spilled + np.arange(len(slots))
        self._num_spilled += len(slots)
        self.num_aside += len(slots)
        return True

    def _take_spilled(self, found: NDArray[np.int64], place: NDArray[np.int32], rows: NDArray[np.int32]) -> None:
        if len(found):
            spilled = np.memmap(self._file, np.int32, "r", shape=(self._num_spilled, rows.shape[1]))  # type: ignore[call-overload]
            rows[found] = spilled[place[found] - len(self._aside.rows)]

    def _places(self, wanted: int) -> NDArray[np.int32]:
        """Free places aside, at most so many."""
        if len(self._free) < wanted:
            fresh = min(wanted - len(self._free), len(self._aside.rows) - self._num_used)
            more = np.arange(self._num_used, self._num_used + fresh, dtype=np.int32)
            self._free, self._num_used = np.concatenate([self._free, more]), self._num_used + fresh
        places, self._free = self._free[:wanted], self._free[wanted:]
        return places


def _nameless_file(folder: Path) -> IO[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder, buffering=0)


class Freezable(ABC):
    """What a store of host memory is beside: it can be read as it was while it is written to."""

    _frozen: FrozenRows | None = None
    _changing: Callable[..., contextlib.AbstractContextManager[object]] = staticmethod(contextlib.nullcontext)
    """To be held while rows of some slots, or the store itself, are changed."""

    def freeze(
        self, wanted: NDArray[np.bool_], num_words: int, max_bytes: int, spill: Path | None = None
    ) -> FrozenRows:
        """The rows of the wanted slots as they are now, until `thaw`; while nobody writes."""
        assert self._frozen is None, "one reader at a time"
        self._frozen = FrozenRows(self.read, wanted, num_words, max_bytes, spill)
        self._changing = self._frozen.changing
        return self._frozen

    def thaw(self) -> None:
        """Whoever reads the frozen rows has done so, or given up."""
        frozen, self._frozen, self._changing = self._frozen, None, contextlib.nullcontext
        if frozen is not None:
            frozen.close()

    @abstractmethod
    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        """Copy rows into a host array."""


class DeviceReader(Freezable):
    """Reads a store in the memory of a device from the host, while nobody writes to it."""

    def __init__(self, store: Store, num_words: int, device: torch.device) -> None:
        self._store, self._num_words, self._device = store, num_words, device

    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        rows = torch.empty(len(slots), self._num_words, dtype=torch.int32, device=self._device)
        self._store.gather(slots, rows)
        np.copyto(out, rows.cpu().numpy())
