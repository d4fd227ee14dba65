"""The dataset card: what a prepared dataset holds, with statistics and the digest of every file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from nestrec.base.config import config, dumps, from_plain
from nestrec.base.errors import DamagedError, DataError, UserError
from nestrec.data.schema import FORMAT_VERSION

CARD_FILE = "card.json"
Kind = Literal["sequences", "rows"]
FeatureKind = Literal["category", "number", "text", "categories"]


@config
class Feature:
    """A feature of an event, a user or an item."""

    name: str
    """Without the column's prefix."""
    kind: FeatureKind
    """`category`: an id from 1, 0 unknown. `number`: float32, NaN unknown. `text`. `categories`: a list of ids."""
    vocabulary_size: int = 0
    """Rows that an embedding table needs, with row 0 for unknown; 0 for numbers and text."""


@config
class DataFile:
    """A file of the dataset."""

    path: str
    """Relative to the dataset's folder."""
    num_bytes: int
    """Size of the file."""
    sha256: str
    """Digest of its bytes."""
    num_rows: int = 0
    """Rows of a Parquet file."""


@config
class Counts:
    """What was read, kept and set aside."""

    users: int
    """Rows of the users table."""
    items: int
    """Size of the catalogue, without the padding item."""
    events: int
    """Events kept (examples, for kind "rows")."""
    rows_read: int
    """Input rows, bad ones included."""
    duplicates_dropped: int = 0
    """Exact repeats of an earlier row that were dropped."""
    duplicates_kept: int = 0
    """Exact repeats of an earlier row that were kept."""
    filtered: Mapping[str, int] = field(default_factory=dict)
    """Good rows removed by a filter, by the filter's name."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Bad rows set aside, by reason."""


@config
class LengthStatistics:
    """Events a user."""

    mean: float = 0.0
    """Arithmetic mean."""
    p50: float = 0.0
    """Median."""
    p90: float = 0.0
    """90th percentile."""
    p99: float = 0.0
    """99th percentile."""
    max: int = 0
    """Longest row."""
    ln_mean: float = 0.0
    """Mean of the natural logarithm: mu of a log-normal fit."""
    ln_sd: float = 0.0
    """Standard deviation of the natural logarithm: sigma of a log-normal fit."""


@config
class PopularityStatistics:
    """How events spread over the items that have any."""

    zipf_s: float = 0.0
    """Exponent of p(rank) ~ rank^-s by maximum likelihood over the observed items."""
    top_1_percent_share: float = 0.0
    """Share of events on the top 1% of the observed items."""
    top_10_percent_share: float = 0.0
    """Share of events on the top 10% of the observed items."""


@config
class BinnedCounts:
    """Counts in logarithmic bins; bin i is [edges[i], edges[i + 1])."""

    edges: tuple[int, ...] = ()
    """Bin edges, one more than bins."""
    counts: tuple[int, ...] = ()
    """Members of each bin."""


@config
class Card:
    """Everything that can be known of a dataset without reading its rows."""

    format_version: int = FORMAT_VERSION
    """Version of the on-disk form."""
    kind: Kind
    """`sequences`: one row a user. `rows`: one row a labelled example."""
    name: str
    """Name for people, from the source."""
    source_format: str
    """The format given to `nestrec prepare`."""
    counts: Counts
    """What was read, kept and set aside."""
    lengths: LengthStatistics = field(default_factory=LengthStatistics)
    """Events a user."""
    popularity: PopularityStatistics = field(default_factory=PopularityStatistics)
    """Events an item."""
    length_histogram: BinnedCounts = field(default_factory=BinnedCounts)
    """Users by number of events."""
    popularity_histogram: BinnedCounts = field(default_factory=BinnedCounts)
    """Items by number of events."""
    has_timestamps: bool = False
    """Whether there is a `timestamps_ms` column."""
    action_bits: Mapping[str, int] = field(default_factory=dict)
    """Bit of each action in the `actions` mask; empty where there is no such column."""
    event_features: tuple[Feature, ...] = ()
    """Columns `event_<name>`."""
    user_features: tuple[Feature, ...] = ()
    """Columns `user_<name>`."""
    item_features: tuple[Feature, ...] = ()
    """Columns `item_<name>` of the items table."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that the dataset was prepared with."""
    files: tuple[DataFile, ...] = ()
    """Every file but the card itself."""

    def save(self, folder: Path) -> None:
        (folder / CARD_FILE).write_text(dumps(self) + "\n")

    @staticmethod
    def load(folder: Path) -> "Card":
        """Read and check the card of a dataset's folder."""
        path = folder / CARD_FILE
        if not path.is_file():
            remedy = "name a folder written by `nestrec prepare`"
            raise DataError(
                "is not a prepared dataset: it has no card.json", field="dataset", value=str(folder), remedy=remedy
            )
        try:
            plain = json.loads(path.read_text())
            version = plain["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, f"cannot be parsed: {error}") from error
        if version != FORMAT_VERSION:
            raise DataError(
                f"has format version {version}, this nestrec reads {FORMAT_VERSION}",
                field="dataset",
                value=str(folder),
                remedy="prepare it again",
            )
        try:
            return from_plain(Card, plain)
        except UserError as error:
            raise _damaged(path, str(error)) from error


def describe_file(folder: Path, path: Path, num_rows: int = 0) -> DataFile:
    """Entry of a file for the card."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    relative = path.relative_to(folder).as_posix()
    return DataFile(path=relative, num_bytes=path.stat().st_size, sha256=digest, num_rows=num_rows)


def _damaged(path: Path, problem: str) -> DamagedError:
    return DamagedError(problem, field="card", value=str(path), remedy="prepare the dataset again")
