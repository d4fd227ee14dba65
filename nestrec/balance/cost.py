"""Cost model of a sample: given or fitted to measured step times, and its changes during a run.

What a sample costs: a * L + b * L^2 + c * candidates, given or fitted to measured step times.

By rule the coefficients are one value that all ranks agree on, changed only at a logged step and saved in the
checkpoint: `to_plain` and `from_plain` of `nestrec.base.config` carry a `CostModel` through JSON unchanged.

Which cost model and which shares deal which batch: given at the start, changed only at logged steps, and the same
when replayed.

Cost coefficients and shares of ranks out of measured compute times.

Coefficients are changed only where that explains the times clearly better, shares where times differ.

Balanced ranks have nearly equal loads, from which nothing can be learnt; a model that is wrong leaves them unequal, and
that shows by how much. So a new fit replaces the present model only if it leaves noticeably less unexplained.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.simple_policies import PowerTuning, equal_shares, slope, tuned
from nestrec.base.config import config
from nestrec.base.config_values import NonNegative
from nestrec.base.errors import UserError
from nestrec.data.batch_order import BatchPosition


@config
class CostModel:
    """Coefficients of the cost of a sample. The unit is free (seconds where fitted); only ratios decide a partition."""

    token: NonNegative = 1.0
    """cost of a token: projections, gates, embedding"""
    token_squared: NonNegative = 0.0
    """cost of a token squared: attention; 0 counts tokens only"""
    candidate: NonNegative = 0.0
    """cost of a candidate to be ranked"""
    step: NonNegative = 0.0
    """cost of a step whatever its samples are; the same on every rank, so no partition depends on it"""

    def __post_init__(self) -> None:
        if self.token + self.token_squared + self.candidate == 0:
            raise UserError("every sample would be free", option="cost", value=0.0, remedy="give token a positive cost")

    def of(self, lengths: NDArray[Any], candidates: NDArray[Any] | None = None) -> NDArray[np.float64]:
        """(B,) cost of each sample, from (B,) tokens and (B,) candidates."""
        tokens = lengths.astype(np.float64)
        cost = self.token * tokens + self.token_squared * (tokens * tokens)
        return cost if candidates is None else cost + self.candidate * candidates.astype(np.float64)


TOKENS = CostModel()
"""Tokens only."""


def hstu_cost(*, dim: int, num_heads: int, head_dim: int, num_layers: int) -> CostModel:
    """FLOPs of a training step of HSTU, forward and backward, for each token and token squared.

    A layer forward, with width w = heads * head_dim: 2 * dim * 4w FLOPs a token for U, V, Q, K and 2 * w * dim for the
    output; 2 * 2w a pair of tokens for the scores and the weighted sum, and causality leaves half of the L^2 pairs. The
    backward pass doubles both. With w = dim the ratio of the two coefficients is 1 / (5 * dim).
    """
    width = num_heads * head_dim
    passes = 3.0 * num_layers
    return CostModel(token=passes * 10.0 * dim * width, token_squared=passes * 2.0 * width)


def fit_cost(
    step_times_s: Sequence[float] | NDArray[np.float64],
    lengths: Sequence[NDArray[Any]],
    candidates: Sequence[NDArray[Any]] | None = None,
) -> CostModel:
    """Coefficients that explain measured compute times best in the least-squares sense, none of them negative.

    One entry for each (rank, step): its time, the tokens of its samples, and their candidates. Give the same
    measurements on every rank (gather them first), or the ranks will not agree.
    """
    asked = None if candidates is None else _sums(candidates, 1)
    return fit_sums(np.asarray(step_times_s, dtype=np.float64), _sums(lengths, 1), _sums(lengths, 2), asked)


def fit_sums(
    times: NDArray[np.float64],
    tokens: NDArray[np.float64],
    tokens_squared: NDArray[np.float64],
    candidates: NDArray[np.float64] | None = None,
) -> CostModel:
    """`fit_cost` from sums: all that a rank needs to tell of a step. One entry for each (rank, step)."""
    columns = [np.ones(len(times)), tokens, tokens_squared]
    if candidates is not None:
        columns.append(candidates)
    step, token, token_squared, *rest = non_negative_least_squares(np.stack(columns, axis=1), times)
    if token + token_squared + sum(rest) == 0:
        problem = "the times do not grow with the lengths"
        raise UserError(
            problem, option="step_times_s", value=len(times), remedy="measure more steps of different lengths"
        )
    return CostModel(token=token, token_squared=token_squared, candidate=rest[0] if rest else 0.0, step=step)


def _sums(parts: Sequence[NDArray[Any]], power: int) -> NDArray[np.float64]:
    return np.array([(part.astype(np.float64) ** power).sum() for part in parts])


def non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """The best of the least-squares solutions over all subsets of the few columns, if it is not negative."""
    scale = np.maximum(np.abs(matrix).max(axis=0, initial=0.0), np.finfo(np.float64).tiny)
    scaled = matrix / scale
    num_columns = matrix.shape[1]
    best = np.zeros(num_columns)
    best_error = float(target @ target)
    for size in range(1, num_columns + 1):
        for subset in itertools.combinations(range(num_columns), size):
            found = np.linalg.lstsq(scaled[:, subset], target, rcond=None)[0]
            error = float(((scaled[:, subset] @ found - target) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best = np.zeros(num_columns)
                best_error = error
                best[list(subset)] = found
    return [float(value) for value in best / scale]


@config
class CostChange:
    """A decision of a run, logged and saved in its checkpoints."""

    step: int
    """steps made when it was taken"""
    first: BatchPosition
    """the first batch that is dealt by it; those before it may have been dealt already"""
    cost: CostModel
    """the cost model from then on"""
    tuning: PowerTuning | None = None
    """what `power` deals by from then on; none: as the cost model says, in equal shares"""


class CostModelHistory:
    """The cost model and tuning of each batch. Data threads ask for them while the loop adds changes."""

    def __init__(self, cost: CostModel, changes: Iterable[CostChange] = (), *, tuning: PowerTuning | None = None):
        self._cost = cost
        self._tuning = tuning
        self._changes = tuple(changes)
        self._last_asked: BatchPosition | None = None

    @property
    def changes(self) -> Sequence[CostChange]:
        """All changes so far, in order."""
        return self._changes

    @property
    def newest(self) -> CostModel:
        """The model of the batches that have not been asked for."""
        return self._changes[-1].cost if self._changes else self._cost

    @property
    def newest_tuning(self) -> PowerTuning | None:
        """Their tuning."""
        return self._changes[-1].tuning if self._changes else self._tuning

    def at(self, position: BatchPosition) -> CostModel:
        """The model that deals the batch of this position."""
        return self.both_at(position)[0]

    def both_at(self, position: BatchPosition) -> tuple[CostModel, PowerTuning | None]:
        """The model and the tuning that deal the batch of this position."""
        self._last_asked = position if self._last_asked is None else max(self._last_asked, position)
        found = self._cost, self._tuning
        for change in self._changes:
            if change.first <= position:
                found = change.cost, change.tuning
        return found

    def is_newest(self, position: BatchPosition) -> bool:
        """Whether the batch of this position was dealt after the last change."""
        return not self._changes or self._changes[-1].first <= position

    def restore(self, changes: Iterable[CostChange]) -> None:
        """Go on where a run stood that had made these changes."""
        self._changes = tuple(changes)
        self._last_asked = None

    def add(self, change: CostChange) -> None:
        """A change applies to batches that no rank has dealt yet, or ranks would not agree on them."""
        assert self._last_asked is None or change.first > self._last_asked
        assert not self._changes or change.first > self._changes[-1].first
        self._changes = (*self._changes, change)


LEAST_GAIN = 0.1
"""A new model must leave at least this part less of the squared error of the present one."""
LEAST_ERROR = 0.01
"""A model whose error is below this part of the mean time is left alone."""
LEAST_MEASUREMENTS = 16
"""Fewer (rank, step) pairs say too little."""
LEAST_STEPS = 8
"""Shares are changed by the times of no fewer steps that were dealt by the present ones."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a rank did in a step."""

    compute_s: float
    """time of its forward and backward passes"""
    tokens: float
    """of its samples"""
    tokens_squared: float
    """sum over its samples of the square of their tokens"""


def refitted(current: CostModel, measured: Sequence[Measurement]) -> CostModel | None:
    """A model that explains the measurements better than `current`, or none. The same on ranks given the same."""
    used = [m for m in measured if m.tokens > 0]
    if len(used) < LEAST_MEASUREMENTS:
        return None
    times, tokens, squared = (np.array(column) for column in zip(*[_columns(m) for m in used], strict=True))
    try:
        candidate = fit_sums(times, tokens, squared)
    except UserError:
        return None
    now = _unexplained(times, current.token * tokens + current.token_squared * squared)
    if now < len(times) * (LEAST_ERROR * times.mean()) ** 2:
        return None
    then = _unexplained(times, candidate.token * tokens + candidate.token_squared * squared)
    return candidate if then < (1.0 - LEAST_GAIN) * now else None


@dataclass(slots=True)
class RankLoads:
    """What ranks did since their shares were last changed, the same on every rank."""

    times_s: NDArray[np.float64]
    """(R,) seconds of computing"""
    tokens: NDArray[np.float64]
    """(R,)"""
    samples: NDArray[np.float64]
    """(R,)"""
    num_steps: int = 0

    @staticmethod
    def nothing(num_ranks: int) -> "RankLoads":
        return RankLoads(np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks))

    def add(self, times_s: NDArray[np.float64], tokens: NDArray[np.float64], samples: NDArray[np.float64]) -> None:
        """(R,) of one step more."""
        self.times_s, self.tokens, self.samples = self.times_s + times_s, self.tokens + tokens, self.samples + samples
        self.num_steps += 1

    @property
    def mean_lengths(self) -> NDArray[np.float64]:
        """(R,) tokens of a sample; 0 where a rank had none."""
        lengths: NDArray[np.float64] = self.tokens / np.maximum(self.samples, 1.0)
        return lengths


def retuned(current: PowerTuning | None, cost: CostModel, loads: RankLoads) -> PowerTuning | None:
    """Shares by which the ranks would have taken more nearly the same time, or none where they nearly did."""
    mean = float(loads.times_s.mean())
    if mean <= 0 or loads.times_s.max() - mean < LEAST_ERROR * mean:
        return None
    sizes = loads.mean_lengths
    if current is None:
        current = PowerTuning(alpha=slope(sizes, cost.of(sizes)), shares=equal_shares(len(sizes)))
    return tuned(current, loads.times_s.tolist(), sizes.tolist())


def _columns(measurement: Measurement) -> tuple[float, float, float]:
    return measurement.compute_s, measurement.tokens, measurement.tokens_squared


def _unexplained(times: NDArray[np.float64], load: NDArray[np.float64]) -> float:
    """Squared error of the best step + scale * load: only the ratios of a cost model matter."""
    matrix = np.stack([np.ones_like(load), load / load.max()], axis=1)
    found = np.linalg.lstsq(matrix, times, rcond=None)[0]
    return float(((matrix @ found - times) ** 2).sum())
