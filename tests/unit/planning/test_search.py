"""The plan search is close to an exhaustive search; memory shortages are reported with a remedy that works."""

from dataclasses import replace

import pytest
from planning_workloads import cpu_cluster, gpu_cluster, workload

from nestrec.base.errors import UserError
from nestrec.planning.hardware_profile import LinearCost
from nestrec.planning.plan import launch_command, make_plan, plan_rows, rejected_rows
from nestrec.planning.plan_search import exhaustive, search
from nestrec.planning.predictor import Predictor
from nestrec.planning.search_space import Candidate, Space
from nestrec.planning.shortage_advice import shortages

SMALL = Space(
    micro_batches=(1, 2, 8),
    policies=("fixed", "zigzag"),
    window_cache=(False,),
    stores=("device", "dram"),
    transports=("collectives",),
)
SPACES = {
    "cores": (workload(), cpu_cluster(cores=16)),
    "one host": (workload(batch_samples=32), cpu_cluster(hosts=1, ranks=4, cores=16)),
    "heavy compute": (workload(flops=2e9), cpu_cluster(cores=16)),
    "heavy traffic": (workload(dim=512), cpu_cluster(cores=16)),
    "short batch": (workload(batch_samples=8), cpu_cluster(cores=16)),
    "few rows": (workload(rows=2_000), cpu_cluster(cores=16)),
    "devices": (workload(batch_samples=512, flops=1e9), gpu_cluster()),
    "devices, traffic": (workload(batch_samples=2048, dim=1024), gpu_cluster()),
    "devices, large tables": (workload(batch_samples=512, rows=2_000_000_000), gpu_cluster()),
    "four hosts": (workload(batch_samples=1024, flops=5e8), gpu_cluster(hosts=4)),
}


IN_CI = ("cores", "heavy traffic", "devices", "devices, large tables")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_CI else pytest.mark.slow) for n in SPACES])
def test_plan_search_is_within_five_percent_of_best(name):
    given, cluster = SPACES[name]
    space = SMALL.for_cluster(cluster, given)
    found = search(Predictor(given, cluster), space)
    everything = exhaustive(Predictor(given, cluster), space)
    quickest = min(outcome.step_s for outcome in everything.best)
    assert found.best[0].step_s <= 1.05 * quickest
    assert len(found.best) + len(found.others) < len(everything.best) + len(everything.others)


def test_plan_search_prefers_simplest_of_equal_times():
    given = workload(batch_samples=16, flops=1e12)
    cluster = cpu_cluster(hosts=1, ranks=1, cores=16)
    best = make_plan(given, cluster).best
    assert best.candidate.store == "device"
    assert not best.candidate.window_cache


def test_plan_search_omits_equivalent_candidates():
    space = replace(SMALL, window_cache=(False, True)).for_cluster(gpu_cluster(), workload(batch_samples=64))
    assert not space.is_sensible(Candidate(schedule="nested", micro_batches=1))
    assert not space.is_sensible(Candidate(schedule="serial", window_cache=True))
    assert len(set(space.all_candidates())) == len(list(space.all_candidates()))


def test_plan_search_names_memory_shortage_and_fix():
    given = workload(batch_samples=64, rows=3_000_000_000)
    cluster = gpu_cluster(hosts=1)
    predictor = Predictor(given, cluster)
    candidate = Candidate(store="device")
    (short,) = shortages(predictor, candidate, Space().for_cluster(cluster, given))
    needed = predictor.memory(candidate)["device"].needed
    assert short.tier == "device"
    assert short.memory.missing == pytest.approx(needed - short.memory.limit)
    assert f"short by {short.memory.missing:,.0f} bytes" in str(short)
    assert "store=dram" in short.remedies
    assert any("hosts instead of 1" in remedy for remedy in short.remedies)
    assert all(memory.missing == 0 for memory in predictor.memory(replace(candidate, store="dram")).values())


def test_plan_search_reports_if_nothing_fits():
    given = workload(batch_samples=64, rows=10**14)
    plan = make_plan(given, gpu_cluster(hosts=1))
    assert plan.best is None
    assert plan.shortages
    assert plan_rows(plan, limit=3) == []


def test_plan_rows_contain_all_figures():
    given, cluster = SPACES["devices"]
    plan = make_plan(given, cluster, SMALL)
    (row,) = plan_rows(plan, limit=1)
    assert row["step_ms"] == pytest.approx(
        row["compute_ms"] + row["exposed_lookup_ms"] + row["exposed_comm_ms"] + row["idle_ms"], rel=0.2
    )
    assert 0 < row["mfu"] < 1
    assert set(row["memory_bytes"]) == {"device", "host", "disk"}
    assert set(row["link_bytes"]) == {"host", "rack", "fabric"}
    assert row["bound_by"] in ("compute", "lookup", "communication", "waiting for other ranks")
    assert all(
        any(word in lost["why"] for word in ("slower", "equally fast", "does not fit"))
        for lost in rejected_rows(plan, limit=50)
    )


def test_plan_search_rejects_batch_smaller_than_world():
    with pytest.raises(UserError, match="at least one sample per rank"):
        make_plan(workload(batch_samples=4), gpu_cluster())


def test_plan_launch_command_contains_all_choices():
    candidate = Candidate(
        schedule="nested", micro_batches=8, replicas=2, store="dram", policy="zigzag", window_cache=True
    )
    command = launch_command("demo", gpu_cluster(hosts=4), candidate, "items")
    for part in (
        "--nnodes 4",
        "--nproc-per-node 8",
        "--pipeline.schedule nested",
        "--batch.num_micro_batches 8",
        "--parallel.num_replicas 2",
        "--tables.items.store dram",
        "--balance.policy zigzag",
        "--pipeline.window_cache true",
    ):
        assert part in command


def test_plan_search_transport_depends_on_kernels_and_bytes():
    slow = gpu_cluster(hosts=2)
    assert Space().for_cluster(slow, workload(batch_samples=64)).transports == ("collectives", "host")
    assert "copy_engine" in Space().for_cluster(gpu_cluster(hosts=1), workload(batch_samples=64)).transports

    def step_s(given, transport):
        candidate = Candidate(schedule="nested", micro_batches=4, transport=transport)
        return Predictor(given, slow).predict(candidate).step_s

    kernels = workload(batch_samples=256, flops=5e11)
    assert step_s(kernels, "host") < step_s(kernels, "collectives")
    traffic = workload(batch_samples=4096, dim=4096, flops=1e6)
    assert step_s(traffic, "host") > step_s(traffic, "collectives")


def test_plan_serial_step_has_no_overlap_slowdown():
    given = workload(batch_samples=64, flops=1e11)
    cluster = gpu_cluster(hosts=1)
    calm = replace(cluster, device=replace(cluster.device, collective_slowdown=0.0))
    steps = [Predictor(given, c).predict(Candidate()).step_s for c in (cluster, calm)]
    assert steps[0] == pytest.approx(steps[1])


def test_plan_search_tries_every_exact_schedule():
    tried = Space().for_cluster(gpu_cluster(hosts=1), workload(batch_samples=64)).schedules
    assert set(tried) == {"serial", "dual_buffer", "frozen_window", "nested", "priority"}
    assert Space(schedules=("stale",)).for_cluster(gpu_cluster(hosts=1), workload(batch_samples=64)).schedules == (
        "stale",
    )


def test_plan_host_cost_counts_in_every_exchange():
    cluster = gpu_cluster(hosts=4)
    candidate = Candidate(schedule="serial", micro_batches=2)

    def step_s(peers):
        profile = replace(cluster.profile, peers=peers)
        return Predictor(workload(), replace(cluster, profile=profile)).predict(candidate).step_s

    more = step_s(LinearCost(unit_s=1e-5)) - step_s(LinearCost())
    # Keys are exchanged once, vectors and gradients per micro-batch (two), each with 32 ranks.
    assert more == pytest.approx(5 * 32 * 1e-5, rel=1e-3)
