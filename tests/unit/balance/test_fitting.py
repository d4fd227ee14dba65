import numpy as np
import pytest

from nestrec.balance import TOKENS, CostModel
from nestrec.balance.balance_metrics import mean_wait_times, sum_per_step, summarize_steps
from nestrec.balance.cost import CostChange, CostModelHistory, Measurement, refit_cost
from nestrec.data.batch_order import BatchPosition

TRUTH = CostModel(token=3e-6, token_squared=2e-9, step=0.01)


def measurements(noise: float, num: int = 80) -> list[Measurement]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(num):
        lengths = rng.integers(5, 4096, rng.integers(2, 20)).astype(np.float64)
        seconds = (TRUTH.step + TRUTH.sample_costs(lengths).sum()) * rng.normal(1.0, noise)
        found.append(Measurement(seconds, float(lengths.sum()), float(lengths @ lengths)))
    return found


def test_cost_model_is_refitted_if_wrong() -> None:
    found = refit_cost(TOKENS, measurements(0.02))
    assert found is not None
    assert found.token_squared / found.token == pytest.approx(TRUTH.token_squared / TRUTH.token, rel=0.3)


def test_cost_model_is_kept_if_right() -> None:
    right = CostModel(token=3.0, token_squared=2e-3)
    assert refit_cost(right, measurements(0.0)) is None
    assert refit_cost(right, measurements(0.05)) is None


def test_cost_model_is_not_fitted_to_few_or_equal_steps() -> None:
    assert refit_cost(TOKENS, measurements(0.02, num=10)) is None
    assert refit_cost(TOKENS, [Measurement(0.1, 1000.0, 1e6)] * 40) is None
    assert refit_cost(TOKENS, [Measurement(0.0, 0.0, 0.0)] * 40) is None


def test_cost_model_change_applies_from_its_batch() -> None:
    costs = CostModelHistory(TOKENS)
    first, second = CostModel(token=2.0), CostModel(token=3.0)
    costs.add(CostChange(step=10, first=BatchPosition(0, 20), cost=first))
    costs.add(CostChange(step=30, first=BatchPosition(1, 2), cost=second))
    positions = [
        BatchPosition(0, 19),
        BatchPosition(0, 20),
        BatchPosition(0, 99),
        BatchPosition(1, 1),
        BatchPosition(1, 2),
        BatchPosition(7, 0),
    ]
    assert [costs.at(position).token for position in positions] == [1.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert costs.newest == second


def test_cost_model_change_skips_assigned_batches() -> None:
    costs = CostModelHistory(TOKENS)
    costs.at(BatchPosition(0, 12))
    with pytest.raises(AssertionError):
        costs.add(CostChange(step=10, first=BatchPosition(0, 12), cost=TOKENS))
    costs.restore([CostChange(step=3, first=BatchPosition(0, 4), cost=CostModel(token=9.0))])
    assert costs.at(BatchPosition(0, 5)).token == 9.0


def test_mean_wait_times_subtract_shortest_duration() -> None:
    # Rank 1 is the last to enter the first collective, and rank 0 is the last to enter the second.
    durations = [[5.0, 1.0], [2.0, 7.0]]
    assert mean_wait_times(durations, [[0, 1]]).tolist() == [1.5, 3.0]
    assert mean_wait_times(durations, [[0], [1]]).tolist() == [0.0, 0.0]
    assert mean_wait_times([[], []], [[0, 1]]).tolist() == []


def test_collective_times_are_summed_per_step() -> None:
    assert sum_per_step(np.array([1.0, 2.0, 3.0]), [1, 2]).tolist() == [1.0, 5.0]
    assert sum_per_step(np.array([1.0, 2.0]), [1, 2]).tolist() == [1.0, 2.0]
    assert sum_per_step(np.array([1.0, 2.0, 3.0, 4.0]), [1, 0, 2]).tolist() == [1.0, 0.0, 5.0]


def test_summarize_steps_divides_by_step_time() -> None:
    step_s = np.array([[10.0, 10.0], [10.0, 10.0]])
    compute_s = np.array([[8.0, 5.0], [4.0, 5.0]])
    found = summarize_steps(step_s, compute_s, np.array([2.0, 0.0]))
    assert found.straggler.tolist() == [0.2, 0.0]
    assert found.imbalance.tolist() == [0.2, 0.0]
