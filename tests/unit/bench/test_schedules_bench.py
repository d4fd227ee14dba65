"""Schedules benchmark: real and emulated links, removal of network namespaces, and parts of a step."""

import os
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec_bench.harness.delayed_engine import Pace
from nestrec_bench.harness.links import can_limit, limited_links
from nestrec_bench.schedules.schedules_bench import SchedulesBenchConfig, measure_schedules
from nestrec_bench.schedules.schedules_job import TABLE, JobConfig, make_engine

needs_links = pytest.mark.skipif(not can_limit(), reason="network namespaces need root, ip and tc")
SMALL = JobConfig(num_rows=2000, dim=8, samples=16, tokens=4, hidden=8)
DESIGN_FIELDS = [
    "schedule",
    "ranks",
    "replicas",
    "micro_batches",
    "link_mbit",
    "step_ms",
    "compute_ms",
    "raw_lookup_ms",
    "exposed_lookup_ms",
    "raw_comm_ms",
    "exposed_comm_ms",
    "idle_ms",
    "speedup",
    "max_abs_diff",
]


def remaining_links() -> list[str]:
    commands = ["ip", "netns"], ["ip", "link"]
    outputs = [subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands]
    tag = f"{os.getpid():x}"
    return [line for text in outputs for line in text.splitlines() if f"nestrec-{tag}-" in line or f"nr{tag}" in line]


def fail_inside_links() -> None:
    with limited_links(2, 100.0) as links:
        assert len(links.namespaces) == 2
        assert remaining_links()
        raise RuntimeError("inside")


@needs_links
def test_limited_links_are_removed_after_error():
    with pytest.raises(RuntimeError, match="inside"):
        fail_inside_links()
    assert not remaining_links()


@pytest.mark.parametrize("emulated", [pytest.param(False, marks=needs_links), True])
def test_schedules_bench_parts_add_up_to_step(emulated):
    bench = SchedulesBenchConfig(
        link_mbit=1000.0,
        micro_batches=(2,),
        rounds=1,
        steps=4,
        job=SMALL,
        schedules=("serial", "nested"),
        emulated=emulated,
    )
    rows = measure_schedules(bench)
    assert {row["link"] for row in rows} == {"emulated" if emulated else "namespaces"}
    assert [(r["schedule"], r["micro_batches"], r["window_cache"]) for r in rows] == [
        ("serial", 1, False),
        ("serial", 2, False),
        ("nested", 2, False),
        ("serial", 2, True),
        ("nested", 2, True),
    ]
    for row in rows:
        assert set(DESIGN_FIELDS) <= set(row)
        assert row["max_abs_diff"] == 0
        parts = row["compute_ms"] + row["exposed_lookup_ms"] + row["exposed_comm_ms"] + row["idle_ms"]
        assert parts == pytest.approx(row["step_ms"], abs=0.01)
    assert not can_limit() or not remaining_links()


def test_schedules_bench_emulates_fabric_in_one_process():
    bench = SchedulesBenchConfig(
        fabric_ranks=4,
        link_mbit=50.0,
        micro_batches=(2,),
        rounds=1,
        steps=4,
        job=SMALL,
        window_cache=(False,),
        schedules=("serial", "nested"),
    )
    rows = measure_schedules(bench)
    assert all(row["link"] == "emulated" and row["ranks"] == 4 and row["max_abs_diff"] == 0 for row in rows)
    for row in rows:  # three of four ranks are remote, so their bytes use the link each way
        assert row["raw_comm_ms"] >= row["sent_mb"] * 8 / 50.0 * 1e3


def test_schedules_bench_hides_emulated_lookup():
    bench = SchedulesBenchConfig(
        fabric_ranks=2,
        link_mbit=1e5,
        lookup_share=30.0,
        micro_batches=(1,),
        rounds=1,
        steps=5,
        job=SMALL,
        window_cache=(False,),
        schedules=("serial", "stale", "dual_buffer"),
        shares_table=True,
    )
    rows = {row["schedule"]: row for row in measure_schedules(bench)}
    added_ms = rows["serial"]["emulated_lookup_ms"]
    assert added_ms > 0
    serial = rows["serial"]
    assert serial["exposed_lookup_ms"] == serial["raw_lookup_ms"] >= added_ms, "serial hides nothing"
    assert serial["max_abs_diff"] is None
    for name in ("stale", "dual_buffer"):  # the longest lane remains: reading and writing, 55% of it
        assert rows[name]["raw_lookup_ms"] >= added_ms
        assert rows[name]["exposed_lookup_ms"] < 0.8 * rows[name]["raw_lookup_ms"], (
            "both are measured in the same steps, so that the ratio holds on any machine"
        )


def test_schedules_bench_on_gpu_requires_fabric():
    with pytest.raises(UserError, match="fabric_ranks"):
        measure_schedules(SchedulesBenchConfig(device="cuda"))


def test_schedules_bench_filled_table_has_initial_rows():
    filled, used = (
        make_engine(replace(SMALL, is_filled=is_filled, optimizer="adagrad"), Topology.single(), Pace())
        for is_filled in (True, False)
    )
    routed = used.route({TABLE: np.arange(2000)})
    used.fetch_rows(routed, step=1)
    assert filled.digest(TABLE) == used.digest(TABLE)
