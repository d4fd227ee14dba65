import numpy as np
from numba import njit

from nestrec.balance.partition_tools import descending
from support.rank_pool import load_compiled


def test_numba_loops_are_preloaded_for_their_types() -> None:
    costs = np.array([1.0, 3.0, 2.0])
    expected = descending(costs).tolist()
    loop = njit(cache=True, nogil=True)(descending.py_func)
    load_compiled(loop)
    assert loop.overloads
    assert loop(costs).tolist() == expected == [1, 2, 0]
    assert sum(loop.stats.cache_misses.values()) == 0
