"""Load balancing of samples: cost model, partition policies and the exchange of samples between ranks."""

from nestrec.balance.cost import TOKENS, CostModel, fit_cost, hstu_cost
from nestrec.balance.policies import EQUAL_COUNTS, POLICIES, BalanceConfig, balance, micro_partition, partition

__all__ = [
    "EQUAL_COUNTS",
    "POLICIES",
    "TOKENS",
    "BalanceConfig",
    "CostModel",
    "balance",
    "fit_cost",
    "hstu_cost",
    "micro_partition",
    "partition",
]
