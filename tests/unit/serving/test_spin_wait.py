"""Spin waiting on a busy core."""

import sys
import threading
import time

from nestrec.serving.engine.batch_pacer import Spin, WakeCounter


def test_spin_wait_releases_interpreter_lock():
    spin = Spin()
    ran = []
    gate = threading.Lock()
    gate.acquire()
    thread = threading.Thread(target=lambda: (gate.acquire(), ran.append(True)))
    thread.start()
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # the interpreter does not switch threads by itself
    try:
        gate.release()
        assert not ran
        end_s = time.perf_counter() + 60.0
        while not ran and time.perf_counter() < end_s:  # the other core may be busy
            spin.wait(2e-3)
        has_run = bool(ran)
    finally:
        sys.setswitchinterval(before_s)
    thread.join()
    assert has_run


def test_spin_wait_is_bounded():
    spin = Spin()
    start_s = time.perf_counter()
    spin.wait(0.0)
    spin.wait(-1.0)
    spin.wait(1e9)
    assert time.perf_counter() - start_s < 10.0


def test_spin_wait_ends_on_new_call():
    spin = Spin()
    calls = WakeCounter()
    spin._iterations_per_s = 1e13  # long enough that only a notification ends the wait
    count = calls.count
    thread = threading.Thread(target=calls.notify)
    thread.start()
    spin.wait_for_notify(2e-3, calls, count)
    thread.join()
    assert calls.count == count + 1
    spin.wait_for_notify(2e-3, calls, count)  # the notification was before, so this does not wait
    spin._iterations_per_s = 1e6
    start_s = time.perf_counter()
    spin.wait_for_notify(2e-3, calls, calls.count)
    assert time.perf_counter() > start_s
