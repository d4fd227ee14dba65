"""Threads that share a loop, and the protocol of futures.

What somebody else is still making.

Host loops split over threads, and calls that run ahead on some: what they do is numba, files and digests, without
the GIL.

Plain threads and not numba's own: its default thread layers may not be entered from two threads at once, and the
lanes of a pipeline are threads.
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
    """A thing that another thread makes."""

    def wait(self) -> T_co:
        """It, once it is there, or the error of its making."""


T = TypeVar("T")

_MIN_WORK_A_THREAD = 1024
_OF_THREAD = threading.local()


def for_parts(size: int, work: int, call: Callable[[int, int], None], num_threads: int = 0) -> None:
    """Call `call(start, stop)` for parts that cover `range(size)`.

    work: rows to be moved; below a few thousand a thread, fewer threads are used. num_threads: 0 for as many as torch
    uses.
    """
    if work < 2 * _MIN_WORK_A_THREAD:  # as for most tables, where there are many
        call(0, size)
        return
    threads = num_threads or torch.get_num_threads()
    parts = max(1, min(threads, work // _MIN_WORK_A_THREAD, size))
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


def in_order(calls: Iterable[Callable[[], T]], num_threads: int) -> Iterator[T]:
    """What each call returns, in order. Up to so many run at once and one waits, ahead of who asks; 0: none does."""
    if num_threads <= 0:
        yield from (call() for call in calls)
        return
    with (
        ThreadTeam.of_thread().more() as join,
        ThreadPoolExecutor(num_threads, thread_name_prefix="nestrec-ahead", initializer=join) as threads,
    ):
        ahead = deque[Future[T]]()
        for call in calls:
            ahead.append(threads.submit(call))
            del call  # what it holds is not needed while the next one is made
            if len(ahead) > num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_rank() -> int:
    """Those for each rank on this host."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class ThreadTeam:
    """Threads that work for one of them, which can all be made nicer, or less so, from anywhere."""

    def __init__(self) -> None:
        self._threads = {threading.get_native_id()}
        self._lock = threading.Lock()

    @staticmethod
    def of_thread() -> "ThreadTeam":
        """That of the calling thread, which is alone in it where nobody has made it a member of another."""
        if not hasattr(_OF_THREAD, "team"):
            _OF_THREAD.team = ThreadTeam()
        team: ThreadTeam = _OF_THREAD.team
        return team

    @contextlib.contextmanager
    def more(self) -> Iterator[Callable[[], None]]:
        """What threads call that become members; they must have ended when the block does. They begin as nice as the
        thread that starts them, as all threads do."""
        joined = set[int]()

        def join() -> None:
            with self._lock:
                joined.add(threading.get_native_id())
                self._threads |= joined
            _OF_THREAD.team = self

        try:
            yield join
        finally:
            with self._lock:
                self._threads -= joined  # others may get their numbers

    def set_niceness(self, more: int) -> None:
        """`set_niceness` for all of them."""
        with self._lock:
            for thread in self._threads:
                set_niceness(thread, more)


def niceness(thread: int) -> int:
    """How much nicer a thread, by its native id, is than its process: it leaves the cores to the others."""
    if sys.platform != "linux":  # elsewhere threads have none of their own
        return 0
    try:
        return os.getpriority(os.PRIO_PROCESS, thread) - os.getpriority(os.PRIO_PROCESS, os.getpid())
    except ProcessLookupError:
        return 0


def set_niceness(thread: int, more: int) -> bool:
    """Make it so; whether it could be done: few processes may make a thread less nice again."""
    if sys.platform != "linux":
        return False
    try:
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + more))
    except (PermissionError, ProcessLookupError):  # the second: it has ended
        return False
    return True
