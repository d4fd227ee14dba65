"""Rows of the host are finite, or one of their elements is not; what lies between rows does not count."""

import numpy as np
import pytest

from nestrec.ops.embedding.host_loops import are_finite


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [(0, 0), (1, 4), (2, 2)])
def test_one_element_that_is_not_finite_is_found(value, place):
    rows = np.full((3, 8), np.finfo(np.float32).max, np.float32)
    rows[:, 1] = np.float32(-1e-45)
    assert are_finite(rows.view(np.int32), 5)
    rows[place] = value
    assert not are_finite(rows.view(np.int32), 5)


def test_words_behind_the_columns_do_not_count():
    rows = np.zeros((2, 8), np.float32)
    rows[:, 5:] = np.nan
    assert are_finite(rows.view(np.int32), 5)
    assert are_finite(rows[:0].view(np.int32), 5)


def test_rows_of_every_thread_are_looked_at():
    rows = np.zeros((5000, 4), np.float32)
    rows[4999, 3] = np.inf
    assert not are_finite(rows.view(np.int32), 4)
