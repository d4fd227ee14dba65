"""The partition functions by name, and the one call that readers and exchanges make.

A policy maps (cost of each sample, number of ranks) to the samples of each rank: every sample exactly once, in
increasing index order inside a rank, no rank loaded more than the most loaded one of `fixed`. It is a pure function,
so every rank computes the same partition from the same lengths; ranks may be empty.

Micro-batches of near equal cost inside a rank, for the frozen window.

Rank r computes its j-th micro-batch while the exchanges of all ranks for the next one run, so a window takes the sum
over j of the costliest j-th micro-batch. Where long samples keep micro-batches from being equal, it helps that the
ranks have their costly ones at the same j: they are in falling order of cost.
"""

from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.cost import TOKENS, CostChange, CostModel
from nestrec.balance.partition_tools import Groups, loads_of
from nestrec.balance.refined import refined
from nestrec.balance.simple_policies import PowerTuning, fixed, greedy, karmarkar_karp, power, token_threshold, zigzag
from nestrec.base.config import config
from nestrec.base.config_values import Count, OneOf
from nestrec.base.errors import UserError
from nestrec.data.batch_order import contiguous_shares


class Policy(Protocol):
    def __call__(self, cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups: ...


POLICIES: dict[str, Policy] = {
    "fixed": fixed,
    "zigzag": zigzag,
    "power": power,
    "token_threshold": token_threshold,
    "greedy": greedy,
    "karmarkar_karp": karmarkar_karp,
    "refined": refined,
}

EQUAL_COUNTS = frozenset({"fixed", "zigzag", "karmarkar_karp"})
"""Policies whose ranks differ by one sample at the most."""


@config
class BalanceConfig:
    """How the samples of a global batch are dealt to the ranks. One value for all ranks."""

    policy: Annotated[str, OneOf(POLICIES)] = "fixed"
    """how samples are dealt to ranks; `fixed` gives each the same number of them, the others look at their cost"""
    cost: CostModel | None = None
    """what a sample costs, until it is fitted (balance.cost.token, .token_squared, .candidate, .step); none: the
    operations of the model, or tokens where the task does not tell them"""
    mode: Literal["read", "exchange"] = "read"
    """read: a rank reads whatever it computes; exchange: it reads its part of the batch, and samples are traded"""
    fit_every_steps: Count | None = None
    """fit the cost to measured times so often, at the next report; none keeps `cost`"""
    tuning: PowerTuning | None = None
    """power: exponent and shares of ranks to begin with; none: as the cost says, in equal shares"""
    tune_every_steps: Count | None = None
    """power: tune exponent and shares to measured times so often, at the next report (FreeScale's AutoTune)"""
    replay: tuple[CostChange, ...] = ()
    """changes of cost and tuning that a run has logged, made again at the same batches; then nothing is fitted"""

    def __post_init__(self) -> None:
        for name in ("tuning", "tune_every_steps"):
            if self.policy != "power" and getattr(self, name) is not None:
                raise UserError(
                    f"the policy {self.policy} has no shares to tune",
                    option=f"balance.{name}",
                    value=getattr(self, name),
                    remedy="take --balance.policy power, or leave it out",
                )

    @property
    def known_cost(self) -> CostModel:
        """The cost that was given, or tokens."""
        return self.cost or TOKENS


def partition(
    policy: str,
    cost: NDArray[np.float64],
    num_ranks: int,
    *,
    lengths: NDArray[Any] | None = None,
    tuning: PowerTuning | None = None,
) -> Groups:
    """The samples of each rank under a policy, or those of `fixed` where its most loaded rank has less to do.

    tuning: of `power`; it was made from measured times, so the cost model is not asked whether it is better.
    """
    assert num_ranks >= 1
    cost = np.array(cost, dtype=np.float64)  # one layout, so that the loops are compiled once
    if tuning is not None:
        assert policy == "power"
        return power(cost, num_ranks, lengths=lengths, tuning=tuning)
    groups = POLICIES[policy](cost, num_ranks, lengths=lengths)
    counts = np.diff(contiguous_shares(cost.size, num_ranks))
    baseline = np.bincount(np.repeat(np.arange(num_ranks), counts), weights=cost, minlength=num_ranks)
    return groups if loads_of(cost, groups).max() <= baseline.max() else fixed(cost, num_ranks)


def balance(
    cfg: BalanceConfig, lengths: NDArray[Any], num_ranks: int, *, candidates: NDArray[Any] | None = None
) -> Groups:
    """For each rank the indices into the global batch, from the (B,) tokens of its samples.

    A reader that can read any sample needs no exchange: it reads `samples[balance(cfg, tokens, num_ranks)[rank]]`.
    """
    cost = cfg.known_cost.of(lengths, candidates)
    return partition(cfg.policy, cost, num_ranks, lengths=lengths, tuning=cfg.tuning)


def micro_partition(cost: NDArray[np.float64], num_micro_batches: int) -> Groups:
    """Indices into a rank's samples for each micro-batch, costliest first, ties by number; some may be empty."""
    groups = partition("refined", cost, num_micro_batches)
    order = np.argsort(-loads_of(cost, groups), kind="stable")
    return [groups[i] for i in order]


def window_imbalance(costs: NDArray[np.float64]) -> float:
    """Part of a frozen window that ranks wait, from (R, N) costs of the micro-batches of each rank."""
    window = float(costs.max(axis=0).sum())
    return 1.0 - float(costs.sum(axis=1).mean()) / window if window > 0 else 0.0
