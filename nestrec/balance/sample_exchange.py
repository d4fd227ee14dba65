"""Sample balancing: partitions each global batch over ranks and exchanges samples between them (all-to-all).

In mode `read`, every rank can read any sample and reads those that the policy assigns to it. In mode `exchange`, a rank
reads a contiguous part of the batch, and the ranks exchange samples. Both modes give every rank the same samples.
Micro-batches within a rank have nearly equal cost under every policy but `fixed`, the baseline that ignores lengths.

For an exchange, the ids, tokens and column lengths of all samples are all-gathered, each rank computes the same
partition, and one all-to-all per column moves the samples. All of it runs on the host over a given communicator, so it
can belong to the data stages of an earlier step. The global batch is the concatenation of the ranks' samples in rank
order.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.balance.balance_metrics import BalanceMetrics, compute_balance_metrics, moved_bytes
from nestrec.balance.cost import CostModelHistory
from nestrec.balance.partition_tools import Groups, assignment_of
from nestrec.balance.policies import BalanceConfig, balance, micro_partition
from nestrec.data.batch_order import BatchPosition, RankSamples, SamplePartitioner
from nestrec.data.dataset import DatasetRows
from nestrec.data.flat_arrays import offsets_of_lengths
from nestrec.distributed.collectives import all_gather_equal, all_to_all_rows
from nestrec.distributed.topology import Communicator
from nestrec.trace import NullTracer, OpenSpan, Tracer

_NO_TRACE = NullTracer()


@dataclass(frozen=True, slots=True)
class SampleExchange:
    """Samples of a rank after the exchange, and metrics of the exchange (the same on every rank)."""

    indices: NDArray[np.int64]
    """Indices of this rank's samples in the global batch."""
    rows: DatasetRows
    """Samples in the order of the global batch."""
    lengths: NDArray[np.int64]
    """Number of tokens of each sample of `rows`."""
    metrics: BalanceMetrics
    """Balance metrics predicted by the cost model."""
    moved_bytes: int
    """Total bytes of the samples that moved to another rank, over all ranks."""


@dataclass(frozen=True, slots=True)
class _GlobalBatch:
    """Metadata of all samples of the global batch, known to every rank."""

    home_rank: NDArray[np.int64]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    candidates: NDArray[np.int64]
    list_lengths: NDArray[np.int64]
    """(B, list columns) length of each list."""


def exchange_samples(
    communicator: Communicator,
    cfg: BalanceConfig,
    rows: DatasetRows,
    lengths: NDArray[Any],
    candidates: NDArray[Any] | None = None,
    *,
    tracer: Tracer = _NO_TRACE,
) -> SampleExchange:
    """Exchange samples so that this rank has those that the policy assigns to it. Collective.

    A rank may have no samples before or after the exchange.

    Args:
        communicator: Ranks that exchange samples.
        cfg: Balance options; the same on every rank.
        rows: Samples that this rank has read; the columns are the same on every rank.
        lengths: Number of tokens of each sample of `rows`.
        candidates: Number of candidates of each sample of `rows`.
        tracer: Tracer of the data stages.
    """
    global_batch = _gather(communicator, rows, lengths, candidates)
    with tracer.span("train.data.balance", lane=threading.current_thread().name):
        groups = balance(cfg, global_batch.lengths, communicator.size, candidates=global_batch.candidates)
    own = groups[communicator.rank]
    cost = cfg.known_cost
    received = _move(communicator, rows, global_batch, groups)
    assert np.array_equal(received.indices, global_batch.ids[own]), "ranks disagree on the partition"
    return SampleExchange(
        indices=own,
        rows=received,
        lengths=global_batch.lengths[own],
        metrics=compute_balance_metrics(
            groups,
            global_batch.lengths,
            cost.sample_costs(global_batch.lengths, global_batch.candidates),
            step_cost=cost.step,
        ),
        moved_bytes=moved_bytes(groups, global_batch.home_rank, _sample_bytes(rows, global_batch)),
    )


def _gather(
    communicator: Communicator, rows: DatasetRows, lengths: NDArray[Any], candidates: NDArray[Any] | None
) -> _GlobalBatch:
    columns: list[NDArray[Any]] = [rows.indices, lengths, np.zeros(rows.num_rows) if candidates is None else candidates]
    columns += [np.diff(rows.lists[name][1]) for name in sorted(rows.lists)]
    local = torch.from_numpy(np.stack(columns, axis=1).astype(np.int64))
    counts = [int(n) for n in all_gather_equal(communicator, torch.tensor([len(local)]))]
    padded = torch.zeros((max(counts), local.shape[1]), dtype=torch.int64)
    padded[: len(local)] = local
    parts = all_gather_equal(communicator, padded)
    table = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).numpy()
    home_rank = np.repeat(np.arange(len(counts)), counts)
    return _GlobalBatch(home_rank, table[:, 0], table[:, 1], table[:, 2], table[:, 3:])


def _move(communicator: Communicator, rows: DatasetRows, global_batch: _GlobalBatch, groups: Groups) -> DatasetRows:
    """Exchange the columns in order of name; sources arrive in rank order, which is the order of the global batch."""
    target = assignment_of(groups, global_batch.ids.size)[global_batch.home_rank == communicator.rank]
    by_target = np.argsort(target, kind="stable")
    own = groups[communicator.rank]
    source = global_batch.home_rank[own]

    def exchange(
        values: NDArray[Any], sent_lengths: NDArray[np.int64], received_lengths: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Exchange values in order of target rank; the lengths are the numbers of values per sample."""
        send = _totals(target[by_target], sent_lengths, communicator.size)
        receive = _totals(source, received_lengths, communicator.size)
        return _all_to_all(communicator, values, send, receive)

    in_order = rows.take(by_target)
    send_ones, receive_ones = np.ones(rows.num_rows, dtype=np.int64), np.ones(own.size, dtype=np.int64)
    scalars = {name: exchange(in_order.scalars[name], send_ones, receive_ones) for name in sorted(rows.scalars)}
    lists = {}
    for column, name in enumerate(sorted(rows.lists)):
        values, offsets = in_order.lists[name]
        received_lengths = global_batch.list_lengths[own, column]
        lists[name] = (exchange(values, np.diff(offsets), received_lengths), offsets_of_lengths(received_lengths))
    return DatasetRows(exchange(in_order.indices, send_ones, receive_ones), scalars, lists)


def _totals(rank: NDArray[np.int64], amounts: NDArray[np.int64], num_ranks: int) -> list[int]:
    totals = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(totals, rank, amounts)
    return [int(total) for total in totals]


def _all_to_all(
    communicator: Communicator, values: NDArray[Any], send: Sequence[int], receive: Sequence[int]
) -> NDArray[Any]:
    """Exchange values as bytes, because torch does not support every NumPy dtype."""
    width = values.dtype.itemsize
    sent = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).reshape(-1, width))
    received = all_to_all_rows(communicator, sent, send, receive)
    return received.numpy().reshape(-1).view(values.dtype)


def _sample_bytes(rows: DatasetRows, global_batch: _GlobalBatch) -> NDArray[np.int64]:
    """Return the (B,) number of bytes of each sample in the exchange, ids included."""
    fixed = rows.indices.dtype.itemsize + sum(values.dtype.itemsize for values in rows.scalars.values())
    widths = np.array([rows.lists[name][0].dtype.itemsize for name in sorted(rows.lists)], dtype=np.int64)
    total: NDArray[np.int64] = fixed + global_batch.list_lengths @ widths
    return total


class BalancedPartitioner(SamplePartitioner):
    """Sample partitioner of mode `read`: a rank reads the samples that it computes."""

    def __init__(self, cfg: BalanceConfig, costs: CostModelHistory, ranks: Communicator, tracer: Tracer):
        super().__init__(ranks.rank, ranks.size)
        self._cfg = cfg
        self._costs = costs
        self._ranks = ranks
        self._tracer = tracer

    def assign_samples(self, position: BatchPosition, tokens: NDArray[np.int64]) -> RankSamples:
        cfg = self._cfg_at(position)
        with self._span("train.data.balance"):
            groups = balance(cfg, tokens, self._ranks.size)
        cost = cfg.known_cost
        metrics = compute_balance_metrics(groups, tokens, cost.sample_costs(tokens), step_cost=cost.step)
        return RankSamples(groups[self._ranks.rank], _metrics_by_name(metrics, moved_bytes=0))

    def costs(self, position: BatchPosition, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._costs.at(position).sample_costs(tokens)

    def micro_batches(
        self, position: BatchPosition, tokens: NDArray[np.int64], num_micro_batches: int
    ) -> list[NDArray[np.int64]]:
        if self._cfg.policy == "fixed" or num_micro_batches == 1:
            return super().micro_batches(position, tokens, num_micro_batches)
        return micro_partition(self.costs(position, tokens), num_micro_batches)

    def _cfg_at(self, position: BatchPosition) -> BalanceConfig:
        cost, tuning = self._costs.cost_and_tuning_at(position)
        return replace(self._cfg, cost=cost, power_tuning=tuning)

    def _span(self, name: str) -> OpenSpan:
        return self._tracer.span(name, kind="other", lane=threading.current_thread().name)


class ExchangingPartitioner(BalancedPartitioner):
    """Sample partitioner of mode `exchange`: a rank reads a contiguous part, and samples are exchanged."""

    exchanges_samples = True

    def assign_samples(self, position: BatchPosition, tokens: NDArray[np.int64]) -> RankSamples:
        return SamplePartitioner.assign_samples(self, position, tokens)

    def exchange_samples(
        self, position: BatchPosition, share: RankSamples, rows: DatasetRows, tokens: NDArray[np.int64]
    ) -> tuple[RankSamples, DatasetRows]:
        with self._span("train.data.exchange_samples") as span:
            exchanged = exchange_samples(
                self._ranks, self._cfg_at(position), rows, tokens[share.indices], tracer=self._tracer
            )
            span.bytes = exchanged.moved_bytes
        return RankSamples(
            exchanged.indices, _metrics_by_name(exchanged.metrics, exchanged.moved_bytes)
        ), exchanged.rows


def make_partitioner(
    cfg: BalanceConfig, costs: CostModelHistory, ranks: Communicator, tracer: Tracer
) -> SamplePartitioner:
    """Create the sample partitioner of the configured mode; `ranks` is the communicator that carries samples."""
    cls = ExchangingPartitioner if cfg.mode == "exchange" else BalancedPartitioner
    return cls(cfg, costs, ranks, tracer)


def _metrics_by_name(metrics: BalanceMetrics, moved_bytes: int) -> dict[str, float]:
    return {
        "predicted_imbalance": metrics.imbalance,
        "max_token_gap": metrics.max_token_gap,
        "moved_bytes": moved_bytes,
    }
