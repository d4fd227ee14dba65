"""How long the steps of a training took, in a file that others can read at any moment, and what a save cost it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.float64]
"""(n, 4): phase, steps (1, or 0 for time that belongs to the steps around it), seconds, processor seconds."""
BEFORE, BESIDE, AFTER = 1, 2, 3
"""Phases: alone before a save, beside it, alone after it."""
_MOST = 1 << 18
_BLOCK_S = 0.5
_DRAWS = 1000


class StepRecords:
    """Of one rank. What it has added is there for others, also when it ends before its time."""

    def __init__(self, path: Path) -> None:
        self._steps = np.lib.format.open_memmap(path, "w+", np.float64, (_MOST, 4))
        self._num = 0
        self.phase = BEFORE

    def add(self, seconds: float, cpu_seconds: float, num_steps: int = 1) -> None:
        """A step of the present phase."""
        self._steps[self._num, 1:] = num_steps, seconds, cpu_seconds
        self._steps[self._num, 0] = self.phase  # last: it says that the others are there
        self._num += 1


def read_steps(path: Path) -> Steps:
    """What has been added so far."""
    steps = np.load(path, mmap_mode="r")
    return np.array(steps[: np.count_nonzero(steps[:, 0])])


def step_ms(of_ranks: Sequence[Steps], phases: Sequence[int]) -> float:
    """Mean of a step's milliseconds in these phases, of which the ranks' mean."""
    chosen = [steps[np.isin(steps[:, 0], phases)] for steps in of_ranks]
    return float(np.mean([1e3 * steps[:, 2].sum() / max(1.0, steps[:, 1].sum()) for steps in chosen]))


def stall(of_ranks: Sequence[Steps], column: int = 2) -> tuple[float, tuple[float, float]]:
    """The part of training that the save has cost, and its interval of 95%.

    1 - (mean step alone) / (mean step beside), the ranks' mean. The interval is that of blocks of half a second, drawn
    again: what disturbs a step disturbs its neighbours as well. column: 2 for seconds, 3 for processor seconds.
    """
    blocks = [
        [_blocks(steps[np.isin(steps[:, 0], phases)]) for phases in ((BEFORE, AFTER), (BESIDE,))] for steps in of_ranks
    ]
    draw = np.random.default_rng(0)
    shares = np.mean([_shares(alone[:, [1, column]], beside[:, [1, column]], draw) for alone, beside in blocks], axis=0)
    low, high = np.percentile(shares[1:], [2.5, 97.5])
    return float(shares[0]), (float(low), float(high))


def _blocks(steps: Steps) -> Steps:
    """Sums of neighbours, each of about half a second."""
    number = (np.cumsum(steps[:, 2]) / _BLOCK_S).astype(np.int64)
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    return np.add.reduceat(steps, starts, axis=0)


def _shares(alone: Steps, beside: Steps, draw: np.random.Generator) -> NDArray[np.float64]:
    """Of all blocks, then of as many blocks drawn again and again; columns: steps, seconds."""

    def means(blocks: Steps) -> NDArray[np.float64]:
        again = blocks[draw.integers(0, len(blocks), (_DRAWS, len(blocks)))].sum(1)
        steps, seconds = np.vstack([blocks.sum(0), again]).T
        found: NDArray[np.float64] = seconds / np.maximum(1, steps)
        return found

    found: NDArray[np.float64] = 1 - means(alone) / means(beside)
    return found
