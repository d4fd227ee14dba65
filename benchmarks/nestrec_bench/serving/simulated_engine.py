"""Simulated device with the batch times of a measured device, for engines in simulated time.

    seconds of a batch   step + history * token + pairs of history * pair
                              + candidates * candidate + pairs of candidates * candidate_pair

The scheduler, trigger, caches and cost estimates of an engine are real. Their decisions can therefore be examined for a
device that is not available, with the same result every time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nestrec.base.clock import Clock
from nestrec.base.errors import UserError
from nestrec.serving.core.cost_model import work_of
from nestrec.serving.engine.reference_runner import BatchItem, BatchItemScores, InFlightBatch
from nestrec.serving.kv_cache.kv_page_pool import pool_for
from nestrec.serving.model.model_adapter import ModelAdapter

_SWEEPS = 2000
Extent = tuple[int, int, int]
"""Number of cached tokens, of new history tokens, and of candidates."""


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Cost coefficients of a device in milliseconds.

    They are the cost per batch, history token, pair of history tokens, candidate, and pair with a candidate.
    """

    values: tuple[float, float, float, float, float]

    @staticmethod
    def fit(measured: Sequence[tuple[Extent, float]]) -> "DeviceCosts":
        """Fit non-negative costs to the milliseconds of batches of one request, by least squares of relative errors."""
        rows = np.array([_features([extent]) for extent, _ in measured]) / np.array([[ms] for _, ms in measured])
        scale = np.maximum(rows.max(0), 1e-30)
        gram, moment = (rows / scale).T @ (rows / scale), (rows / scale).sum(0)
        values = np.zeros(len(scale))
        for _ in range(_SWEEPS):
            for i in range(len(values)):
                others = gram[i] @ values - gram[i, i] * values[i]
                values[i] = max(0.0, (moment[i] - others) / gram[i, i]) if gram[i, i] else 0.0
        step, token, pair, candidate, candidate_pair = (values / scale).tolist()
        return DeviceCosts((step, token, pair, candidate, candidate_pair))

    def milliseconds(self, extents: Sequence[Extent]) -> float:
        """Return the milliseconds of a batch."""
        return float(np.dot(self.values, _features(extents)))


def costs_of_rows(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[DeviceCosts, float]:
    """Fit the costs to the rows that `nestrec bench engine` wrote for a model.

    Returns:
        The costs, and the largest relative error of the fit.
    """
    measured = [
        (_extent(row), float(row["ms"])) for row in rows if row.get("model") == model and row.get("step") in _EXTENTS
    ]
    if not measured:
        known = sorted({str(row.get("model")) for row in rows})
        problem = "the file of device costs does not contain this model"
        raise UserError(problem, option="costs_of_model", value=model, remedy=f"choose from: {', '.join(known)}")
    costs = DeviceCosts.fit(measured)
    return costs, max(abs(costs.milliseconds([extent]) / ms - 1) for extent, ms in measured)


class SimulatedRunner:
    """Batch runner that simulates the time of batches, which run in order, with two in flight, as on a GPU."""

    depth: int = 2
    warm_events: int = 4096
    row_step: int = 1
    spins: bool = False

    def __init__(
        self,
        adapter: ModelAdapter,
        costs: DeviceCosts,
        clock: Clock,
        *,
        cache_bytes: int,
        page_tokens: int,
        host_ms: float,
    ):
        """Create a runner.

        Args:
            adapter: Adapter of the model, which determines the size of prefixes.
            costs: Costs of the device.
            clock: Simulated clock.
            cache_bytes: Size of the KV cache.
            page_tokens: Number of tokens per page.
            host_ms: Milliseconds between the scheduling of a batch and its launch.
        """
        self.adapter = adapter
        self._costs = costs
        self._clock = clock
        self._host_s = host_ms / 1e3
        self._busy_until_s = -math.inf
        meta = torch.device("meta")  # no memory is allocated for the pages
        self.pool = pool_for(adapter.servable, cache_bytes=cache_bytes, page_tokens=page_tokens, device=meta)

    def launch(self, items: Sequence[BatchItem]) -> InFlightBatch:
        self._clock.sleep(self._host_s)
        seconds = self._costs.milliseconds([item.extent for item in items]) / 1e3
        self._busy_until_s = end_s = max(self._busy_until_s, self._clock.now_s()) + seconds
        outputs = len(self.adapter.outputs)
        scored = [
            BatchItemScores(item.candidates.items, np.zeros((item.num_candidates, outputs), np.float32))
            if item.candidates is not None
            else None
            for item in items
        ]

        def wait() -> tuple[list[BatchItemScores | None], float]:
            self._clock.sleep(max(0.0, end_s - self._clock.now_s()))
            return scored, seconds

        return InFlightBatch(wait, lambda: self._clock.now_s() >= end_s)

    def weights_changed(self) -> None:
        """Do nothing, because a simulated device does not have weights."""


def _features(extents: Sequence[Extent]) -> tuple[float, float, float, float, float]:
    history = pairs = candidates = candidate_pairs = 0
    for prefix, new, num_candidates in extents:
        history += new
        candidates += num_candidates
        history_pairs = work_of(prefix, new, 0)[1]
        pairs += history_pairs
        candidate_pairs += work_of(prefix, new, num_candidates)[1] - history_pairs
    return 1.0, history, pairs, candidates, candidate_pairs


_EXTENTS = {"prefix": (False, False), "rank": (True, True), "full": (False, True)}
"""Step of `nestrec bench engine` to whether the history is cached, and whether candidates are ranked."""


def _extent(row: Mapping[str, Any]) -> Extent:
    is_cached, ranks = _EXTENTS[row["step"]]
    tokens = int(row["tokens"])
    return (tokens, 0, int(row["candidates"])) if is_cached else (0, tokens, int(row["candidates"]) if ranks else 0)
