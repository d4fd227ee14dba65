"""Balance policies by name, and the partition of a global batch or of a rank's micro-batches.

A policy maps (cost of each sample, number of ranks) to the indices of each rank's samples. Every sample occurs exactly
once, in increasing index order within a rank, and no rank has a higher load than the most loaded rank of `fixed`. A
policy is a pure function, so every rank computes the same partition from the same lengths. Ranks may be empty.

The same policies partition the samples of a rank into micro-batches of nearly equal cost for the frozen window. A rank
computes its j-th micro-batch while the all-to-alls of the next one run, so a window takes the sum over j of the most
expensive j-th micro-batch. If long samples prevent equal micro-batches, it helps if all ranks have their expensive ones
at the same j; therefore they are sorted by decreasing cost.
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
from nestrec.data.batch_order import contiguous_bounds


class Policy(Protocol):
    """Function that partitions samples over ranks."""

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
"""Policies whose sample counts per rank differ by at most one."""


@config
class BalanceConfig:
    """Options for partitioning the samples of a global batch over ranks; the same on all ranks."""

    policy: Annotated[str, OneOf(POLICIES)] = "fixed"
    """Balance policy: `fixed` assigns equal sample counts to all ranks; the other policies balance by cost."""
    cost: CostModel | None = None
    """Cost model of a sample until it is fitted (balance.cost.token, .token_squared, .candidate, .step); None: the
    FLOPs of the model, or the number of tokens if the task does not declare them.
    """
    mode: Literal["read", "exchange"] = "read"
    """How a rank gets its samples: `read` reads the samples that it computes; `exchange` reads a contiguous part of the
    batch, and the ranks exchange samples.
    """
    fit_every_steps: Count | None = None
    """Interval in steps at which the cost model is fitted to measured times, at the next report; None keeps `cost`."""
    power_tuning: PowerTuning | None = None
    """Initial exponent and shares of the ranks for the `power` policy; None: exponent from the cost model, equal
    shares.
    """
    tune_every_steps: Count | None = None
    """Interval in steps at which the `power` policy tunes its exponent and shares to measured times, at the next report
    (FreeScale's AutoTune); None keeps them.
    """
    replay_changes: tuple[CostChange, ...] = ()
    """Logged changes of cost model and tuning of an earlier run, applied at the same batches; disables fitting and
    tuning.
    """

    def __post_init__(self) -> None:
        for name in ("power_tuning", "tune_every_steps"):
            if self.policy != "power" and getattr(self, name) is not None:
                raise UserError(
                    f"the option requires the power policy, not {self.policy}",
                    option=f"balance.{name}",
                    value=getattr(self, name),
                    remedy=f"set --balance.policy=power, or remove --balance.{name}",
                )

    @property
    def known_cost(self) -> CostModel:
        """Configured cost model, or the number of tokens."""
        return self.cost or TOKENS


def partition(
    policy: str,
    cost: NDArray[np.float64],
    num_ranks: int,
    *,
    lengths: NDArray[Any] | None = None,
    tuning: PowerTuning | None = None,
) -> Groups:
    """Return the samples of each rank under a policy, or those of `fixed` if its most loaded rank has a lower load.

    Args:
        policy: Name of the policy.
        cost: (B,) cost of each sample.
        num_ranks: Number of ranks.
        lengths: (B,) number of tokens of each sample.
        tuning: Tuning of `power`. It is based on measured times, so the result is not compared with `fixed` by the
            cost model.
    """
    assert num_ranks >= 1
    cost = np.array(cost, dtype=np.float64)  # contiguous float64, so that Numba compiles the loops only once
    if tuning is not None:
        assert policy == "power"
        return power(cost, num_ranks, lengths=lengths, tuning=tuning)
    groups = POLICIES[policy](cost, num_ranks, lengths=lengths)
    counts = np.diff(contiguous_bounds(cost.size, num_ranks))
    baseline = np.bincount(np.repeat(np.arange(num_ranks), counts), weights=cost, minlength=num_ranks)
    return groups if loads_of(cost, groups).max() <= baseline.max() else fixed(cost, num_ranks)


def balance(
    cfg: BalanceConfig, lengths: NDArray[Any], num_ranks: int, *, candidates: NDArray[Any] | None = None
) -> Groups:
    """Return the indices into the global batch of each rank's samples.

    A reader that can read any sample needs no exchange: it reads `samples[balance(cfg, tokens, num_ranks)[rank]]`.

    Args:
        cfg: Balance options.
        lengths: (B,) number of tokens of each sample.
        num_ranks: Number of ranks.
        candidates: (B,) number of candidates of each sample.
    """
    cost = cfg.known_cost.sample_costs(lengths, candidates)
    return partition(cfg.policy, cost, num_ranks, lengths=lengths, tuning=cfg.power_tuning)


def micro_partition(cost: NDArray[np.float64], num_micro_batches: int) -> Groups:
    """Return the indices into a rank's samples for each micro-batch.

    Micro-batches are sorted by decreasing cost, ties by index; some may be empty.
    """
    groups = partition("refined", cost, num_micro_batches)
    order = np.argsort(-loads_of(cost, groups), kind="stable")
    return [groups[i] for i in order]


def window_imbalance(costs: NDArray[np.float64]) -> float:
    """Return the fraction of a frozen window that ranks wait, from the (R, N) costs of their micro-batches."""
    window = float(costs.max(axis=0).sum())
    return 1.0 - float(costs.sum(axis=1).mean()) / window if window > 0 else 0.0
