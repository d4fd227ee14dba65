"""Measure the host time of one rank in a training step, as a function of the number of ranks.

One rank is real, with real keys, routing, rows and sums. A loopback replaces the others: their requests to this rank
are drawn and packed before the measurement, and returned by the exchange of keys. The time of the loopback and of the
model does not count. The processor time of a single thread is measured, which never waits, so that other processes have
little effect. Rounds are interleaved over the numbers of ranks. Figures are medians over rounds; `host_ms_least` is the
fastest round.

    nestrec bench host --ranks 8,64,512,1536 --json host.json
"""

import contextlib
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.distributed.transports import Transport
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.routing.deduplicated_keys import ERROR_WORDS
from nestrec.ops.embedding.dedup_host import dedup_segments
from nestrec.pipeline import (
    Coupling,
    LearningRates,
    LookaheadIterator,
    PipelineConfig,
    PipelineCore,
    StepTotals,
    TrainingStep,
)
from nestrec_bench.bench import Bench, ExtraFields, OutputPart, Row

Model = Literal["retrieval", "tables"]
_COUNT_BYTES = 8 * (ERROR_WORDS + 1)
_SPREAD = 2654435761
_WARM_UP = 4
_DIMS = (8, 16, 32, 64)
PARTS = {
    "deduplicate": ["deduplicate"],
    "keys": ["exchange_keys"],
    "arrange": ["build_exchange_plan"],
    "fetch": ["fetch_rows"],
    "vectors": ["exchange_vectors"],
    "gradients": ["exchange_gradients", "add_gradients"],
    "update": ["update_rows"],
    "write_back": ["write_back"],
}
"""Part of a step to the operations of the engine that it consists of."""
OTHER = "other"
"""Part of a step that consists of the schedule and its window."""


@config
class HostBenchConfig:
    """Options of the host benchmark."""

    ranks: tuple[Count, ...] = (8, 64, 512, 1536)
    """Numbers of ranks, one of which is real."""
    models: tuple[Model, ...] = ("retrieval", "tables")
    """Models. retrieval: one table, histories; tables: many tables of several widths, each with one key per sample."""
    num_tables: Count = 40
    """Number of tables of the model with many tables."""
    micro_batches: Count = 8
    """Number of micro-batches of a rank's batch."""
    samples: Count = 512
    """Number of samples of a rank's batch; retrieval uses an eighth of them, each with 128 events."""
    table_rows: Count = 100_000
    """Number of rows of a table; retrieval uses ten times as many."""
    rounds: Count = 12
    """Number of timed steps, after four steps of warm-up."""
    window_cache: bool = False
    """Whether to use the window cache, as with --pipeline.window_cache."""


class Loopback(Transport):
    """Transport that responds as the other ranks would, and measures its own time to exclude it."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.seconds = 0.0
        self._counts = np.zeros(num_ranks, np.int64)
        self._records = torch.empty(0, dtype=torch.uint8)

    def set_requests(self, counts: NDArray[np.int64], records: NDArray[Any]) -> None:
        """Set the requests of the other ranks in the next exchange of keys.

        Args:
            counts: Number of records per source; 0 for this rank, which is the first one.
            records: Records, ordered by source.
        """
        self._counts = counts
        self._records = torch.from_numpy(records.view(np.uint8).reshape(-1))

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        start = time.thread_time()
        own = receive[0]
        if len(into) == self.num_ranks * _COUNT_BYTES and receive[0] == receive[-1] == _COUNT_BYTES:
            message = into.view(torch.int64).view(self.num_ranks, -1)
            message.zero_()
            message[:, -1] = torch.from_numpy(self._counts)
        elif len(into) - own == len(self._records):
            into[own:] = self._records
        else:  # vectors or gradients, whose values do not matter
            into.zero_()
        into[:own] = sent[:own]
        self.seconds += time.thread_time() - start

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Do nothing, because all others contribute zeros."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Do nothing, because all ranks have the same values."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.num_ranks


class _Rank:
    """The real rank, and its steps with the schedule `serial`."""

    def __init__(self, bench: HostBenchConfig, model: Model, num_ranks: int) -> None:
        self._bench = bench
        self.model = model
        self.num_ranks = num_ranks
        self._loopback = Loopback(num_ranks)
        alone = Topology.single()
        groups = {n: replace(getattr(alone, n), size=num_ranks, transport=self._loopback) for n in ("keys", "vectors")}
        self._topology = replace(alone, world=num_ranks, **groups)
        self.tables = _tables(bench, model)
        self._spent = dict.fromkeys(PARTS, 0.0)
        engine = EmbeddingEngine(self.tables, self._topology)
        for shard in engine.shards.values():  # all rows exist, as in trained tables
            shard.fetch_rows(shard.keys(), 1)
        for part, operations in PARTS.items():
            for name in operations:
                setattr(engine, name, self._timed(part, getattr(engine, name)))
        options = PipelineConfig(window_cache=bench.window_cache)
        self._compute = _Compute()
        self._pipeline = PipelineCore.build(self._compute, engine, _Dense(), options)
        self._step = 1
        self.rounds = list[dict[str, float]]()
        self.exchanges = 0

    def run(self, watch: Callable[[Callable[[], object]], None] | None = None) -> None:
        """Run one step and time its parts.

        Args:
            watch: Function that calls the step under some instrumentation. None: call it directly.
        """
        self._step += 1
        keys = self._prepare_keys()
        before = self._topology.log.count
        parts = tuple(MicroBatch(np.arange(1), k, {}, 1, 1) for k in keys)
        batch = Batch(
            BatchPosition(0, self._step), 1.0, np.arange(len(parts)), parts, tokens=np.ones(len(parts), np.int64)
        )
        step = TrainingStep(number=self._step, batch=batch, rates=LearningRates(dense=0.1, tables=0.1))
        self._spent.update(dict.fromkeys(PARTS, 0.0))
        start = time.thread_time() - self._loopback.seconds - self._compute.seconds
        (watch or _call)(lambda: self._pipeline.schedule.advance(step, LookaheadIterator(iter(()))))
        total = time.thread_time() - self._loopback.seconds - self._compute.seconds - start
        self.rounds.append({**self._spent, OTHER: total - sum(self._spent.values())})
        self.exchanges = self._topology.log.count - before

    def _timed(self, part: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time() - self._loopback.seconds
            found = operation(*args, **kwargs)
            self._spent[part] += time.thread_time() - self._loopback.seconds - start
            return found

        return timed

    def _prepare_keys(self) -> list[dict[str, NDArray[np.int64]]]:
        """Return the keys of this rank's batch, and pass the requests of the others to the loopback."""
        num_tables = len(self.tables)
        others = []
        for rank in range(1, self.num_ranks):
            drawn = _draw_keys(self._bench, self.model, [self._step, rank])
            segments = np.repeat(np.arange(self._bench.micro_batches * num_tables), drawn.shape[-1])
            flat = drawn.reshape(-1)
            is_owned = owner_of(flat, self.num_ranks) == 0
            bounds = np.searchsorted(segments[is_owned], np.arange(self._bench.micro_batches * num_tables + 1))
            found = dedup_segments(flat[is_owned], bounds)
            record = np.empty(len(found.keys), _record_type(self._bench, num_tables))
            record["key"] = found.keys
            if "segment" in (record.dtype.names or ()):
                record["segment"] = np.repeat(np.arange(len(bounds) - 1), np.diff(found.bounds))
            if "last" in (record.dtype.names or ()):
                record["last"] = self._bench.micro_batches - 1
            others.append(record)
        self._loopback.set_requests(np.array([0, *map(len, others)]), np.concatenate(others))
        own = _draw_keys(self._bench, self.model, [self._step, 0])
        return [{t.name: own[p, i] for i, t in enumerate(self.tables)} for p in range(len(own))]


class _Compute:
    """Compute stage without a model: gradients are zeros, and their time does not count."""

    couples_samples: Coupling = "micro_batch"

    def __init__(self) -> None:
        self.seconds = 0.0

    def transfer(self, micro_batch: MicroBatch) -> MicroBatch:
        return micro_batch

    def forward_backward(
        self,
        micro_batch: MicroBatch,
        rows: Mapping[str, torch.Tensor],
        index: Mapping[str, torch.Tensor],
        weight: float,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        start = time.thread_time()
        gradients = {name: torch.zeros_like(vectors) for name, vectors in rows.items()}
        self.seconds += time.thread_time() - start
        return torch.zeros(()), gradients


class _Dense:
    """Dense optimizer without weights."""

    def overlap_backward(self, submit: Callable[[Callable[[], None]], None]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reduce(self, loss: torch.Tensor, stop_requested: bool) -> torch.Tensor:
        return torch.zeros(2)

    def apply(self, sums: torch.Tensor, learning_rate: float) -> StepTotals:
        return StepTotals(loss=sums[0], gradient_norm=sums[0], stop_requested=sums[1])


def _call(step: Callable[[], object]) -> None:
    step()


def _record_type(bench: HostBenchConfig, num_tables: int) -> np.dtype[Any]:
    fields = [("key", "<i8")] + ([("segment", "<u2")] if bench.micro_batches * num_tables > 1 else [])
    return np.dtype(fields + ([("last", "<i2")] if bench.window_cache else []))


def _tables(bench: HostBenchConfig, model: Model) -> list[TableConfig]:
    if model == "retrieval":
        return [TableConfig(name="items", dim=64, num_rows=10 * bench.table_rows)]
    return [
        TableConfig(name=f"table{i}", dim=_DIMS[i % len(_DIMS)], num_rows=bench.table_rows, seed=i)
        for i in range(bench.num_tables)
    ]


def _draw_keys(bench: HostBenchConfig, model: Model, seed: list[int]) -> NDArray[np.int64]:
    """Draw the keys of a rank's batch, with dimensions (micro-batch, table, key), by Zipf's law with exponent 1."""
    is_retrieval = model == "retrieval"
    parts = bench.micro_batches
    shape = (parts, bench.num_tables, bench.samples // parts)
    if is_retrieval:
        shape = (parts, 1, bench.samples // 8 * 128 // parts)
    rows = bench.table_rows * (10 if is_retrieval else 1)
    popular = np.exp(np.random.default_rng(seed).random(shape) * np.log(rows)).astype(np.int64)
    keys: NDArray[np.int64] = popular * _SPREAD % rows
    return keys


def _measure(bench: HostBenchConfig) -> Generator[Row, None, ExtraFields]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for model in bench.models:
        ranks = [_Rank(bench, model, n) for n in bench.ranks]
        for _ in range(_WARM_UP + bench.rounds):
            for rank in ranks:
                rank.run()
        for rank in ranks:
            yield _row(rank, bench)
    torch.set_num_threads(threads)
    return {}


def _row(rank: _Rank, bench: HostBenchConfig) -> Row:
    timed = rank.rounds[_WARM_UP:]
    totals = sorted(1e3 * sum(spent.values()) for spent in timed)
    parts = {part: 1e3 * statistics.median(spent[part] for spent in timed) for part in (*PARTS, OTHER)}
    exchanges = rank.exchanges
    return {
        "model": rank.model,
        "ranks": rank.num_ranks,
        "tables": len(rank.tables),
        "micro_batches": bench.micro_batches,
        "host_ms": round(statistics.median(totals), 3),
        "host_ms_least": round(totals[0], 3),
        "host_ms_spread": [round(totals[len(totals) // 10], 3), round(totals[-1 - len(totals) // 10], 3)],
        "parts": {part: round(value, 3) for part, value in parts.items()},
        "exchanges": exchanges,
        "python_calls": _python_calls(rank),
        "host_mib": round(_peak_mib(rank), 2),
    }


def _python_calls(rank: _Rank) -> int:
    """Count the calls of Python and C functions in a step."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def watch(step: Callable[[], object]) -> None:
        sys.setprofile(note)
        step()
        sys.setprofile(None)

    rank.run(watch)
    return count


def _peak_mib(rank: _Rank) -> float:
    """Measure the peak host memory of a step without its rows: keys, permutations and lists."""
    peak = 0

    def watch(step: Callable[[], object]) -> None:
        nonlocal peak
        tracemalloc.start()
        step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    rank.run(watch)
    return peak / 2**20


def _show(rows: Sequence[Row], more: ExtraFields) -> Iterable[OutputPart]:
    flat = [{k: v for k, v in row.items() if k not in ("parts", "host_ms_spread")} | row["parts"] for row in rows]
    yield "host", flat


BENCH = Bench(config=HostBenchConfig, measure=_measure, show=_show)
