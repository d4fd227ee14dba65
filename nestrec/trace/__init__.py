"""Tracing: spans, counters, exposed-time analysis of training steps, and export for Perfetto."""

from nestrec.trace.device_tracer import DeviceTracer
from nestrec.trace.exposed import RawParts, StepParts, Timeline
from nestrec.trace.span_files import load_spans, merge, save_spans, to_perfetto, write_perfetto
from nestrec.trace.tracer import Kind, NullTracer, OpenSpan, Span, Tracer

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
