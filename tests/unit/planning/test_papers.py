"""The simulator predicts the claimed rows of papers within their bounds, from few numbers of the papers."""

import pytest

from nestrec_bench.planning.papers import PAPERS
from nestrec_bench.planning.papers.comparison import PublishedResult
from nestrec_bench.planning.papers.nestpipe import COMMUNICATION_SHARE, LOOKUP_SHARE, METHODS, simulated
from nestrec_bench.planning.papers.two_d import GROUP, SHARDED_QPS, step_time


@pytest.mark.parametrize("paper", PAPERS)
def test_papers_claims_hold_and_assumptions_are_listed(paper):
    found = PAPERS[paper]()
    assert found.assumptions
    assert [row for row in found.rows if row.agrees is False] == []


def test_papers_rows_match_published_claims():
    claimed = {row.method: row.published for row in PAPERS["nestpipe"]().rows if row.bound is not None}
    assert claimed == {"2D-SP": 1.18, "UniEmb": 1.98, "NestPipe": 3.06, "NestPipe + 2D-SP": 3.18}
    scaling = {row.method: row.published for row in PAPERS["2d"]().rows if row.bound is not None}
    assert scaling == {"1024 devices": 96.0, "2048 devices": 95.0, "4096 devices": 90.0}


@pytest.mark.parametrize("workers", [128, 1536])
def test_papers_baseline_has_published_shares(workers):
    parts = simulated(METHODS[0], workers).parts(0)
    assert parts.exposed_lookup_ns / parts.step_ns == pytest.approx(LOOKUP_SHARE[workers], abs=1e-6)
    assert parts.exposed_communication_ns / parts.step_ns == pytest.approx(COMMUNICATION_SHARE[workers], abs=1e-6)


def test_papers_replica_groups_speed_up_nested_as_published():
    speed = {row.method: row.predicted for row in PAPERS["nestpipe"]().rows if row.quantity == "speed-up"}
    assert speed["NestPipe + 2D-SP"] > speed["NestPipe"]
    exposed = {row.method: row.predicted for row in PAPERS["nestpipe"]().rows if "communication" in row.quantity}
    assert exposed["NestPipe + 2D-SP"] < exposed["NestPipe"]


def test_papers_fit_of_2d_matches_its_points():
    ratio = step_time(512, 512) / step_time(256, 256)
    assert ratio == pytest.approx(2 * SHARDED_QPS[256] / SHARDED_QPS[512])
    assert step_time(GROUP, GROUP) == pytest.approx(1.0)


def test_papers_differences_are_relative_or_absolute():
    row = PublishedResult(table="t", quantity="q", method="m", published=2.0, predicted=2.1, bound=0.1)
    assert row.difference == pytest.approx(0.05)
    assert row.agrees
    points = PublishedResult(
        table="t", quantity="%", method="m", published=96.0, predicted=90.0, bound=5.0, is_relative=False
    )
    assert points.difference == pytest.approx(-6.0)
    assert points.agrees is False
