import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.config import config, dumps, to_plain
from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError, UserErrorGroup


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@config
class Inner:
    """Nested config."""

    num_layers: int = 2
    """Depth."""
    dropout: float = 0.1
    """Dropout rate."""
    name: str = "a"
    """A name."""
    is_causal: bool = True
    """A flag."""


@config
class Choice:
    """Choices whose text is also a value of another type."""

    which: Literal["none", "true", 1] = 1
    """One of them."""


@config
class Outer:
    """Config with every type of field."""

    inner: Inner = Inner()
    """A nested config."""
    mode: Literal["sum", "mean"] = "sum"
    """A choice."""
    dims: tuple[int, ...] = (1, 2)
    """A sequence."""
    pair: tuple[int, str] = (1, "x")
    """A fixed sequence."""
    limit_s: float | None = None
    """Optional."""
    parts: Mapping[str, Inner] = dataclasses.field(default_factory=dict)
    """By name."""
    spare: Inner | None = None
    """Optional nested config."""
    color: Color = Color.RED
    """An enum."""
    names: list[str] = dataclasses.field(default_factory=list)
    """Texts."""


@config
class RequiredSeedConfig:
    """Config with a field without default."""

    seed: int
    """Required."""


inners = st.builds(
    Inner, num_layers=st.integers(), dropout=st.floats(allow_nan=False), name=st.text(), is_causal=st.booleans()
)
outers = st.builds(
    Outer,
    inner=inners,
    mode=st.sampled_from(["sum", "mean"]),
    dims=st.lists(st.integers()).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    limit_s=st.none() | st.floats(allow_nan=False),
    parts=st.dictionaries(st.text(), inners, max_size=3),
    color=st.sampled_from(Color),
    names=st.lists(st.text()),
)


@given(outers)
def test_config_round_trips_through_json(value: Outer) -> None:
    assert from_plain(Outer, to_plain(value)) == value
    assert from_plain(Outer, json.loads(dumps(value))) == value


@given(outers, outers)
def test_config_override_sets_every_field(value: Outer, base: Outer) -> None:
    plain = to_plain(value)
    nested = {f"inner.{name}": json.dumps(inner) for name, inner in plain.pop("inner").items()}
    overrides = {name: json.dumps(field) for name, field in plain.items()} | nested
    assert apply_overrides(base, overrides) == value


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("inner.num_layers", "7", 7),
        ("inner.dropout", "1", 1.0),
        ("inner.dropout", "1e-3", 0.001),
        ("inner.name", "12", "12"),
        ("inner.name", "none", "none"),
        ("inner.name", "true", "true"),
        ("inner.is_causal", "False", False),
        ("inner.is_causal", "true", True),
        ("mode", "mean", "mean"),
        ("dims", "3,4,5", (3, 4, 5)),
        ("dims", "[6]", (6,)),
        ("dims", "8", (8,)),
        ("names", "a,b", ["a", "b"]),
        ("names", "7", ["7"]),
        ("names", "1,x", ["1", "x"]),
        ("limit_s", "none", None),
        ("limit_s", "2", 2.0),
        ("color", "blue", Color.BLUE),
    ],
)
def test_config_override_parses_command_line_text(path: str, text: str, expected: Any) -> None:
    changed: Any = apply_overrides(Outer(), {path: text})
    for name in path.split("."):
        changed = getattr(changed, name)
    assert changed == expected
    assert type(changed) is type(expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"iner.dropout": "1"}, r"Did you mean --inner\.dropout\?"),
        ({"inner.num_layer": "1"}, r"Did you mean --inner\.num_layers\?"),
        ({"inner.num_layers": "x"}, "inner.num_layers=x: must be of type int"),
        ({"inner.num_layers": "1.5"}, "must be of type int"),
        ({"inner.num_layers": "true"}, "must be of type int"),
        ({"inner.is_causal": "1"}, "must be of type bool"),
        ({"mode": "meen"}, "Did you mean 'mean'"),
        ({"mode.x": "1"}, "no such option"),
        ({"inner": "3"}, "this is a group of options"),
        ({"color": "green"}, "color=green: is not one of the choices"),
        ({"pair": "[1]"}, "contains 1 values. Set 2 values"),
        ({"parts.new.droput": "1"}, r"Did you mean --parts\.new\.dropout\?"),
        ({"parts.new": "3"}, "must be a mapping"),
        ({"dims": "a,b"}, r"dims\[0\]"),
        ({"inner.dropout": "9" * 400}, r"inner.dropout=9+\.\.\.: is too large"),
        ({"inner.dropout": "9" * 5_000}, "must be of type float"),
        ({"inner.dropout": "[" * 50_000}, "must be of type float"),
    ],
)
def test_config_override_error_names_option_and_remedy(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_overrides(Outer(), overrides)


def test_config_override_sets_entry_of_mapping() -> None:
    changed = apply_overrides(Outer(parts={"a": Inner(), "b": Inner()}), {"parts.a.dropout": "0.5"})
    assert changed.parts == {"a": Inner(dropout=0.5), "b": Inner()}
    changed = apply_overrides(Outer(), {"parts.c": '{"dropout": 0.25}'})
    assert changed.parts == {"c": Inner(dropout=0.25)}
    assert apply_overrides(Outer(), {"spare.dropout": "0.25"}).spare == Inner(dropout=0.25), "the field was None"
    changed = apply_overrides(Outer(), {"parts.c.dropout": "0.25", "parts.c.name": "b"})
    assert changed.parts == {"c": Inner(dropout=0.25, name="b")}, "the mapping did not contain this entry"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {"dropuot": 1}}, r"inner.dropuot=1: Inner has no such field. Did you mean 'dropout'"),
        ({"inner": 3}, "must be a mapping"),
        ({"parts": {"a": {"name": 3}}}, "parts.a.name=3: must be of type str"),
        ({"pair": [1, 2]}, r"pair\[1\]"),
    ],
)
def test_config_from_plain_error_names_field(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_plain(Outer, data)


def test_config_choice_named_none_is_not_null() -> None:
    assert apply_overrides(Choice(), {"which": "none"}).which == "none"
    assert apply_overrides(Choice(which="none"), {"which": "1"}).which == 1


def test_config_from_plain_names_missing_field() -> None:
    with pytest.raises(UserError, match="seed=None: is required"):
        from_plain(RequiredSeedConfig, {})


def test_configs_are_frozen_keyword_only_and_slotted() -> None:
    value = Inner()
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.dropout = 0.3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Inner(3)  # type: ignore[misc]
    assert not hasattr(value, "__dict__")


@config
class Small:
    """Member of a union."""

    kind: Literal["small"] = "small"
    """Its name."""
    width: int = 1
    """A number."""


@config
class Large:
    """Another member."""

    kind: Literal["large"] = "large"
    """Its name."""
    width: int = 9
    """A number."""
    height: int = 9
    """Another number."""


@config
class Either:
    """Config with unions, mappings and sequences."""

    size: Small | Large = Small()
    """One of two kinds."""
    often: int | Literal["auto"] | None = "auto"
    """A number or a word."""
    actions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts by name."""
    names: tuple[str, ...] = ("a",)
    """Texts."""
    limit: int = 1
    """A number."""


def test_config_errors_are_reported_together() -> None:
    wrong = {"inner.num_layers": "x", "mode": "meen", "inner.dropuot": "1", "nosuch": "1", "dims": "a,2,b"}
    with pytest.raises(UserErrorGroup) as caught:
        apply_overrides(Outer(), wrong)
    fields = [error.option for error in caught.value.errors]
    assert sorted(map(str, fields)) == ["dims[0]", "dims[2]", "inner.dropuot", "inner.num_layers", "mode", "nosuch"]
    assert all(str(field) in str(caught.value) for field in fields)
    with pytest.raises(UserErrorGroup) as caught:
        from_plain(Outer, {"inner": {"dropout": "x", "name": 3}, "mode": 1})
    assert [error.option for error in caught.value.errors] == ["inner.dropout", "inner.name", "mode"]


def test_config_override_suggests_full_path() -> None:
    with pytest.raises(UserError, match=r"Did you mean --inner\.num_layers\?"):
        apply_overrides(Outer(), {"num_layers": "3"})


def test_config_union_is_selected_by_kind() -> None:
    assert apply_overrides(Either(), {"size": '{"kind": "large", "height": 2}'}).size == Large(height=2)
    for text, message in (
        ('{"kind": "small", "widht": 3}', "size.widht=3: Small has no such field. Did you mean 'width'"),
        ('{"kind": "large", "width": "x"}', "size.width=x: must be of type int"),
        ('{"kind": "medium"}', "size.kind=medium: is not one of the choices. Known names: large, small"),
    ):
        with pytest.raises(UserError, match=message):
            apply_overrides(Either(), {"size": text})


def test_config_override_lists_options_for_unknown_word() -> None:
    with pytest.raises(UserError, match="often=ofen") as caught:
        apply_overrides(Either(), {"often": "ofen"})
    assert caught.value.remedy == "write an integer, such as 8, or known names: auto, or none"


def test_config_mapping_accepts_name_value_pairs() -> None:
    changed = apply_overrides(Either(), {"actions": "click=clicked,buy=event:buy"})
    assert changed.actions == {"click": "clicked", "buy": "event:buy"}
    assert apply_overrides(Either(actions={"a": "b"}), {"actions": ""}).actions == {}
    with pytest.raises(UserError, match="Write name=value,other=value"):
        apply_overrides(Either(), {"actions": "click=clicked,buy"})


def test_config_empty_text_is_empty_list() -> None:
    assert apply_overrides(Either(), {"names": ""}).names == ()
    assert apply_overrides(Outer(), {"dims": ""}).dims == ()


def test_config_type_errors_describe_expected_value() -> None:
    with pytest.raises(UserError, match=r"Write an integer, such as 8\.$"):
        apply_overrides(Either(), {"limit": "x"})


@config
class _SizesConfig:
    sizes: dict[str, int] | None = None


def test_config_errors_inside_optional_config_name_value():
    with pytest.raises(UserError, match=r"^sizes.a=x: must be of type int. Write an integer, such as 8\.$"):
        from_plain(_SizesConfig, {"sizes": {"a": "x"}})
    with pytest.raises(UserError, match=r"(?s)2 mistakes.*sizes.a=x.*sizes.b=y") as both:
        from_plain(_SizesConfig, {"sizes": {"a": "x", "b": "y"}})
    assert "None" not in str(both.value)
