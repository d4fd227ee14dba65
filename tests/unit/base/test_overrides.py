import pytest

from nestrec.base.errors import UserError
from nestrec.base.overrides import parse_overrides


def test_both_ways_of_writing_a_value_are_read() -> None:
    assert parse_overrides(["--a.b", "3", "--c=x=y"]) == {"a.b": "3", "c": "x=y"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["3"], "does not belong"), (["--outptu"], "did you mean 'output'"), (["--outptu", "x"], "did you mean --output")],
)
def test_a_mistake_says_what_was_meant(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_overrides(arguments, ("output",))
