"""Host loops split over threads: the loops are numba and release the GIL.

Plain threads and not numba's own: its default thread layers may not be entered from two threads at once, and the
lanes of a pipeline are threads.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

_MIN_WORK_A_THREAD = 1024


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
