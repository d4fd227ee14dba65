"""Configs of plugins are selected by `kind`, also those of other packages; errors name the plugin."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Annotated, Any, Literal

import pytest

from nestrec.base import plugins as module
from nestrec.base.config import config, to_plain
from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import Count, PluginConfig, from_plain
from nestrec.base.errors import UserError
from nestrec.base.plugins import PluginRegistry


@config
class SquareConfig:
    kind: Literal["square"] = "square"
    side: Count = 1


@config
class CircleConfig:
    kind: Literal["circle"] = "circle"
    radius: Count = 1


@dataclass(frozen=True)
class Shape:
    config: type


CIRCLE, MISNAMED = Shape(CircleConfig), Shape(SquareConfig)
SHAPES: PluginRegistry[Shape] = PluginRegistry("tests.shapes", "shape", {"square": Shape(SquareConfig)}, of=Shape)


@config
class Drawing:
    shape: Annotated[Any, PluginConfig(SHAPES)] = SquareConfig()


@pytest.fixture(autouse=True)
def another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"circle": "CIRCLE", "misnamed": "MISNAMED"}
    points = [EntryPoint(name=name, value=f"{__name__}:{at}", group="tests.shapes") for name, at in names.items()]
    monkeypatch.setattr(module, "entry_points", lambda group: [point for point in points if point.group == group])
    SHAPES.__dict__.pop("_external", None)


def test_plugin_config_round_trips_by_kind() -> None:
    drawing = from_plain(Drawing, {"shape": {"kind": "circle", "radius": 3}})
    assert drawing.shape == CircleConfig(radius=3)
    assert from_plain(Drawing, to_plain(drawing)) == drawing
    assert from_plain(Drawing, {"shape": CircleConfig(radius=2)}).shape.radius == 2


def test_plugin_config_override_sets_member_then_fields() -> None:
    circle = {"shape": '{"kind": "circle", "radius": 3}'}
    assert apply_overrides(Drawing(), circle).shape == CircleConfig(radius=3)
    assert apply_overrides(Drawing(), {**circle, "shape.radius": "4"}).shape == CircleConfig(radius=4)


@pytest.mark.parametrize(
    ("plain", "field", "problem"),
    [
        ({"kind": "circle", "side": 3}, "shape.side", "CircleConfig has no such field"),
        ({"kind": "circle", "radius": 0}, "shape.radius", "must be 1 or more"),
        ({"kind": "oval"}, "shape.kind", "no such shape"),
        ({"kind": "misnamed"}, "tests.shapes: misnamed", "its config SquareConfig does not have this kind"),
        ({"width": 3}, "tests.shapes: misnamed", "its config SquareConfig does not have this kind"),
        (3, "shape", "must be a mapping"),
        (Drawing(), "shape", "must be the config of a shape"),
    ],
)
def test_plugin_config_error_names_member_of_kind(plain: Any, field: str, problem: str) -> None:
    with pytest.raises(UserError) as raised:
        from_plain(Drawing, {"shape": plain})
    assert (raised.value.option, raised.value.problem) == (field, problem)


def test_plugin_config_error_names_registry_and_package() -> None:
    error = SHAPES.missing_field_error("square", "area", "its area is not known")
    assert (error.option, error.value, error.problem) == ("shape", "square", "its area is not known")
    assert error.remedy is not None
    assert "`area`" in error.remedy
    assert "nestrec" in error.remedy
