"""Balancing as the data stages see it: who reads and who computes each sample of a global batch.

`read`: every rank can read any sample, so it reads what the policy gives it. `exchange`: a rank reads its contiguous
part of the batch, and samples are traded. Both give every rank the same samples. Micro-batches inside a rank are of
near equal cost under every policy but `fixed`, the baseline that knows nothing of lengths.
"""

import threading
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.changes import CostSchedule
from nestrec.balance.exchange import exchange_samples
from nestrec.balance.metrics import Evenness, evenness
from nestrec.balance.micro_batches import micro_partition
from nestrec.balance.policies import BalanceConfig, balance
from nestrec.data.dataset import Rows
from nestrec.data.dealing import Dealer, Share
from nestrec.data.order import Position
from nestrec.distributed.topology import Communicator
from nestrec.trace import OpenSpan, Tracer


class BalancedDealer(Dealer):
    """Mode `read`."""

    def __init__(self, cfg: BalanceConfig, costs: CostSchedule, ranks: Communicator, tracer: Tracer):
        super().__init__(ranks.rank, ranks.size)
        self._cfg, self._costs, self._ranks, self._tracer = cfg, costs, ranks, tracer

    def share(self, position: Position, tokens: NDArray[np.int64]) -> Share:
        cfg = self._cfg_at(position)
        with self._span("train.data.partition"):
            groups = balance(cfg, tokens, self._ranks.size)
        cost = cfg.known_cost
        found = evenness(groups, tokens, cost.of(tokens), step_cost=cost.step)
        return Share(groups[self._ranks.rank], _figures(found, moved_bytes=0))

    def costs(self, position: Position, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._costs.at(position).of(tokens)

    def micro_batches(
        self, position: Position, tokens: NDArray[np.int64], num_micro_batches: int
    ) -> list[NDArray[np.int64]]:
        if self._cfg.policy == "fixed" or num_micro_batches == 1:
            return super().micro_batches(position, tokens, num_micro_batches)
        return micro_partition(self.costs(position, tokens), num_micro_batches)

    def _cfg_at(self, position: Position) -> BalanceConfig:
        cost, tuning = self._costs.both_at(position)
        return replace(self._cfg, cost=cost, tuning=tuning)

    def _span(self, name: str) -> OpenSpan:
        return self._tracer.span(name, kind="other", lane=threading.current_thread().name)


class TradingDealer(BalancedDealer):
    """Mode `exchange`."""

    trades = True

    def share(self, position: Position, tokens: NDArray[np.int64]) -> Share:
        return Dealer.share(self, position, tokens)

    def trade(self, position: Position, share: Share, rows: Rows, tokens: NDArray[np.int64]) -> tuple[Share, Rows]:
        with self._span("train.data.exchange") as span:
            traded = exchange_samples(
                self._ranks, self._cfg_at(position), rows, tokens[share.places], tracer=self._tracer
            )
            span.bytes = traded.moved_bytes
        return Share(traded.places, _figures(traded.evenness, traded.moved_bytes)), traded.rows


def make_dealer(cfg: BalanceConfig, costs: CostSchedule, ranks: Communicator, tracer: Tracer) -> Dealer:
    """The dealer of a mode; `ranks` is the communicator that carries samples."""
    kind = TradingDealer if cfg.mode == "exchange" else BalancedDealer
    return kind(cfg, costs, ranks, tracer)


def _figures(found: Evenness, moved_bytes: int) -> dict[str, float]:
    return {
        "predicted_imbalance": found.imbalance,
        "max_token_gap": found.max_token_gap,
        "moved_bytes": moved_bytes,
    }
