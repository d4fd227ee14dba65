"""Partitions each global batch over ranks and exchanges the samples between them.

Balancing as the data stages see it: who reads and who computes each sample of a global batch.

`read`: every rank can read any sample, so it reads what the policy gives it. `exchange`: a rank reads its contiguous
part of the batch, and samples are traded. Both give every rank the same samples. Micro-batches inside a rank are of
near equal cost under every policy but `fixed`, the baseline that knows nothing of lengths.

Samples moved between ranks so that each has equal work, for readers that read only their own part of a global batch.

Every rank has read some samples of the global batch. Their ids, tokens and column lengths are gathered, each rank
computes the same partition, and one all-to-all a column moves the samples. All of it runs on the host over a
communicator that the caller gives, so it can belong to the data stages of an earlier step. The global batch is the
ranks' samples in rank order; where each rank reads a contiguous share of it, that is its own order, and balanced
ranks hold the same samples as they would with a reader of any sample.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.balance.balance_metrics import BalanceMetrics, evenness, moved_bytes
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
    """A rank's samples after the exchange, and what it was worth (the same figures on every rank)."""

    places: NDArray[np.int64]
    """indices of this rank's samples in the global batch"""
    rows: DatasetRows
    """in the order of the global batch"""
    lengths: NDArray[np.int64]
    """tokens of each sample of `rows`"""
    evenness: BalanceMetrics
    """predicted by the cost model"""
    moved_bytes: int
    """bytes of samples that changed their rank, over all ranks"""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What every rank knows of every sample of the global batch."""

    home_rank: NDArray[np.int64]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    candidates: NDArray[np.int64]
    list_lengths: NDArray[np.int64]
    """(B, list columns)"""


def exchange_samples(
    communicator: Communicator,
    cfg: BalanceConfig,
    rows: DatasetRows,
    lengths: NDArray[Any],
    candidates: NDArray[Any] | None = None,
    *,
    tracer: Tracer = _NO_TRACE,
) -> SampleExchange:
    """Trade `rows`, of which sample b has `lengths[b]` tokens, for the samples that the policy gives to this rank.

    Every rank calls it with the same columns and the same `cfg`; a rank may come with no samples and leave with none.
    """
    every = _gather(communicator, rows, lengths, candidates)
    with tracer.span("train.data.partition", lane=threading.current_thread().name):
        groups = balance(cfg, every.lengths, communicator.size, candidates=every.candidates)
    mine = groups[communicator.rank]
    cost = cfg.known_cost
    received = _move(communicator, rows, every, groups)
    assert np.array_equal(received.indices, every.ids[mine]), "ranks disagree on the partition"
    return SampleExchange(
        places=mine,
        rows=received,
        lengths=every.lengths[mine],
        evenness=evenness(groups, every.lengths, cost.of(every.lengths, every.candidates), step_cost=cost.step),
        moved_bytes=moved_bytes(groups, every.home_rank, _sample_bytes(rows, every)),
    )


def _gather(
    communicator: Communicator, rows: DatasetRows, lengths: NDArray[Any], candidates: NDArray[Any] | None
) -> _Gathered:
    columns: list[NDArray[Any]] = [rows.indices, lengths, np.zeros(rows.num_rows) if candidates is None else candidates]
    columns += [np.diff(rows.lists[name][1]) for name in sorted(rows.lists)]
    mine = torch.from_numpy(np.stack(columns, axis=1).astype(np.int64))
    counts = [int(n) for n in all_gather_equal(communicator, torch.tensor([len(mine)]))]
    padded = torch.zeros((max(counts), mine.shape[1]), dtype=torch.int64)
    padded[: len(mine)] = mine
    parts = all_gather_equal(communicator, padded)
    table = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).numpy()
    home_rank = np.repeat(np.arange(len(counts)), counts)
    return _Gathered(home_rank, table[:, 0], table[:, 1], table[:, 2], table[:, 3:])


def _move(communicator: Communicator, rows: DatasetRows, every: _Gathered, groups: Groups) -> DatasetRows:
    """Column by column, in order of name on every rank. Sources come in rank order, which keeps the batch's order."""
    target = assignment_of(groups, every.ids.size)[every.home_rank == communicator.rank]
    by_target = np.argsort(target, kind="stable")
    mine = groups[communicator.rank]
    source = every.home_rank[mine]

    def trade(values: NDArray[Any], sent: NDArray[np.int64], taken: NDArray[np.int64]) -> NDArray[Any]:
        """Values in order of target; `sent` and `taken` are the values of each sample sent and received."""
        send = _totals(target[by_target], sent, communicator.size)
        receive = _totals(source, taken, communicator.size)
        return _all_to_all(communicator, values, send, receive)

    in_order = rows.take(by_target)
    one_each, one_taken = np.ones(rows.num_rows, dtype=np.int64), np.ones(mine.size, dtype=np.int64)
    scalars = {name: trade(in_order.scalars[name], one_each, one_taken) for name in sorted(rows.scalars)}
    lists = {}
    for column, name in enumerate(sorted(rows.lists)):
        values, offsets = in_order.lists[name]
        taken = every.list_lengths[mine, column]
        lists[name] = (trade(values, np.diff(offsets), taken), offsets_of_lengths(taken))
    return DatasetRows(trade(in_order.indices, one_each, one_taken), scalars, lists)


def _totals(rank: NDArray[np.int64], amounts: NDArray[np.int64], num_ranks: int) -> list[int]:
    totals = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(totals, rank, amounts)
    return [int(total) for total in totals]


def _all_to_all(
    communicator: Communicator, values: NDArray[Any], send: Sequence[int], receive: Sequence[int]
) -> NDArray[Any]:
    """As bytes, since torch does not know every numpy type."""
    width = values.dtype.itemsize
    sent = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).reshape(-1, width))
    received = all_to_all_rows(communicator, sent, send, receive)
    return received.numpy().reshape(-1).view(values.dtype)


def _sample_bytes(rows: DatasetRows, every: _Gathered) -> NDArray[np.int64]:
    """(B,) bytes of each sample that the exchange carries, ids included."""
    fixed = rows.indices.dtype.itemsize + sum(values.dtype.itemsize for values in rows.scalars.values())
    widths = np.array([rows.lists[name][0].dtype.itemsize for name in sorted(rows.lists)], dtype=np.int64)
    total: NDArray[np.int64] = fixed + every.list_lengths @ widths
    return total


class BalancedPartitioner(SamplePartitioner):
    """Mode `read`."""

    def __init__(self, cfg: BalanceConfig, costs: CostModelHistory, ranks: Communicator, tracer: Tracer):
        super().__init__(ranks.rank, ranks.size)
        self._cfg = cfg
        self._costs = costs
        self._ranks = ranks
        self._tracer = tracer

    def share(self, position: BatchPosition, tokens: NDArray[np.int64]) -> RankSamples:
        cfg = self._cfg_at(position)
        with self._span("train.data.partition"):
            groups = balance(cfg, tokens, self._ranks.size)
        cost = cfg.known_cost
        found = evenness(groups, tokens, cost.of(tokens), step_cost=cost.step)
        return RankSamples(groups[self._ranks.rank], _figures(found, moved_bytes=0))

    def costs(self, position: BatchPosition, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._costs.at(position).of(tokens)

    def micro_batches(
        self, position: BatchPosition, tokens: NDArray[np.int64], num_micro_batches: int
    ) -> list[NDArray[np.int64]]:
        if self._cfg.policy == "fixed" or num_micro_batches == 1:
            return super().micro_batches(position, tokens, num_micro_batches)
        return micro_partition(self.costs(position, tokens), num_micro_batches)

    def _cfg_at(self, position: BatchPosition) -> BalanceConfig:
        cost, tuning = self._costs.both_at(position)
        return replace(self._cfg, cost=cost, tuning=tuning)

    def _span(self, name: str) -> OpenSpan:
        return self._tracer.span(name, kind="other", lane=threading.current_thread().name)


class ExchangingPartitioner(BalancedPartitioner):
    """Mode `exchange`."""

    trades = True

    def share(self, position: BatchPosition, tokens: NDArray[np.int64]) -> RankSamples:
        return SamplePartitioner.share(self, position, tokens)

    def trade(
        self, position: BatchPosition, share: RankSamples, rows: DatasetRows, tokens: NDArray[np.int64]
    ) -> tuple[RankSamples, DatasetRows]:
        with self._span("train.data.exchange") as span:
            traded = exchange_samples(
                self._ranks, self._cfg_at(position), rows, tokens[share.places], tracer=self._tracer
            )
            span.bytes = traded.moved_bytes
        return RankSamples(traded.places, _figures(traded.evenness, traded.moved_bytes)), traded.rows


def make_dealer(cfg: BalanceConfig, costs: CostModelHistory, ranks: Communicator, tracer: Tracer) -> SamplePartitioner:
    """The dealer of a mode; `ranks` is the communicator that carries samples."""
    kind = ExchangingPartitioner if cfg.mode == "exchange" else BalancedPartitioner
    return kind(cfg, costs, ranks, tracer)


def _figures(found: BalanceMetrics, moved_bytes: int) -> dict[str, float]:
    return {
        "predicted_imbalance": found.imbalance,
        "max_token_gap": found.max_token_gap,
        "moved_bytes": moved_bytes,
    }
