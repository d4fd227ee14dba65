"""An invalid key in a batch is an error of the step that uses the batch, in every schedule and on every rank."""

import pytest
from schedule_jobs import Job, train_until_rejected

from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline import SCHEDULES

MESSAGE = "feature 'item'=4000: not a valid key of table 'items', whose keys are 0 to 3999 (detected on rank 1)"
GROUPS = {
    "one group": {},
    "gradients": {"ranks": ParallelConfig(num_replicas=2)},
    "weights": {
        "ranks": ParallelConfig(num_replicas=2),
        "replica_sync": ReplicaSyncConfig(mode="weights", every_steps=3),
    },
}


@pytest.mark.parametrize("groups", GROUPS)
def test_rejected_batch_fails_only_its_step(pools, groups):
    job = Job(num_steps=9, bad_step=6, fences=(3,), window_cache=True, **GROUPS[groups])
    expected = pools[2].run(train_until_rejected, "serial", job)
    for schedule in SCHEDULES:
        results = pools[2].run(train_until_rejected, schedule, job)
        assert [result["error"] for result in results] == [expected[0]["error"]] * 2
        assert MESSAGE in results[0]["error"]
        assert [result["steps"] for result in results] == [5, 5], schedule
        if schedule not in ("stale", "semi_async"):
            assert results == expected


def test_rejected_batch_that_is_not_reached_is_ignored(pools):
    job = Job(num_steps=9, bad_step=6, fences=(3,))
    serial = pools[2].run(train_until_rejected, "serial", job, 5)
    for schedule in SCHEDULES:
        results = pools[2].run(train_until_rejected, schedule, job, 5)
        assert [result["error"] for result in results] == [None, None], schedule
        assert schedule in ("stale", "semi_async") or results == serial, schedule
