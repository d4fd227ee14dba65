"""The planner says which tables every rank had better hold, and why."""

from dataclasses import replace

from planning_workloads import cpu_cluster, workload

from nestrec.planning.search_space import Candidate
from nestrec.planning.tier_memory import Memory, options_of, placements_of


def tables():
    items = workload().tables[0]
    few = {"seen_keys": (10.0, 1000.0), "distinct_keys": (8.0, 50.0)}
    small = replace(items, name="device", rows=50, has_fixed_rows=True, **few)
    return replace(items, has_fixed_rows=True), small, replace(small, name="dynamic", has_fixed_rows=False)


def found(cluster=None, limit=1e9, **changes):
    candidate = replace(Candidate(schedule="nested", micro_batches=4), **changes)
    memory = {"host": Memory(limit=limit), "disk": Memory()}
    placements = placements_of(workload(tables=tables()), cluster or cpu_cluster(), candidate, memory)
    return {p.table: (p.placement, p.why) for p in placements}, options_of(placements)


def test_a_small_table_is_replicated_and_large_or_dynamic_ones_are_not():
    placements, options = found()
    assert options == {"tables.device.placement": "replicated"}
    assert placements["items"] == ("sharded", "fewer bytes cross")
    assert placements["dynamic"] == ("sharded", "it has no fixed number of rows")
    assert "more memory a rank" in placements["device"][1]


def test_a_placement_that_is_given_is_kept():
    placed = [replace(t, placement=p) for t, p in zip(tables(), ("replicated", "sharded", None), strict=True)]
    candidate = Candidate(schedule="nested", micro_batches=4)
    memory = {"host": Memory(limit=1e9), "disk": Memory()}
    found = placements_of(workload(tables=tuple(placed)), cpu_cluster(), candidate, memory)
    assert [(p.placement, p.why) for p in found[:2]] == [("replicated", "given"), ("sharded", "given")]
    assert options_of(found) == {}, "the run has been told"


def test_nothing_is_replicated_where_that_sends_more_or_does_not_fit():
    assert found(window_cache=True)[0]["device"] == ("sharded", "fewer bytes cross")
    assert found(replicas=2)[0]["device"] == ("sharded", "replica groups hold copies of shards")
    assert "short by" in found(limit=100.0)[0]["device"][1]
    assert found(cpu_cluster(hosts=1, ranks=1))[0]["device"] == ("sharded", "there is one rank")
