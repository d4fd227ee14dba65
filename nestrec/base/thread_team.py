"""Thread pools for host work: parallel loops, calls that run ahead in order, teams with a common niceness, futures.

The work is numba code, file access and hashing, which release the GIL. Plain threads are used instead of numba's
parallel loops, because the default threading layers of numba must not be entered by two threads at the same time, and
the lanes of a training pipeline are threads.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol, TypeVar

import torch

T_co = TypeVar("T_co", covariant=True)


class FutureLike(Protocol[T_co]):
    """Value that another thread computes."""

    def result(self) -> T_co:
        """Block until the value is ready and return it, or raise the exception of the computation."""


T = TypeVar("T")

_MIN_WORK_PER_THREAD = 1024
_LOCAL = threading.local()


def parallel_for(size: int, work: int, call: Callable[[int, int], None], num_threads: int = 0) -> None:
    """Run `call(start, stop)` on several threads, for ranges that cover `range(size)`.

    Args:
        size: Number of iterations.
        work: Number of rows to move; with less than 1,024 per thread, fewer threads are used.
        call: Processes the iterations from `start` to `stop`.
        num_threads: Maximum number of threads; 0 uses as many as torch.
    """
    if work < 2 * _MIN_WORK_PER_THREAD:  # the common case of models with many small tables
        call(0, size)
        return
    threads = num_threads or torch.get_num_threads()
    parts = max(1, min(threads, work // _MIN_WORK_PER_THREAD, size))
    if parts == 1:
        call(0, size)
        return
    bounds = [size * p // parts for p in range(parts + 1)]
    pool = _pool(threads)
    waiting = [pool.submit(call, bounds[p], bounds[p + 1]) for p in range(1, parts)]
    call(bounds[0], bounds[1])
    for future in waiting:
        future.result()


@lru_cache(maxsize=8)
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="nestrec-host")


def run_ahead(calls: Iterable[Callable[[], T]], num_threads: int) -> Iterator[T]:
    """Run calls ahead of the consumer on threads, and yield their results in order (prefetching).

    Up to `num_threads` calls run at the same time while one more waits; 0 runs each call when its result is requested.
    """
    if num_threads <= 0:
        yield from (call() for call in calls)
        return
    with (
        ThreadTeam.current().add_members() as join,
        ThreadPoolExecutor(num_threads, thread_name_prefix="nestrec-ahead", initializer=join) as threads,
    ):
        ahead = deque[Future[T]]()
        for call in calls:
            ahead.append(threads.submit(call))
            del call  # release its objects before the next call is created
            if len(ahead) > num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def usable_cores() -> int:
    """Return the number of cores that this process is allowed to use (its CPU affinity)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_per_rank() -> int:
    """Return the number of cores per rank on this host, at least 1."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class ThreadTeam:
    """Thread with its helper threads, whose niceness can be changed together from any thread."""

    def __init__(self) -> None:
        self._threads = {threading.get_native_id()}
        self._lock = threading.Lock()

    @staticmethod
    def current() -> "ThreadTeam":
        """Return the team of the calling thread; a thread that has not joined a team gets its own."""
        if not hasattr(_LOCAL, "team"):
            _LOCAL.team = ThreadTeam()
        team: ThreadTeam = _LOCAL.team
        return team

    @contextlib.contextmanager
    def add_members(self) -> Iterator[Callable[[], None]]:
        """Yield a function that new threads call to join the team; they must have ended before the block ends.

        Like all threads, they inherit the niceness of the thread that starts them.
        """
        joined = set[int]()

        def join() -> None:
            with self._lock:
                joined.add(threading.get_native_id())
                self._threads |= joined
            _LOCAL.team = self

        try:
            yield join
        finally:
            with self._lock:
                self._threads -= joined  # the system can reuse their ids

    def set_niceness(self, increment: int) -> None:
        """Call `set_niceness` for all threads of the team."""
        with self._lock:
            for thread in self._threads:
                set_niceness(thread, increment)


def niceness(thread: int) -> int:
    """Return the niceness of a thread relative to its process; a nicer thread has a lower scheduling priority.

    Args:
        thread: Native id of the thread.
    """
    if sys.platform != "linux":  # other systems do not have a niceness per thread
        return 0
    try:
        return os.getpriority(os.PRIO_PROCESS, thread) - os.getpriority(os.PRIO_PROCESS, os.getpid())
    except ProcessLookupError:
        return 0


def set_niceness(thread: int, increment: int) -> bool:
    """Set the niceness of a thread relative to its process.

    Returns:
        Whether it succeeded; unprivileged processes cannot lower the niceness again.
    """
    if sys.platform != "linux":
        return False
    try:
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + increment))
    except (PermissionError, ProcessLookupError):  # ProcessLookupError: the thread has ended
        return False
    return True
