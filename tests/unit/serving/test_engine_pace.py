from nestrec.serving.engine.batch_pacer import BatchPacer


def test_slowness_is_what_goes_by_for_a_second_of_work_while_work_waits():
    pace = BatchPacer(spins=False)
    now_s = 0.0
    for _ in range(2000):  # a millisecond of work every three of them, with more behind it
        now_s += 0.003
        pace.done(now_s, 0.001, has_more=True)
    assert abs(pace.slowness - 3.0) < 0.1
    pace.done(now_s + 0.003, 0.001, has_more=False)
    for _ in range(200):  # nobody waits: how long it takes until the next one comes says nothing
        now_s += 1.0
        pace.done(now_s, 0.001, has_more=False)
    assert abs(pace.slowness - 3.0) < 0.1
    for _ in range(5000):
        now_s += 0.001
        pace.done(now_s, 0.001, has_more=True)
    assert pace.slowness < 1.05
    for number in range(100):  # a long one is not slow: it is answered once
        now_s += 0.1
        pace.done(now_s, 10.0 if number == 99 else 0.0, has_more=True)
    assert pace.slowness < 1.5


def test_a_device_that_the_host_keeps_waiting_is_not_busy():
    pace = BatchPacer(spins=False)
    began_s = pace._window_began_s
    for number in range(1, 101):
        pace.worked(began_s + 0.01 * number, 0.002)
    assert abs(pace.busy_share - 0.2) < 0.01


def test_the_hosts_part_of_a_batch_is_what_it_takes_of_late_whatever_hiccups_there_are():
    pace = BatchPacer(spins=False)
    for number in range(400):
        pace.answered_alone(0.5 if number % 100 == 99 else 0.002)
    assert abs(pace.host_s - 0.002) < 5e-4
    for _ in range(200):
        pace.answered_alone(0.0005)
    assert abs(pace.host_s - 0.0005) < 1e-4
