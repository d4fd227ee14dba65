"""Exit of a process, huge pages and garbage collection.

The end of a process whose threads may still be inside torch.

When an interpreter ends, it stops such threads where they are, and what was compiled around them calls that a fault: a
rank that had done all its work was now and then ended by SIGABRT, and its launcher took the run for a failed one.

How the process asks the system for memory, and looks for what it can give back.
"""

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from nestrec.base import compat, errors

_LIMIT_S = 10.0
"""to take leave of other ranks, one of which may have died since the last step"""
_BY_AGREEMENT = (0, errors.INTERRUPTED)
"""codes with which all ranks end together; with any other, a rank may be the only one that knows"""


def leave(code: int) -> NoReturn:
    """End with this code. Where ranks or a device were at work, without taking the interpreter down first."""
    if not _is_at_work():
        sys.exit(code)
    atexit.unregister(_leave_ranks_at_end)  # here the code is known
    compat.run_exit_handlers()  # what an interpreter does before it stops threads
    if code in _BY_AGREEMENT:
        take_leave_of_ranks()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_ranks_at_end() -> None:
    """For a script, which ends as interpreters do: what it holds of other ranks is given back before that. As process
    groups are torn down otherwise, one that had trained to its end was now and then ended by SIGABRT, too."""
    atexit.register(_leave_ranks_at_end)


def _leave_ranks_at_end() -> None:
    has_failed = hasattr(sys, "last_value")  # then others may still use theirs
    if "torch" in sys.modules and not has_failed:
        take_leave_of_ranks()


def _is_at_work() -> bool:
    """Whether this process has met other ranks or used a device; torch is not loaded to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and (has_met_ranks() or bool(torch.cuda.is_initialized()))


def has_met_ranks() -> bool:
    """Whether there are process groups; torch must be loaded."""
    distributed = sys.modules["torch"].distributed
    return bool(distributed.is_available() and distributed.is_initialized())


def take_leave_of_ranks(groups: Sequence[Any] | None = None) -> None:
    """Give back what process groups hold, of devices above all. The work is done: no failure, and no rank that is gone
    and keeps us waiting, changes the code. groups: these alone; none: all of them."""

    def destroy() -> None:
        give_back = sys.modules["torch"].distributed.destroy_process_group
        for arguments in [()] if groups is None else [(group,) for group in groups]:
            with contextlib.suppress(Exception):
                give_back(*arguments)

    if has_met_ranks():
        thread = threading.Thread(target=destroy, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # from Python 3.12 on, none can be started at the end of an interpreter
            destroy()
            return
        thread.join(_LIMIT_S)


HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def ask_for_huge_pages() -> None:
    """Large tensors in host memory on pages of 2 MiB, where the system has them; before torch makes its first tensor.

    A step of training gives back its activations and asks for as much again, and the system hands it out anew, page by
    page: at 4 KiB a page that is a third of the processor time of a small transformer's step on a CPU. torch reads the
    variable once; a value that the user has set is kept.
    """
    os.environ.setdefault(HUGE_PAGES, "1")


def memory_bytes() -> int:
    """Of this machine; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Around a measurement of latencies: a collection of garbage over all that is there would be felt as one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around the import of torch and many modules, none of which is ever garbage: looked through neither now nor later.

    That is a fifth of the time of loading them. Where torch is there already, what was made since may be garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
