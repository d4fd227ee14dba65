"""A device that computes nothing and takes as long as one that was measured: for engines in simulated time.

    seconds of a batch   step + history * token + pairs of history * pair
                              + candidates * candidate + pairs of candidates * candidate_pair

Planner, trigger, caches and estimates of an engine are its own. So what they decide can be looked at for a device that
is not there, and again and again with the same result.
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
"""(prefix, new history, candidates)"""


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Milliseconds: of a batch, of a token of a history, of a pair of them, of a candidate, of a pair with one."""

    values: tuple[float, float, float, float, float]

    @staticmethod
    def fitted(measured: Sequence[tuple[Extent, float]]) -> "DeviceCosts":
        """To milliseconds of batches of one part each: least squares of the relative errors, no cost below zero."""
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
        """Of a batch."""
        return float(np.dot(self.values, _features(extents)))


def costs_of_rows(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[DeviceCosts, float]:
    """From what `nestrec bench engine` has written of a model; and the largest relative error."""
    measured = [
        (_extent(row), float(row["ms"])) for row in rows if row.get("model") == model and row.get("step") in _EXTENTS
    ]
    if not measured:
        known = sorted({str(row.get("model")) for row in rows})
        raise UserError("is not in the file of device costs", option="costs_of_model", value=model,
                        remedy=f"name one of {', '.join(known)}")  # fmt: skip
    costs = DeviceCosts.fitted(measured)
    return costs, max(abs(costs.milliseconds([extent]) / ms - 1) for extent, ms in measured)


class SimulatedRunner:
    """Batches one after the other, and two on their way at once, as on a GPU."""

    depth: int = 2
    warm_events: int = 4096
    row_step: int = 1
    spins: bool = False

    def __init__(
        self,
        form: ModelAdapter,
        costs: DeviceCosts,
        clock: Clock,
        *,
        cache_bytes: int,
        page_tokens: int,
        host_ms: float,
    ):
        """form: the model's; a prefix has its bytes. host_ms: from the plan of a batch until it is on its way."""
        self.form = form
        self._costs = costs
        self._clock = clock
        self._host_s = host_ms / 1e3
        self._busy_until_s = -math.inf
        meta = torch.device("meta")  # no memory is allocated for the pages
        self.pool = pool_for(form.servable, cache_bytes=cache_bytes, page_tokens=page_tokens, device=meta)

    def launch(self, parts: Sequence[BatchItem]) -> InFlightBatch:
        self._clock.sleep(self._host_s)
        seconds = self._costs.milliseconds([part.extent for part in parts]) / 1e3
        self._busy_until_s = end_s = max(self._busy_until_s, self._clock.now_s()) + seconds
        outputs = len(self.form.outputs)
        scored = [
            BatchItemScores(part.candidates.items, np.zeros((part.num_candidates, outputs), np.float32))
            if part.candidates is not None
            else None
            for part in parts
        ]

        def wait() -> tuple[list[BatchItemScores | None], float]:
            self._clock.sleep(max(0.0, end_s - self._clock.now_s()))
            return scored, seconds

        return InFlightBatch(wait, lambda: self._clock.now_s() >= end_s)

    def weights_changed(self) -> None:
        """It has none."""


def _features(extents: Sequence[Extent]) -> tuple[float, float, float, float, float]:
    history = pairs = candidates = candidate_pairs = 0
    for prefix, new, asked in extents:
        history, candidates = history + new, candidates + asked
        of_history = work_of(prefix, new, 0)[1]
        pairs += of_history
        candidate_pairs += work_of(prefix, new, asked)[1] - of_history
    return 1.0, history, pairs, candidates, candidate_pairs


_EXTENTS = {"prefix": (False, False), "rank": (True, True), "full": (False, True)}
"""steps of `bench engine`: is the history there already, are candidates ranked"""


def _extent(row: Mapping[str, Any]) -> Extent:
    is_kept, ranks = _EXTENTS[row["step"]]
    tokens = int(row["tokens"])
    return (tokens, 0, int(row["candidates"])) if is_kept else (0, tokens, int(row["candidates"]) if ranks else 0)
