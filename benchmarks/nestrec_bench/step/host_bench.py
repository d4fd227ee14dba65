"""What the host of one rank does in a step, by the number of ranks: does it grow with them?

One real rank: real keys, real routing, rows and sums. The others are a loopback: what they would ask this rank for is
drawn and packed as they would, before the clock runs, and handed over when an exchange asks for it. What the loopback
itself takes, and the model's computation, do not count. One thread, which waits for nobody: its processor time, to
which others on the machine add little. Rounds are interleaved over the numbers of ranks; a figure is the median of its
rounds, and least the quickest of them.

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
from nestrec_bench.bench import Bench, More, Row, Shown

Model = Literal["retrieval", "tables"]
_COUNT_BYTES = 8 * (ERROR_WORDS + 1)
_SPREAD = 2654435761
_WARM_UP = 4
_DIMS = (8, 16, 32, 64)
PARTS = {
    "deduplicate": ["deduplicate"],
    "keys": ["exchange_keys"],
    "arrange": ["arrange"],
    "fetch": ["fetch"],
    "vectors": ["exchange_vectors"],
    "gradients": ["exchange_gradients", "add_gradients"],
    "update": ["update_rows"],
    "write_back": ["write_back"],
}
"""Part of a step to the operations of the engine that it is made of."""
OTHER = "other"
"""What the schedule and its window do beside them."""


@config
class HostBench:
    """What is measured."""

    ranks: tuple[Count, ...] = (8, 64, 512, 1536)
    """numbers of ranks, of which one is real"""
    models: tuple[Model, ...] = ("retrieval", "tables")
    """retrieval: one table, histories; tables: many tables of several widths, one key a sample in each"""
    num_tables: Count = 40
    """tables of the model of many"""
    micro_batches: Count = 8
    """parts of a rank's batch"""
    samples: Count = 512
    """samples of a rank's batch; retrieval: an eighth of them, each with 128 events"""
    table_rows: Count = 100_000
    """rows of a table; retrieval: ten times as many"""
    rounds: Count = 12
    """timed steps, after four that are not counted"""
    window_cache: bool = False
    """as --pipeline.window_cache"""


class Loopback(Transport):
    """Answers as the other ranks would. What it takes for that is none of this rank's time."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.seconds = 0.0
        self._counts = np.zeros(num_ranks, np.int64)
        self._records = torch.empty(0, dtype=torch.uint8)

    def ask(self, counts: NDArray[np.int64], records: NDArray[Any]) -> None:
        """What the others will ask for in the next exchange of keys, source by source; of this rank, the first,
        nothing."""
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
        else:  # vectors or gradients, of which any will do
            into.zero_()
        into[:own] = sent[:own]
        self.seconds += time.thread_time() - start

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """All others have zeros."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """All have the same."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.num_ranks


class _Rank:
    """The real one among so many, and its steps under `serial`."""

    def __init__(self, bench: HostBench, model: Model, num_ranks: int) -> None:
        self._bench = bench
        self.model = model
        self.num_ranks = num_ranks
        self._loopback = Loopback(num_ranks)
        alone = Topology.single()
        carried = {n: replace(getattr(alone, n), size=num_ranks, transport=self._loopback) for n in ("keys", "vectors")}
        self._topology = replace(alone, world=num_ranks, **carried)
        self.tables = _tables(bench, model)
        self._spent = dict.fromkeys(PARTS, 0.0)
        engine = EmbeddingEngine(self.tables, self._topology)
        for shard in engine.shards.values():  # tables that have been trained: every row is there
            shard.fetch(shard.keys(), 1)
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
        """One step, its parts timed. watch: calls it in its own way."""
        self._step += 1
        keys = self._prepared()
        before = self._topology.log.count
        parts = tuple(MicroBatch(np.arange(1), k, {}, 1, 1) for k in keys)
        batch = Batch(
            BatchPosition(0, self._step), 1.0, np.arange(len(parts)), parts, tokens=np.ones(len(parts), np.int64)
        )
        step = TrainingStep(number=self._step, batch=batch, rates=LearningRates(dense=0.1, tables=0.1))
        self._spent.update(dict.fromkeys(PARTS, 0.0))
        start = time.thread_time() - self._loopback.seconds - self._compute.seconds
        (watch or _plainly)(lambda: self._pipeline.schedule.advance(step, LookaheadIterator(iter(()))))
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

    def _prepared(self) -> list[dict[str, NDArray[np.int64]]]:
        """The keys of this rank's batch; what the others ask for goes to the loopback."""
        num_tables = len(self.tables)
        others = []
        for rank in range(1, self.num_ranks):
            drawn = _drawn(self._bench, self.model, [self._step, rank])
            segments = np.repeat(np.arange(self._bench.micro_batches * num_tables), drawn.shape[-1])
            flat = drawn.reshape(-1)
            mine = owner_of(flat, self.num_ranks) == 0
            bounds = np.searchsorted(segments[mine], np.arange(self._bench.micro_batches * num_tables + 1))
            found = dedup_segments(flat[mine], bounds)
            record = np.empty(len(found.keys), _record_type(self._bench, num_tables))
            record["key"] = found.keys
            if "segment" in (record.dtype.names or ()):
                record["segment"] = np.repeat(np.arange(len(bounds) - 1), np.diff(found.bounds))
            if "last" in (record.dtype.names or ()):
                record["last"] = self._bench.micro_batches - 1
            others.append(record)
        self._loopback.ask(np.array([0, *map(len, others)]), np.concatenate(others))
        own = _drawn(self._bench, self.model, [self._step, 0])
        return [{t.name: own[p, i] for i, t in enumerate(self.tables)} for p in range(len(own))]


class _Compute:
    """No model: gradients are zeros, and take no time."""

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
    """No dense weights."""

    def early_sums(self, submit: Callable[[Callable[[], None]], None]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reduce(self, loss: torch.Tensor, wants_stop: bool) -> torch.Tensor:
        return torch.zeros(2)

    def apply(self, sums: torch.Tensor, learning_rate: float) -> StepTotals:
        return StepTotals(loss=sums[0], gradient_norm=sums[0], wants_stop=sums[1])


def _plainly(step: Callable[[], object]) -> None:
    step()


def _record_type(bench: HostBench, num_tables: int) -> np.dtype[Any]:
    fields = [("key", "<i8")] + ([("segment", "<u2")] if bench.micro_batches * num_tables > 1 else [])
    return np.dtype(fields + ([("last", "<i2")] if bench.window_cache else []))


def _tables(bench: HostBench, model: Model) -> list[TableConfig]:
    if model == "retrieval":
        return [TableConfig(name="items", dim=64, num_rows=10 * bench.table_rows)]
    return [
        TableConfig(name=f"table{i}", dim=_DIMS[i % len(_DIMS)], num_rows=bench.table_rows, seed=i)
        for i in range(bench.num_tables)
    ]


def _drawn(bench: HostBench, model: Model, seed: list[int]) -> NDArray[np.int64]:
    """(micro-batch, table, key) of a rank's batch; popularity falls as one over the rank of a key."""
    is_one = model == "retrieval"
    parts = bench.micro_batches
    shape = (
        (parts, 1, bench.samples // 8 * 128 // parts) if is_one else (parts, bench.num_tables, bench.samples // parts)
    )
    rows = bench.table_rows * (10 if is_one else 1)
    popular = np.exp(np.random.default_rng(seed).random(shape) * np.log(rows)).astype(np.int64)
    keys: NDArray[np.int64] = popular * _SPREAD % rows
    return keys


def _measure(bench: HostBench) -> Generator[Row, None, More]:
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


def _row(rank: _Rank, bench: HostBench) -> Row:
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
    """Functions that a step enters, of Python and of C."""
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
    """Most memory of the host that a step holds beside its rows: keys, orders, lists."""
    peak = 0

    def watch(step: Callable[[], object]) -> None:
        nonlocal peak
        tracemalloc.start()
        step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    rank.run(watch)
    return peak / 2**20


def _show(rows: Sequence[Row], more: More) -> Iterable[Shown]:
    flat = [{k: v for k, v in row.items() if k not in ("parts", "host_ms_spread")} | row["parts"] for row in rows]
    yield "host", flat


BENCH = Bench(config=HostBench, measure=_measure, show=_show)
