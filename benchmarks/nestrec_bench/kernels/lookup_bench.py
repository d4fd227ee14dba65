"""Measure gather, update, and deduplicate + sum + update of rows in device memory, compared with PyTorch and a copy.

Bytes are those that an operation has to transfer: each row that it reads or writes is counted once, independent of
caches. The bytes of the copy are also counted for reading and writing. A figure is the median of successive rounds
without synchronization, as in a training run. Successive rounds have different keys.

    nestrec bench lookup --num_rows 1000000 --num_keys 65536 --zipf 1.05 --device cpu
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.functional import embedding

from nestrec.base.config import config
from nestrec.distributed.topology import check_device
from nestrec.embedding.routing.deduplicated_keys import dedup_on_device
from nestrec.embedding.table_config import DTYPES, TableConfig, layout_of
from nestrec.ops.embedding.dedup_host import dedup
from nestrec.ops.embedding.dedup_keys import dedup_keys
from nestrec.ops.embedding.row_copy import move_rows
from nestrec.ops.embedding.row_gather import take_rows
from nestrec.ops.embedding.row_sum import sum_by_index
from nestrec.ops.embedding.row_update import RowRule, update_rows
from nestrec_bench.bench import Bench
from nestrec_bench.kernels.kernel_timing import PATHS, TorchTable

T = TypeVar("T")
_KEY_SETS = 3
_REPEATS = 20
_DTYPES = ("float32", "bfloat16")
_MAX_HOST_KEYS = 1 << 22
_TARGET_S = 0.06
"""Approximate time of all rounds of an operation; slow operations have fewer rounds."""
_MIN_ROUNDS = 3
_COPY_BYTES = 1 << 32
_HEAD_START_CYCLES = 6_000_000
"""Wait of the device before the first round, in cycles, so that the host runs ahead as in training."""


@config
class LookupBenchConfig:
    """Options of the benchmark."""

    num_rows: int = 1 << 26
    """Number of rows of the table."""
    dim: int = 128
    """Embedding dimension."""
    num_keys: tuple[int, ...] = (1 << 20, 1 << 23)
    """Numbers of keys per lookup."""
    zipf: tuple[float, ...] = (0.75, 1.05, 0.0)
    """Exponents of the Zipf distribution of keys; 0 is uniform. Popular rows are spread over the table."""
    rounds: int = 10
    """Maximum number of timed rounds per operation, after two warm-up rounds; slow operations have fewer rounds."""
    device: str = "cuda"
    """Device that stores the table."""


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    store: str
    num_bytes: int
    call: Callable[[int], object]
    """Function of the number of the round."""
    dtype: str = "float32"
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the result row."""


def measure_lookup(bench: LookupBenchConfig) -> Iterator[dict[str, Any]]:
    """Measure all operations, and yield one row each."""
    device = torch.device(bench.device)
    check_device(device)
    torch.manual_seed(0)
    copy_gb_per_s = _copy_rate(bench, device)
    tables = _Tables(bench, device)
    for num_keys in bench.num_keys:
        for exponent in bench.zipf:
            keys = [_keys(bench, exponent, num_keys, device) for _ in range(_KEY_SETS)]
            unique = [torch.unique(k) for k in keys]
            common = {
                "keys": num_keys,
                "distinct": len(unique[0]),
                "zipf": exponent,
                "dim": bench.dim,
                "table_rows": bench.num_rows,
                "copy_gb_per_s": round(copy_gb_per_s, 1),
            }
            for make in (_gathers, _learning, _updates, _row_moves, _parts):
                rows = [_row(operation, bench, device) for operation in make(tables, keys, unique)]
                yield from (_add_comparison({**row, **common}, rows) for row in rows)


def short_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns that fit a terminal."""
    columns = ("op", "store", "dtype", "zipf", "keys", "distinct", "ms", "gb_per_s", "of_copy", "of_best_torch")
    return [{name: row[name] for name in columns if name in row} for row in rows]


def _row(operation: _Operation, bench: LookupBenchConfig, device: torch.device) -> dict[str, Any]:
    seconds = _median_s(operation.call, bench.rounds, device)
    return {
        "op": operation.name,
        "store": operation.store,
        "dtype": operation.dtype,
        "gb_per_s": round(operation.num_bytes / seconds / 1e9, 1),
        "ms": round(1e3 * seconds, 4),
        **operation.extra_fields,
    }


def _add_comparison(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add the ratio to the rate of the copy, and the speedup over the fastest PyTorch implementation."""
    row["of_copy"] = round(row["gb_per_s"] / row["copy_gb_per_s"], 3)
    same = [r for r in rows if (r["op"], r["dtype"]) == (row["op"], row["dtype"]) and r["store"].startswith("torch")]
    if same:
        row["of_best_torch"] = round(min(r["ms"] for r in same) / row["ms"], 2)
    return row


def _keys(bench: LookupBenchConfig, exponent: float, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return random int64 keys with a Zipf distribution."""
    if exponent == 0.0:
        return torch.randint(0, bench.num_rows, (num_keys,), device=device)
    generator = torch.Generator(device).manual_seed(0)
    permutation = torch.randperm(bench.num_rows, device=device, generator=generator)
    mass = torch.arange(1, bench.num_rows + 1, dtype=torch.float64, device=device).pow_(-exponent).cumsum_(0)
    ranks = torch.searchsorted(mass, torch.rand(num_keys, dtype=torch.float64, device=device) * mass[-1])
    return permutation[ranks.clamp_(max=bench.num_rows - 1)]


def _copy_rate(bench: LookupBenchConfig, device: torch.device) -> float:
    """Return the bytes that a copy reads and writes per second, in GB/s."""
    size = min(_COPY_BYTES, 4 * bench.num_rows * bench.dim) // 4
    source = torch.rand(size, device=device)
    target = torch.empty(size, device=device)
    return 8 * size / _median_s(lambda _: target.copy_(source), bench.rounds, device) / 1e9


class _Tables:
    """Tables to measure: columns in separate tensors as in PyTorch, and complete rows as in nestrec."""

    def __init__(self, bench: LookupBenchConfig, device: torch.device) -> None:
        shape = bench.num_rows, bench.dim
        self.weights = {n: torch.empty(shape, dtype=DTYPES[n], device=device).uniform_() for n in _DTYPES}
        self.plain = TorchTable(self.weights["float32"], torch.zeros(bench.num_rows, device=device))
        self.layout = layout_of(TableConfig(name="t", dim=bench.dim))
        self.rows = torch.zeros(bench.num_rows, self.layout.num_words, dtype=torch.int32, device=device)
        self.grad = torch.empty(max(bench.num_keys), bench.dim, device=device).uniform_(-1, 1)
        self.rule = RowRule(kind="rowwise_adagrad", learning_rate=self.plain.learning_rate, eps=self.plain.eps)

    @property
    def row_bytes(self) -> int:
        """Size of a weight and its sum of squares, in bytes."""
        return 4 * (self.plain.weight.shape[1] + 1)


def _gathers(tables: _Tables, keys: list[torch.Tensor], _: list[torch.Tensor]) -> Iterator[_Operation]:
    for dtype, table in tables.weights.items():
        yield from _gathers_of(table, keys, dtype)


def _gathers_of(table: torch.Tensor, keys: list[torch.Tensor], dtype: str) -> Iterator[_Operation]:
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "nestrec": lambda k: take_rows(table, k),
        "torch index_select": lambda k: table.index_select(0, k),
        "torch embedding": lambda k: embedding(k, table),
    }
    num_bytes = 2 * len(keys[0]) * table.shape[1] * table.element_size()
    for store, call in calls.items():
        yield _Operation("gather", store, num_bytes, _rotate(keys, call), dtype)


def _learning(tables: _Tables, keys: list[torch.Tensor], unique: list[torch.Tensor]) -> Iterator[_Operation]:
    """Yield the operations that deduplicate, sum and update."""
    plain = tables.plain
    grad = tables.grad[: len(keys[0])]
    num_bytes = grad.numel() * 4 + 2 * tables.row_bytes * len(unique[0])
    of_nestrec = _rotate(keys, lambda k: learn(plain.weight, plain.state[:, None], k, grad, tables.rule))
    inverse = torch.unique(keys[0], return_inverse=True)[1]
    repeats = {"identical_repeats": _identical_repeats(inverse, len(unique[0]), grad)}
    yield _Operation("learn", "nestrec", num_bytes, of_nestrec, extra_fields=repeats)
    for name, path in PATHS.items():
        yield _Operation("learn", f"torch {name}", num_bytes, _rotate(keys, partial(_train, path, plain, grad)))


def learn(weight: torch.Tensor, state: torch.Tensor, keys: torch.Tensor, grad: torch.Tensor, rule: RowRule) -> None:
    """Deduplicate keys, sum their gradients, and update their rows, by the operators of training."""
    unique = dedup_keys(keys.to(torch.int32))
    count = int(unique.count)
    update_rows(weight, [state], sum_by_index(grad, unique.inverse(), count), rule, unique.keys_P[:count])


def _train(path: Callable[..., None], table: TorchTable, grad: torch.Tensor, keys: torch.Tensor) -> None:
    path(table, keys, grad)


def _updates(tables: _Tables, keys: list[torch.Tensor], unique: list[torch.Tensor]) -> Iterator[_Operation]:
    """Yield the updates from deduplicated gradients: of rows in the table, and of the fetched rows of a batch."""
    plain = tables.plain
    grad = tables.grad
    rule = tables.rule
    num_bytes = len(unique[0]) * (4 * grad.shape[1] + 2 * tables.row_bytes)
    of_nestrec = _rotate(unique, lambda k: update_rows(plain.weight, [plain.state[:, None]], grad[: len(k)], rule, k))
    yield _Operation("update", "nestrec", num_bytes, of_nestrec)
    yield _Operation("update", "torch", num_bytes, _rotate(unique, lambda k: plain.update(k, grad[: len(k)])))
    fetched = tables.rows[: len(unique[0])]
    weight, state = (tables.layout.view(fetched, column.name) for column in tables.layout.columns)
    call = partial(update_rows, weight, [state], grad[: len(fetched)], rule)
    yield _Operation("update fetched rows", "nestrec", num_bytes, lambda _: call())


def _row_moves(tables: _Tables, keys: list[torch.Tensor], unique: list[torch.Tensor]) -> Iterator[_Operation]:
    """Yield the copies of the unique rows of a batch, weight and state together, as in the embedding engine."""
    rows = tables.rows
    buffer, other = (rows.new_zeros(max(len(k) for k in unique), rows.shape[1]) for _ in range(2))
    indices = [torch.randperm(len(k), device=k.device) for k in unique]
    calls: dict[str, Callable[[int], object]] = {
        "fetch rows": _rotate(unique, lambda k: move_rows(rows, buffer, k)),
        "write rows": _rotate(unique, lambda k: move_rows(buffer, rows, None, k)),
        "copy shared rows": _rotate(indices, lambda i: move_rows(buffer, other, i, i)),
    }
    num_bytes = 2 * len(unique[0]) * 4 * rows.shape[1]
    for name, call in calls.items():
        yield _Operation(name, "nestrec", num_bytes, call)


def _parts(tables: _Tables, keys: list[torch.Tensor], unique: list[torch.Tensor]) -> Iterator[_Operation]:
    """Yield deduplication and sums as separate operations."""
    size = len(keys[0])
    count = len(unique[0])
    grad = tables.grad[: len(keys[0])]
    inverse = torch.unique(keys[0], return_inverse=True)[1].to(torch.int32)
    yield _Operation("sum", "nestrec", 4 * grad.shape[1] * (size + count), lambda _: sum_by_index(grad, inverse, count))
    yield _Operation("deduplicate", "nestrec", 8 * size, _rotate(keys, lambda k: dedup_keys(k.to(torch.int32))))
    torch_unique = _rotate(keys, lambda k: torch.unique(k, return_inverse=True))
    yield _Operation("deduplicate", "torch unique", 8 * size, torch_unique)
    if size <= _MAX_HOST_KEYS:
        host = [k.cpu().numpy() for k in keys]
        on_device = _rotate(host, lambda k: dedup_on_device([k], 1, grad.device, len(tables.rows)))
        yield _Operation("deduplicate host keys", "nestrec", 8 * size, on_device)
        yield _Operation("deduplicate host keys", "host loop", 8 * size, _rotate(host, dedup))


def _identical_repeats(keys: torch.Tensor, num_rows: int, grad: torch.Tensor) -> int:
    """Return the number of repetitions with bitwise the same result as the first one."""
    first = None
    same = 0
    for _ in range(_REPEATS):
        weight = grad.new_ones(num_rows, grad.shape[1])
        state = grad.new_zeros(num_rows, 1)
        learn(weight, state, keys, grad, RowRule(kind="rowwise_adagrad", learning_rate=0.01, eps=1e-8))
        first = weight if first is None else first
        same += int(torch.equal(weight, first))
    return same


def _rotate(inputs: Sequence[T], call: Callable[[T], object]) -> Callable[[int], object]:
    return lambda number: call(inputs[number % len(inputs)])


def _median_s(call: Callable[[int], object], rounds: int, device: torch.device) -> float:
    """Return the median time of a call, measured by events on CUDA."""
    call(0)
    _wait(device)
    start_s = time.perf_counter()
    call(1)
    _wait(device)
    num_in_target = int(_TARGET_S / (time.perf_counter() - start_s))
    rounds = min(rounds, max(_MIN_ROUNDS, num_in_target))
    return _median_cuda_s(call, rounds) if device.type == "cuda" else _median_cpu_s(call, rounds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_cpu_s(call: Callable[[int], object], rounds: int) -> float:
    times = []
    for number in range(rounds):
        start_s = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def _median_cuda_s(call: Callable[[int], object], rounds: int) -> float:
    torch.cuda._sleep(_HEAD_START_CYCLES)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for number in range(rounds):
        call(number)
        events[number + 1].record()
    torch.cuda.synchronize()
    return statistics.median(float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)) / 1e3


BENCH = Bench(config=LookupBenchConfig, measure=measure_lookup, show=lambda rows, more: [("lookup", short_rows(rows))])
