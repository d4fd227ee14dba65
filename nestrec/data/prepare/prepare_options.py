"""Options of `nestrec prepare` that all formats of event logs have.

How a long preparation tells what it is doing; who shows it is not decided here.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal, Protocol

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural, NonNegative, NumberRange, Share, moment_ms
from nestrec.base.errors import UserError
from nestrec.data.prepare.text_encoding import is_encoding
from nestrec.data.transform import Transform

TimeUnit = Literal["auto", "s", "ms", "us", "ns", "iso"]
NumberTransform = Literal["none", "standard", "log", "quantiles"]
"""What is learnt of a column of numbers."""


def check_separator(separator: str, field: str) -> None:
    """Refuse what cannot stand between fields."""
    one = separator.replace("\\t", "\t")
    if separator != "::" and (len(one) != 1 or not one.isascii() or one in '"\r\n'):
        remedy = "give one ASCII character, \\t for a tab, or ::"
        raise UserError("cannot separate fields", option=field, value=separator, remedy=remedy)


@config
class HashingConfig:
    """How a text becomes ids: its words, runs of words and pieces of words, hashed."""

    buckets: Annotated[int, NumberRange(2, 2**31 - 1)] = 1 << 14
    """Rows of the table that they share; two words in one bucket cannot be told apart."""
    words: tuple[Count, ...] = (1, 2)
    """How many words in a row make an id."""
    characters: tuple[Count, ...] = (3,)
    """How many characters of a word, its ends marked, make an id; none for whole words alone."""
    max_ids: Count = 64
    """The most ids of a text: words first, then runs of words, then pieces."""

    def transform(self) -> Transform:
        return Transform(
            kind="ngrams",
            buckets=self.buckets,
            words=self.words,
            characters=self.characters,
            max_ids=self.max_ids,
        )


@config
class LogColumns:
    """The columns of a log of one's own."""

    user: str = "user"
    """Column of the user's id."""
    item: str = "item"
    """Column of the item's id."""
    time: str | None = None
    """Column of the time of the event; without it and `position`, events keep the order of the file."""
    time_unit: TimeUnit = "auto"
    """Unit of numbers in the time column, or `iso` for dates as text; a date that names no zone is in UTC. `auto`: the
    unit in which the times are of the years 1980 to 2099; it is an error if two units fit, and `s` if none does."""
    max_ahead_s: NonNegative | None = 86_400.0
    """Events whose time lies further ahead of the clock than this are set aside as bad rows: the clock that made them
    was wrong. The clock is that of the machine that reads; of a stream, that at which an event came. A day lets times
    of any zone pass; none lets any time pass."""
    position: str | None = None
    """Column that orders the events of a user (after the time, where both are given)."""
    rating: str | None = None
    """Column of a rating; it becomes the event feature `rating`, and `min_rating` applies to it."""
    actions: Mapping[str, str] = field(default_factory=dict)
    """Action name to column (set where the number is not 0) or to `column:value` (set where the text is that value):
    click=clicked,buy=event:buy. Bits are given in this order from 1; at most 31 actions, `positive` included."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Feature name to a column of numbers that an event tells only when it is over, such as a watch time or the price
    paid: watch_time=play_ms. Models never read them of the event that they are to predict."""
    categories: tuple[str, ...] = ()
    """Columns with one value of a few that are known before the user reacts, such as a device."""
    lists: tuple[str, ...] = ()
    """Columns with several such values: lists of Parquet or JSON, or text with a separator or as ["a", "b"]."""
    list_separator: str = ","
    """Character between the values of such a text."""
    numbers: tuple[str, ...] = ()
    """Columns of numbers that are known before the user reacts, such as a position on the page."""
    transforms: Mapping[str, NumberTransform] = field(default_factory=dict)
    """Number to what models read of it: quantiles (the bucket in which it lies, where nothing is said), standard, log
    or none: age=standard,price=log."""
    num_buckets: Count = 16
    """Buckets of a number by quantiles, with about equally many events of the training part each."""
    texts: tuple[str, ...] = ()
    """Columns of free text, such as a search query: models read hashed words and pieces of words."""
    hashing: HashingConfig = HashingConfig()
    """How texts become ids."""
    separator: str = ","
    """Between the fields of a text file: one ASCII character (`\\t` for a tab) or `::`."""
    names: tuple[str, ...] = ()
    """Column names of a text file without a header line."""
    has_quotes: bool = True
    """Whether fields may stand in double quotes."""
    encoding: str = "utf-8"
    """Of the characters of a text file, as Python names it: utf-8, latin-1, ..."""

    def __post_init__(self) -> None:
        check_separator(self.separator, "log.separator")
        if not is_encoding(self.encoding):
            remedy = "give an encoding of text that Python knows, such as utf-8 or latin-1"
            raise UserError("is not an encoding of text", option="log.encoding", value=self.encoding, remedy=remedy)


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
    new_items: Share = 0.0
    """Make this share of the items new, chosen by hashes: of their events only the last ones of users stay, which a
    split by last events tests on. So it can be measured how items are found that nothing was trained on."""
    fit_share: Annotated[float, NumberRange(0, 1, above=True)] = 0.8
    """What is learnt of numbers comes from this share of the events, the first in time, without the
    last two of each user."""
    fit_until: str | None = None
    """Instead: from the events before this date, such as 2026-10-25 or 2026-10-25T12:00+02:00."""
    memory_bytes: Count = 256 << 20
    """About how much memory a partition of events may take while it is sorted."""
    force: bool = False
    """Replace the dataset that is in the folder already; without it that is an error."""

    def fit_until_ms(self) -> int | None:
        """Unix milliseconds of `fit_until`."""
        return moment_ms(self.fit_until, "fit_until")


class Progress(Protocol):
    """Called now and then from the preparing thread."""

    def __call__(self, stage: str, done: float) -> None:
        """`stage` for people, `done` from 0 to 1 inside it."""


def silent(stage: str, done: float) -> None:
    """Shows nothing."""
