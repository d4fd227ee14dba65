"""Capturing CUDA graphs beside everything else that a process does."""

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import torch

_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, memory: Any) -> Iterator[None]:
    """What this thread launches becomes the graph; other threads may go on using the device."""
    with without_collections(), torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        yield


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """One thread at a time in which the interpreter collects no garbage.

    Collected inside a capture, the graphs and events of a model that was served before would be freed there, which
    ends the capture with an error.
    """
    with _ONE_AT_A_TIME:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
