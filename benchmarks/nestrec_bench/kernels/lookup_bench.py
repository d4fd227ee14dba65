"""Rows of a table in device memory: gather, update, and deduplicate + sum + update, beside plain torch and a copy.

Bytes are those an operation must move: each row it reads or writes once, whatever the caches do. The copy counts bytes
read and written too. A figure is the median of rounds that follow each other without waiting for the device, as the
steps of a training run do; each round has other keys than the one before.

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
_MOST_HOST_KEYS = 1 << 22
_ENOUGH_S = 0.06
"""Rounds of an operation end when they have taken so long."""
_FEWEST_ROUNDS = 3
_COPY_BYTES = 1 << 32
_HEAD_START_CYCLES = 6_000_000
"""The device waits so long before the first round, so that the host is ahead of it, as in training."""


@config
class LookupBench:
    """What is measured."""

    num_rows: int = 1 << 26
    """Rows of the table."""
    dim: int = 128
    """Elements of a row."""
    num_keys: tuple[int, ...] = (1 << 20, 1 << 23)
    """Looked-up positions of a call."""
    zipf: tuple[float, ...] = (0.75, 1.05, 0.0)
    """Exponents of the keys' popularity; 0: uniform. Popular rows are spread over the table."""
    rounds: int = 10
    """Most timed rounds of an operation, after two that are not counted; fewer where one takes long."""
    device: str = "cuda"
    """Where the table lies."""


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    store: str
    num_bytes: int
    call: Callable[[int], object]
    """given the number of the round"""
    dtype: str = "float32"
    also: Mapping[str, Any] = field(default_factory=dict)
    """further fields of its row"""


def measure_lookup(bench: LookupBench) -> Iterator[dict[str, Any]]:
    """Rows of the bench, as they are measured."""
    device = torch.device(bench.device)
    check_device(device)
    torch.manual_seed(0)
    copy_gb_per_s = _copy_rate(bench, device)
    tables = _Tables(bench, device)
    for num_keys in bench.num_keys:
        for exponent in bench.zipf:
            keys = [_keys(bench, exponent, num_keys, device) for _ in range(_KEY_SETS)]
            distinct = [torch.unique(k) for k in keys]
            common = {
                "keys": num_keys,
                "distinct": len(distinct[0]),
                "zipf": exponent,
                "dim": bench.dim,
                "table_rows": bench.num_rows,
                "copy_gb_per_s": round(copy_gb_per_s, 1),
            }
            for make in (_gathers, _learning, _updates, _row_moves, _parts):
                rows = [_row(operation, bench, device) for operation in make(tables, keys, distinct)]
                yield from (_compared({**row, **common}, rows) for row in rows)


def short_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What fits a terminal."""
    shown = ("op", "store", "dtype", "zipf", "keys", "distinct", "ms", "gb_per_s", "of_copy", "of_best_torch")
    return [{name: row[name] for name in shown if name in row} for row in rows]


def _row(operation: _Operation, bench: LookupBench, device: torch.device) -> dict[str, Any]:
    seconds = _median_s(operation.call, bench.rounds, device)
    return {
        "op": operation.name,
        "store": operation.store,
        "dtype": operation.dtype,
        "gb_per_s": round(operation.num_bytes / seconds / 1e9, 1),
        "ms": round(1e3 * seconds, 4),
        **operation.also,
    }


def _compared(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """With its part of the copy's rate, and how many times it is as fast as the best of plain torch."""
    row["of_copy"] = round(row["gb_per_s"] / row["copy_gb_per_s"], 3)
    same = [r for r in rows if (r["op"], r["dtype"]) == (row["op"], row["dtype"]) and r["store"].startswith("torch")]
    if same:
        row["of_best_torch"] = round(min(r["ms"] for r in same) / row["ms"], 2)
    return row


def _keys(bench: LookupBench, exponent: float, num_keys: int, device: torch.device) -> torch.Tensor:
    """int64 keys drawn by a Zipf law."""
    if exponent == 0.0:
        return torch.randint(0, bench.num_rows, (num_keys,), device=device)
    generator = torch.Generator(device).manual_seed(0)
    permutation = torch.randperm(bench.num_rows, device=device, generator=generator)
    mass = torch.arange(1, bench.num_rows + 1, dtype=torch.float64, device=device).pow_(-exponent).cumsum_(0)
    ranks = torch.searchsorted(mass, torch.rand(num_keys, dtype=torch.float64, device=device) * mass[-1])
    return permutation[ranks.clamp_(max=bench.num_rows - 1)]


def _copy_rate(bench: LookupBench, device: torch.device) -> float:
    """Bytes read plus written a second, in units of 1e9."""
    size = min(_COPY_BYTES, 4 * bench.num_rows * bench.dim) // 4
    source = torch.rand(size, device=device)
    target = torch.empty(size, device=device)
    return 8 * size / _median_s(lambda _: target.copy_(source), bench.rounds, device) / 1e9


class _Tables:
    """What is read and trained: columns in tensors of their own, as plain torch has them, and whole rows."""

    def __init__(self, bench: LookupBench, device: torch.device) -> None:
        shape = bench.num_rows, bench.dim
        self.weights = {n: torch.empty(shape, dtype=DTYPES[n], device=device).uniform_() for n in _DTYPES}
        self.plain = TorchTable(self.weights["float32"], torch.zeros(bench.num_rows, device=device))
        self.layout = layout_of(TableConfig(name="t", dim=bench.dim))
        self.rows = torch.zeros(bench.num_rows, self.layout.num_words, dtype=torch.int32, device=device)
        self.grad = torch.empty(max(bench.num_keys), bench.dim, device=device).uniform_(-1, 1)
        self.rule = RowRule(kind="rowwise_adagrad", learning_rate=self.plain.learning_rate, eps=self.plain.eps)

    @property
    def row_bytes(self) -> int:
        """Of a weight and its sum of squares."""
        return 4 * (self.plain.weight.shape[1] + 1)


def _gathers(tables: _Tables, keys: list[torch.Tensor], _: list[torch.Tensor]) -> Iterator[_Operation]:
    for dtype, table in tables.weights.items():
        yield from _gathers_of(table, keys, dtype)


def _gathers_of(table: torch.Tensor, keys: list[torch.Tensor], dtype: str) -> Iterator[_Operation]:
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "nestrec": lambda k: take_rows(table, k),
        "torch index_select": lambda k: table.index_select(0, k),
        "torch embedding": lambda k: embedding(k, table),
    }
    num_bytes = 2 * len(keys[0]) * table.shape[1] * table.element_size()
    for store, way in ways.items():
        yield _Operation("gather", store, num_bytes, _rotate(keys, way), dtype)


def _learning(tables: _Tables, keys: list[torch.Tensor], distinct: list[torch.Tensor]) -> Iterator[_Operation]:
    """Deduplicate, sum, update."""
    plain = tables.plain
    grad = tables.grad[: len(keys[0])]
    num_bytes = grad.numel() * 4 + 2 * tables.row_bytes * len(distinct[0])
    ours = _rotate(keys, lambda k: learn(plain.weight, plain.state[:, None], k, grad, tables.rule))
    inverse = torch.unique(keys[0], return_inverse=True)[1]
    repeats = {"identical_repeats": _identical_repeats(inverse, len(distinct[0]), grad)}
    yield _Operation("learn", "nestrec", num_bytes, ours, also=repeats)
    for name, path in PATHS.items():
        yield _Operation("learn", f"torch {name}", num_bytes, _rotate(keys, partial(_train, path, plain, grad)))


def learn(weight: torch.Tensor, state: torch.Tensor, keys: torch.Tensor, grad: torch.Tensor, rule: RowRule) -> None:
    """Deduplicate, sum, update, by the operators that training runs."""
    found = dedup_keys(keys.to(torch.int32))
    count = int(found.count)
    update_rows(weight, [state], sum_by_index(grad, found.inverse(), count), rule, found.keys_P[:count])


def _train(path: Callable[..., None], table: TorchTable, grad: torch.Tensor, keys: torch.Tensor) -> None:
    path(table, keys, grad)


def _updates(tables: _Tables, keys: list[torch.Tensor], distinct: list[torch.Tensor]) -> Iterator[_Operation]:
    """From deduplicated gradients, in place: rows where they lie in the table, and the fetched rows of a batch."""
    plain = tables.plain
    grad = tables.grad
    rule = tables.rule
    num_bytes = len(distinct[0]) * (4 * grad.shape[1] + 2 * tables.row_bytes)
    ours = _rotate(distinct, lambda k: update_rows(plain.weight, [plain.state[:, None]], grad[: len(k)], rule, k))
    yield _Operation("update", "nestrec", num_bytes, ours)
    yield _Operation("update", "torch", num_bytes, _rotate(distinct, lambda k: plain.update(k, grad[: len(k)])))
    fetched = tables.rows[: len(distinct[0])]
    weight, state = (tables.layout.view(fetched, column.name) for column in tables.layout.columns)
    call = partial(update_rows, weight, [state], grad[: len(fetched)], rule)
    yield _Operation("update fetched rows", "nestrec", num_bytes, lambda _: call())


def _row_moves(tables: _Tables, keys: list[torch.Tensor], distinct: list[torch.Tensor]) -> Iterator[_Operation]:
    """What the engine does with the distinct rows of a batch, weight and state together."""
    rows = tables.rows
    buffer, other = (rows.new_zeros(max(len(d) for d in distinct), rows.shape[1]) for _ in range(2))
    places = [torch.randperm(len(d), device=d.device) for d in distinct]
    ways: dict[str, Callable[[int], object]] = {
        "fetch rows": _rotate(distinct, lambda k: move_rows(rows, buffer, k)),
        "write rows": _rotate(distinct, lambda k: move_rows(buffer, rows, None, k)),
        "copy shared rows": _rotate(places, lambda p: move_rows(buffer, other, p, p)),
    }
    num_bytes = 2 * len(distinct[0]) * 4 * rows.shape[1]
    for name, way in ways.items():
        yield _Operation(name, "nestrec", num_bytes, way)


def _parts(tables: _Tables, keys: list[torch.Tensor], distinct: list[torch.Tensor]) -> Iterator[_Operation]:
    """Deduplication and sums alone."""
    size = len(keys[0])
    count = len(distinct[0])
    grad = tables.grad[: len(keys[0])]
    inverse = torch.unique(keys[0], return_inverse=True)[1].to(torch.int32)
    yield _Operation("sum", "nestrec", 4 * grad.shape[1] * (size + count), lambda _: sum_by_index(grad, inverse, count))
    yield _Operation("deduplicate", "nestrec", 8 * size, _rotate(keys, lambda k: dedup_keys(k.to(torch.int32))))
    unique = _rotate(keys, lambda k: torch.unique(k, return_inverse=True))
    yield _Operation("deduplicate", "torch unique", 8 * size, unique)
    if size <= _MOST_HOST_KEYS:
        host = [k.cpu().numpy() for k in keys]
        sent = _rotate(host, lambda k: dedup_on_device([k], 1, grad.device, len(tables.rows)))
        yield _Operation("deduplicate host keys", "nestrec", 8 * size, sent)
        yield _Operation("deduplicate host keys", "host loop", 8 * size, _rotate(host, dedup))


def _identical_repeats(keys: torch.Tensor, num_rows: int, grad: torch.Tensor) -> int:
    """How many of some repeats give the bits of the first."""
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
    """Median time of a call, by the device's clock on CUDA."""
    call(0)
    _wait(device)
    start_s = time.perf_counter()
    call(1)
    _wait(device)
    enough = int(_ENOUGH_S / (time.perf_counter() - start_s))
    rounds = min(rounds, max(_FEWEST_ROUNDS, enough))
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


BENCH = Bench(config=LookupBench, measure=measure_lookup, show=lambda rows, more: [("lookup", short_rows(rows))])
