"""Tests of the log of GPU clock and power."""

import sys
import time

from nestrec_bench.harness.gpu_clocks import ClockLog

SAMPLES = "import time\nfor n in range(10**6): print(f'{1500 + n}, 600.5, 700.0', flush=True); time.sleep(0.005)"
LIMIT_S = 60.0


def test_gpu_clock_log_returns_samples_of_time_range():
    with ClockLog((sys.executable, "-c", "print('no such field')\n" + SAMPLES)) as log:
        limit = time.perf_counter() + LIMIT_S
        while not log.medians(0.0, limit) and time.perf_counter() < limit:
            time.sleep(0.01)
        begin = time.perf_counter()
        while not (found := log.medians(begin, limit)) and time.perf_counter() < limit:
            time.sleep(0.01)
    assert found["sm_mhz"] > 1500
    assert (found["power_w"], found["power_limit_w"]) == (600.5, 700.0)
    assert log.medians(begin + 1e6, begin + 2e6) == {}


def test_gpu_clock_log_is_empty_without_nvidia_smi():
    with ClockLog(("no-such-program",)) as log:
        assert log.medians(0.0, time.perf_counter()) == {}
