"""Step times of a training run in a file that other processes can read at any moment, and the cost of a save."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.float64]
"""(n, 4): phase, steps (1, or 0 for time that belongs to the steps around it), seconds, CPU seconds."""
BEFORE, DURING, AFTER = 1, 2, 3
"""Phases: before, during and after a save."""
_MAX_STEPS = 1 << 18
_BLOCK_S = 0.5
_DRAWS = 1000


class StepRecords:
    """Step records of one rank; they remain readable if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._steps = np.lib.format.open_memmap(path, "w+", np.float64, (_MAX_STEPS, 4))
        self._num = 0
        self.phase = BEFORE

    def add(self, seconds: float, cpu_seconds: float, num_steps: int = 1) -> None:
        """Add a step of the current phase."""
        self._steps[self._num, 1:] = num_steps, seconds, cpu_seconds
        self._steps[self._num, 0] = self.phase  # written last, because it marks the row as complete
        self._num += 1


def read_steps(path: Path) -> Steps:
    """Return the records that have been added so far."""
    steps = np.load(path, mmap_mode="r")
    return np.array(steps[: np.count_nonzero(steps[:, 0])])


def step_ms(ranks: Sequence[Steps], phases: Sequence[int]) -> float:
    """Return the mean milliseconds per step in these phases, averaged over the ranks."""
    selected = [steps[np.isin(steps[:, 0], phases)] for steps in ranks]
    return float(np.mean([1e3 * steps[:, 2].sum() / max(1.0, steps[:, 1].sum()) for steps in selected]))


def stall(ranks: Sequence[Steps], column: int = 2) -> tuple[float, tuple[float, float]]:
    """Return the fraction of training time that a save has cost, and its 95% confidence interval.

    The fraction is 1 - (mean step before and after the save) / (mean step during the save), averaged over the ranks.
    The interval is computed by a bootstrap over blocks of half a second, because noise is correlated between
    successive steps.

    Args:
        ranks: Steps of each rank.
        column: 2 for seconds, 3 for CPU seconds.
    """
    blocks = [
        [_blocks(steps[np.isin(steps[:, 0], phases)]) for phases in ((BEFORE, AFTER), (DURING,))] for steps in ranks
    ]
    draw = np.random.default_rng(0)
    fractions = np.mean(
        [_stall_fractions(alone[:, [1, column]], during[:, [1, column]], draw) for alone, during in blocks], axis=0
    )
    low, high = np.percentile(fractions[1:], [2.5, 97.5])
    return float(fractions[0]), (float(low), float(high))


def _blocks(steps: Steps) -> Steps:
    """Return sums over successive steps, each of about half a second."""
    number = (np.cumsum(steps[:, 2]) / _BLOCK_S).astype(np.int64)
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    return np.add.reduceat(steps, starts, axis=0)


def _stall_fractions(alone: Steps, during: Steps, draw: np.random.Generator) -> NDArray[np.float64]:
    """Return the stall fraction of all blocks, followed by those of bootstrap samples; columns: steps, seconds."""

    def means(blocks: Steps) -> NDArray[np.float64]:
        resampled = blocks[draw.integers(0, len(blocks), (_DRAWS, len(blocks)))].sum(1)
        steps, seconds = np.vstack([blocks.sum(0), resampled]).T
        seconds_per_step: NDArray[np.float64] = seconds / np.maximum(1, steps)
        return seconds_per_step

    fractions: NDArray[np.float64] = 1 - means(alone) / means(during)
    return fractions
