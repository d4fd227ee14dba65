"""Spans on the disk, one JSON object a line, and spans of several ranks put together."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from nestrec.base.errors import DataError
from nestrec.trace.span import Span


def save_spans(path: Path, spans: Iterable[Span], *, append: bool = False) -> None:
    """Write spans to a file, or add them to it."""
    with path.open("a" if append else "w") as file:
        for span in spans:
            file.write(json.dumps(dataclasses.asdict(span)) + "\n")


def load_spans(path: Path) -> list[Span]:
    """The spans of a file; a last line cut short by a crash is left out."""
    spans = []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                spans.append(Span(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise DataError(f"line {number} is not a span: {error}", field="trace", value=str(path)) from error
    return spans


def merge(
    spans_of_rank: Mapping[int, Iterable[Span]], offset_ns_of_rank: Mapping[int, int] | None = None
) -> list[Span]:
    """Spans of several ranks in order of time.

    Ranks on one machine share a clock. For others, `offset_ns_of_rank` says how far a rank's clock is ahead.
    """
    offsets = offset_ns_of_rank or {}
    merged = [_shifted(span, rank, offsets.get(rank, 0)) for rank, spans in spans_of_rank.items() for span in spans]
    return sorted(merged, key=lambda span: (span.start_ns, span.rank, span.id))


def _shifted(span: Span, rank: int, offset_ns: int) -> Span:
    return dataclasses.replace(span, rank=rank, start_ns=span.start_ns - offset_ns, end_ns=span.end_ns - offset_ns)
