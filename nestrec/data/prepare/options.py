"""Options of `nestrec prepare` that all formats of event logs have."""

import codecs
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from nestrec.base.bounds import Count, Natural, Share
from nestrec.base.config import config
from nestrec.base.errors import UserError

TimeUnit = Literal["s", "ms", "us", "ns", "iso"]


@config
class LogColumns:
    """The columns of a log of one's own."""

    user: str = "user"
    """Column of the user's id."""
    item: str = "item"
    """Column of the item's id."""
    time: str | None = None
    """Column of the time of the event; without it and `position`, events keep the order of the file."""
    time_unit: TimeUnit = "s"
    """Unit of numbers in the time column, or `iso` for dates as text; a date that names no zone is in UTC."""
    position: str | None = None
    """Column that orders the events of a user (after the time, where both are given)."""
    rating: str | None = None
    """Column of a rating; it becomes the event feature `rating`, and `min_rating` applies to it."""
    actions: Mapping[str, str] = field(default_factory=dict)
    """Action name to column (set where the number is not 0) or to `column:value` (set where the text is that value):
    click=clicked,buy=event:buy. Bits are given in this order from 1."""
    categories: tuple[str, ...] = ()
    """Columns that become event features with a vocabulary. Nothing reads numbers of single events: cut them into
    ranges, and name these here."""
    separator: str = ","
    """Between the fields of a text file: one character (`\\t` for a tab) or `::`."""
    names: tuple[str, ...] = ()
    """Column names of a text file without a header line."""
    has_quotes: bool = True
    """Whether fields may stand in double quotes."""
    encoding: str = "utf-8"
    """Of the characters of a text file, as Python names it: utf-8, latin-1, ..."""

    def __post_init__(self) -> None:
        if len(self.separator.replace("\\t", "\t")) != 1 and self.separator != "::":
            remedy = "give one character, \\t for a tab, or ::"
            raise UserError("cannot separate fields", field="log.separator", value=self.separator, remedy=remedy)
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            remedy = "give a name that Python knows, such as utf-8 or latin-1"
            raise UserError("is no known encoding", field="log.encoding", value=self.encoding, remedy=remedy) from None


@config
class PrepareOptions:
    """What to keep of a log, whatever its format; formats add options of their own."""

    duplicates: Literal["default", "keep", "drop"] = "default"
    """Exact duplicate rows are always counted. By default KuaiRand's are dropped, all others kept."""
    max_bad_share: Share = 0.01
    """More bad rows than this share of the input is an error; 1 allows any number."""
    user_core: Natural = 0
    """Remove users with fewer events."""
    item_core: Natural = 0
    """Remove items with fewer events."""
    core_passes: Literal["iterated", "single"] = "iterated"
    """`iterated`: until every user and item left has enough events. `single`: counts taken once, before removal."""
    min_user_events: Natural = 0
    """After that, remove users with fewer events left."""
    memory_bytes: Count = 256 << 20
    """About how much memory a partition of events may take while it is sorted."""
    force: bool = False
    """Replace the dataset that is in the folder already; without it that is an error."""
