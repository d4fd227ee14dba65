"""Pages say what the result files say."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
spec = importlib.util.spec_from_file_location("result_tables", DOCS / "result_tables.py")
assert spec is not None
assert spec.loader is not None
result_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(result_tables)


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_tables_of_pages_are_those_of_their_result_files(page: Path) -> None:
    text = page.read_text()
    assert result_tables.rewritten(text) == text, "run `make results`"


def test_a_changed_figure_is_noticed() -> None:
    page = (DOCS / "results" / "serving.md").read_text()
    start = page.index("<!-- table overload.json")
    changed = page[:start] + page[start:].replace("| 2x | 4", "| 2x | 5", 1)
    assert changed != page
    assert result_tables.rewritten(changed) == page
