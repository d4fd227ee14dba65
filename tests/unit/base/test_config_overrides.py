import datetime

import pytest

from nestrec.base.config_overrides import apply_overrides, override_texts, parse_overrides
from nestrec.base.errors import UserError
from nestrec.data.formats.log_format import LogOptions


def test_overrides_accept_equals_sign_or_space() -> None:
    assert parse_overrides(["--a.b", "3", "--c=x=y"]) == {"a.b": "3", "c": "x=y"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["3"], "unexpected argument"),
        (["--outptu"], r"the value is missing.* did you mean --output\?"),
        (["--outptu", "x"], r"Did you mean --output\?"),
    ],
)
def test_overrides_suggest_options_of_the_command(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_overrides(arguments, ("output",))


def test_overrides_keep_dots_in_column_names() -> None:
    """Columns of nested JSON have such names."""
    columns = {"numbers": ["meta.price"], "transforms": {"meta.price": "log"}}
    log = {"user": "u", "item": "i", "actions": {"click": "meta.clicked", "like.it": "liked"}}
    found = apply_overrides(LogOptions(), override_texts({"log": log, "item_columns": columns, "items": "items.csv"}))
    assert found.item_columns.transforms == columns["transforms"]
    assert found.log.actions == log["actions"]


@pytest.mark.parametrize("moment", ["2026-11-01", "2026-11-01 12:30:00+02:00"])
def test_overrides_accept_dates_and_their_text(moment: str) -> None:
    kind = datetime.datetime if " " in moment else datetime.date
    date, text = (override_texts({"fit_until": value}) for value in (kind.fromisoformat(moment), moment))
    assert apply_overrides(LogOptions(), date) == apply_overrides(LogOptions(), text)


def test_overrides_reject_single_value_for_mapping() -> None:
    with pytest.raises(UserError, match=r"log.actions=event: must be a list of names with values. Write name=value"):
        apply_overrides(LogOptions(), {"log.actions": "event"})
