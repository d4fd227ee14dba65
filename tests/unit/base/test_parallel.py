import threading

import pytest

from nestrec.base.parallel import for_parts


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 3, 10_000, 100_001])
def test_parts_cover_the_range_once(size, threads):
    seen, lock = [], threading.Lock()

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
