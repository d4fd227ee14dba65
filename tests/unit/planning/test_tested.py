"""Plans say what of them has not been run on that kind of device."""

from planning_workloads import cpu_cluster, gpu_cluster, workload

from nestrec.planning.plan import make_plan, plan_rows
from nestrec.planning.search_space import Candidate, Space, untested


def test_a_plan_for_many_gpus_says_what_was_not_run():
    space = Space(schedules=("nested",), micro_batches=(2,), policies=("fixed",))
    (row,) = plan_rows(make_plan(workload(), gpu_cluster(hosts=2), space), most=1)
    assert "cuda ranks on more than 1 host" in row["untested"]
    assert "between more than" in row["untested"]


def test_what_was_run_is_not_called_untested():
    assert untested(Candidate(schedule="priority"), cpu_cluster(hosts=2, ranks=2)) is None
    assert "more than 4 cpu ranks" in (untested(Candidate(), cpu_cluster(hosts=4, ranks=2)) or "")
