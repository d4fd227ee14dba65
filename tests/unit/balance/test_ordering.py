import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nestrec.balance.partition_tools import assignment_of, descending, groups_of, loads_of


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(0, 1e300, allow_subnormal=True), max_size=300))
def test_descending_is_a_stable_sort(values: list[float]) -> None:
    assert descending(np.array(values)).tolist() == np.argsort(-np.array(values), kind="stable").tolist()


def test_descending_treats_negative_zero_as_zero() -> None:
    assert descending(np.array([0.0, -0.0, 0.0, 1.0])).tolist() == [3, 0, 1, 2]


@given(st.lists(st.integers(0, 6), max_size=50))
def test_groups_and_assignment_are_inverse(ranks: list[int]) -> None:
    groups = groups_of(np.array(ranks, dtype=np.int64), 7)
    assert assignment_of(groups, len(ranks)).tolist() == ranks


def test_loads_include_empty_ranks() -> None:
    groups = [np.array([1]), np.array([], dtype=np.int64), np.array([0, 2])]
    assert loads_of(np.array([1.0, 2.0, 4.0]), groups).tolist() == [2.0, 0.0, 5.0]
