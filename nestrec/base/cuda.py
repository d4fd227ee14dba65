"""CUDA helpers: device selection, CUDA graph capture in multi-threaded processes, pinned copies and side streams.

A copy between pageable memory and a device synchronizes with all earlier work, so copies go through pinned memory. On a
CPU device the functions do nothing special: a copy is the tensor itself.
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

_GC_LOCK = threading.Lock()


@contextlib.contextmanager
def capture_cuda_graph(graph: torch.cuda.CUDAGraph, memory: Any) -> Iterator[None]:
    """Capture the work that this thread launches as a CUDA graph; other threads may use the device at the same time.

    Args:
        graph: Empty graph that receives the work.
        memory: Memory pool of the graph (see `torch.cuda.graph_pool_handle`).
    """
    with gc_paused(), torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        yield


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection for the block; one thread at a time.

    A collection during a capture could free CUDA graphs and events of a model that is no longer served, and freeing
    them makes the capture fail.
    """
    with _GC_LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


DeviceChoice = Literal["auto", "cpu", "cuda"]
"""Values of device options."""


def resolve_device(device: str) -> str:
    """Resolve `auto` to `cuda` if a GPU is available and to `cpu` otherwise; return other names unchanged."""
    import torch  # configs name `DeviceChoice`, and reading a config must not load torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_device(device: str) -> "torch.device":
    """Return the `torch.device` with this name, or of `auto`.

    Raises:
        UserError: torch does not know the name.
    """
    import torch

    try:
        return torch.device(resolve_device(device))
    except (RuntimeError, TypeError):
        remedy = 'use "cpu", "cuda" or "auto"'
        raise UserError("not a torch device", option="device", value=device, remedy=remedy) from None


_ALIGNMENT_BYTES = 16
_URGENT = -1
"""Priority of urgent streams; a lower number is a higher priority."""


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a tensor on the device; on a CPU the tensor shares the memory of the array."""
    return copy_to_device(torch.from_numpy(array), device)


def arrays_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy several arrays to the device with one transfer, because each transfer costs the host a launch."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for array in arrays]
    pinned = pinned_empty([sum(sizes)], torch.uint8, device)
    start = 0
    tensors = []
    for array, size in zip(arrays, sizes, strict=True):
        pinned.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += size
    on_device = pinned.to(device, non_blocking=True)
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors.append(on_device[start : start + array.nbytes].view(dtype))
        start += size
    return tensors


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device through pinned memory, asynchronously; on a CPU, return the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pinned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized host tensor for copies to and from a device; it is pinned if the device is a GPU."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized host tensor with the shape and dtype of `tensor`; it is pinned if that is on a GPU."""
    return pinned_empty(tensor.shape, tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Asynchronous copy from a device to the host."""

    host: torch.Tensor
    """Host tensor; its values are valid after `wait`."""
    arrived: torch.cuda.Event | None
    """Event at the end of the copy; None if the tensor was on the host already."""

    def wait(self) -> torch.Tensor:
        """Wait for the copy, but not for work that was launched after it, and return the host tensor."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host


def to_host(tensor: torch.Tensor) -> HostCopy:
    """Start copying a tensor to pinned memory on the current stream; a host tensor is its own copy."""
    if not tensor.is_cuda:
        return HostCopy(tensor, None)
    host = pinned_like(tensor).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))
    return HostCopy(host, arrived)


def side_stream(device: torch.device, *, is_urgent: bool = False) -> torch.cuda.Stream | None:
    """Return a new CUDA stream, with high priority if it is urgent, or None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=_URGENT if is_urgent else 0)


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that makes the stream the current one of this thread; None changes nothing."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def record_stream_use(tensors: Iterable[torch.Tensor]) -> None:
    """Mark tensors of another stream as used by the current stream.

    The caching allocator then reuses their memory only after the work of this stream (`torch.Tensor.record_stream`).
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
