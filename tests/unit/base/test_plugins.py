"""Plugin registries: built-in plugins and plugins of other packages, by name."""

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


def test_plugin_registry_finds_built_in_plugins_first(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = shapes(monkeypatch, other=f"{__name__}:TRIANGLE")
    assert list(registry) == ["square", "triangle", "other"]
    assert len(registry) == 3
    assert "other" in registry
    assert "circle" not in registry
    assert registry.find("triangle") is TRIANGLE
    assert registry.find("other") is TRIANGLE
    assert registry.package_of("square") == "nestrec"


def test_plugin_registry_suggests_names_for_unknown_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"draw.shape=sqare: no such shape(.|\n)*Did you mean 'square'.*tests.shapes"):
        shapes(monkeypatch).find("sqare", field="draw.shape")


def test_plugin_registry_rejects_duplicate_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="two shapes have this name"):
        list(shapes(monkeypatch, square=f"{__name__}:TRIANGLE"))


def test_plugin_registry_names_invalid_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = shapes(monkeypatch, wrong=f"{__name__}:NOT_A_SHAPE", gone="no_such_module:X")
    with pytest.raises(UserError, match=r"tests.shapes: wrong.*must be a shape"):
        registry.find("wrong")
    with pytest.raises(UserError, match=r"tests.shapes: gone.*cannot be loaded \(ModuleNotFoundError"):
        registry.find("gone")


def test_plugin_registry_names_plugin_that_exits_on_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "foreign_script.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"tests.shapes: script.*cannot be loaded \(SystemExit: 3"):
        shapes(monkeypatch, script="foreign_script:X").find("script")


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


def specs(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> PluginRegistry[Spec]:
    monkeypatch.setattr(module, "entry_points", lambda group: [])
    return PluginRegistry("tests.specs", "spec", {"one": Spec(**{"area": area, **fields})}, of=Spec)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": "Style"}, r"specs: one, config=Style: the value has the wrong type.*Set a dataclass"),
        ({"config": Style()}, r"one, config=Style\(width=1\): the value has the wrong type"),
        ({"area": None}, r"one, area=None: the value has .*a function of \(Any, OnlyForTypeCheckers\)"),
        ({"area": lambda shape: 1.0}, r"does not accept the required arguments: its signature is \(shape\)"),
        ({"draw": lambda canvas, size: None}, r"its signature is \(canvas, size\).*a function of \(canvas, scale=\)"),
        ({"corners": [Shape(3)]}, r"one, corners=.*Set a tuple of Shape"),
        ({"corners": ("corner",)}, r"one, corners=\('corner',\)"),
        ({"kind": "sharp"}, r"one, kind=sharp: .*.*'flat' or 'round'"),
        ({"names": ["a"]}, r"one, names=.*Set a Mapping"),
    ],
)
def test_plugin_spec_violation_names_field(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        specs(monkeypatch, **fields).find("one")
    assert specs(monkeypatch).find("one").area is area


def test_plugin_spec_lazy_reference_is_checked_on_use(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = specs(monkeypatch)
    with pytest.raises(UserError, match=r"spec=one: its painted 'gone:X' cannot be loaded \(ModuleNotFoundError"):
        registry.resolve_field("one", "painted", "gone:X", of=Shape)
    with pytest.raises(UserError, match="its painted must be a Shape, not 3"):
        registry.resolve_field("one", "painted", 3, of=Shape)
    assert registry.resolve_field("one", "painted", f"{__name__}:TRIANGLE", of=Shape) is TRIANGLE


def test_plugin_options_without_defaults_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert specs(monkeypatch).default_config("one", "config") == Style()
    with pytest.raises(UserError, match=r"its config BareStyle must have a default for every field \(.*'width'"):
        specs(monkeypatch, config=BareStyle).default_config("one", "config")
