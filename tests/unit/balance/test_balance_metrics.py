import numpy as np
import pytest

from nestrec.balance import TOKENS, partition
from nestrec.balance.balance_metrics import (
    SlowRankDetector,
    compute_balance_metrics,
    find_slow_rank,
    imbalance,
    max_token_gap,
    moved_bytes,
    noise_floor,
    noise_gaussian,
    noise_uniform,
    straggler,
)
from nestrec.data.synthetic.synthetic_logs import lengths as draw_lengths


def test_imbalance_is_mean_wait_over_slowest_rank() -> None:
    assert imbalance(np.array([1.0, 1.0, 2.0])) == pytest.approx(1 / 3)
    assert imbalance(np.array([2.0, 2.0])) == 0.0
    assert imbalance(np.zeros(3)) == 0.0


def test_straggler_is_mean_idle_over_the_iteration() -> None:
    assert straggler(np.array([1.0, 3.0]), 4.0) == pytest.approx(0.25)


def test_balance_straggler_is_diluted_by_common_cost() -> None:
    groups = [np.array([0]), np.array([1])]
    found = compute_balance_metrics(groups, np.array([10, 30]), np.array([10.0, 30.0]), step_cost=10.0)
    assert (found.imbalance, found.straggler, found.max_token_gap) == (pytest.approx(1 / 3), pytest.approx(0.25), 20)


def test_token_gap_counts_empty_ranks() -> None:
    assert max_token_gap(np.array([7]), [np.array([0]), np.array([], dtype=np.int64)]) == 7


def test_moved_bytes_count_only_moved_samples() -> None:
    groups = [np.array([0, 3]), np.array([1, 2])]
    assert moved_bytes(groups, np.array([0, 0, 1, 1]), np.array([1, 10, 100, 1000])) == 1010


def test_noise_has_configured_magnitude() -> None:
    uniform = noise_uniform(100_000, 0.1, 0)
    gaussian = noise_gaussian(100_000, 0.1, 0)
    assert uniform.min() >= 0.9
    assert uniform.max() <= 1.1
    assert gaussian.std() == pytest.approx(0.1, rel=0.02)


def test_refined_partition_reaches_noise_floor() -> None:
    """The imbalance of the refined partition is within a tenth of the lower bound of all partitions."""
    found, floor = [], []
    for seed in range(8):
        cost = TOKENS.sample_costs(draw_lengths("freescale", 64 * 128, seed))
        groups = partition("refined", cost, 64)
        found += [imbalance(_loads(cost * noise_uniform(cost.size, 0.1, 100 * seed + k), groups)) for k in range(5)]
        floor.append(noise_floor(cost, 64, 0.1 / np.sqrt(3)))
    assert np.mean(found) == pytest.approx(np.mean(floor), rel=0.1)
    assert np.mean(found) <= 0.024


def _loads(cost: np.ndarray, groups: list[np.ndarray]) -> np.ndarray:
    return np.array([cost[group].sum() for group in groups])


def test_slow_rank_takes_longer_for_equal_tokens():
    tokens = np.array([[10.0, 10], [30, 30], [10, 10], [20, 20]])
    even = tokens * 0.001
    assert find_slow_rank(even, tokens) is None, "more tokens take longer"
    found = find_slow_rank(even * np.array([[1.0], [1], [1.8], [1.1]]), tokens)
    assert found is not None
    assert found[0] == 2
    assert found[1] == pytest.approx(1.8)
    assert find_slow_rank(np.array([[1.0], [1.6]]), np.ones((2, 1)))[0] == 1
    assert find_slow_rank(np.ones((1, 3)), np.ones((1, 3))) is None, "a single rank cannot be slow"


def test_slow_rank_detector_warns_once_after_three_reports():
    detector = SlowRankDetector()
    assert not any(detector.should_warn(rank) for rank in (0, 1, None, 0, 1, 1, None, 1, 0))
    assert [detector.should_warn(1) for _ in range(4)] == [False, False, True, False]
    assert [detector.should_warn(rank) for rank in (None, 1, 1, 1, 0, 0, 0)] == [*[False] * 6, True]
