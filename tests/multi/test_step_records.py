"""The cost of checkpoints, computed from step records, including records of interrupted runs."""

import numpy as np
import pytest
from large_checkpoint import cost_of_saves
from step_records import AFTER, BEFORE, DURING, StepRecords, read_steps, stall, step_ms


def steps_of(phase: int, seconds: np.ndarray) -> np.ndarray:
    return np.stack([np.full(len(seconds), phase), np.ones(len(seconds)), seconds, seconds / 2], 1)


def test_step_records_are_readable_while_written(tmp_path):
    records = StepRecords(tmp_path / "steps.npy")
    assert len(read_steps(tmp_path / "steps.npy")) == 0
    records.add(0.5, 0.25)
    records.phase = DURING
    records.add(2.0, 1.0, num_steps=0)
    assert read_steps(tmp_path / "steps.npy").tolist() == [[BEFORE, 1, 0.5, 0.25], [DURING, 0, 2.0, 1.0]]


def test_step_records_stall_is_within_its_interval():
    draw = np.random.default_rng(0)
    ranks = []
    for _ in range(3):
        alone = draw.normal(0.010, 0.001, 1000)
        during = draw.normal(0.0125, 0.001, 2000)
        ranks.append(np.vstack([steps_of(BEFORE, alone[:500]), steps_of(DURING, during), steps_of(AFTER, alone[500:])]))
    share, (low, high) = stall(ranks)
    assert share == pytest.approx(0.2, abs=0.005)
    assert low < share < high
    assert high - low < 0.02
    frozen = np.array([[DURING, 0, 2.0, 0.0]])  # two seconds without a step
    more, _ = stall([np.vstack([ranks[0], frozen])] * 2)
    alone_ms = step_ms(ranks[:1], [BEFORE, AFTER])
    during_ms = step_ms(ranks[:1], [DURING])
    assert more == pytest.approx(1 - alone_ms / (during_ms + 1.0)), "2 s over 2,000 steps"


def test_step_records_correlated_noise_widens_interval():
    draw = np.random.default_rng(0)
    bursts = np.repeat(draw.choice([0.01, 0.03], 40), 50)  # about a second each
    widths = []
    for during in (bursts, draw.permutation(bursts)):
        _, (low, high) = stall([np.vstack([steps_of(BEFORE, np.full(500, 0.01)), steps_of(DURING, during)])])
        widths.append(high - low)
    assert widths[0] > 3 * widths[1]


def test_step_records_interrupted_save_is_reported():
    before = steps_of(BEFORE, np.full(300, 0.01))
    during = steps_of(DURING, np.full(100, 0.02))
    assert cost_of_saves([], 0) == {"steps": 0}
    assert cost_of_saves([before], 0) == {"steps": 0}
    row = cost_of_saves([np.vstack([before, during])] * 2, on_device=1)
    assert (row["steps"], row["stall_share"], row["stall_share_of_host"]) == (100, 0.5, 0.5)
    assert (row["step_ms_before"], row["step_ms_beside"]) == (10.0, 20.0)
    assert "step_ms_after" not in row
