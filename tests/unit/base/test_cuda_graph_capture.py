import gc
import threading

import pytest

from nestrec.base.cuda import gc_paused


def test_cuda_graph_capture_pauses_garbage_collection():
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_cuda_graph_capture_is_serialized_between_threads():
    inside, may_end = threading.Event(), threading.Event()
    seen = []

    def first():
        with gc_paused():
            inside.set()
            may_end.wait(10)
            seen.append(("first", gc.isenabled()))

    def second():
        inside.wait(10)
        with gc_paused():
            seen.append(("second", gc.isenabled()))

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    assert not seen
    may_end.set()
    for thread in threads:
        thread.join()
    assert seen == [("first", False), ("second", False)]
    assert gc.isenabled()
