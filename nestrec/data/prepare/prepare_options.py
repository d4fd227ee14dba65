"""Defines the options of `nestrec prepare` that all event log formats share, and the progress callback.

Preparation calls a `Progress` callback periodically; the command line shows it as a progress bar.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal, Protocol

from nestrec.base.config import config
from nestrec.base.config_values import Count, Fraction, Natural, NonNegative, NumberRange, parse_time_ms
from nestrec.base.errors import UserError
from nestrec.data.prepare.text_encoding import is_encoding
from nestrec.data.transform import Transform

TimeUnit = Literal["auto", "s", "ms", "us", "ns", "iso"]
NumberTransform = Literal["none", "standard", "log", "quantiles"]
"""Transform of a numeric column whose parameters are fitted on training events."""


def check_separator(separator: str, field: str) -> None:
    """Raise if `separator` is not a supported separator of fields.

    Args:
        separator: Separator as the user typed it.
        field: Name of the option, for the error message.
    """
    one = separator.replace("\\t", "\t")
    if separator != "::" and (len(one) != 1 or not one.isascii() or one in '"\r\n'):
        remedy = "use one ASCII character, \\t for a tab, or ::"
        raise UserError("unsupported field separator", option=field, value=separator, remedy=remedy)


@config
class HashingConfig:
    """Feature hashing of text: words, word n-grams and character n-grams are hashed to ids."""

    num_buckets: Annotated[int, NumberRange(2, 2**31 - 1)] = 1 << 14
    """Number of hash buckets (rows of the embedding table); n-grams in the same bucket share an id."""
    word_ngrams: tuple[Count, ...] = (1, 2)
    """Lengths of the word n-grams, in words."""
    char_ngrams: tuple[Count, ...] = (3,)
    """Lengths of the character n-grams, in characters of a word with marked ends; empty for no character n-grams."""
    max_ids_per_text: Count = 64
    """Maximum number of ids per text: words first, then longer word n-grams, then character n-grams."""

    def transform(self) -> Transform:
        return Transform(
            kind="ngrams",
            buckets=self.num_buckets,
            words=self.word_ngrams,
            characters=self.char_ngrams,
            max_ids=self.max_ids_per_text,
        )


@config
class LogColumns:
    """Columns of an event log, and the format of its files."""

    user: str = "user"
    """Column of the user id."""
    item: str = "item"
    """Column of the item id."""
    time: str | None = None
    """Column of the event time (timestamp); without `time` and `position`, events keep the order of the file."""
    time_unit: TimeUnit = "auto"
    """Unit of the numbers in the time column, or `iso` for dates as text; dates without a time zone are in UTC. `auto`
    infers the unit in which the times are in the years 1980 to 2099; it is an error if two units fit, and `s` is used
    if none fits."""
    max_future_s: NonNegative | None = 86_400.0
    """Maximum number of seconds that an event time may be ahead of the clock; later events are rejected as bad rows,
    because the clock that produced them was wrong. The clock is that of the reading machine, for streams the arrival
    time of the event. The default of one day accepts local times of any time zone; none accepts any time."""
    position: str | None = None
    """Column of integers by which the events of a user are ordered (after the time, if both are set)."""
    rating: str | None = None
    """Column of the rating; it becomes the event feature `rating`; `min_rating` and `positive_rating` apply to it."""
    actions: Mapping[str, str] = field(default_factory=dict)
    """Action name to a column (set if the number is not 0) or to `column:value` (set if the cell has that value):
    click=clicked,buy=event:buy. Bits are assigned in this order from 1; at most 31 actions, including `positive`."""
    outcome_features: Mapping[str, str] = field(default_factory=dict)
    """Feature name to a column of numbers that are known only after the event, such as the watch time or the price
    paid: watch_time=play_ms. Models never read them for the event that they predict."""
    categories: tuple[str, ...] = ()
    """Categorical columns that are known before the user reacts, such as the device."""
    lists: tuple[str, ...] = ()
    """Categorical columns with several values per event: lists of Parquet or JSON, or text with a separator or such as
    ["a", "b"]."""
    list_separator: str = ","
    """Separator of the values of list columns that are text."""
    numbers: tuple[str, ...] = ()
    """Numeric columns that are known before the user reacts, such as the position on the page."""
    transforms: Mapping[str, NumberTransform] = field(default_factory=dict)
    """Numeric column to the transform that models read: quantiles (the id of its bucket, the default), standard, log or
    none: age=standard,price=log."""
    num_buckets: Count = 16
    """Number of quantile buckets of a numeric column; each has about the same number of training events."""
    texts: tuple[str, ...] = ()
    """Columns of free text, such as a search query; models read hashed n-grams of words and characters."""
    hashing: HashingConfig = HashingConfig()
    """Feature hashing of the text columns."""
    separator: str = ","
    """Separator of the fields of a text file: one ASCII character (`\\t` for a tab) or `::`."""
    column_names: tuple[str, ...] = ()
    """Column names of a text file without a header line."""
    has_quotes: bool = True
    """Whether fields of a text file may be enclosed in double quotes."""
    encoding: str = "utf-8"
    """Character encoding of text files, by its Python name: utf-8, latin-1, ..."""

    def __post_init__(self) -> None:
        check_separator(self.separator, "log.separator")
        if not is_encoding(self.encoding):
            remedy = "use a text encoding that Python supports, such as utf-8 or latin-1"
            raise UserError("unsupported text encoding", option="log.encoding", value=self.encoding, remedy=remedy)


@config
class PrepareOptions:
    """Filters and transforms that apply to event logs of any format; formats add their own options."""

    duplicates: Literal["default", "keep", "drop"] = "default"
    """Whether exact duplicate rows are kept or dropped; by default those of KuaiRand are dropped and all others kept.
    Duplicates are counted in either case."""
    max_bad_fraction: Fraction = 0.01
    """Maximum fraction of bad rows in the input; more are an error. 1 allows any number."""
    min_events_per_user: Natural = 0
    """Minimum number of events of a user (k-core filter); users with fewer events are removed. 0 disables it."""
    min_events_per_item: Natural = 0
    """Minimum number of events of an item (k-core filter); items with fewer events are removed. 0 disables it."""
    core_filter: Literal["iterated", "single"] = "iterated"
    """Kind of the k-core filter. `iterated` repeats the removal until every remaining user and item has enough events;
    `single` counts events once, before the removal."""
    final_min_events_per_user: Natural = 0
    """Minimum number of remaining events of a user, applied once after the k-core filter. 0 disables it."""
    simulated_new_items: Fraction = 0.0
    """Fraction of the items that become simulated cold-start items, chosen by hash: only those of their events remain
    that are the last event of a user, which a leave-last-out split uses for testing. This measures how well a model
    recommends items that it was not trained on. 0 disables it."""
    fit_fraction: Annotated[float, NumberRange(0, 1, above=True)] = 0.8
    """Fraction of the events, the earliest in time, that transforms of numbers are fitted on; the last two events of
    each user are always left out."""
    fit_until: str | None = None
    """Date before which events are used to fit transforms, such as 2026-10-25 or 2026-10-25T12:00+02:00; overrides
    `fit_fraction`."""
    sort_memory_bytes: Count = 256 << 20
    """Approximate memory in bytes that one partition of events may use while it is sorted (external sort)."""
    force: bool = False
    """Whether an existing dataset in the output folder is replaced; otherwise it is an error."""

    def fit_until_ms(self) -> int | None:
        """Return `fit_until` in milliseconds since 1970 UTC; None if it is not set."""
        return parse_time_ms(self.fit_until, "fit_until")


class Progress(Protocol):
    """Callback for the progress of a preparation; called periodically from the preparation thread."""

    def __call__(self, stage: str, done: float) -> None:
        """Report progress.

        Args:
            stage: Display name of the current stage.
            done: Fraction of the stage that is complete, from 0 to 1.
        """


def silent(stage: str, done: float) -> None:
    """Ignore progress reports."""
