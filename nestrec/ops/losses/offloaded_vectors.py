"""Host offload of candidate vectors, as in TurboGR: copied to the host in segments and back with a double buffer.

    forward    gather a segment into one of two device buffers, yield it, and copy it to the host concurrently
    backward   copy a segment into one buffer while the caller uses the other

A buffer is overwritten only after its reader is done: the copy stream and the caller's stream wait for each other's
events, and the host waits for neither. Without CUDA the vectors are in host memory anyway and are yielded directly.

Legend: T tokens, S tokens of a segment, N candidates of a token, U rows, D channels.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch

from nestrec.base.cuda import pinned_empty, side_stream


class OffloadedVectors:
    """Vectors of all candidates of a micro-batch, offloaded to host memory."""

    def __init__(self, row_UD: torch.Tensor, index_TN: torch.Tensor, segment_tokens: int) -> None:
        self._row_UD = row_UD
        self._index_TN = index_TN
        self._segment_tokens = segment_tokens
        self._is_cuda = row_UD.is_cuda
        shape = (*index_TN.shape, row_UD.shape[1])
        self._host_TND = pinned_empty(shape, row_UD.dtype, row_UD.device)

    @property
    def num_bytes(self) -> int:
        """Number of bytes transferred in each direction."""
        return self._host_TND.nbytes

    def forward(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Gather the segments from the rows; yields (start, stop, (S, N, D) vectors), valid until the next one."""
        buffers = _DoubleBuffer(self._row_UD.device) if self._is_cuda else None
        for number, (start, stop) in enumerate(self._bounds()):
            flat_index = self._index_TN[start:stop].reshape(-1)
            if buffers is None:
                vectors = self._host_TND[start:stop]
                torch.index_select(self._row_UD, 0, flat_index, out=vectors.view(-1, vectors.shape[2]))
                yield start, stop, vectors
            else:
                vectors = buffers.take(number, self._host_TND[start:stop])
                torch.index_select(self._row_UD, 0, flat_index, out=vectors.view(-1, vectors.shape[2]))
                buffers.copy(number, vectors, self._host_TND[start:stop])
                yield start, stop, vectors
        self._row_UD = self._row_UD[:0]  # the host copy replaces the rows: release them

    def backward(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the segments of `forward` again, copied from the host."""
        bounds = list(self._bounds())
        if not self._is_cuda:
            for start, stop in bounds:
                yield start, stop, self._host_TND[start:stop]
            return
        buffers = _DoubleBuffer(self._index_TN.device)

        def fetch(number: int) -> torch.Tensor:
            segment = self._host_TND[slice(*bounds[number])]
            vectors = buffers.take(number, segment)
            buffers.copy(number, segment, vectors)
            return vectors

        prefetched = fetch(0) if bounds else None
        for number, (start, stop) in enumerate(bounds):
            vectors, prefetched = prefetched, fetch(number + 1) if number + 1 < len(bounds) else None
            assert vectors is not None
            buffers.wait_for_copy(number)
            yield start, stop, vectors
            buffers.release(number)

    def _bounds(self) -> Iterator[tuple[int, int]]:
        num_tokens = len(self._index_TN)
        for start in range(0, num_tokens, self._segment_tokens):
            yield start, min(start + self._segment_tokens, num_tokens)


class _DoubleBuffer:
    """Two device buffers shared by the current (compute) stream and a copy stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = _copy_stream(device.index or 0)
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._released: list[torch.cuda.Event | None] = [None, None]
        self._compute = torch.cuda.current_stream(device)

    def take(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer of a segment; kernels launched next on the current stream can write to it."""
        buffer_index = number % 2
        buffer = self._buffers[buffer_index]
        if buffer is None:
            buffer = self._buffers[buffer_index] = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            buffer.record_stream(self._copies)
        copied = self._copied[buffer_index]
        if copied is not None:
            self._compute.wait_event(copied)
        return buffer[: len(like)]

    def copy(self, number: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start a copy that runs after the launched work of the current stream and after the buffer's reader."""
        buffer_index = number % 2
        released = self._released[buffer_index]
        ready = released
        if ready is None or source.is_cuda:
            ready = torch.cuda.Event()
            ready.record(self._compute)
        self._copies.wait_event(ready)
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._copies)
        self._copied[buffer_index] = done

    def wait_for_copy(self, number: int) -> None:
        """Make the current stream wait until the segment is in the buffer."""
        copied = self._copied[number % 2]
        assert copied is not None
        self._compute.wait_event(copied)

    def release(self, number: int) -> None:
        """Mark the buffer as free after all kernels that the current stream has launched so far."""
        event = torch.cuda.Event()
        event.record(self._compute)
        self._released[number % 2] = event


@lru_cache(maxsize=8)
def _copy_stream(device_index: int) -> torch.cuda.Stream:
    stream = side_stream(torch.device("cuda", device_index))
    assert stream is not None
    return stream
