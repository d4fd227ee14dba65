"""The device side of a lane: a stream of its own on CUDA, nothing on a CPU."""

import contextlib
from collections.abc import Iterator

import torch


class Stream:
    """Work that a lane's thread launches goes to this stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Inside the block, this thread launches into the stream."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> torch.cuda.Event | None:
        """An event behind all that the stream was given so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
