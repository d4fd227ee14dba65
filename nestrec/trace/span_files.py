"""Span files: storage as JSON lines, merging over ranks, and export for Perfetto.

The export uses the Chrome trace event format, which ui.perfetto.dev opens, with one track per lane of each rank.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nestrec.base.errors import DataError
from nestrec.trace.tracer import Span


def write_perfetto(path: Path, spans: Iterable[Span]) -> None:
    """Write spans to a file that Perfetto can open."""
    path.write_text(json.dumps(to_perfetto(spans)))


def to_perfetto(spans: Iterable[Span]) -> dict[str, Any]:
    """Convert spans to the Chrome trace event format; times are relative to the first span."""
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.id))
    origin_ns = ordered[0].start_ns if ordered else 0
    track_of = _tracks(ordered)
    events = [_event(span, track_of[span.rank, span.lane], origin_ns) for span in ordered]
    return {"traceEvents": [*_names(track_of), *events], "displayTimeUnit": "ms"}


def _tracks(spans: Iterable[Span]) -> dict[tuple[int, str], int]:
    lanes = sorted({(span.rank, span.lane) for span in spans})
    return {lane: track for track, lane in enumerate(lanes, start=1)}


def _names(track_of: dict[tuple[int, str], int]) -> list[dict[str, Any]]:
    ranks = sorted({rank for rank, _ in track_of})
    processes = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}} for rank in ranks
    ]
    lanes = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": lane}}
        for (rank, lane), track in track_of.items()
    ]
    return processes + lanes


def _event(span: Span, track: int, origin_ns: int) -> dict[str, Any]:
    details = {
        "id": span.id,
        "step": span.step,
        "micro_batch": span.micro_batch,
        "bytes": span.bytes,
        "rows": span.rows,
        "awaits": span.awaits,
    }
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": track,
        "ts": (span.start_ns - origin_ns) / 1000,
        "dur": span.duration_ns / 1000,
        "args": {name: value for name, value in details.items() if value is not None},
    }


def save_spans(path: Path, spans: Iterable[Span], *, append: bool = False) -> None:
    """Write spans to a file, or append them to it, as one JSON object per line."""
    with path.open("a" if append else "w") as file:
        for span in spans:
            file.write(json.dumps(dataclasses.asdict(span)) + "\n")


def load_spans(path: Path) -> list[Span]:
    """Read the spans of a file; a last line that was truncated by a crash is ignored."""
    spans = []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                spans.append(_with_present_name(Span(**json.loads(line))))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise DataError(f"line {number} is not a span: {error}", option="trace", value=str(path)) from error
    return spans


_FORMER_NAMES = {
    "train.compute": "train.forward_backward",
    "train.data.exchange": "train.data.exchange_samples",
    "train.data.partition": "train.data.balance",
    "train.dense.reduce": "train.dense.all_reduce",
    "train.embedding.copy": "train.embedding.copy_shared_rows",
    "train.embedding.fetch": "train.embedding.read_rows",
    "train.embedding.gradients": "train.embedding.exchange_gradients",
    "train.embedding.replicas": "train.embedding.sync_replicas",
    "train.embedding.route": "train.embedding.exchange_keys",
    "train.embedding.vectors": "train.embedding.exchange_vectors",
}
"""Span names in traces of earlier versions, and their present names."""


def _with_present_name(span: Span) -> Span:
    if span.name not in _FORMER_NAMES:
        return span
    return dataclasses.replace(span, name=_FORMER_NAMES[span.name])


def merge(
    spans_of_rank: Mapping[int, Iterable[Span]], offset_ns_of_rank: Mapping[int, int] | None = None
) -> list[Span]:
    """Merge the spans of several ranks in time order.

    Args:
        spans_of_rank: Spans by rank.
        offset_ns_of_rank: Nanoseconds that the clock of a rank is ahead; needed if ranks do not share a machine.
    """
    offsets = offset_ns_of_rank or {}
    merged = [_shift(span, rank, offsets.get(rank, 0)) for rank, spans in spans_of_rank.items() for span in spans]
    return sorted(merged, key=lambda span: (span.start_ns, span.rank, span.id))


def _shift(span: Span, rank: int, offset_ns: int) -> Span:
    return dataclasses.replace(span, rank=rank, start_ns=span.start_ns - offset_ns, end_ns=span.end_ns - offset_ns)
