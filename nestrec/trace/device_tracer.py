"""Tracer for lanes that launch work on a CUDA device: spans have device times instead of host times.

A time stamp is a CUDA event on the current stream of the calling thread. A span therefore starts when the device
reaches it and ends when the device has finished it, including host work in between, because the second event is
recorded after it. Events are converted to times when the spans are read.
"""

from collections import deque
from collections.abc import Collection
from typing import Any

import torch

from nestrec.trace.tracer import OpenSpan, Span, Tracer


class DeviceTracer(Tracer):
    """Tracer with device times for some lanes and host times for all others, for example the data lanes."""

    def __init__(self, device: torch.device, *, lanes: Collection[str], rank: int = 0) -> None:
        super().__init__(rank=rank)
        self._device = device
        self._lanes = frozenset(lanes)
        self._pending: deque[tuple[OpenSpan, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(torch.cuda.current_stream(device))
        self._base.synchronize()
        self._base_ns = self.now_ns()

    def stamp(self, lane: str) -> Any:
        if lane not in self._lanes:
            return self.now_ns()
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self, span: OpenSpan, end: Any) -> None:
        if isinstance(end, int):
            super().finish(span, end)
        else:
            self._pending.append((span, span.start, end))

    def spans(self) -> list[Span]:
        self._resolve_pending()
        return super().spans()

    def take(self) -> list[Span]:
        """Remove and return finished spans; waits until the device has finished the launched ones."""
        self._resolve_pending()
        return super().take()

    def _resolve_pending(self) -> None:
        """Convert events to times.

        Elapsed times are float32, so the base event advances to keep them small and precise.
        """
        last = self._base
        last_ns = self._base_ns
        for _ in range(len(self._pending)):
            span, start, end = self._pending.popleft()
            end.synchronize()
            start_ns, last_ns = self._time_ns(start), self._time_ns(end)
            self.record(span.closed(start_ns, max(start_ns, last_ns)))
            self._free += [start] if last is self._base else [start, last]
            last = end
        if last is not self._base:
            self._free.append(self._base)
            self._base = last
            self._base_ns = last_ns

    def _time_ns(self, event: torch.cuda.Event) -> int:
        return self._base_ns + round(float(self._base.elapsed_time(event)) * 1e6)
