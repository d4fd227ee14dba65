import gc
import threading

import pytest

from nestrec.base.cuda import without_collections


def test_nothing_is_collected_inside_and_all_is_as_before_behind_it():
    assert gc.isenabled()
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), without_collections():
        _ = 1 / 0
    assert gc.isenabled()


def test_threads_take_turns_so_that_none_ends_the_others():
    inside, may_end = threading.Event(), threading.Event()
    seen = []

    def first():
        with without_collections():
            inside.set()
            may_end.wait(10)
            seen.append(("first", gc.isenabled()))

    def second():
        inside.wait(10)
        with without_collections():
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
