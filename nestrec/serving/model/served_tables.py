"""Embedding tables of a served model: on the device, offloaded to host memory or disk, sharded, or quantized.

A table is stored completely on the device (`DeviceTable`), on several devices (`MultiDeviceTable`), or in DRAM or on
disk with a bounded cache of rows on the device (`CachedTable`, host offload). All of them return bitwise identical
rows. Serving does not insert rows: an id is a row of the export, and row 0 is the row of unknown ids, as in evaluation.

Quantized tables (`QuantizedTable`) have 8-bit numbers with one scale per row. A stored row has the bytes of its
numbers, then the four bytes of its scale.

    row = scale * (int8 or float8_e4m3fn numbers),   scale = largest number of the row / largest number of the format

Stores and caches hold quantized rows as bytes; rows are dequantized after the lookup.

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
from nestrec.base.cuda import copy_to_device, to_device
from nestrec.base.errors import UserError
from nestrec.embedding.key_hash_table import KeyHashTable
from nestrec.serving.model.row_sources import DiskRows, DramRows, RowSource


def allocate_mapped(scratch: Path, num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros of shape (num_rows, dim) in a memory-mapped unnamed file, so that they can exceed host memory.

    Disk blocks are allocated immediately: on a full disk, writing to an unallocated page would kill the process with
    SIGBUS.

    Args:
        scratch: Folder of the file.
        num_rows: Number of rows.
        dim: Elements per row.
        dtype: Data type.

    Raises:
        UserError: The disk does not have enough free space.
    """
    num_bytes = num_rows * dim * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=scratch) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        problem = f"cannot hold {num_bytes:,} bytes of temporary rows: {error.strerror}"
        remedy = "free disk space, or choose a folder on another disk (if a run is loaded: set TMPDIR)"
        raise UserError(problem, option="folder", value=str(scratch), remedy=remedy) from error
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, dim)


_PART_ROWS = 1 << 16
_NOT_USED, _USED, _CHOSEN = 0, 1, 2


@config
class TablesConfig:
    """Options for the storage of embedding tables and of the retrieval index."""

    store: Literal["device", "dram", "disk"] = "device"
    """Storage of the tables: completely on the device, or in host memory (`dram`) or the exported files (`disk`) with a
    cache on the device."""
    cache_rows: Natural = 1 << 20
    """Number of rows of each table that the device caches; smaller tables are stored completely on the device."""
    index_devices: tuple[str, ...] = ()
    """Devices over which the rows of a retrieval index are sharded, such as cuda:0,cuda:1, if it does not fit on one;
    empty uses the device of the model."""


class ServedTable(Protocol):
    """Embedding table of a served model, addressed by row id."""

    num_rows: int

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return copies of rows on the device, of shape (ids, D)."""
        ...

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over all rows in order, as (first row id, read-only rows on the device)."""
        ...

    def statistics(self) -> dict[str, int]:
        """Return the number of rows, of rows on the device, of unique rows looked up, and of cache misses."""
        ...

    # Updates of a model that follows published versions; called between two batches:

    @property
    def capacity(self) -> int:
        """Number of rows for which memory is allocated."""
        ...

    @property
    def row_device(self) -> torch.device:
        """Device from which `put` reads rows without an additional copy."""
        ...

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite the rows of unique ids."""
        ...


class DeviceTable:
    """Table stored completely on one device.

    Args:
        weight: The rows.
        num_rows: Number of rows in use; the others are spare capacity. None uses all.
    """

    def __init__(self, weight: torch.Tensor, num_rows: int | None = None):
        self.weight = weight
        self.num_rows = len(weight) if num_rows is None else num_rows

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids.to(self.weight.device))

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.weight[: self.num_rows]

    @property
    def capacity(self) -> int:
        return len(self.weight)

    @property
    def row_device(self) -> torch.device:
        return self.weight.device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.weight.index_copy_(0, ids, rows)

    def statistics(self) -> dict[str, int]:
        return {"rows": self.num_rows, "device_rows": self.num_rows, "lookups": 0, "misses": 0}


class MultiDeviceTable:
    """Table that is sharded over several devices by contiguous ranges of rows.

    Args:
        parts: Shards in order, each on its device; looked-up rows are returned on the device of the first.
    """

    def __init__(self, parts: Sequence[torch.Tensor]):
        self._parts = list(parts)
        self._firsts = np.cumsum([0, *(len(part) for part in parts)])
        self.num_rows = int(self._firsts[-1])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids, device = ids.cpu(), self._parts[0].device
        out = torch.empty(len(ids), self._parts[0].shape[1], dtype=self._parts[0].dtype, device=device)
        for (first, end), part in zip(itertools.pairwise(self._firsts.tolist()), self._parts, strict=True):
            local = ((ids >= first) & (ids < end)).nonzero().squeeze(1)
            out[local.to(device)] = part.index_select(0, (ids[local] - first).to(part.device)).to(device)
        return out

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from zip(self._firsts[:-1].tolist(), self._parts, strict=True)

    def statistics(self) -> dict[str, int]:
        return {"rows": self.num_rows, "device_rows": self.num_rows, "lookups": 0, "misses": 0}

    @property
    def capacity(self) -> int:
        return self.num_rows

    @property
    def row_device(self) -> torch.device:
        return self._parts[0].device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        for first, part in self.parts():
            is_local = (ids >= first) & (ids < first + len(part))
            part[(ids[is_local] - first).to(part.device)] = rows[is_local.to(rows.device)].to(part)


class CachedTable:
    """Table in DRAM or on disk with a cache of rows on the device (host offload).

    The cache uses CLOCK eviction (second chance), an approximation of LRU. A lookup can request more rows than fit into
    the cache: it returns copies, and inserts the missing rows afterwards as far as they fit. Thread-safe if all threads
    use the same CUDA stream.

    Args:
        source: Storage of all rows.
        device: Device of the cache.
        cache_rows: Number of rows in the cache.
        num_rows: Number of rows of the source in use; the others are spare capacity. None uses all.
    """

    def __init__(self, source: RowSource, device: torch.device, cache_rows: int, num_rows: int | None = None):
        self._source = source
        self._device = device
        self.num_rows = source.num_rows if num_rows is None else num_rows
        self._cache = torch.empty(cache_rows, source.dim, dtype=source.dtype, device=device)
        self._slots = KeyHashTable()
        self._use = np.zeros(cache_rows, np.uint8)
        self._hand = 0
        self._lock = threading.Lock()
        self._num_lookups = 0
        self._num_misses = 0

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        keys, inverse = np.unique(ids.numpy(), return_inverse=True)
        return self._unique_rows(keys).index_select(0, to_device(inverse, self._device))

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(0, self.num_rows, _PART_ROWS):
            yield first, self._source.read_range(first, min(first + _PART_ROWS, self.num_rows)).to(self._device)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "rows": self.num_rows,
                "device_rows": self._slots.num_keys,
                "lookups": self._num_lookups,
                "misses": self._num_misses,
            }

    @property
    def capacity(self) -> int:
        return self._source.num_rows

    @property
    def row_device(self) -> torch.device:
        return torch.device("cpu")

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._source.put(ids, rows)
        keys = ids.numpy()
        with self._lock:
            slots = self._slots.find(keys)
            cached = np.flatnonzero(slots >= 0)
            if len(cached):
                updated = copy_to_device(rows.index_select(0, torch.from_numpy(cached)), self._device)
                self._cache.index_copy_(0, to_device(slots[cached], self._device), updated)

    def _unique_rows(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """Return the rows of unique keys, from the cache or the source."""
        with self._lock:
            slots = self._slots.find(keys)
            is_cached = slots >= 0
            self._use[slots[is_cached]] = _USED
            self._num_lookups += len(keys)
            self._num_misses += len(keys) - int(is_cached.sum())
            # Launch the copy under the lock, before another thread can overwrite these slots: streams preserve order.
            cached = self._cache.index_select(0, to_device(slots[is_cached], self._device))
        if is_cached.all():
            return cached
        missing = keys[~is_cached]
        loaded = copy_to_device(self._source.read(missing), self._device)
        self._insert(missing, loaded)
        rows = torch.empty(len(keys), *loaded.shape[1:], dtype=loaded.dtype, device=self._device)
        rows[to_device(is_cached, self._device)] = cached
        rows[to_device(~is_cached, self._device)] = loaded
        return rows

    def _insert(self, keys: NDArray[np.int64], loaded: torch.Tensor) -> None:
        """Insert rows into the cache; evict others if it is full."""
        with self._lock:
            is_new = self._slots.find(keys) < 0  # another thread may have inserted some of them since
            selected = np.flatnonzero(is_new)[: len(self._use)]
            if not len(selected):
                return
            self._evict_for(len(selected))
            zeros = np.zeros(len(selected), np.int64)
            slots = self._slots.insert(keys[selected], zeros, zeros)
            self._use[slots] = _NOT_USED
            index, source = to_device(slots, self._device), to_device(selected, self._device)
            self._cache.index_copy_(0, index, loaded.index_select(0, source))

    def _evict_for(self, count: int) -> None:
        surplus = self._slots.num_keys + count - len(self._use)
        if surplus > 0:
            evicted = np.empty(surplus, np.int64)
            self._hand = _advance_clock_hand(self._use, self._slots.is_live, self._hand, evicted)
            self._slots.remove(evicted)


def open_table(
    path: Path, tensor: str, device: torch.device, cfg: TablesConfig, *, is_streamed: bool = False
) -> ServedTable:
    """Open the table in a safetensors file.

    Args:
        path: The file.
        tensor: Name of the tensor.
        device: Device on which rows are returned.
        cfg: Storage options.
        is_streamed: Whether the table is always read completely, so that a cache is useless (the retrieval index).
    """
    if cfg.cache_rows < 0:
        raise UserError(
            "must not be negative", option="tables.cache_rows", value=cfg.cache_rows, remedy="set 0 or more rows"
        )
    rows = DiskRows(path, tensor)
    if is_streamed and cfg.index_devices:
        bounds = np.linspace(0, rows.num_rows, len(cfg.index_devices) + 1).astype(int).tolist()
        ranges = zip(itertools.pairwise(bounds), cfg.index_devices, strict=True)
        return MultiDeviceTable([rows.read_range(first, end).to(name) for (first, end), name in ranges])
    if cfg.store == "device" or rows.num_rows <= cfg.cache_rows:
        return DeviceTable(rows.read_range(0, rows.num_rows).to(device))
    source: RowSource = DramRows(rows.read_range(0, rows.num_rows)) if cfg.store == "dram" else rows
    return CachedTable(source, device, 0 if is_streamed else cfg.cache_rows)


@njit(cache=True, nogil=True)
def _advance_clock_hand(use, is_live, hand, evicted):  # type: ignore[no-untyped-def]
    """Fill `evicted` with slots that were not used since the clock hand last passed them; return the new position."""
    num_evicted = 0
    while num_evicted < len(evicted):
        slot = hand
        hand = (hand + 1) % len(use)
        if slot >= len(is_live) or not is_live[slot] or use[slot] == _CHOSEN:
            continue
        if use[slot] == _USED:
            use[slot] = _NOT_USED
        else:
            use[slot] = _CHOSEN
            evicted[num_evicted] = slot
            num_evicted += 1
    return hand


QuantizationKind = Literal["int8", "fp8"]
"""Quantization format; also the name of the tensor in an exported file."""
QUANTIZATION_KINDS: tuple[QuantizationKind, ...] = ("int8", "fp8")
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SCALE_BYTES = 4


def quantized_width(dim: int) -> int:
    """Return the size of a quantized row in bytes."""
    return dim + _SCALE_BYTES


def quantize_rows(rows_ND: torch.Tensor, kind: QuantizationKind) -> torch.Tensor:
    """Quantize rows to bytes, uint8 of shape (N, D + 4)."""
    rows_ND = rows_ND.float()
    scale_N1 = rows_ND.abs().amax(1, keepdim=True) / _LARGEST[kind]
    scale_N1 = torch.where(scale_N1 > 0, scale_N1, 1.0)
    scaled_ND = rows_ND / scale_N1
    if kind == "int8":
        numbers = scaled_ND.round().to(torch.int8).view(torch.uint8)
    else:
        numbers = scaled_ND.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([numbers, scale_N1.view(torch.uint8)], dim=1)


def dequantize_rows(bytes_NB: torch.Tensor, kind: QuantizationKind) -> torch.Tensor:
    """Dequantize rows, float32 of shape (N, D)."""
    numbers = bytes_NB[:, :-_SCALE_BYTES]
    scale_N1 = bytes_NB[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    return numbers.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float() * scale_N1


class QuantizedTable:
    """Table that dequantizes the rows of a table of bytes, which can have any storage.

    Args:
        byte_table: Table of quantized rows.
        kind: Quantization format.
    """

    def __init__(self, byte_table: ServedTable, kind: QuantizationKind):
        self.byte_table = byte_table
        self.kind = kind

    @property
    def num_rows(self) -> int:
        return self.byte_table.num_rows

    @num_rows.setter
    def num_rows(self, count: int) -> None:
        self.byte_table.num_rows = count

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return dequantize_rows(self.byte_table.rows(ids), self.kind)

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        for first, part in self.byte_table.parts():
            for start in range(0, len(part), _PART_ROWS):
                yield first + start, dequantize_rows(part[start : start + _PART_ROWS], self.kind)

    @property
    def capacity(self) -> int:
        return self.byte_table.capacity

    @property
    def row_device(self) -> torch.device:
        return self.byte_table.row_device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.byte_table.put(ids, quantize_rows(rows, self.kind))

    def statistics(self) -> dict[str, int]:
        return self.byte_table.statistics()
