import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestrec.balance import TOKENS, partition
from nestrec.balance.partition_tools import loads_of
from nestrec.balance.policies import micro_partition, window_imbalance
from nestrec.data.synthetic.synthetic_logs import lengths as draw_lengths


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 12))
def test_micro_partition_assigns_each_sample_once(values: list[float], num: int) -> None:
    cost = np.array(values)
    parts = micro_partition(cost, num)
    assert len(parts) == num
    assert np.sort(np.concatenate(parts)).tolist() == list(range(cost.size))
    assert (np.diff(loads_of(cost, parts)) <= 0).all()


def test_micro_partition_of_balanced_batch_is_balanced() -> None:
    cost = TOKENS.sample_costs(draw_lengths("freescale", 64 * 128, 0))
    costs = np.array(
        [loads_of(cost[group], micro_partition(cost[group], 8)) for group in partition("refined", cost, 64)]
    )
    assert window_imbalance(costs) < 0.005


def test_window_imbalance_counts_costliest_micro_batches() -> None:
    assert window_imbalance(np.array([[4.0, 1.0], [1.0, 4.0]])) == pytest.approx(1 - 5 / 8)
    assert window_imbalance(np.array([[4.0, 1.0], [4.0, 1.0]])) == 0.0
    assert window_imbalance(np.zeros((2, 3))) == 0.0
