"""The end of a process whose threads may still be inside torch.

When an interpreter ends, it stops such threads where they are, and what was compiled around them calls that a fault: a
rank that had done all its work was now and then ended by SIGABRT, and its launcher took the run for a failed one.
"""

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End with this code. Where ranks or a device were at work, without taking the interpreter down first."""
    if not _is_at_work():
        sys.exit(code)
    # What an interpreter does before it stops threads; multiprocessing ends its processes in the same way.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_at_work() -> bool:
    """Whether this process has met other ranks or used a device; torch is not loaded to find out."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    distributed = torch.distributed
    return bool((distributed.is_available() and distributed.is_initialized()) or torch.cuda.is_initialized())
