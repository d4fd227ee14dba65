"""Spans, counters, exposed-time arithmetic, export for Perfetto."""

from nestrec.trace.device import DeviceTracer
from nestrec.trace.exposed import RawParts, StepParts, Timeline
from nestrec.trace.perfetto import to_perfetto, write_perfetto
from nestrec.trace.span import Kind, Span
from nestrec.trace.storage import load_spans, merge, save_spans
from nestrec.trace.tracer import NullTracer, OpenSpan, Tracer

__all__ = [
    "DeviceTracer",
    "Kind",
    "NullTracer",
    "OpenSpan",
    "RawParts",
    "Span",
    "StepParts",
    "Timeline",
    "Tracer",
    "load_spans",
    "merge",
    "save_spans",
    "to_perfetto",
    "write_perfetto",
]
