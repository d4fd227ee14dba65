"""Costs for tests: one number per operation, with or without variation between ranks."""

import numpy as np

from nestrec.planning.simulator.program_replay import Cost

WIRES = {
    "exchange_keys": "shards",
    "exchange_vectors": "shards",
    "exchange_gradients": "shards",
    "all_reduce_replica_gradients": "replicas",
    "average_replicas": "replicas",
    "dense_reduce": "all",
}


class CostTable:
    """Costs in seconds by operation; `spread` varies the compute costs between ranks, deterministically."""

    def __init__(self, seconds: dict[str, float], world: int = 1, spread: float = 0.0) -> None:
        self._seconds = seconds
        self._world = world
        self._spread = spread

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        seconds = self._seconds.get(operation, 0.0)
        if operation in WIRES:
            return Cost(0.0, seconds, WIRES[operation])
        draw = np.random.default_rng([step, micro_batch or 0, len(operation)])
        return Cost(seconds * (1.0 + self._spread * draw.uniform(-1, 1, self._world)))


def typical_costs(micro_batches: int) -> dict[str, float]:
    return {
        "deduplicate": 0.1,
        "exchange_keys": 0.02,
        "build_exchange_plan": 0.05,
        "fetch_rows": 0.3,
        "prefetch_rows": 0.2,
        "exchange_vectors": 0.4 / micro_batches,
        "forward_backward": 1.0 / micro_batches,
        "exchange_gradients": 0.35 / micro_batches,
        "add_gradients": 0.01,
        "all_reduce_replica_gradients": 0.03,
        "update_rows": 0.04,
        "write_back": 0.15,
        "dense_reduce": 0.02,
        "dense_apply": 0.01,
        "train.embedding.intersect": 0.01,
        "train.embedding.copy_shared_rows": 0.005,
    }
