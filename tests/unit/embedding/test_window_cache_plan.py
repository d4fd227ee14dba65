"""Plans of the window cache with the maximum number of micro-batches."""

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.embedding.routing.window_cache_plan import MAX_MICRO_BATCHES, plan_window
from nestrec.pipeline.schedule_types import check_can_cache


def test_window_plan_rejects_too_many_micro_batches():
    check_can_cache(MAX_MICRO_BATCHES)
    with pytest.raises(UserError, match="the window cache supports at most"):
        check_can_cache(MAX_MICRO_BATCHES + 1)


@pytest.mark.slow
def test_window_plan_accepts_maximum_micro_batches():
    first_and_last = np.array([5])
    none = np.empty(0, np.int64)
    plan = plan_window([first_and_last, *[none] * (MAX_MICRO_BATCHES - 2), first_and_last], 1)
    assert plan.last_micro_batches(0).tolist() == [MAX_MICRO_BATCHES - 1]
    assert [p for p, used in enumerate(plan.cache_indices) if len(used)] == [0, MAX_MICRO_BATCHES - 1]
