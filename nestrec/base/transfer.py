"""Host arrays and tensors to the engine's device without making the host wait for the device."""

from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor of the device; on a CPU it shares the array's memory."""
    return sent_to_device(torch.from_numpy(array), device)


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
