import itertools

import numpy as np
import pytest

from nestrec.balance.balance_metrics import imbalance
from nestrec.balance.cost import CostModel
from nestrec.balance.partition_tools import loads_of
from nestrec.balance.simple_policies import PowerTuning, equal_shares, power, slope, tune_power
from nestrec.data.synthetic.synthetic_logs import lengths as draw_lengths


def test_slope_of_a_power_law_is_its_exponent() -> None:
    x = np.array([1.0, 3.0, 10.0, 200.0])
    assert slope(x, 5.0 * x**1.7) == pytest.approx(1.7)
    assert slope(np.ones(4), x) == 0.0
    assert slope(np.zeros(0), np.zeros(0)) == 0.0


def test_power_groups_are_contiguous_in_length() -> None:
    lengths = draw_lengths("freescale", 512, 0)
    groups = power(lengths.astype(np.float64), 8, lengths=lengths)
    for longer, shorter in itertools.pairwise(groups):
        assert lengths[longer].min() >= lengths[shorter].max()


def test_power_tuning_balances_measured_times() -> None:
    """From a wrong alpha, with one rank at half speed, the imbalance of the times falls to a few percent."""
    truth = CostModel(token=1.0, token_squared=1 / 5120)
    speed = np.ones(8)
    speed[3] = 0.5
    tuning = PowerTuning(alpha=0.3, shares=equal_shares(8))
    waits = []
    for step in range(60):
        lengths = draw_lengths("freescale", 8 * 512, step)
        cost = truth.sample_costs(lengths)
        groups = power(cost, 8, lengths=lengths, tuning=tuning)
        times = loads_of(cost, groups) / speed
        waits.append(imbalance(times))
        tuning = tune_power(tuning, times.tolist(), [float(lengths[group].mean()) for group in groups], gain=0.3)
    assert waits[0] > 0.5
    assert np.mean(waits[-10:]) < 0.06


def test_power_tuning_keeps_balanced_step() -> None:
    tuning = PowerTuning(alpha=1.2, shares=equal_shares(4))
    assert tune_power(tuning, [2.0] * 4, [10.0, 20.0, 40.0, 80.0]).alpha == pytest.approx(1.2)
    assert tune_power(tuning, [2.0] * 4, [10.0, 20.0, 40.0, 80.0]).shares == pytest.approx(tuning.shares)


def test_power_tuning_ignores_ranks_without_samples() -> None:
    tuning = PowerTuning(alpha=1.0, shares=equal_shares(3))
    assert tune_power(tuning, [1.0, 0.0, 0.0], [10.0, 0.0, 0.0]) == tuning
    assert sum(tune_power(tuning, [1.0, 2.0, 0.0], [10.0, 10.0, 0.0]).shares) == pytest.approx(1.0)
