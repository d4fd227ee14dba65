"""What a sample costs: a * L + b * L^2 + c * candidates, given or fitted to measured step times.

By rule the coefficients are one value that all ranks agree on, changed only at a logged step and saved in the
checkpoint: `to_plain` and `from_plain` of `nestrec.base.config` carry a `CostModel` through JSON unchanged.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.bounds import NonNegative
from nestrec.base.config import config
from nestrec.base.errors import UserError


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
            raise UserError("every sample would be free", field="cost", value=0.0, remedy="give token a positive cost")

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
            problem, field="step_times_s", value=len(times), remedy="measure more steps of different lengths"
        )
    return CostModel(token=token, token_squared=token_squared, candidate=rest[0] if rest else 0.0, step=step)


def _sums(parts: Sequence[NDArray[Any]], power: int) -> NDArray[np.float64]:
    return np.array([(part.astype(np.float64) ** power).sum() for part in parts])


def non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """The best of the least-squares solutions over all subsets of the few columns, if it is not negative."""
    scale = np.maximum(np.abs(matrix).max(axis=0, initial=0.0), np.finfo(np.float64).tiny)
    scaled, num_columns = matrix / scale, matrix.shape[1]
    best, best_error = np.zeros(num_columns), float(target @ target)
    for size in range(1, num_columns + 1):
        for subset in itertools.combinations(range(num_columns), size):
            found = np.linalg.lstsq(scaled[:, subset], target, rcond=None)[0]
            error = float(((scaled[:, subset] @ found - target) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[list(subset)] = found
    return [float(value) for value in best / scale]
