"""Cost model of samples: given or fitted to measured step times, and changed during a run.

The cost of a sample is a * L + b * L^2 + c * candidates, with L tokens. All ranks use the same coefficients, which
change only at a logged step and are saved in checkpoints; `to_plain` and `from_plain` of `nestrec.base.config` convert
a `CostModel` to and from JSON without loss. `CostModelHistory` stores which coefficients and shares partition which
batch, so that a run can be replayed.

Coefficients are refitted only if the new ones explain the measured times clearly better, and shares are tuned only if
the times of the ranks differ. Balanced ranks have nearly equal loads, from which a fit learns nothing; a wrong model
makes the loads unequal, and the inequality shows the size of the error.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.simple_policies import PowerTuning, equal_shares, slope, tune_power
from nestrec.base.config import config
from nestrec.base.config_values import NonNegative
from nestrec.base.errors import UserError
from nestrec.data.batch_order import BatchPosition


@config
class CostModel:
    """Coefficients of the cost of a sample.

    The unit is arbitrary (seconds if fitted): only the ratios of costs determine a partition.
    """

    token: NonNegative = 1.0
    """Cost per token: projections, gates, embeddings."""
    token_squared: NonNegative = 0.0
    """Cost per squared number of tokens: attention. 0 counts tokens only."""
    candidate: NonNegative = 0.0
    """Cost per candidate to rank."""
    step: NonNegative = 0.0
    """Cost of a step that does not depend on its samples. It is the same on every rank, so it does not change
    partitions.
    """

    def __post_init__(self) -> None:
        if self.token + self.token_squared + self.candidate == 0:
            raise UserError(
                "all cost coefficients are 0", option="cost", value=0.0, remedy="set cost.token to a positive value"
            )

    def sample_costs(self, lengths: NDArray[Any], candidates: NDArray[Any] | None = None) -> NDArray[np.float64]:
        """Return the (B,) cost of each sample from its (B,) tokens and (B,) candidates."""
        tokens = lengths.astype(np.float64)
        cost = self.token * tokens + self.token_squared * (tokens * tokens)
        return cost if candidates is None else cost + self.candidate * candidates.astype(np.float64)


TOKENS = CostModel()
"""Cost model that counts tokens only."""


def hstu_cost(*, dim: int, num_heads: int, head_dim: int, num_layers: int) -> CostModel:
    """Return the FLOPs of an HSTU training step (forward and backward) per token and per squared number of tokens.

    With width w = heads * head_dim, the forward pass of a layer takes 2 * dim * 4w FLOPs per token for U, V, Q and K,
    and 2 * w * dim for the output; the scores and the weighted sum take 2 * 2w per pair of tokens, of which causality
    leaves half of L^2. The backward pass takes twice as much as the forward pass. With w = dim the ratio of the two
    coefficients is 1 / (5 * dim).
    """
    width = num_heads * head_dim
    passes = 3.0 * num_layers
    return CostModel(token=passes * 10.0 * dim * width, token_squared=passes * 2.0 * width)


def fit_cost(
    step_times_s: Sequence[float] | NDArray[np.float64],
    lengths: Sequence[NDArray[Any]],
    candidates: Sequence[NDArray[Any]] | None = None,
) -> CostModel:
    """Fit non-negative coefficients to measured compute times by least squares.

    All arguments have one entry per (rank, step). Pass the same measurements on every rank (gather them first), or the
    ranks will compute different coefficients.

    Args:
        step_times_s: Compute time in seconds.
        lengths: Number of tokens of each sample.
        candidates: Number of candidates of each sample.
    """
    candidate_sums = None if candidates is None else _sums(candidates, 1)
    return fit_sums(np.asarray(step_times_s, dtype=np.float64), _sums(lengths, 1), _sums(lengths, 2), candidate_sums)


def fit_sums(
    times: NDArray[np.float64],
    tokens: NDArray[np.float64],
    tokens_squared: NDArray[np.float64],
    candidates: NDArray[np.float64] | None = None,
) -> CostModel:
    """Same as `fit_cost`, but from sums over the samples of each (rank, step), which is all that a rank must report."""
    columns = [np.ones(len(times)), tokens, tokens_squared]
    if candidates is not None:
        columns.append(candidates)
    step, token, token_squared, *rest = non_negative_least_squares(np.stack(columns, axis=1), times)
    if token + token_squared + sum(rest) == 0:
        problem = "the measured times do not increase with the lengths"
        raise UserError(
            problem, option="step_times_s", value=len(times), remedy="measure more steps of different lengths"
        )
    return CostModel(token=token, token_squared=token_squared, candidate=rest[0] if rest else 0.0, step=step)


def _sums(parts: Sequence[NDArray[Any]], power: int) -> NDArray[np.float64]:
    return np.array([(part.astype(np.float64) ** power).sum() for part in parts])


def non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Solve non-negative least squares exactly by trying all subsets of the few columns."""
    scale = np.maximum(np.abs(matrix).max(axis=0, initial=0.0), np.finfo(np.float64).tiny)
    scaled = matrix / scale
    num_columns = matrix.shape[1]
    best = np.zeros(num_columns)
    best_error = float(target @ target)
    for size in range(1, num_columns + 1):
        for subset in itertools.combinations(range(num_columns), size):
            solution = np.linalg.lstsq(scaled[:, subset], target, rcond=None)[0]
            error = float(((scaled[:, subset] @ solution - target) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best = np.zeros(num_columns)
                best_error = error
                best[list(subset)] = solution
    return [float(value) for value in best / scale]


@config
class CostChange:
    """A change of the cost model or tuning during a run; logged and saved in its checkpoints."""

    step: int
    """Number of completed steps when the change was made."""
    first: BatchPosition
    """Position of the first batch that is partitioned with it; earlier batches may have been partitioned already."""
    cost: CostModel
    """Cost model from this batch on."""
    tuning: PowerTuning | None = None
    """Tuning of the `power` policy from this batch on; None: exponent from the cost model, equal shares."""


class CostModelHistory:
    """Cost model and tuning of each batch. Data threads read it while the training loop adds changes."""

    def __init__(self, cost: CostModel, changes: Iterable[CostChange] = (), *, tuning: PowerTuning | None = None):
        self._cost = cost
        self._tuning = tuning
        self._changes = tuple(changes)
        self._last_requested: BatchPosition | None = None

    @property
    def changes(self) -> Sequence[CostChange]:
        """All changes so far, in order."""
        return self._changes

    @property
    def newest(self) -> CostModel:
        """Cost model of batches that have not been requested yet."""
        return self._changes[-1].cost if self._changes else self._cost

    @property
    def newest_tuning(self) -> PowerTuning | None:
        """Tuning of batches that have not been requested yet."""
        return self._changes[-1].tuning if self._changes else self._tuning

    def at(self, position: BatchPosition) -> CostModel:
        """Return the cost model that partitions the batch at this position."""
        return self.cost_and_tuning_at(position)[0]

    def cost_and_tuning_at(self, position: BatchPosition) -> tuple[CostModel, PowerTuning | None]:
        """Return the cost model and the tuning that partition the batch at this position."""
        self._last_requested = position if self._last_requested is None else max(self._last_requested, position)
        result = self._cost, self._tuning
        for change in self._changes:
            if change.first <= position:
                result = change.cost, change.tuning
        return result

    def is_newest(self, position: BatchPosition) -> bool:
        """Return whether the batch at this position was partitioned after the last change."""
        return not self._changes or self._changes[-1].first <= position

    def restore(self, changes: Iterable[CostChange]) -> None:
        """Restore the changes of a resumed run."""
        self._changes = tuple(changes)
        self._last_requested = None

    def add(self, change: CostChange) -> None:
        """Add a change. It must start after all requested batches, or the ranks would partition them differently."""
        assert self._last_requested is None or change.first > self._last_requested
        assert not self._changes or change.first > self._changes[-1].first
        self._changes = (*self._changes, change)


MIN_GAIN = 0.1
"""Fraction by which a new model must reduce the squared error of the current one."""
MIN_ERROR = 0.01
"""Relative error, as a fraction of the mean time, below which a model is not changed."""
MIN_MEASUREMENTS = 16
"""Minimum number of (rank, step) pairs for a fit."""
MIN_STEPS = 8
"""Minimum number of steps with the current shares before shares are tuned again."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Compute time and token counts of one rank in one step."""

    compute_s: float
    """Time of its forward and backward passes, in seconds."""
    tokens: float
    """Number of tokens of its samples."""
    tokens_squared: float
    """Sum over its samples of the squared number of tokens."""


def refit_cost(current: CostModel, measured: Sequence[Measurement]) -> CostModel | None:
    """Return a model that explains the measurements clearly better than `current`, or None.

    Deterministic: ranks with the same arguments return the same model.
    """
    used = [m for m in measured if m.tokens > 0]
    if len(used) < MIN_MEASUREMENTS:
        return None
    times, tokens, squared = (np.array(column) for column in zip(*[_columns(m) for m in used], strict=True))
    try:
        candidate = fit_sums(times, tokens, squared)
    except UserError:
        return None
    current_error = _squared_error(times, current.token * tokens + current.token_squared * squared)
    if current_error < len(times) * (MIN_ERROR * times.mean()) ** 2:
        return None
    candidate_error = _squared_error(times, candidate.token * tokens + candidate.token_squared * squared)
    return candidate if candidate_error < (1.0 - MIN_GAIN) * current_error else None


@dataclass(slots=True)
class RankLoads:
    """Accumulated times and loads of all ranks since their shares were last changed; the same on every rank."""

    times_s: NDArray[np.float64]
    """(R,) compute time in seconds."""
    tokens: NDArray[np.float64]
    """(R,) number of tokens."""
    samples: NDArray[np.float64]
    """(R,) number of samples."""
    num_steps: int = 0

    @staticmethod
    def zeros(num_ranks: int) -> "RankLoads":
        return RankLoads(np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks))

    def add(self, times_s: NDArray[np.float64], tokens: NDArray[np.float64], samples: NDArray[np.float64]) -> None:
        """Add the (R,) values of one step."""
        self.times_s, self.tokens, self.samples = self.times_s + times_s, self.tokens + tokens, self.samples + samples
        self.num_steps += 1

    @property
    def mean_lengths(self) -> NDArray[np.float64]:
        """(R,) mean number of tokens per sample; 0 for ranks without samples."""
        lengths: NDArray[np.float64] = self.tokens / np.maximum(self.samples, 1.0)
        return lengths


def retune_shares(current: PowerTuning | None, cost: CostModel, loads: RankLoads) -> PowerTuning | None:
    """Return shares that would have made the times of the ranks more equal, or None if the times were nearly equal."""
    mean = float(loads.times_s.mean())
    if mean <= 0 or loads.times_s.max() - mean < MIN_ERROR * mean:
        return None
    sizes = loads.mean_lengths
    if current is None:
        current = PowerTuning(alpha=slope(sizes, cost.sample_costs(sizes)), shares=equal_shares(len(sizes)))
    return tune_power(current, loads.times_s.tolist(), sizes.tolist())


def _columns(measurement: Measurement) -> tuple[float, float, float]:
    return measurement.compute_s, measurement.tokens, measurement.tokens_squared


def _squared_error(times: NDArray[np.float64], load: NDArray[np.float64]) -> float:
    """Return the squared error of the best fit step + scale * load; only the ratios of a cost model matter."""
    matrix = np.stack([np.ones_like(load), load / load.max()], axis=1)
    solution = np.linalg.lstsq(matrix, times, rcond=None)[0]
    return float(((matrix @ solution - times) ** 2).sum())
