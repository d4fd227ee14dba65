"""Embedding tables of a served model: resident, memory-mapped or quantized.

Memory that the system may write out to a disk: a table may be larger than the host's.

Tables of a model that is served: whole on the device, or in DRAM or on disk behind a bounded cache of rows there.

Both give the same rows to the bit. Serving never inserts into a table: an id is a row of the export, and 0 is the row
that evaluation gives to whatever it does not know.

Tables of 8 bits with a scale for each row: the numbers of a row, then the four bytes of its scale.

    row = scale * (int8 or float8_e4m3fn numbers),   scale = largest of the row / largest of the format

A row is bytes like any other, so stores and caches carry it as it is; it becomes numbers when it is looked up.

Legend: N rows, D numbers of a row.
"""

import itertools
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Natural
from nestrec.base.cuda import sent_to_device, to_device
from nestrec.base.errors import UserError
from nestrec.embedding.key_hash_table import KeyHashTable
from nestrec.serving.model.row_sources import DiskRows, DramRows, RowSource


def mapped(scratch: Path, num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """(num_rows, dim) zeros in a file without a name in the folder `scratch`.

    Blocks are allocated at once: on a full disk the first touch of a row without one would end the process (SIGBUS).
    """
    num_bytes = num_rows * dim * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=scratch) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        problem = f"cannot hold {num_bytes:,} bytes of rows for a while: {error.strerror}"
        remedy = "free space, or name a folder on another disk (TMPDIR where a run is loaded)"
        raise UserError(problem, option="folder", value=str(scratch), remedy=remedy) from error
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, dim)


_PART_ROWS = 1 << 16
_NOT_USED, _USED, _CHOSEN = 0, 1, 2


@config
class TablesConfig:
    store: Literal["device", "dram", "disk"] = "device"
    """where tables lie: whole on the device, or in host memory or the exported files behind a cache on the device"""
    cache_rows: Natural = 1 << 20
    """rows of each table that the device keeps; a table of no more rows lies there whole"""
    index_devices: tuple[str, ...] = ()
    """devices that share the rows of a retrieval index, such as cuda:0,cuda:1, where it is larger than one of them;
    none: it lies where the model does"""


class ServedTable(Protocol):
    """Rows by id."""

    num_rows: int

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(ids, D) on the device, free to be changed"""
        ...

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All rows in order, as pieces on the device with the number of their first row; not to be changed"""
        ...

    def statistics(self) -> dict[str, int]:
        """Rows on the device, and distinct rows that were asked for and were not there."""
        ...

    # Of a model that follows a run, between two batches:

    @property
    def room(self) -> int:
        """rows that there is memory for"""
        ...

    @property
    def row_device(self) -> torch.device:
        """where `put` takes rows from best"""
        ...

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows in the place of those of distinct ids."""
        ...


class DeviceTable:
    """Whole on the device."""

    def __init__(self, weight: torch.Tensor, num_rows: int | None = None):
        """num_rows: the rows beyond are room for more."""
        self.weight = weight
        self.num_rows = len(weight) if num_rows is None else num_rows

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids.to(self.weight.device))

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.weight[: self.num_rows]

    @property
    def room(self) -> int:
        return len(self.weight)

    @property
    def row_device(self) -> torch.device:
        return self.weight.device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.weight.index_copy_(0, ids, rows)

    def statistics(self) -> dict[str, int]:
        return {"rows": self.num_rows, "device_rows": self.num_rows, "asked": 0, "missed": 0}


class MultiDeviceTable:
    """Whole on several devices, each of which has a run of its rows."""

    def __init__(self, parts: Sequence[torch.Tensor]):
        """parts: rows in order, each where it lies; rows are handed out on the device of the first"""
        self._parts = list(parts)
        self._firsts = np.cumsum([0, *(len(part) for part in parts)])
        self.num_rows = int(self._firsts[-1])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids, home = ids.cpu(), self._parts[0].device
        out = torch.empty(len(ids), self._parts[0].shape[1], dtype=self._parts[0].dtype, device=home)
        for (first, end), part in zip(itertools.pairwise(self._firsts.tolist()), self._parts, strict=True):
            here = ((ids >= first) & (ids < end)).nonzero().squeeze(1)
            out[here.to(home)] = part.index_select(0, (ids[here] - first).to(part.device)).to(home)
        return out

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from zip(self._firsts[:-1].tolist(), self._parts, strict=True)

    def statistics(self) -> dict[str, int]:
        return {"rows": self.num_rows, "device_rows": self.num_rows, "asked": 0, "missed": 0}

    @property
    def room(self) -> int:
        return self.num_rows

    @property
    def row_device(self) -> torch.device:
        return self._parts[0].device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        for first, part in self.parts():
            here = (ids >= first) & (ids < first + len(part))
            part[(ids[here] - first).to(part.device)] = rows[here.to(rows.device)].to(part)


class CachedTable:
    """At most `cache_rows` rows on the device, for any number of threads of one stream.

    A row stays until the hand of a clock finds it unused since its last turn. What one call asks for need not fit: rows
    are handed out as copies, and those that were missing are kept afterwards, as far as there is room.
    """

    def __init__(self, source: RowSource, device: torch.device, cache_rows: int, num_rows: int | None = None):
        """num_rows: the rows of the source beyond are room for more."""
        self._source = source
        self._device = device
        self.num_rows = source.num_rows if num_rows is None else num_rows
        self._cache = torch.empty(cache_rows, source.dim, dtype=source.dtype, device=device)
        self._slots = KeyHashTable()
        self._use = np.zeros(cache_rows, np.uint8)
        self._hand = 0
        self._lock = threading.Lock()
        self._num_asked = self._num_missed = 0

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        keys, place = np.unique(ids.numpy(), return_inverse=True)
        return self._distinct(keys).index_select(0, to_device(place, self._device))

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(0, self.num_rows, _PART_ROWS):
            yield first, self._source.read_range(first, min(first + _PART_ROWS, self.num_rows)).to(self._device)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "rows": self.num_rows,
                "device_rows": self._slots.num_keys,
                "asked": self._num_asked,
                "missed": self._num_missed,
            }

    @property
    def room(self) -> int:
        return self._source.num_rows

    @property
    def row_device(self) -> torch.device:
        return torch.device("cpu")

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._source.put(ids, rows)
        keys = ids.numpy()
        with self._lock:
            slots = self._slots.find(keys)
            here = np.flatnonzero(slots >= 0)
            if len(here):
                fresh = sent_to_device(rows.index_select(0, torch.from_numpy(here)), self._device)
                self._cache.index_copy_(0, to_device(slots[here], self._device), fresh)

    def _distinct(self, keys: NDArray[np.int64]) -> torch.Tensor:
        with self._lock:
            slots = self._slots.find(keys)
            is_here = slots >= 0
            self._use[slots[is_here]] = _USED
            self._num_asked += len(keys)
            self._num_missed += len(keys) - int(is_here.sum())
            # A copy, before anyone can put other rows into these slots: work on the device keeps this order.
            here = self._cache.index_select(0, to_device(slots[is_here], self._device))
        if is_here.all():
            return here
        missing = keys[~is_here]
        fresh = sent_to_device(self._source.read(missing), self._device)
        self._keep(missing, fresh)
        rows = torch.empty(len(keys), *fresh.shape[1:], dtype=fresh.dtype, device=self._device)
        rows[to_device(is_here, self._device)] = here
        rows[to_device(~is_here, self._device)] = fresh
        return rows

    def _keep(self, keys: NDArray[np.int64], fresh: torch.Tensor) -> None:
        """Put rows into the cache, instead of others where it is full."""
        with self._lock:
            is_new = self._slots.find(keys) < 0  # another thread may have brought some of them meanwhile
            chosen = np.flatnonzero(is_new)[: len(self._use)]
            if not len(chosen):
                return
            self._make_room(len(chosen))
            none = np.zeros(len(chosen), np.int64)
            slots = self._slots.insert(keys[chosen], none, none)
            self._use[slots] = _NOT_USED
            index, source = to_device(slots, self._device), to_device(chosen, self._device)
            self._cache.index_copy_(0, index, fresh.index_select(0, source))

    def _make_room(self, count: int) -> None:
        surplus = self._slots.num_keys + count - len(self._use)
        if surplus > 0:
            leaving = np.empty(surplus, np.int64)
            self._hand = _turn(self._use, self._slots.is_live, self._hand, leaving)
            self._slots.remove(leaving)


def open_table(
    path: Path, tensor: str, device: torch.device, cfg: TablesConfig, *, is_streamed: bool = False
) -> ServedTable:
    """The table in a safetensors file. is_streamed: it is read from end to end, which no cache can help."""
    if cfg.cache_rows < 0:
        raise UserError("is negative", option="tables.cache_rows", value=cfg.cache_rows, remedy="give 0 or more rows")
    rows = DiskRows(path, tensor)
    if is_streamed and cfg.index_devices:
        bounds = np.linspace(0, rows.num_rows, len(cfg.index_devices) + 1).astype(int).tolist()
        places = zip(itertools.pairwise(bounds), cfg.index_devices, strict=True)
        return MultiDeviceTable([rows.read_range(first, end).to(place) for (first, end), place in places])
    if cfg.store == "device" or rows.num_rows <= cfg.cache_rows:
        return DeviceTable(rows.read_range(0, rows.num_rows).to(device))
    source: RowSource = DramRows(rows.read_range(0, rows.num_rows)) if cfg.store == "dram" else rows
    return CachedTable(source, device, 0 if is_streamed else cfg.cache_rows)


@njit(cache=True, nogil=True)
def _turn(use, is_live, hand, leaving):  # type: ignore[no-untyped-def]
    """Fill `leaving` with slots that were not used since the hand last passed them; where the hand stands then."""
    found = 0
    while found < len(leaving):
        slot = hand
        hand = (hand + 1) % len(use)
        if slot >= len(is_live) or not is_live[slot] or use[slot] == _CHOSEN:
            continue
        if use[slot] == _USED:
            use[slot] = _NOT_USED
        else:
            use[slot] = _CHOSEN
            leaving[found] = slot
            found += 1
    return hand


PackedKind = Literal["int8", "fp8"]
"""also the name of the tensor in an exported file"""
PACKED_KINDS: tuple[PackedKind, ...] = ("int8", "fp8")
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SCALE_BYTES = 4


def packed_width(dim: int) -> int:
    """Bytes of a row."""
    return dim + _SCALE_BYTES


def packed_rows(rows_ND: torch.Tensor, kind: PackedKind) -> torch.Tensor:
    """(N, D + 4) uint8"""
    rows_ND = rows_ND.float()
    scale_N1 = rows_ND.abs().amax(1, keepdim=True) / _LARGEST[kind]
    scale_N1 = torch.where(scale_N1 > 0, scale_N1, 1.0)
    small = rows_ND / scale_N1
    if kind == "int8":
        numbers = small.round().to(torch.int8).view(torch.uint8)
    else:
        numbers = small.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([numbers, scale_N1.view(torch.uint8)], dim=1)


def unpacked_rows(bytes_NB: torch.Tensor, kind: PackedKind) -> torch.Tensor:
    """(N, D) float32"""
    numbers = bytes_NB[:, :-_SCALE_BYTES]
    scale_N1 = bytes_NB[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    return numbers.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float() * scale_N1


class QuantizedTable:
    """Numbers over a table of bytes, which lies wherever tables lie."""

    def __init__(self, packed: ServedTable, kind: PackedKind):
        self.packed = packed
        self.kind = kind

    @property
    def num_rows(self) -> int:
        return self.packed.num_rows

    @num_rows.setter
    def num_rows(self, count: int) -> None:
        self.packed.num_rows = count

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return unpacked_rows(self.packed.rows(ids), self.kind)

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        for first, part in self.packed.parts():
            for start in range(0, len(part), _PART_ROWS):
                yield first + start, unpacked_rows(part[start : start + _PART_ROWS], self.kind)

    @property
    def room(self) -> int:
        return self.packed.room

    @property
    def row_device(self) -> torch.device:
        return self.packed.row_device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.packed.put(ids, packed_rows(rows, self.kind))

    def statistics(self) -> dict[str, int]:
        return self.packed.statistics()
