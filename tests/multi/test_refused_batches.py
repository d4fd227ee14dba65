"""A mistake in the keys of a batch belongs to the step that needs the batch, under every schedule and on every rank."""

import pytest
from schedule_jobs import Job, train_until_refused

from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline import SCHEDULES

WORDS = "feature 'item' = 4000: is not a key of table 'items', which holds 0 to 3999 (found on rank 1)"
GROUPS = {
    "one group": {},
    "gradients": {"ranks": ParallelConfig(replicas=2)},
    "weights": {"ranks": ParallelConfig(replicas=2), "replica_sync": ReplicaSyncConfig(mode="weights", every=3)},
}


@pytest.mark.parametrize("groups", GROUPS)
def test_steps_before_a_refused_batch_are_those_of_serial_and_its_own_step_says_what_is_wrong(pools, groups):
    job = Job(num_steps=9, bad_step=6, fences=(3,), window_cache=True, **GROUPS[groups])
    expected = pools[2].run(train_until_refused, "serial", job)
    for schedule in SCHEDULES:
        results = pools[2].run(train_until_refused, schedule, job)
        assert [result["error"] for result in results] == [expected[0]["error"]] * 2
        assert WORDS in results[0]["error"]
        assert [result["steps"] for result in results] == [5, 5], schedule
        if schedule not in ("stale", "semi_async"):
            assert results == expected


def test_a_refused_batch_that_is_not_reached_is_not_noticed(pools):
    job = Job(num_steps=9, bad_step=6, fences=(3,))
    serial = pools[2].run(train_until_refused, "serial", job, 5)
    for schedule in SCHEDULES:
        results = pools[2].run(train_until_refused, schedule, job, 5)
        assert [result["error"] for result in results] == [None, None], schedule
        assert schedule in ("stale", "semi_async") or results == serial, schedule
