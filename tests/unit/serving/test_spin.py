"""Waiting with a busy core."""

import sys
import threading
import time

from nestrec.serving.engine.batch_pacer import Calls, Spin


def test_others_have_the_interpreter_while_a_thread_spins():
    spin = Spin()
    ran = []
    gate = threading.Lock()
    gate.acquire()
    thread = threading.Thread(target=lambda: (gate.acquire(), ran.append(True)))
    thread.start()
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody takes the interpreter from this thread
    try:
        gate.release()
        assert not ran
        end_s = time.perf_counter() + 60.0
        while not ran and time.perf_counter() < end_s:  # the other core may be busy with something else
            spin.wait(2e-3)
        has_run = bool(ran)
    finally:
        sys.setswitchinterval(before_s)
    thread.join()
    assert has_run


def test_a_wait_is_bounded_and_none_is_none():
    spin = Spin()
    start_s = time.perf_counter()
    spin.wait(0.0)
    spin.wait(-1.0)
    spin.wait(1e9)
    assert time.perf_counter() - start_s < 10.0


def test_a_call_ends_a_wait_and_one_that_was_seen_does_not():
    spin = Spin()
    calls = Calls()
    spin._turns_a_second = 1e13  # so long that only a call ends it
    seen = calls.count
    thread = threading.Thread(target=calls.call)
    thread.start()
    spin.wait_for_call(2e-3, calls, seen)
    thread.join()
    assert calls.count == seen + 1
    spin.wait_for_call(2e-3, calls, seen)  # it was called before: not for a moment
    spin._turns_a_second = 1e6
    start_s = time.perf_counter()
    spin.wait_for_call(2e-3, calls, calls.count)
    assert time.perf_counter() > start_s
