"""Measure gather and scatter of rows in each store, compared with torch.index_select on a dense tensor.

Rounds are interleaved, so that disturbances of the machine affect all operations; a figure is the median of its rounds.
The bytes of a moved row are counted once. The copy is a plain copy of the same number of bytes, counted in the same
way. A pause precedes every call, because threads of OpenMP spin for up to 0.2 s after operations of torch and would use
cores that the next operation needs. `copy_hidden` is the fraction of the copy to the device that overlaps with the
gather into pinned memory.

    nestrec bench stores --num_rows 100000 --num_keys 10000 --disk_rows 10000
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.distributed.topology import check_device
from nestrec.embedding.key_hash_table import KeyHashTable
from nestrec.embedding.stores import Store
from nestrec.embedding.stores.device_store import DeviceStore
from nestrec.embedding.stores.disk_store import DiskStore
from nestrec.embedding.stores.host_store import DramStore
from nestrec.report.result_file import write_frame
from nestrec_bench.bench import Bench

_FILL_ROWS = 1 << 16
_KEY_STRIDE = 2654435761
_PAUSE_S = 0.25
_CHECKED_ROWS = 10_000


@config
class StoresBenchConfig:
    """Options of the benchmark."""

    num_rows: int = 10_000_000
    """Number of rows of the tables in memory."""
    disk_rows: int = 1_000_000
    """Number of rows of the table on disk; a tenth of them fits into its cache."""
    dim: int = 128
    """Number of float32 elements per row."""
    num_keys: int = 1_000_000
    """Number of rows per gather, with repetitions."""
    zipf: float = 0.75
    """Exponent of the Zipf distribution of keys; popular rows are spread over the table."""
    rounds: int = 7
    """Number of timed rounds, after one warm-up round."""
    device: str = "cpu"
    """Destination of gathered rows: `cpu`, or `cuda` through pinned memory."""


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    store: str
    num_rows: int
    row_bytes: int
    call: Callable[[], object]


def measure_stores(bench: StoresBenchConfig, *, output: Path | None = None, command: str = "") -> list[dict[str, Any]]:
    """Measure each operation of each store.

    Args:
        bench: Options of the benchmark.
        output: Result file to write, or None.
        command: Command line that is recorded in the result file.

    Returns:
        One row per operation and store.
    """
    check_device(bench.device)
    device = torch.device(bench.device)
    dense = torch.randint(0, 2**31 - 1, (bench.num_rows, bench.dim), dtype=torch.int32)
    slots = zipf_slots(bench.num_rows, bench.num_keys, bench.zipf)
    with tempfile.TemporaryDirectory(prefix="nestrec-bench-") as folder:
        disk = DiskStore(Path(folder) / "rows", bench.dim, device, cache_rows=bench.disk_rows // 10)
        stores: dict[str, tuple[Store, int]] = {
            "device": (DeviceStore(bench.dim, device), bench.num_rows),
            "dram": (DramStore(bench.dim, device), bench.num_rows),
            "disk": (disk, bench.disk_rows),
        }
        if device.type == "cpu":
            del stores["device"]  # on a CPU, it would be another copy of `dense`
        operations = _baselines(dense, slots)
        for name, (store, num_rows) in stores.items():
            _fill(store, dense[:num_rows], device)
            _check(store, dense[:num_rows], slots % num_rows, device)
            operations += _store_operations(name, store, slots % num_rows, bench.dim, device)
        seconds = _interleaved(operations, bench.rounds, device)
        for store, _ in stores.values():
            store.close()
    rows = _rows(operations, seconds, bench)
    if output is not None:
        write_frame(output, bench="stores", command=command, rows=rows)
    return rows


def zipf_slots(num_rows: int, num_keys: int, exponent: float, seed: int = 0) -> NDArray[np.int64]:
    """Draw slots from a Zipf distribution; the popular slots are spread over the table."""
    draw = np.random.default_rng(seed)
    mass = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
    ranks = np.searchsorted(mass, draw.random(num_keys) * mass[-1])
    slots: NDArray[np.int64] = draw.permutation(num_rows)[np.minimum(ranks, num_rows - 1)]
    return slots


def _fill(store: Store, dense: torch.Tensor, device: torch.device) -> None:
    store.reserve(len(dense))
    for start in range(0, len(dense), _FILL_ROWS):
        part = dense[start : start + _FILL_ROWS]
        store.scatter(np.arange(start, start + len(part)), part.to(device))


def _check(store: Store, dense: torch.Tensor, slots: NDArray[np.int64], device: torch.device) -> None:
    """Verify that a store gathers the correct rows, because otherwise the measurement would be invalid."""
    out = torch.empty(len(slots), dense.shape[1], dtype=torch.int32, device=device)
    store.gather(slots, out)
    some = torch.arange(0, len(slots), max(1, len(slots) // _CHECKED_ROWS))
    if not torch.equal(out[some.to(device)].cpu(), dense[torch.from_numpy(slots)[some]]):
        raise RuntimeError(f"{type(store).__name__} gathered rows that differ from the stored ones")


def _baselines(dense: torch.Tensor, slots: NDArray[np.int64]) -> list[_Operation]:
    index = torch.from_numpy(slots)
    out = torch.empty(len(slots), dense.shape[1], dtype=torch.int32)
    other = torch.empty_like(out)
    row_bytes = 4 * dense.shape[1]
    keys = KeyHashTable()
    ones = np.ones(len(dense), np.int64)
    keys.insert(np.arange(len(dense)) * _KEY_STRIDE, ones, ones)
    requested = slots * _KEY_STRIDE
    return [
        _Operation("copy", "torch", len(slots), row_bytes, lambda: other.copy_(out)),
        _Operation(
            "gather", "index_select", len(slots), row_bytes, lambda: torch.index_select(dense, 0, index, out=out)
        ),
        _Operation("find", "key table", len(slots), 8, lambda: keys.find(requested)),
    ]


def _store_operations(
    name: str, store: Store, slots: NDArray[np.int64], dim: int, device: torch.device
) -> list[_Operation]:
    out = torch.empty(len(slots), dim, dtype=torch.int32, device=device)
    unique = np.random.default_rng(1).permutation(np.unique(slots))
    rows = torch.ones(len(unique), dim, dtype=torch.int32, device=device)
    operations = [
        _Operation("gather", name, len(slots), 4 * dim, lambda: store.gather(slots, out)),
        _Operation("scatter", name, len(unique), 4 * dim, lambda: store.scatter(unique, rows)),
    ]
    if isinstance(store, DramStore) and device.type == "cuda":
        pinned = torch.empty(len(slots), dim, dtype=torch.int32, pin_memory=True)
        host = pinned.numpy()
        operations.append(
            _Operation("gather to pinned", name, len(slots), 4 * dim, lambda: store.read(slots, host)),
        )
        operations.append(
            _Operation("copy to device", "pinned", len(slots), 4 * dim, lambda: out.copy_(pinned, non_blocking=True))
        )
    return operations


def _interleaved(operations: list[_Operation], rounds: int, device: torch.device) -> list[float]:
    """Run the operations in interleaved rounds, and return the median time of each in seconds."""
    seconds: list[list[float]] = [[] for _ in operations]
    for _ in range(rounds + 1):
        for times, operation in zip(seconds, operations, strict=True):
            time.sleep(_PAUSE_S)
            start_s = time.perf_counter()
            operation.call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start_s)
    return [statistics.median(times[1:]) for times in seconds]


def _rows(operations: list[_Operation], seconds: list[float], bench: StoresBenchConfig) -> list[dict[str, Any]]:
    rates = [o.num_rows * o.row_bytes / s / 1e9 for o, s in zip(operations, seconds, strict=True)]
    copy, index_select = rates[:2]
    rows: list[dict[str, Any]] = [
        {
            "op": o.name,
            "store": o.store,
            "keys": o.num_rows,
            "dim": bench.dim,
            "dtype": "float32",
            "gb_per_s": round(rate, 3),
            "copy_gb_per_s": round(copy, 3),
            "of_index_select": round(rate / index_select, 3),
            "ms": round(1e3 * s, 3),
            "threads": torch.get_num_threads(),
            "zipf": bench.zipf,
            "device": bench.device,
            "table_rows": bench.disk_rows if o.store == "disk" else bench.num_rows,
        }
        for o, s, rate in zip(operations, seconds, rates, strict=True)
    ]
    _add_hidden_copy(rows)
    return rows


def _add_hidden_copy(rows: list[dict[str, Any]]) -> None:
    ms = {(row["op"], row["store"]): row["ms"] for row in rows}
    gather_ms = ms.get(("gather to pinned", "dram"))
    copy_ms = ms.get(("copy to device", "pinned"))
    for row in rows:
        row["copy_hidden"] = None
        if (row["op"], row["store"]) == ("gather", "dram") and gather_ms is not None and copy_ms is not None:
            row["copy_hidden"] = round((gather_ms + copy_ms - row["ms"]) / copy_ms, 3)


BENCH = Bench(config=StoresBenchConfig, measure=measure_stores)
