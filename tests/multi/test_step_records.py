"""What a save cost a training: from records of its steps, also where nobody could finish them."""

import numpy as np
import pytest
from large_checkpoint import cost_of_saves
from step_records import AFTER, BEFORE, BESIDE, StepRecords, read_steps, stall, step_ms


def steps_of(phase: int, seconds: np.ndarray) -> np.ndarray:
    return np.stack([np.full(len(seconds), phase), np.ones(len(seconds)), seconds, seconds / 2], 1)


def test_steps_are_there_for_others_when_they_are_added(tmp_path):
    records = StepRecords(tmp_path / "steps.npy")
    assert len(read_steps(tmp_path / "steps.npy")) == 0
    records.add(0.5, 0.25)
    records.phase = BESIDE
    records.add(2.0, 1.0, num_steps=0)
    assert read_steps(tmp_path / "steps.npy").tolist() == [[BEFORE, 1, 0.5, 0.25], [BESIDE, 0, 2.0, 1.0]]


def test_the_stall_is_the_part_of_training_that_is_lost_and_lies_in_its_interval():
    draw = np.random.default_rng(0)
    ranks = []
    for _ in range(3):
        alone, beside = draw.normal(0.010, 0.001, 1000), draw.normal(0.0125, 0.001, 2000)
        ranks.append(np.vstack([steps_of(BEFORE, alone[:500]), steps_of(BESIDE, beside), steps_of(AFTER, alone[500:])]))
    share, (low, high) = stall(ranks)
    assert share == pytest.approx(0.2, abs=0.005)
    assert low < share < high
    assert high - low < 0.02
    frozen = np.array([[BESIDE, 0, 2.0, 0.0]])  # two seconds in which there was no step
    more, _ = stall([np.vstack([ranks[0], frozen])] * 2)
    alone, beside = step_ms(ranks[:1], [BEFORE, AFTER]), step_ms(ranks[:1], [BESIDE])
    assert more == pytest.approx(1 - alone / (beside + 1.0)), "2 s over 2,000 steps"


def test_what_disturbs_many_steps_in_a_row_makes_the_interval_wider():
    draw = np.random.default_rng(0)
    bursts = np.repeat(draw.choice([0.01, 0.03], 40), 50)  # a second each
    widths = []
    for beside in (bursts, draw.permutation(bursts)):
        _, (low, high) = stall([np.vstack([steps_of(BEFORE, np.full(500, 0.01)), steps_of(BESIDE, beside)])])
        widths.append(high - low)
    assert widths[0] > 3 * widths[1]


def test_a_save_that_was_cut_off_is_told_as_far_as_it_came():
    before, beside = steps_of(BEFORE, np.full(300, 0.01)), steps_of(BESIDE, np.full(100, 0.02))
    assert cost_of_saves([], 0) == {"steps": 0}
    assert cost_of_saves([before], 0) == {"steps": 0}
    row = cost_of_saves([np.vstack([before, beside])] * 2, on_device=1)
    assert (row["steps"], row["stall_share"], row["stall_share_of_host"]) == (100, 0.5, 0.5)
    assert (row["step_ms_before"], row["step_ms_beside"]) == (10.0, 20.0)
    assert "step_ms_after" not in row
