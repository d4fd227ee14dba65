"""Which keys cross with which micro-batch, at the largest number of them."""

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.embedding.routing.window_cache_plan import MOST_MICRO_BATCHES, plan_window
from nestrec.pipeline.schedule_types import check_can_cache


def test_one_more_than_the_most_is_refused():
    check_can_cache(MOST_MICRO_BATCHES)
    with pytest.raises(UserError, match="is more than the window cache can tell apart"):
        check_can_cache(MOST_MICRO_BATCHES + 1)


@pytest.mark.slow
def test_the_last_micro_batch_of_the_most_is_known_as_such():
    first_and_last = np.array([5])
    none = np.empty(0, np.int64)
    plan = plan_window([first_and_last, *[none] * (MOST_MICRO_BATCHES - 2), first_and_last], 1)
    assert plan.last_of(0).tolist() == [MOST_MICRO_BATCHES - 1]
    assert [p for p, used in enumerate(plan.places) if len(used)] == [0, MOST_MICRO_BATCHES - 1]
