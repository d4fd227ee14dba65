"""Frontend and overload benchmarks: summaries of a load, and a small run over HTTP."""

import numpy as np
import pytest

from nestrec_bench.load_test.open_loop import Trial
from nestrec_bench.load_test.server_under_load import ServedLoadResult, quantile
from nestrec_bench.serving.front_bench import FrontBenchConfig, measure_front
from nestrec_bench.serving.overload_bench import normal_after_s


def served(latency_ms):
    latency_ms = np.array(latency_ms)
    return ServedLoadResult(
        at_s=np.arange(len(latency_ms), dtype=np.float64),
        trial=Trial(1.0, latency_ms, 0.0, 1.0),
        refusal_ms=np.where(np.isinf(latency_ms), 2.0, np.nan),
        num_without_retry=0,
        rss_before=0,
        rss_after=0,
        server_cores=0.0,
    )


@pytest.mark.parametrize(
    ("latency_ms", "after_s"),
    [([1, 2, 3], 0), ([9, np.inf, 2, 3], 2), ([1, 11, 2, 3], 2), ([1, np.inf], None), ([1.0] * 150 + [11.0], 0)],
)
def test_overload_bench_recovery_uses_p99(latency_ms, after_s):
    assert normal_after_s(served(latency_ms), 10.0) == after_s


def test_served_load_separates_accepted_and_rejected():
    load = served([5.0, np.inf, 1.0, np.inf])
    assert load.completed_ms.tolist() == [1.0, 5.0]
    assert load.rejected_ms.tolist() == [2.0, 2.0]
    assert (quantile(load.completed_ms, 50), quantile(load.completed_ms, 99)) == (1.0, 5.0)


def test_front_bench_small_load_has_no_rejections():
    rows = measure_front(FrontBenchConfig(rate=40.0, duration_s=0.5, rounds=1, candidates=8))
    assert [row["client"] for row in rows] == ["polls", "sleeps"]
    assert all(row["answered"] == row["requests"] > 0 for row in rows)
