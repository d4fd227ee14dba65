"""Form of the pages of the documentation: included files, tables and lists of fields."""

import dataclasses
import re
from pathlib import Path

from nestrec.models.sequence import SequenceInfo

ROOT = Path(__file__).resolve().parents[2]


def test_files_that_pages_show_are_included():
    """The formatter of code once took the marks apart, and the page showed the mark in the place of the example."""
    marks = [line for page in (ROOT / "docs").rglob("*.md") for line in page.read_text().splitlines() if "8<" in line]
    broken = [page for page in (ROOT / "docs").rglob("*.md") if re.search(r"--\s*8\s+<|8\s*<\s+--", page.read_text())]
    assert marks
    assert not broken
    for mark in marks:
        (shown,) = re.findall(r'^--8<-- "([^"]+)"$', mark)
        assert (ROOT / shown).is_file()


def test_tables_of_pages_have_one_row_per_line():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for line in page.read_text().splitlines():
            assert not (line.startswith("|") and "||" in re.sub(r"`[^`]*`", "", line)), f"{page.name}: {line}"


def test_own_model_page_lists_fields_of_sequence_info():
    page = (ROOT / "docs" / "own-model.md").read_text()
    missing = [field.name for field in dataclasses.fields(SequenceInfo) if f"| `{field.name}` |" not in page]
    assert missing == []
