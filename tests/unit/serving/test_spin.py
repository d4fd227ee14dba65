"""Waiting with a busy core."""

import sys
import threading
import time

from nestrec.serving.engine.spin import Spin


def test_others_have_the_interpreter_while_a_thread_spins():
    spin, ran, gate = Spin(), [], threading.Lock()
    gate.acquire()
    thread = threading.Thread(target=lambda: (gate.acquire(), ran.append(True)))
    thread.start()
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody takes the interpreter from this thread
    try:
        gate.release()
        assert not ran
        for _ in range(100):  # the other core may be busy with something else
            spin.wait(2e-3)
            if ran:
                break
    finally:
        sys.setswitchinterval(before_s)
    thread.join()
    assert ran


def test_a_wait_is_bounded_and_none_is_none():
    spin = Spin()
    start_s = time.perf_counter()
    spin.wait(0.0)
    spin.wait(-1.0)
    spin.wait(1e9)
    assert time.perf_counter() - start_s < 10.0
