"""Seams: members by name, ours and those of other packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from nestrec.base import plugins as module
from nestrec.base.errors import UserError
from nestrec.base.plugins import PluginRegistry


@dataclass(frozen=True)
class Shape:
    sides: int


TRIANGLE = Shape(3)
NOT_A_SHAPE = "square"


def shapes(monkeypatch: pytest.MonkeyPatch, **foreign: str) -> PluginRegistry[Shape]:
    points = [EntryPoint(name=name, value=value, group="tests.shapes") for name, value in foreign.items()]
    monkeypatch.setattr(module, "entry_points", lambda group: [point for point in points if point.group == group])
    return PluginRegistry("tests.shapes", "shape", {"square": Shape(4), "triangle": f"{__name__}:TRIANGLE"}, of=Shape)


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
        UserError, match=r"draw.shape=sqare: no such shape(.|\n)*did you mean 'square'.*tests.shapes"
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


class Drawing(Protocol):
    def __call__(self, canvas: Any, *, scale: float) -> None: ...


@dataclass(frozen=True)
class Style:
    width: int = 1


@dataclass(frozen=True)
class BareStyle:
    width: int


@dataclass(frozen=True, kw_only=True)
class Spec:
    config: type = Style
    area: Callable[[Any, "OnlyForTypeCheckers"], float]  # noqa: F821
    draw: Drawing = lambda canvas, *, scale: None
    corners: tuple[Shape, ...] = ()
    kind: Literal["flat", "round"] = "flat"
    names: Mapping[str, int] = field(default_factory=dict)
    painted: Any = None


def area(shape: Any, unit: Any) -> float:
    return 1.0


def specs(monkeypatch: pytest.MonkeyPatch, **given: Any) -> PluginRegistry[Spec]:
    monkeypatch.setattr(module, "entry_points", lambda group: [])
    return PluginRegistry("tests.specs", "spec", {"one": Spec(**{"area": area, **given})}, of=Spec)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": "Style"}, r"specs: one, config=Style: is not what is asked for.*give a dataclass"),
        ({"config": Style()}, r"one, config=Style\(width=1\): is not what"),
        ({"area": None}, r"one, area=None: is not what .*.*a function of \(Any, OnlyForTypeCheckers\)"),
        ({"area": lambda shape: 1.0}, r"cannot be called as it will be: it takes \(shape\)"),
        ({"draw": lambda canvas, size: None}, r"it takes \(canvas, size\)\n.*a function of \(canvas, scale=\)"),
        ({"corners": [Shape(3)]}, r"one, corners = .*\n.*give a tuple of Shape"),
        ({"corners": ("corner",)}, r"one, corners = \('corner',\)"),
        ({"kind": "sharp"}, r"one, kind=sharp: .*.*'flat' or 'round'"),
        ({"names": ["a"]}, r"one, names = .*\n.*give a Mapping"),
    ],
)
def test_a_field_of_a_spec_that_holds_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        specs(monkeypatch, **given).find("one")
    assert specs(monkeypatch).find("one").area is area


def test_what_a_spec_names_without_importing_it_is_checked_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = specs(monkeypatch)
    with pytest.raises(UserError, match=r"spec=one: its painted 'gone:X' cannot be loaded \(ModuleNotFoundError"):
        seam.resolved("one", "painted", "gone:X", of=Shape)
    with pytest.raises(UserError, match="its painted is 3, which is no Shape"):
        seam.resolved("one", "painted", 3, of=Shape)
    assert seam.resolved("one", "painted", f"{__name__}:TRIANGLE", of=Shape) is TRIANGLE


def test_options_without_defaults_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert specs(monkeypatch).by_default("one", "config") == Style()
    with pytest.raises(UserError, match=r"its config BareStyle cannot be made without values \(.*'width'"):
        specs(monkeypatch, config=BareStyle).by_default("one", "config")
