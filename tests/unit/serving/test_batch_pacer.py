from nestrec.serving.engine.batch_pacer import BatchPacer


def test_pacer_slowdown_is_time_per_second_of_work():
    pace = BatchPacer(spins=False)
    now_s = 0.0
    for _ in range(2000):  # one millisecond of work every three milliseconds, with more requests in the queue
        now_s += 0.003
        pace.observe_completed(now_s, 0.001, has_more=True)
    assert abs(pace.slowness - 3.0) < 0.1
    pace.observe_completed(now_s + 0.003, 0.001, has_more=False)
    for _ in range(200):  # no request waits, so the time until the next one is not a measure of slowness
        now_s += 1.0
        pace.observe_completed(now_s, 0.001, has_more=False)
    assert abs(pace.slowness - 3.0) < 0.1
    for _ in range(5000):
        now_s += 0.001
        pace.observe_completed(now_s, 0.001, has_more=True)
    assert pace.slowness < 1.05
    for number in range(100):  # one long batch does not mean that the engine is slow
        now_s += 0.1
        pace.observe_completed(now_s, 10.0 if number == 99 else 0.0, has_more=True)
    assert pace.slowness < 1.5


def test_pacer_device_waiting_for_host_is_not_busy():
    pace = BatchPacer(spins=False)
    began_s = pace._window_began_s
    for number in range(1, 101):
        pace.observe_device_time(began_s + 0.01 * number, 0.002)
    assert abs(pace.busy_fraction - 0.2) < 0.01


def test_pacer_host_time_is_robust_to_outliers():
    pace = BatchPacer(spins=False)
    for number in range(400):
        pace.observe_host_time(0.5 if number % 100 == 99 else 0.002)
    assert abs(pace.host_s - 0.002) < 5e-4
    for _ in range(200):
        pace.observe_host_time(0.0005)
    assert abs(pace.host_s - 0.0005) < 1e-4
