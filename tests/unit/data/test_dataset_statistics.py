"""Statistics on the dataset card."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.data.dataset_card import length_statistics, log_histogram, popularity_statistics, zipf_exponent


@pytest.mark.parametrize("s", [0.0, 0.6, 0.75, 1.0, 1.5])
def test_zipf_exponent_of_exact_counts_is_recovered(s: float) -> None:
    counts = np.round(1e9 * np.arange(1, 2001) ** -s).astype(np.int64)
    assert zipf_exponent(counts) == pytest.approx(s, abs=1e-3)


@given(values=st.lists(st.integers(0, 10**7), min_size=1, max_size=50))
def test_log_histogram_counts_each_positive_value_once(values: list[int]) -> None:
    histogram = log_histogram(np.array(values))
    assert sum(histogram.counts) == sum(v > 0 for v in values)
    assert len(histogram.edges) == len(histogram.counts) + 1 or not histogram.counts
    for low, high, count in zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True):
        assert count == sum(low <= v < high for v in values) or high == histogram.edges[-1]


def test_dataset_statistics_of_empty_data_are_zero() -> None:
    assert length_statistics(np.zeros(0, np.int32)).max == 0
    assert popularity_statistics(np.zeros(5, np.int64)).zipf_s == 0.0


def test_popularity_top_shares_count_observed_items_only() -> None:
    counts = np.array([0] * 900 + [1] * 90 + [10] * 10)
    statistics = popularity_statistics(counts)
    assert statistics.top_10_percent_share == pytest.approx(100 / 190, abs=1e-4)
    assert statistics.top_1_percent_share == pytest.approx(10 / 190, abs=1e-4)


def test_length_statistics_equal_numpy() -> None:
    lengths = np.array([1, 2, 3, 4, 100])
    statistics = length_statistics(lengths)
    assert (statistics.mean, statistics.p50, statistics.max) == (22.0, 3.0, 100)
    assert statistics.ln_mean == pytest.approx(np.log(lengths).mean(), abs=1e-4)
