import json
from typing import Literal

import pytest

from nestrec.base.config import config
from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import (
    Count,
    Decay,
    Fraction,
    Natural,
    NumberRange,
    OutOfRangeError,
    Positive,
    from_plain,
)
from nestrec.base.errors import UserError


@config
class Sizes:
    """Numbers with bounds."""

    count: Count = 1
    """1 or more."""
    optional: Natural | None = None
    """0 or more, or none."""
    choice: Count | Literal["auto"] = "auto"
    """A number or a word."""
    widths: tuple[Count, ...] = (3,)
    """Each 1 or more."""
    rate: Positive = 0.5
    """More than 0."""
    share: Fraction = 1.0
    """0 to 1."""
    decay: Decay = 0.0
    """0 to less than 1."""

    def __post_init__(self) -> None:
        if self.count == 13:
            raise UserError("is not allowed", option="count", value=13)


@config
class OuterConfig:
    """Config that contains the bounded config."""

    sizes: Sizes = Sizes()
    """The numbers."""


OUT_OF_RANGE = [
    ("count", "0", "1 or more"),
    ("optional", "-1", "0 or more"),
    ("choice", "0", "1 or more"),
    ("widths", "4,0", "1 or more"),
    ("rate", "0", "more than 0"),
    ("rate", "NaN", "more than 0"),
    ("rate", "Infinity", "more than 0"),
    ("share", "1.5", "0 to 1"),
    ("decay", "1", "0 to less than 1"),
]


@pytest.mark.parametrize(("name", "text", "expected"), OUT_OF_RANGE)
def test_config_bounds_error_names_dotted_option(name: str, text: str, expected: str) -> None:
    with pytest.raises(OutOfRangeError, match=expected) as by_override:
        apply_overrides(OuterConfig(), {f"sizes.{name}": text})
    value = [4, 0] if name == "widths" else json.loads(text)
    with pytest.raises(OutOfRangeError, match=expected) as by_file:
        from_plain(OuterConfig, {"sizes": {name: value}})
    with pytest.raises(OutOfRangeError, match=expected) as by_hand:
        Sizes(**{name: value})
    assert (by_override.value.option, by_file.value.option) == (f"sizes.{name}", f"sizes.{name}")
    assert by_hand.value.option == name


def test_config_bounds_are_checked_before_post_init() -> None:
    assert Sizes(count=12).count == 12
    with pytest.raises(UserError, match="is not allowed"):
        Sizes(count=13)


def test_config_overrides_apply_in_any_order() -> None:
    for overrides in ({"sizes.count": "13", "sizes": '{"rate": 2}'}, {"sizes": '{"rate": 2}', "sizes.count": "13"}):
        with pytest.raises(UserError, match="is not allowed"):
            apply_overrides(OuterConfig(), overrides)
        assert apply_overrides(OuterConfig(), {**overrides, "sizes.count": "2"}).sizes == Sizes(count=2, rate=2.0)


def test_config_bounds_describe_allowed_values() -> None:
    assert [str(bound) for bound in (NumberRange(1), NumberRange(0, above=True), NumberRange(0, 1))] == [
        "1 or more",
        "more than 0",
        "0 to 1",
    ]
