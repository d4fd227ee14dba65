import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.config import config, dumps, to_plain
from nestrec.base.config_overrides import with_overrides
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError, UserErrorGroup


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@config
class Inner:
    """A part."""

    num_layers: int = 2
    """Depth."""
    dropout: float = 0.1
    """Share of zeros."""
    name: str = "a"
    """A name."""
    is_causal: bool = True
    """A flag."""


@config
class Choice:
    """A choice that a command line would read as another type."""

    which: Literal["none", "true", 1] = 1
    """One of them."""


@config
class Outer:
    """A whole."""

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
    """Maybe a nested config."""
    color: Color = Color.RED
    """An enum."""
    names: list[str] = dataclasses.field(default_factory=list)
    """Texts."""


@config
class Required:
    """Has a field without default."""

    seed: int
    """Must be given."""


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
def test_a_config_survives_plain_data_and_json(value: Outer) -> None:
    assert from_plain(Outer, to_plain(value)) == value
    assert from_plain(Outer, json.loads(dumps(value))) == value


@given(outers, outers)
def test_every_field_can_be_set_by_an_override(value: Outer, base: Outer) -> None:
    plain = to_plain(value)
    nested = {f"inner.{name}": json.dumps(inner) for name, inner in plain.pop("inner").items()}
    overrides = {name: json.dumps(field) for name, field in plain.items()} | nested
    assert with_overrides(base, overrides) == value


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
def test_overrides_read_as_typed_on_a_command_line(path: str, text: str, expected: Any) -> None:
    changed: Any = with_overrides(Outer(), {path: text})
    for name in path.split("."):
        changed = getattr(changed, name)
    assert changed == expected
    assert type(changed) is type(expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"iner.dropout": "1"}, "did you mean 'inner.dropout'"),
        ({"inner.num_layer": "1"}, "did you mean 'inner.num_layers'"),
        ({"inner.num_layers": "x"}, "inner.num_layers=x: is not of type int"),
        ({"inner.num_layers": "1.5"}, "not of type int"),
        ({"inner.num_layers": "true"}, "not of type int"),
        ({"inner.is_causal": "1"}, "not of type bool"),
        ({"mode": "meen"}, "did you mean 'mean'"),
        ({"mode.x": "1"}, "has no fields"),
        ({"inner": "3"}, "must hold named fields"),
        ({"color": "green"}, "color=green: is not one of the choices"),
        ({"pair": "[1]"}, "has 1 values. Give 2 values"),
        ({"parts.new.droput": "1"}, "did you mean 'parts.new.dropout'"),
        ({"parts.new": "3"}, "must hold named fields"),
        ({"dims": "a,b"}, r"dims\[0\]"),
        ({"inner.dropout": "9" * 400}, r"inner.dropout=9+\.\.\.: is too large"),
        ({"inner.dropout": "9" * 5_000}, "not of type float"),
        ({"inner.dropout": "[" * 50_000}, "not of type float"),
    ],
)
def test_a_wrong_override_names_the_field_and_the_remedy(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_overrides(Outer(), overrides)


def test_an_override_reaches_into_a_mapping() -> None:
    changed = with_overrides(Outer(parts={"a": Inner(), "b": Inner()}), {"parts.a.dropout": "0.5"})
    assert changed.parts == {"a": Inner(dropout=0.5), "b": Inner()}
    changed = with_overrides(Outer(), {"parts.c": '{"dropout": 0.25}'})
    assert changed.parts == {"c": Inner(dropout=0.25)}
    assert with_overrides(Outer(), {"spare.dropout": "0.25"}).spare == Inner(dropout=0.25), "it was none"
    changed = with_overrides(Outer(), {"parts.c.dropout": "0.25", "parts.c.name": "b"})
    assert changed.parts == {"c": Inner(dropout=0.25, name="b")}, "nothing was said of it before"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {"dropuot": 1}}, r"inner.dropuot=1: Inner has no such field. Did you mean 'dropout'"),
        ({"inner": 3}, "must hold named fields"),
        ({"parts": {"a": {"name": 3}}}, "parts.a.name=3: is not of type str"),
        ({"pair": [1, 2]}, r"pair\[1\]"),
    ],
)
def test_wrong_plain_data_names_the_field(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_plain(Outer, data)


def test_the_choice_none_is_not_read_as_null() -> None:
    assert with_overrides(Choice(), {"which": "none"}).which == "none"
    assert with_overrides(Choice(which="none"), {"which": "1"}).which == 1


def test_a_missing_value_is_named() -> None:
    with pytest.raises(UserError, match="seed=None: is required"):
        from_plain(Required, {})


def test_configs_are_frozen_keyword_only_and_slotted() -> None:
    value = Inner()
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.dropout = 0.3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Inner(3)  # type: ignore[misc]
    assert not hasattr(value, "__dict__")


@config
class Small:
    """A member of a union."""

    kind: Literal["small"] = "small"
    """Its name."""
    width: int = 1
    """A number."""


@config
class Large:
    """Another one."""

    kind: Literal["large"] = "large"
    """Its name."""
    width: int = 9
    """A number."""
    height: int = 9
    """Another number."""


@config
class Either:
    """Holds unions, mappings and sequences."""

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


def test_all_mistakes_of_a_config_are_told_at_once() -> None:
    wrong = {"inner.num_layers": "x", "mode": "meen", "inner.dropuot": "1", "nosuch": "1", "dims": "a,2,b"}
    with pytest.raises(UserErrorGroup) as caught:
        with_overrides(Outer(), wrong)
    fields = [error.option for error in caught.value.errors]
    assert sorted(map(str, fields)) == ["dims[0]", "dims[2]", "inner.dropuot", "inner.num_layers", "mode", "nosuch"]
    assert all(str(field) in str(caught.value) for field in fields)
    with pytest.raises(UserErrorGroup) as caught:
        from_plain(Outer, {"inner": {"dropout": "x", "name": 3}, "mode": 1})
    assert [error.option for error in caught.value.errors] == ["inner.dropout", "inner.name", "mode"]


def test_an_option_given_without_its_path_is_found() -> None:
    with pytest.raises(UserError, match=r"did you mean 'inner.num_layers'\?"):
        with_overrides(Outer(), {"num_layers": "3"})


def test_a_value_of_a_union_is_read_as_the_kind_that_it_names() -> None:
    assert with_overrides(Either(), {"size": '{"kind": "large", "height": 2}'}).size == Large(height=2)
    for text, message in (
        ('{"kind": "small", "widht": 3}', "size.widht=3: Small has no such field. Did you mean 'width'"),
        ('{"kind": "large", "width": "x"}', "size.width=x: is not of type int"),
        ('{"kind": "medium"}', "size.kind=medium: is not one of the choices. Known names: large, small"),
    ):
        with pytest.raises(UserError, match=message):
            with_overrides(Either(), {"size": text})


def test_a_word_that_fits_nothing_names_all_that_would() -> None:
    with pytest.raises(UserError, match="often = 'ofen'") as caught:
        with_overrides(Either(), {"often": "ofen"})
    assert caught.value.remedy == "give an int, or known names: auto, or none"


def test_named_texts_need_no_json() -> None:
    changed = with_overrides(Either(), {"actions": "click=clicked,buy=event:buy"})
    assert changed.actions == {"click": "clicked", "buy": "event:buy"}
    assert with_overrides(Either(actions={"a": "b"}), {"actions": ""}).actions == {}
    with pytest.raises(UserError, match="write name=value,other=value"):
        with_overrides(Either(), {"actions": "click=clicked,buy"})


def test_nothing_between_quotes_is_an_empty_list() -> None:
    assert with_overrides(Either(), {"names": ""}).names == ()
    assert with_overrides(Outer(), {"dims": ""}).dims == ()


def test_types_are_named_in_english() -> None:
    with pytest.raises(UserError, match=r"remedy: give an int$"):
        with_overrides(Either(), {"limit": "x"})


@config
class _Named:
    sizes: dict[str, int] | None = None


def test_mistakes_inside_an_optional_value_are_named_with_their_own_values():
    with pytest.raises(UserError, match=r"^sizes.a=x: is not of type int. Give an int$"):
        from_plain(_Named, {"sizes": {"a": "x"}})
    with pytest.raises(UserError, match=r"(?s)2 mistakes.*sizes.a = 'x'.*sizes.b = 'y'") as both:
        from_plain(_Named, {"sizes": {"a": "x", "b": "y"}})
    assert "None" not in str(both.value)
