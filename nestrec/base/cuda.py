"""Capturing CUDA graphs beside everything else that a process does.

Which device is meant where a config says `auto`.

Host arrays and tensors to the engine's device without making the host wait for the device.
"""

import contextlib
import gc
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError

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


DeviceChoice = Literal["auto", "cpu", "cuda"]
"""What a config may ask for."""


def chosen_device(wanted: str) -> str:
    """`auto` is a GPU where there is one, else the CPU; anything else is itself."""
    import torch  # configs name `DeviceChoice`, and whoever reads one need not load torch

    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def known_device(wanted: str) -> "torch.device":
    """The same as torch has it; a `UserError` where that is none."""
    import torch

    try:
        return torch.device(chosen_device(wanted))
    except (RuntimeError, TypeError):
        remedy = 'take "cpu", "cuda" or "auto"'
        raise UserError("is no device", field="device", value=wanted, remedy=remedy) from None


_ALIGNMENT_BYTES = 16


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor of the device; on a CPU it shares the array's memory."""
    return sent_to_device(torch.from_numpy(array), device)


def all_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """`to_device` of several arrays in one copy: each costs the host about as much as a launch."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for array in arrays]
    pinned, at, found = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda"), 0, []
    for array, size in zip(arrays, sizes, strict=True):
        pinned.numpy()[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += size
    there, at = pinned.to(device, non_blocking=True), 0
    for array, size in zip(arrays, sizes, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        found.append(there[at : at + array.nbytes].view(dtype))
        at += size
    return found


def sent_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device; on a CPU the same one.

    Through pinned memory (which torch keeps for reuse): a copy from pageable memory would wait for all work before it.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Tensors made on another stream are read on this one: their memory may not be reused before that is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
