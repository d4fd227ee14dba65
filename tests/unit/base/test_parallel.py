import sys
import threading
from functools import partial

import pytest

from nestrec.base.thread_team import ThreadTeam, for_parts, in_order, niceness, set_niceness


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 3, 10_000, 100_001])
def test_parts_cover_the_range_once(size, threads):
    seen = []
    lock = threading.Lock()

    def work(start: int, stop: int) -> None:
        with lock:
            seen.append((start, stop))

    for_parts(size, 100_000, work, threads)
    assert [i for start, stop in sorted(seen) for i in range(start, stop)] == list(range(size))
    assert len(seen) <= threads


def test_an_error_in_a_thread_reaches_the_caller():
    def work(start: int, stop: int) -> None:
        if start > 0:
            raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        for_parts(100, 100_000, work, 3)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_calls_that_run_ahead_return_in_order(threads):
    assert list(in_order((partial(pow, i, 2) for i in range(20)), threads)) == [i * i for i in range(20)]


def test_calls_run_while_the_next_one_is_made_and_few_are_made_ahead():
    made = []
    ran = threading.Event()

    def calls():
        yield ran.set
        assert ran.wait(60), "the first call runs while the second is being made"
        for number in range(10):
            made.append(number)
            yield partial(int, number)

    found = in_order(calls(), 2)
    next(found)
    assert len(made) == 2, "two run or wait, the first has returned"
    assert list(found) == list(range(10))


def test_an_error_of_a_call_is_raised_in_its_turn():
    found = in_order([partial(int, "1"), partial(int, "one"), partial(int, "2")], 2)
    assert next(found) == 1
    with pytest.raises(ValueError, match="one"):
        next(found)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_calls_that_run_ahead_are_as_nice_as_who_asks_for_them_and_follow_when_that_is_changed():
    seen, teams = list[str | int](), list[ThreadTeam]()

    def call() -> None:
        seen.append(niceness(own := threading.get_native_id()))
        ThreadTeam.of_thread().set_niceness(0)  # by a member, or by anybody who knows the team
        seen.append(niceness(own))

    def ask() -> None:
        own = threading.get_native_id()
        if not set_niceness(own, 1) or not set_niceness(own, 0):
            seen.append("may not")
            return
        set_niceness(own, 3)
        teams.append(ThreadTeam.of_thread())
        list(in_order([call], 2))
        seen.extend([niceness(own), len(teams[0]._threads)])

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen in (["may not"], [3, 0, 0, 1]), "and who has ended is no member"
