"""Process helpers: exit while threads are inside torch, transparent huge pages, and garbage collection.

When the interpreter is finalized, it stops threads wherever they are, and native code around them treats that as a
fault: a rank that had finished its work was occasionally killed by SIGABRT, and its launcher reported a failed run. So
such a process runs its exit handlers and then calls `os._exit`.
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

_TIMEOUT_S = 10.0
"""Timeout for destroying process groups; another rank may have died since the last step."""
_COLLECTIVE_EXIT_CODES = (0, errors.INTERRUPTED)
"""Exit codes on which all ranks have agreed; with any other code, the other ranks may still use the process groups."""


def exit_process(code: int) -> NoReturn:
    """Exit with this code; a process that used ranks or a GPU skips the finalization of the interpreter."""
    if not _uses_torch_runtime():
        sys.exit(code)
    atexit.unregister(_destroy_at_exit)  # destroyed below, because the exit code is known here
    compat.run_exit_handlers()  # as the interpreter does before it stops threads
    if code in _COLLECTIVE_EXIT_CODES:
        destroy_process_groups()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def destroy_process_groups_at_exit() -> None:
    """Destroy the process groups before the interpreter is finalized, for scripts that do not call `exit_process`.

    Otherwise a script that had finished its training was occasionally killed by SIGABRT, too.
    """
    atexit.register(_destroy_at_exit)


def _destroy_at_exit() -> None:
    has_failed = hasattr(sys, "last_value")  # then other ranks may still use the process groups
    if "torch" in sys.modules and not has_failed:
        destroy_process_groups()


def _uses_torch_runtime() -> bool:
    """Return whether this process has process groups or has used a GPU; the check does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and (has_process_groups() or bool(torch.cuda.is_initialized()))


def has_process_groups() -> bool:
    """Return whether there are process groups; torch must be imported already."""
    distributed = sys.modules["torch"].distributed
    return bool(distributed.is_available() and distributed.is_initialized())


def destroy_process_groups(groups: Sequence[Any] | None = None) -> None:
    """Destroy process groups and release their device memory; ignore failures, and wait for at most 10 s.

    The work of the process is done, so an error or a dead rank must not change its exit code.

    Args:
        groups: Process groups to destroy; None destroys all of them.
    """

    def destroy() -> None:
        destroy_group = sys.modules["torch"].distributed.destroy_process_group
        for arguments in [()] if groups is None else [(group,) for group in groups]:
            with contextlib.suppress(Exception):
                destroy_group(*arguments)

    if has_process_groups():
        thread = threading.Thread(target=destroy, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # since Python 3.12, threads cannot be started during finalization
            destroy()
            return
        thread.join(_TIMEOUT_S)


HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def enable_huge_pages() -> None:
    """Let torch use transparent huge pages (2 MiB) for large host tensors, if the system supports them.

    Every training step frees its activations and allocates them again, and the kernel maps the memory page by page:
    with 4 KiB pages, that takes a third of the CPU time of a small transformer's step. Must be called before the first
    tensor is created, because torch reads the environment variable once. A value that the user has set is kept.
    """
    os.environ.setdefault(HUGE_PAGES, "1")


def memory_bytes() -> int:
    """Return the memory of this machine in bytes; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection during a latency measurement, because a full collection would add to a latency."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def gc_frozen_import() -> Iterator[None]:
    """Disable garbage collection during the import of torch and other modules, and exclude them from it afterwards.

    Modules never become garbage, and scanning them takes a fifth of the import time. Does nothing if torch is imported
    already, because objects that were created since then can become garbage.
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
