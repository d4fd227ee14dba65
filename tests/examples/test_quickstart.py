"""The quickstart notebook runs completely in an empty folder."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.timeout(300)  # four seconds alone, more if other tests run at the same time
def test_quickstart_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(cells):
        exec(compile(ast.parse(source), f"cell {number}", "exec"), space)
    printed = capsys.readouterr().out
    assert "200 users, 80 items" in printed
    assert "model        ndcg@10" in printed
    assert len(space["best"].items) == 5
    assert not set(space["best"].items) & set(space["history"]["items"])
    assert len(space["scores"]) == 3
    assert [len(ranking) for ranking in space["many"]] == [3, 3]
    assert space["vectors"].shape == (80, 16)
