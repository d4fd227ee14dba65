"""A wait of a given time in the order of a thread's work. For benchmarks that emulate what is not there.

On a CPU the thread sleeps. On CUDA the stream waits, not the thread: the driver calls the C library's `usleep` between
two pieces of the stream's work, on a thread of its own. No kernel runs, so nothing is taken from the computation (on an
H200 matrix products beside such waits took what they took alone), and Python has no part in it. A wait takes 0.1 to 0.2
ms longer than asked for. The driver makes such calls one after another, so only one stream at a time should wait so.
"""

import ctypes
import time
from functools import lru_cache
from typing import Any

import torch


def wait_in_order(duration_s: float, device: torch.device) -> None:
    """What this thread does, or launches, next on the device comes this much later."""
    if device.type != "cuda":
        time.sleep(duration_s)
        return
    launch, usleep = _calls()
    stream = torch.cuda.current_stream(device).cuda_stream
    if (code := launch(stream, usleep, round(duration_s * 1e6))) != 0:
        raise RuntimeError(f"cuLaunchHostFunc failed with code {code}")


@lru_cache(maxsize=1)
def _calls() -> tuple[Any, Any]:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    # The argument of a host function is a pointer, which is passed as an integer is: usleep takes it for its own.
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return launch, ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
