import sys
import threading
from functools import partial

import pytest

from nestrec.base.thread_team import ThreadTeam, niceness, parallel_for, run_ahead, set_niceness


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 3, 10_000, 100_001])
def test_thread_team_covers_range_once(size, threads):
    seen = []
    lock = threading.Lock()

    def work(start: int, stop: int) -> None:
        with lock:
            seen.append((start, stop))

    parallel_for(size, 100_000, work, threads)
    assert [i for start, stop in sorted(seen) for i in range(start, stop)] == list(range(size))
    assert len(seen) <= threads


def test_thread_team_raises_errors_of_threads():
    def work(start: int, stop: int) -> None:
        if start > 0:
            raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        parallel_for(100, 100_000, work, 3)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_run_ahead_returns_results_in_order(threads):
    assert list(run_ahead((partial(pow, i, 2) for i in range(20)), threads)) == [i * i for i in range(20)]


def test_run_ahead_overlaps_and_bounds_its_depth():
    made = []
    ran = threading.Event()

    def calls():
        yield ran.set
        assert ran.wait(60), "the first call runs while the second is created"
        for number in range(10):
            made.append(number)
            yield partial(int, number)

    found = run_ahead(calls(), 2)
    next(found)
    assert len(made) == 2, "two calls run or wait, and the first has returned"
    assert list(found) == list(range(10))


def test_run_ahead_raises_errors_in_order():
    found = run_ahead([partial(int, "1"), partial(int, "one"), partial(int, "2")], 2)
    assert next(found) == 1
    with pytest.raises(ValueError, match="one"):
        next(found)


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no niceness per thread")
def test_run_ahead_inherits_niceness_of_caller():
    seen, teams = list[str | int](), list[ThreadTeam]()

    def call() -> None:
        seen.append(niceness(own := threading.get_native_id()))
        ThreadTeam.current().set_niceness(0)  # allowed for members and for others that have the team
        seen.append(niceness(own))

    def run() -> None:
        own = threading.get_native_id()
        if not set_niceness(own, 1) or not set_niceness(own, 0):
            seen.append("not permitted")
            return
        set_niceness(own, 3)
        teams.append(ThreadTeam.current())
        list(run_ahead([call], 2))
        seen.extend([niceness(own), len(teams[0]._threads)])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen in (["not permitted"], [3, 0, 0, 1]), "a thread that has ended is not a member"
