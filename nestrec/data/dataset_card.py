"""The dataset card: contents and statistics of a prepared dataset, and the digest of every file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import config, dumps
from nestrec.base.config_values import from_plain
from nestrec.base.errors import CorruptFileError, DataError, UserError
from nestrec.data.dataset_schema import COUNTS_SUFFIX, FORMAT_VERSION
from nestrec.data.transform import Transform

CARD_FILE = "card.json"
PENDING_PREFIX = "pending-"
"""File name prefix, in the newest layer, of stream rows that were read and belong to later windows."""
Kind = Literal["sequences", "rows"]
FeatureKind = Literal["category", "categories", "number", "text", "bag", "vector"]
Owner = Literal["event", "item", "user"]


@config
class Feature:
    """A feature of an event, a user or an item."""

    name: str
    """Name of the feature, without the column's prefix."""
    kind: FeatureKind
    """Kind of the values. `category`: an id from 1; 0 is unknown. `categories`: a list of such ids. `number`: the raw
    value as float32; NaN is unknown. `text`: text for display. `bag`: a text as a list of hashed ids. `vector`: a row
    of an array file."""
    vocabulary_size: int = 0
    """Number of rows of an embedding table for this feature, including row 0 for unknown values; the number of hash
    buckets of a bag; 0 for kinds without ids."""
    owner: Owner = "event"
    """Entity that the feature describes."""
    transform: Transform = Transform()
    """Transform from the raw value to the model input. Categories made by `quantiles` are stored transformed; numbers
    are stored raw."""
    width: int = 0
    """Number of elements of a vector; 0 for other kinds."""
    file: str = ""
    """Path of a vector's array file, relative to the dataset folder. Row 0 of an item array is padding; user arrays
    start with user 0."""
    known: Literal["before", "after"] = "before"
    """Whether the value is known before the event, or only `after` it (for example a watch time). The latter is never a
    model input for the same event."""

    @property
    def column(self) -> str:
        """Column name in the users or items table."""
        return f"{self.owner}_{self.name}"

    @property
    def counts_column(self) -> str:
        """Column with the number of ids per event, for an event feature with lists."""
        return self.column + COUNTS_SUFFIX

    @property
    def is_list(self) -> bool:
        """Whether a value is a list of ids."""
        return self.kind in ("categories", "bag")


@config
class TransformFit:
    """Training subset that the transform parameters were fitted on: events that train under either kind of split."""

    until_ms: int = 0
    """Time limit in Unix milliseconds: earlier events were used, except the last two of each user; 0 if the log has no
    times."""
    events: int = 0
    """Number of events that were used; 0 if there was nothing to fit."""


@config
class DataFile:
    """A file of the dataset."""

    path: str
    """Path relative to the dataset folder."""
    num_bytes: int
    """Size of the file in bytes."""
    sha256: str
    """SHA-256 digest of the file."""
    num_rows: int = 0
    """Number of rows of a Parquet file; 0 for other files."""


@config
class Counts:
    """Number of rows that were read, retained and rejected."""

    users: int
    """Number of rows of the users table."""
    items: int
    """Size of the catalog, without the padding item."""
    events: int
    """Number of retained events (examples, for kind "rows")."""
    rows_read: int
    """Number of input rows, including rejected ones."""
    duplicates_dropped: int = 0
    """Number of exact repetitions of an earlier row that were dropped."""
    duplicates_kept: int = 0
    """Number of exact repetitions of an earlier row that were retained."""
    filtered: Mapping[str, int] = field(default_factory=dict)
    """Number of valid rows that a filter removed, by name of the filter."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Number of rejected rows in the quarantine, by reason."""


@config
class LengthStatistics:
    """Statistics of the number of events per user."""

    mean: float = 0.0
    """Arithmetic mean of the number of events per user."""
    p50: float = 0.0
    """Median number of events per user."""
    p90: float = 0.0
    """90th percentile of the number of events per user."""
    p99: float = 0.0
    """99th percentile of the number of events per user."""
    max: int = 0
    """Number of events of the longest row."""
    ln_mean: float = 0.0
    """Mean of the natural logarithm: mu of a log-normal fit."""
    ln_sd: float = 0.0
    """Standard deviation of the natural logarithm: sigma of a log-normal fit."""


@config
class PopularityStatistics:
    """Distribution of events over the items that have any."""

    zipf_s: float = 0.0
    """Exponent of p(rank) ~ rank^-s, by maximum likelihood over the observed items."""
    top_1_percent_share: float = 0.0
    """Fraction of events on the most popular 1% of the observed items."""
    top_10_percent_share: float = 0.0
    """Fraction of events on the most popular 10% of the observed items."""


@config
class BinnedCounts:
    """Histogram with logarithmic bins; bin i is [edges[i], edges[i + 1])."""

    edges: tuple[int, ...] = ()
    """Bin edges; one more than the number of bins."""
    counts: tuple[int, ...] = ()
    """Number of values in each bin."""


@config
class LayerEntry:
    """A layer of the dataset: the files written by preparation, or those of one append."""

    name: str
    """Name of the folder `layers/<name>`; empty for the base layer, whose files are in the dataset folder itself."""
    events: int
    """Number of events in the layer."""

    @property
    def folder(self) -> str:
        """Path prefix of the layer's files."""
        return f"layers/{self.name}/" if self.name else ""


@config
class Generation:
    """A version of a dataset: as prepared, or after an append."""

    number: int
    """Generation number: 0 after preparation, incremented by each append."""
    digest: str
    """Digest of the names and digests of its files; see `DatasetCard.digest_of_files`."""
    events: int
    """Number of events."""
    users: int
    """Number of users."""
    items: int
    """Number of items."""
    last_ms: int = 0
    """Time of the latest event in Unix milliseconds; 0 if events have no times."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of the appended files, by name."""
    stream: Mapping[str, Any] = field(default_factory=dict)
    """State of the stream that this generation was read from: the committed offset and what the next window depends on.
    """


@config
class DatasetCard:
    """Metadata of a dataset: everything that is known without reading its rows."""

    format_version: int = FORMAT_VERSION
    """Version of the on-disk format."""
    kind: Kind
    """Kind of the rows: `sequences` has one row per user, `rows` has one row per labeled example."""
    name: str
    """Display name, from the source."""
    source_format: str
    """Format that was passed to `nestrec prepare`."""
    counts: Counts
    """Number of rows that were read, retained and rejected."""
    lengths: LengthStatistics = field(default_factory=LengthStatistics)
    """Statistics of the number of events per user."""
    popularity: PopularityStatistics = field(default_factory=PopularityStatistics)
    """Statistics of the number of events per item."""
    length_histogram: BinnedCounts = field(default_factory=BinnedCounts)
    """Histogram of users by number of events."""
    popularity_histogram: BinnedCounts = field(default_factory=BinnedCounts)
    """Histogram of items by number of events."""
    has_timestamps: bool = False
    """Whether the dataset has a `timestamps_ms` column."""
    action_bits: Mapping[str, int] = field(default_factory=dict)
    """Bit of each action in the `actions` mask; empty if there is no such column."""
    event_features: tuple[Feature, ...] = ()
    """Features of events, columns `event_<name>`."""
    user_features: tuple[Feature, ...] = ()
    """Features of users, columns `user_<name>`."""
    item_features: tuple[Feature, ...] = ()
    """Features of items, columns `item_<name>` of the items table."""
    notes: tuple[str, ...] = ()
    """Warnings about the input for people, such as ids that look like missing values."""
    fit: TransformFit = field(default_factory=TransformFit)
    """Training subset that the transform parameters were fitted on."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `nestrec prepare`."""
    files: tuple[DataFile, ...] = ()
    """All files of the dataset except the card itself."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files that the dataset was prepared from, by name."""
    layers: tuple[LayerEntry, ...] = ()
    """Layers of an appended dataset, oldest first; a user's row is the union of all layers. Empty if nothing was
    appended."""
    generations: tuple[Generation, ...] = ()
    """All generations, the current one last; empty if nothing was appended."""

    @property
    def generation(self) -> int:
        """Number of this generation."""
        return self.generations[-1].number if self.generations else 0

    @property
    def digest_of_files(self) -> str:
        """Digest of the file names and contents; independent of the rest of the card."""
        digests = sorted((file.path, file.sha256) for file in self.files)
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def find_generation(self, earlier: "DatasetCard") -> Generation | None:
        """Return the generation of this dataset that an earlier card describes, or None if it is of another dataset."""
        digest = earlier.digest_of_files
        return next((generation for generation in self.generations if generation.digest == digest), None)

    @property
    def features(self) -> tuple[Feature, ...]:
        """All features, of events, items and users."""
        return self.event_features + self.item_features + self.user_features

    @property
    def all_layers(self) -> tuple[LayerEntry, ...]:
        """All layers; only the base layer if nothing was appended."""
        return self.layers or (LayerEntry(name="", events=self.counts.events),)

    def files_of(self, layer: LayerEntry) -> tuple[DataFile, ...]:
        """Return the files of a layer."""
        if layer.folder:
            return tuple(file for file in self.files if file.path.startswith(layer.folder))
        return tuple(file for file in self.files if not file.path.startswith(("layers/", "quarantine/")))

    @property
    def all_inputs(self) -> dict[str, str]:
        """Names of all prepared and appended files, by digest."""
        inputs = [self.inputs, *(generation.inputs for generation in self.generations)]
        return {digest: name for each in inputs for name, digest in each.items()}

    def save(self, folder: Path) -> None:
        (folder / CARD_FILE).write_text(dumps(self) + "\n")

    @staticmethod
    def load(folder: Path, generation: int | None = None) -> "DatasetCard":
        """Read and validate the card of a dataset folder.

        Args:
            folder: Dataset folder.
            generation: Generation whose card is read; by default the latest.

        Raises:
            DataError: If the folder is not a dataset or its format version is not supported.
            CorruptFileError: If the card cannot be parsed.
        """
        path = folder / CARD_FILE
        if generation is not None and (earlier := folder / generation_card_path(generation)).is_file():
            path = earlier
        if not path.is_file():
            remedy = "choose a folder written by `nestrec prepare`"
            raise DataError(
                "the folder is not a prepared dataset: card.json is missing",
                option="dataset",
                value=str(folder),
                remedy=remedy,
            )
        try:
            plain = json.loads(path.read_text())
            version = plain["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise _corrupt_card_error(path, f"the card cannot be parsed: {error}") from error
        if version not in range(1, FORMAT_VERSION + 1):
            raise DataError(
                f"the dataset has format version {version}, but this nestrec reads versions 1 to {FORMAT_VERSION}",
                option="dataset",
                value=str(folder),
                remedy="prepare the dataset again",
            )
        try:
            return from_plain(DatasetCard, plain if version > 1 else _from_version_1(plain))
        except UserError as error:
            raise _corrupt_card_error(path, str(error)) from error


def generation_card_path(number: int) -> str:
    """Return the path of the card of an earlier generation, relative to the dataset folder."""
    return f"cards/{number:06d}.json"


def describe_file(folder: Path, path: Path, num_rows: int = 0) -> DataFile:
    """Return the card entry of a file, including its size and digest."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    relative = path.relative_to(folder).as_posix()
    return DataFile(path=relative, num_bytes=path.stat().st_size, sha256=digest, num_rows=num_rows)


def _from_version_1(plain: dict[str, Any]) -> dict[str, Any]:
    """Convert a card of format version 1, whose features lack an owner; its event numbers are outcomes."""
    converted = {}
    for owner in ("event", "item", "user"):
        features = plain.get(f"{owner}_features", ())
        known = {n: "after" for n in ("number",) if owner == "event"}
        converted[f"{owner}_features"] = [
            {**feature, "owner": owner, "known": known.get(feature["kind"], "before")} for feature in features
        ]
    return {**plain, **converted}


def _corrupt_card_error(path: Path, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="card", value=str(path), remedy="prepare the dataset again")


def length_statistics(lengths: NDArray[Any]) -> LengthStatistics:
    """Compute the statistics of the number of events per user."""
    positive = lengths[lengths > 0]
    if not positive.size:
        return LengthStatistics()
    p50, p90, p99 = np.percentile(positive, [50, 90, 99])
    logs = np.log(positive)
    return LengthStatistics(
        mean=round(float(lengths.mean()), 4),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=int(lengths.max()),
        ln_mean=round(float(logs.mean()), 4),
        ln_sd=round(float(logs.std()), 4),
    )


def popularity_statistics(counts: NDArray[np.int64]) -> PopularityStatistics:
    """Compute the statistics of the number of events per item; items without events are ignored."""
    ranked = np.sort(counts[counts > 0])[::-1]
    if not ranked.size:
        return PopularityStatistics()
    return PopularityStatistics(
        zipf_s=round(zipf_exponent(ranked), 4),
        top_1_percent_share=round(_top_share(ranked, 0.01), 4),
        top_10_percent_share=round(_top_share(ranked, 0.10), 4),
    )


def zipf_exponent(ranked: NDArray[np.int64]) -> float:
    """Return the maximum-likelihood s of p(r) ~ r^-s over the given ranks, by Newton's method.

    The likelihood is concave in s: its slope is (mean of ln r under the model) minus (mean of ln r in the data).
    """
    if ranked.size < 2:
        return 0.0
    log_rank = np.log(np.arange(1, ranked.size + 1, dtype=np.float64))
    observed = float((ranked * log_rank).sum() / ranked.sum())
    s = 0.7
    for _ in range(50):
        weight = np.exp(-s * log_rank)
        weight /= weight.sum()
        mean = float((weight * log_rank).sum())
        variance = float((weight * log_rank**2).sum()) - mean**2
        step = (mean - observed) / max(variance, 1e-12)
        s = min(max(s + step, -10.0), 10.0)
        if abs(step) < 1e-9:
            break
    return s


def log_histogram(values: NDArray[Any], bins_per_decade: int = 10) -> BinnedCounts:
    """Return a histogram of positive integers in logarithmic bins; zeros are ignored."""
    positive = values[values > 0]
    if not positive.size:
        return BinnedCounts()
    top = float(positive.max()) + 1
    num_steps = int(np.ceil(np.log10(top) * bins_per_decade)) + 1
    edges = np.unique(np.round(10 ** (np.arange(num_steps + 1) / bins_per_decade)).astype(np.int64))
    edges = edges[: int(np.searchsorted(edges, top)) + 1]
    counts = np.histogram(positive, bins=edges)[0]
    return BinnedCounts(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


def _top_share(ranked: NDArray[np.int64], fraction: float) -> float:
    top = max(1, round(ranked.size * fraction))
    return float(ranked[:top].sum() / ranked.sum())
