"""The check for non-finite elements in host rows; padding between rows is ignored."""

import numpy as np
import pytest

from nestrec.ops.embedding.host_loops import are_finite


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("index", [(0, 0), (1, 4), (2, 2)])
def test_finite_check_finds_one_nonfinite_element(value, index):
    rows = np.full((3, 8), np.finfo(np.float32).max, np.float32)
    rows[:, 1] = np.float32(-1e-45)
    assert are_finite(rows.view(np.int32), 5)
    rows[index] = value
    assert not are_finite(rows.view(np.int32), 5)


def test_finite_check_ignores_padding_after_columns():
    rows = np.zeros((2, 8), np.float32)
    rows[:, 5:] = np.nan
    assert are_finite(rows.view(np.int32), 5)
    assert are_finite(rows[:0].view(np.int32), 5)


def test_finite_check_covers_rows_of_every_thread():
    rows = np.zeros((5000, 4), np.float32)
    rows[4999, 3] = np.inf
    assert not are_finite(rows.view(np.int32), 4)
