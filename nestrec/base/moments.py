"""Dates and moments as people write them, in Unix milliseconds."""

import datetime

from nestrec.base.errors import UserError


def moment_ms(text: str | None, field: str) -> int | None:
    """Unix milliseconds of a date or moment in ISO form."""
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        remedy = "write a date (2026-11-01) or a moment (2026-11-01T12:00+02:00)"
        raise UserError("is no date", field=field, value=text, remedy=remedy) from None
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return round(zoned.timestamp() * 1000)


def iso_moment(time_ms: int) -> str:
    """The moment in UTC as text."""
    return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC).isoformat()
