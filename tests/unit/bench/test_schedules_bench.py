"""The bench of schedules: real links hold back what they should and leave nothing behind; rows tell the whole step."""

import os
import subprocess

import pytest

from nestrec.bench.limited_links import can_limit, limited_links
from nestrec.bench.schedules import SchedulesBench, measure_schedules
from nestrec.bench.schedules_job import JobConfig

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


def left_behind() -> list[str]:
    commands = ["ip", "netns"], ["ip", "link"]
    listed = [subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands]
    tag = f"{os.getpid():x}"
    return [line for text in listed for line in text.splitlines() if f"nestrec-{tag}-" in line or f"nr{tag}" in line]


def fail_inside_links() -> None:
    with limited_links(2, 100.0) as links:
        assert len(links.namespaces) == 2
        assert left_behind()
        raise RuntimeError("inside")


@needs_links
def test_links_are_removed_after_an_error():
    with pytest.raises(RuntimeError, match="inside"):
        fail_inside_links()
    assert not left_behind()


@pytest.mark.parametrize("emulated", [pytest.param(False, marks=needs_links), True])
def test_rows_hold_the_fields_of_the_design_and_parts_add_up_to_the_step(emulated):
    bench = SchedulesBench(
        link_mbit=1000.0, micro_batches=(2,), rounds=1, steps=4, job=SMALL, schedules=("serial", "nested"),
        emulated=emulated,
    )  # fmt: skip
    rows = measure_schedules(bench)
    assert {row["link"] for row in rows} == {"emulated" if emulated else "namespaces"}
    assert [(r["schedule"], r["micro_batches"], r["window_cache"]) for r in rows] == [
        ("serial", 1, False), ("serial", 2, False), ("nested", 2, False), ("serial", 2, True), ("nested", 2, True)
    ]  # fmt: skip
    for row in rows:
        assert set(DESIGN_FIELDS) <= set(row)
        assert row["max_abs_diff"] == 0
        parts = row["compute_ms"] + row["exposed_lookup_ms"] + row["exposed_comm_ms"] + row["idle_ms"]
        assert parts == pytest.approx(row["step_ms"], abs=0.01)
    assert not can_limit() or not left_behind()
