"""The device side of lanes: a stream and events on CUDA, nothing on a CPU.

On a CPU a thread's work is done when it goes on; on CUDA it has only been launched. Events make up for it: whoever
submits a task leaves one behind what it has launched so far, and whoever waits for a ticket waits for the lane's.
"""

import contextlib
from collections import deque
from collections.abc import Iterator

import torch

_URGENT = -1
_STEPS_AHEAD = 2
_STEPS_KEPT = 8
"""Batches are begun up to five steps before theirs, and the host may be two steps ahead of the device."""


def launched(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that this thread has launched into its current stream."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """What this thread launches next comes after the event; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def is_over(event: torch.cuda.Event | None) -> bool:
    """Whether the device has passed the event."""
    return event is None or event.query()


@contextlib.contextmanager
def own_stream(device: torch.device, *, is_urgent: bool = False) -> Iterator[None]:
    """Inside the block, this thread launches into a stream of its own; what is urgent gets room on the device first."""
    if device.type != "cuda":
        yield
        return
    if device.index is not None:  # without one, a new thread is on the first device, which is the only one then
        torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device, priority=_URGENT if is_urgent else 0)):
        yield


class RunAhead:
    """Lets the host be two steps ahead of the device, and keeps what steps use until the device is done with it.

    Without it a tensor that the host has dropped could be given to another stream while kernels still read it. On a CPU
    there is nothing to keep.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now: list[object] = []
        self._kept: deque[list[object]] = deque(maxlen=_STEPS_KEPT)
        self._ends: deque[torch.cuda.Event] = deque()

    def keep(self, used: object) -> None:
        """Something that this step or one of the next three uses."""
        if self._device.type == "cuda":
            self._now.append(used)

    def end_step(self) -> None:
        end = launched(self._device)
        if end is None:
            return
        self._ends.append(end)
        if len(self._ends) > _STEPS_AHEAD:
            self._ends.popleft().synchronize()
        self._kept.append(self._now)
        self._now = []
