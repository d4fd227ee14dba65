import datetime

import pytest

from nestrec.base.config_overrides import override_texts, parse_overrides, with_overrides
from nestrec.base.errors import UserError
from nestrec.data.formats.log_format import LogOptions


def test_both_ways_of_writing_a_value_are_read() -> None:
    assert parse_overrides(["--a.b", "3", "--c=x=y"]) == {"a.b": "3", "c": "x=y"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["3"], "does not belong"), (["--outptu"], "did you mean 'output'"), (["--outptu", "x"], "did you mean --output")],
)
def test_a_mistake_says_what_was_meant(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_overrides(arguments, ("output",))


def test_names_of_columns_with_dots_are_no_paths_to_fields() -> None:
    """Columns of nested JSON are called so."""
    columns = {"numbers": ["meta.price"], "transforms": {"meta.price": "log"}}
    log = {"user": "u", "item": "i", "actions": {"click": "meta.clicked", "like.it": "liked"}}
    found = with_overrides(LogOptions(), override_texts({"log": log, "item_columns": columns, "items": "items.csv"}))
    assert found.item_columns.transforms == columns["transforms"]
    assert found.log.actions == log["actions"]


@pytest.mark.parametrize("moment", ["2026-11-01", "2026-11-01 12:30:00+02:00"])
def test_dates_are_values_as_their_texts_are(moment: str) -> None:
    kind = datetime.datetime if " " in moment else datetime.date
    given, typed = (override_texts({"fit_until": value}) for value in (kind.fromisoformat(moment), moment))
    assert with_overrides(LogOptions(), given) == with_overrides(LogOptions(), typed)


def test_single_value_for_named_values_asks_for_names() -> None:
    with pytest.raises(
        UserError, match=r"log.actions=event: must hold names with values. Write name=value"
    ):
        with_overrides(LogOptions(), {"log.actions": "event"})
