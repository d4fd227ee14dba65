"""The tests that SECURITY.md names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
FILES = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


def test_security_page_names_existing_tests():
    named = re.findall(r"(test_\w+\.py)(?:::(test_\w+))?", TEXT)
    assert len(named) > 20
    for file, test in named:
        assert file in FILES, file
        assert f"def {test}" in FILES[file], (file, test)


def test_security_page_rows_name_tests():
    rows = [line for line in TEXT.partition("the test that verifies it")[2].splitlines() if line.startswith("| ")][2:]
    rows = [row for row in rows if not row.startswith("| ---")]
    assert len(rows) > 10
    assert [row for row in rows if "test_" not in row.rsplit("|", 2)[1]] == []
