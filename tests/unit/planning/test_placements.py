"""The planner chooses which tables to replicate on every rank, and reports the reason."""

from dataclasses import replace

from planning_workloads import cpu_cluster, workload

from nestrec.planning.search_space import Candidate
from nestrec.planning.tier_memory import Memory, choose_placements, placement_options


def tables():
    items = workload().tables[0]
    few = {"seen_keys": (10.0, 1000.0), "distinct_keys": (8.0, 50.0)}
    small = replace(items, name="device", rows=50, has_fixed_rows=True, **few)
    return replace(items, has_fixed_rows=True), small, replace(small, name="dynamic", has_fixed_rows=False)


def found(cluster=None, limit=1e9, **changes):
    candidate = replace(Candidate(schedule="nested", micro_batches=4), **changes)
    memory = {"host": Memory(limit=limit), "disk": Memory()}
    placements = choose_placements(workload(tables=tables()), cluster or cpu_cluster(), candidate, memory)
    return {p.table: (p.placement, p.why) for p in placements}, placement_options(placements)


def test_plan_placement_replicates_small_static_tables():
    placements, options = found()
    assert options == {"tables.device.placement": "replicated"}
    assert placements["items"] == ("sharded", "transfers fewer bytes")
    assert placements["dynamic"] == ("sharded", "no fixed number of rows")
    assert "more memory per rank" in placements["device"][1]


def test_plan_placement_keeps_user_choice():
    placed = [replace(t, placement=p) for t, p in zip(tables(), ("replicated", "sharded", None), strict=True)]
    candidate = Candidate(schedule="nested", micro_batches=4)
    memory = {"host": Memory(limit=1e9), "disk": Memory()}
    found = choose_placements(workload(tables=tuple(placed)), cpu_cluster(), candidate, memory)
    assert [(p.placement, p.why) for p in found[:2]] == [
        ("replicated", "set by the user"),
        ("sharded", "set by the user"),
    ]
    assert placement_options(found) == {}, "the run already has these options"


def test_plan_placement_shards_if_cheaper_or_too_large():
    assert found(window_cache=True)[0]["device"] == ("sharded", "transfers fewer bytes")
    assert found(replicas=2)[0]["device"] == ("sharded", "replica groups already hold copies of shards")
    assert "short by" in found(limit=100.0)[0]["device"][1]
    assert found(cpu_cluster(hosts=1, ranks=1))[0]["device"] == ("sharded", "only one rank")
