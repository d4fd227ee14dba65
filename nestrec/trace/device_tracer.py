"""Spans of lanes that launch work on a CUDA device: times of the device, not of the host that launches.

A stamp is an event in the stream of the thread that takes it, so a span begins when the device gets to it and ends when
the device is done with it; work of the host in between is inside, since the second event is recorded after it. Events
become times when the spans are asked for.
"""

from collections import deque
from collections.abc import Collection
from typing import Any

import torch

from nestrec.trace.tracer import OpenSpan, Span, Tracer


class DeviceTracer(Tracer):
    """A tracer whose spans of some lanes have the device's times; other lanes, say of data, have the host's."""

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
        self._settle()
        return super().spans()

    def take(self) -> list[Span]:
        """Finished spans, removed from the buffer; waits until the device is done with those that were launched."""
        self._settle()
        return super().take()

    def _settle(self) -> None:
        """Events to times. They are told as single floats, so the base moves along."""
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
