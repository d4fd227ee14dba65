import numpy as np
import pytest

from nestrec.balance import TOKENS, CostModel
from nestrec.balance.balance_metrics import measured_steps, per_step, waiting
from nestrec.balance.cost import CostChange, CostModelHistory, Measurement, refitted
from nestrec.data.batch_order import BatchPosition

TRUTH = CostModel(token=3e-6, token_squared=2e-9, step=0.01)


def measurements(noise: float, num: int = 80) -> list[Measurement]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(num):
        lengths = rng.integers(5, 4096, rng.integers(2, 20)).astype(np.float64)
        seconds = (TRUTH.step + TRUTH.of(lengths).sum()) * rng.normal(1.0, noise)
        found.append(Measurement(seconds, float(lengths.sum()), float(lengths @ lengths)))
    return found


def test_a_wrong_model_is_replaced_by_one_that_fits() -> None:
    found = refitted(TOKENS, measurements(0.02))
    assert found is not None
    assert found.token_squared / found.token == pytest.approx(TRUTH.token_squared / TRUTH.token, rel=0.3)


def test_a_right_model_is_left_alone_whatever_its_scale_and_the_noise() -> None:
    right = CostModel(token=3.0, token_squared=2e-3)
    assert refitted(right, measurements(0.0)) is None
    assert refitted(right, measurements(0.05)) is None


def test_nothing_is_learnt_from_few_or_equal_or_empty_steps() -> None:
    assert refitted(TOKENS, measurements(0.02, num=10)) is None
    assert refitted(TOKENS, [Measurement(0.1, 1000.0, 1e6)] * 40) is None
    assert refitted(TOKENS, [Measurement(0.0, 0.0, 0.0)] * 40) is None


def test_a_change_holds_from_its_first_batch_on() -> None:
    costs = CostModelHistory(TOKENS)
    first, second = CostModel(token=2.0), CostModel(token=3.0)
    costs.add(CostChange(step=10, first=BatchPosition(0, 20), cost=first))
    costs.add(CostChange(step=30, first=BatchPosition(1, 2), cost=second))
    asked = [
        BatchPosition(0, 19),
        BatchPosition(0, 20),
        BatchPosition(0, 99),
        BatchPosition(1, 1),
        BatchPosition(1, 2),
        BatchPosition(7, 0),
    ]
    assert [costs.at(position).token for position in asked] == [1.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert costs.newest == second


def test_a_change_never_reaches_batches_that_were_dealt() -> None:
    costs = CostModelHistory(TOKENS)
    costs.at(BatchPosition(0, 12))
    with pytest.raises(AssertionError):
        costs.add(CostChange(step=10, first=BatchPosition(0, 12), cost=TOKENS))
    costs.restore([CostChange(step=3, first=BatchPosition(0, 4), cost=CostModel(token=9.0))])
    assert costs.at(BatchPosition(0, 5)).token == 9.0


def test_waiting_is_what_a_rank_spends_beyond_the_last_to_enter() -> None:
    # Two collectives; rank 1 enters the first last, rank 0 the second.
    durations = [[5.0, 1.0], [2.0, 7.0]]
    assert waiting(durations, [[0, 1]]).tolist() == [1.5, 3.0]
    assert waiting(durations, [[0], [1]]).tolist() == [0.0, 0.0]
    assert waiting([[], []], [[0, 1]]).tolist() == []


def test_collectives_are_summed_by_step_also_where_some_are_not_known_yet() -> None:
    assert per_step(np.array([1.0, 2.0, 3.0]), [1, 2]).tolist() == [1.0, 5.0]
    assert per_step(np.array([1.0, 2.0]), [1, 2]).tolist() == [1.0, 2.0]
    assert per_step(np.array([1.0, 2.0, 3.0, 4.0]), [1, 0, 2]).tolist() == [1.0, 0.0, 5.0]


def test_measured_figures_are_parts_of_the_step() -> None:
    step_s = np.array([[10.0, 10.0], [10.0, 10.0]])
    compute_s = np.array([[8.0, 5.0], [4.0, 5.0]])
    found = measured_steps(step_s, compute_s, np.array([2.0, 0.0]))
    assert found.straggler.tolist() == [0.2, 0.0]
    assert found.imbalance.tolist() == [0.2, 0.0]
