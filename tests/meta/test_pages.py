"""Pages of the documentation hold what they say they hold."""

import re
from pathlib import Path

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
