"""Plans list features that were not tested on that kind of device."""

from planning_workloads import cpu_cluster, gpu_cluster, workload

from nestrec.planning.plan import make_plan, plan_rows
from nestrec.planning.search_space import Candidate, Space, describe_untested


def test_plan_lists_untested_features():
    space = Space(schedules=("nested",), micro_batches=(2,), policies=("fixed",))
    (row,) = plan_rows(make_plan(workload(), gpu_cluster(hosts=2), space), limit=1)
    assert "cuda ranks on more than 1 host" in row["untested"]
    assert "between more than" in row["untested"]


def test_plan_does_not_list_tested_features():
    assert describe_untested(Candidate(schedule="priority"), cpu_cluster(hosts=2, ranks=2)) is None
    assert "more than 4 cpu ranks" in (describe_untested(Candidate(), cpu_cluster(hosts=4, ranks=2)) or "")
