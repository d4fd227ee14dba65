"""CUDA in one place: graph capture next to other threads, the choice of a device, pinned copies and side streams.

A copy between pageable memory and a device waits for all work before it, so copies go through pinned memory. Functions
that take a device do nothing special on a CPU: a copy is the tensor itself.
"""

import contextlib
import gc
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
        raise UserError("is no device", option="device", value=wanted, remedy=remedy) from None


_ALIGNMENT_BYTES = 16
_URGENT = -1
"""Priority of a stream; lower numbers come first."""


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor of the device; on a CPU it shares the array's memory."""
    return sent_to_device(torch.from_numpy(array), device)


def all_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """`to_device` of several arrays in one copy: each costs the host about as much as a launch."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for array in arrays]
    pinned = pinned_empty([sum(sizes)], torch.uint8, device)
    at = 0
    found = []
    for array, size in zip(arrays, sizes, strict=True):
        pinned.numpy()[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += size
    there = pinned.to(device, non_blocking=True)
    at = 0
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


def pinned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns an uninitialized host tensor for copies to and from a device: in pinned memory if that is a GPU."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialized host tensor with the shape and type of `tensor`, pinned if that is on a GPU."""
    return pinned_empty(tensor.shape, tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy from a device to the host that may still be under way."""

    host: torch.Tensor
    """Holds the values after `wait`."""
    arrived: torch.cuda.Event | None
    """Happens at the end of the copy; None if there was nothing to copy."""

    def wait(self) -> torch.Tensor:
        """Returns the host tensor after the copy has ended; the host waits for nothing that was launched later."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host


def to_host(tensor: torch.Tensor) -> HostCopy:
    """Starts the copy of a tensor into pinned memory, on the current stream; a host tensor is its own copy."""
    if not tensor.is_cuda:
        return HostCopy(tensor, None)
    host = pinned_like(tensor).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))
    return HostCopy(host, arrived)


def side_stream(device: torch.device, *, is_urgent: bool = False) -> torch.cuda.Stream | None:
    """Returns a new stream of a GPU, or None on a CPU; the device prefers work of urgent streams."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=_URGENT if is_urgent else 0)


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Inside the block, this thread launches into the stream; None changes nothing."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Tensors made on another stream are read on this one: their memory may not be reused before that is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
