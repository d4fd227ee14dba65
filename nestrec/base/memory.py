"""How the process asks the system for memory, and looks for what it can give back."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

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
