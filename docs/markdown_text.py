"""Markdown of the generated pages: tables, and plain text with the characters escaped that Markdown would interpret."""

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\*_\[\]<>|#])")


def escaped(text: str) -> str:
    """Return plain text as Markdown; spans in backticks stay code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _SPECIAL.sub(r"\\\1", part) for part in parts)


def code(text: str) -> str:
    """Return text as a code span."""
    return f"`{text}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown cells; line breaks in cells become spaces."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(" ".join(cell.split()) for cell in line) + " |" for line in lines)


def page(*parts: str) -> str:
    """Return the non-empty parts as one page."""
    return "\n\n".join(part for part in parts if part) + "\n"
