"""Seams: members by name, ours and those of other packages."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from nestrec.base import seam as module
from nestrec.base.errors import UserError
from nestrec.base.seam import Seam


@dataclass(frozen=True)
class Shape:
    sides: int


TRIANGLE = Shape(3)
NOT_A_SHAPE = "square"


def shapes(monkeypatch: pytest.MonkeyPatch, **foreign: str) -> Seam[Shape]:
    points = [EntryPoint(name=name, value=value, group="tests.shapes") for name, value in foreign.items()]
    monkeypatch.setattr(module, "entry_points", lambda group: [point for point in points if point.group == group])
    return Seam("tests.shapes", "shape", {"square": Shape(4), "triangle": f"{__name__}:TRIANGLE"}, of=Shape)


def test_members_are_found_by_name_ours_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = shapes(monkeypatch, other=f"{__name__}:TRIANGLE")
    assert list(seam) == ["square", "triangle", "other"]
    assert len(seam) == 3
    assert "other" in seam
    assert "circle" not in seam
    assert seam.find("triangle") is TRIANGLE
    assert seam.find("other") is TRIANGLE
    assert seam.package_of("square") == "nestrec"


def test_an_unknown_name_says_what_was_meant_and_how_to_add_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"draw.shape = 'sqare': no such shape(.|\n)*did you mean 'square'.*tests.shapes"
    ):
        shapes(monkeypatch).find("sqare", field="draw.shape")


def test_a_foreign_member_may_not_take_the_name_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="two shapes of one name"):
        list(shapes(monkeypatch, square=f"{__name__}:TRIANGLE"))


def test_a_member_of_another_type_or_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = shapes(monkeypatch, wrong=f"{__name__}:NOT_A_SHAPE", gone="no_such_module:X")
    with pytest.raises(UserError, match=r"tests.shapes: wrong.*is no shape"):
        seam.find("wrong")
    with pytest.raises(UserError, match=r"tests.shapes: gone.*cannot be loaded \(ModuleNotFoundError"):
        seam.find("gone")


def test_a_member_whose_module_ends_the_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a_script_of_others.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"tests.shapes: script.*cannot be loaded \(SystemExit: 3"):
        shapes(monkeypatch, script="a_script_of_others:X").find("script")
