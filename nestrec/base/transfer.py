"""Host arrays and tensors to the engine's device without making the host wait for the device."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
