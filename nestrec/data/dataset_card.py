"""The dataset card: what a prepared dataset holds, with statistics and the digest of every file.

Statistics of lengths and popularity for the dataset card.
"""

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
PENDING = "pending-"
"""Begins the names of files of the newest layer with rows of a stream that were read and wait for their window."""
Kind = Literal["sequences", "rows"]
FeatureKind = Literal["category", "categories", "number", "text", "bag", "vector"]
Owner = Literal["event", "item", "user"]


@config
class Feature:
    """A feature of an event, a user or an item."""

    name: str
    """Without the column's prefix."""
    kind: FeatureKind
    """`category`: an id from 1, 0 unknown. `categories`: a list of such ids. `number`: float32 as it came, NaN unknown.
    `text`: for people. `bag`: a text as a list of hashed ids. `vector`: a row of an array file."""
    vocabulary_size: int = 0
    """Rows that an embedding table needs, with row 0 for unknown; of a bag its hash buckets; 0 for the others."""
    owner: Owner = "event"
    """What it is a feature of."""
    transform: Transform = Transform()
    """How a raw value becomes what models read: a category by `quantiles` is stored as such, a number as it came."""
    width: int = 0
    """Numbers of a vector."""
    file: str = ""
    """Of a vector: the array, relative to the dataset's folder; row 0 of items is no item, users count from 0."""
    known: Literal["before", "after"] = "before"
    """`after`: what an event tells only when it is over, such as a watch time; never an input for that event."""

    @property
    def column(self) -> str:
        """Its column in the table of users or items."""
        return f"{self.owner}_{self.name}"

    @property
    def counts_column(self) -> str:
        """Of a list of an event: the column that says how many ids each event has."""
        return self.column + COUNTS_SUFFIX

    @property
    def is_list(self) -> bool:
        """Whether a value is a list of ids."""
        return self.kind in ("categories", "bag")


@config
class TransformFit:
    """What the parameters of transforms were learnt from: the events that train under either kind of split."""

    until_ms: int = 0
    """Only events before this moment, and not the last two of a user; 0 where the log has no times."""
    events: int = 0
    """How many that were; 0 where there was nothing to learn."""


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
class LayerEntry:
    """Files that belong together: those of the dataset as it was prepared, or those of events appended to it."""

    name: str
    """Of the folder `layers/<name>`; empty for the files of the dataset's own folder."""
    events: int
    """Events in it."""

    @property
    def folder(self) -> str:
        """Before the paths of its files."""
        return f"layers/{self.name}/" if self.name else ""


@config
class Generation:
    """A state that a dataset has been in: as it was prepared, or after events were appended."""

    number: int
    """0 as prepared; one more with each append."""
    digest: str
    """Of the names and digests of its files; see `DatasetCard.digest_of_files`."""
    events: int
    """Events that it has."""
    users: int
    """Users that it has."""
    items: int
    """Items that it has."""
    last_ms: int = 0
    """Time of its latest event; 0 where events have no times."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Files that were appended, by name, with their digests."""
    stream: Mapping[str, Any] = field(default_factory=dict)
    """Where a stream was read that far: its position and what else the next window depends on."""


@config
class DatasetCard:
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
    notes: tuple[str, ...] = ()
    """What a person should know of the input, such as ids that look like missing ones."""
    fit: TransformFit = field(default_factory=TransformFit)
    """What the parameters of transforms were learnt from."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that the dataset was prepared with."""
    files: tuple[DataFile, ...] = ()
    """Every file but the card itself."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Files that the dataset was prepared from, by name, with their digests."""
    layers: tuple[LayerEntry, ...] = ()
    """Where events were appended: what is read, oldest first. A user's row is that of all layers together."""
    generations: tuple[Generation, ...] = ()
    """The states that it has been in, this one last; empty where nothing was appended yet."""

    @property
    def generation(self) -> int:
        """The number of this state."""
        return self.generations[-1].number if self.generations else 0

    @property
    def digest_of_files(self) -> str:
        """The same for the same files, whatever else the card says."""
        named = sorted((file.path, file.sha256) for file in self.files)
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()

    def generation_of(self, earlier: "DatasetCard") -> Generation | None:
        """The state of this dataset that another card describes; none where it is of another dataset."""
        digest = earlier.digest_of_files
        return next((generation for generation in self.generations if generation.digest == digest), None)

    @property
    def features(self) -> tuple[Feature, ...]:
        """Of events, items and users."""
        return self.event_features + self.item_features + self.user_features

    @property
    def all_layers(self) -> tuple[LayerEntry, ...]:
        """The layers; one where nothing was appended yet."""
        return self.layers or (LayerEntry(name="", events=self.counts.events),)

    def files_of(self, layer: LayerEntry) -> tuple[DataFile, ...]:
        """Files of a layer."""
        if layer.folder:
            return tuple(file for file in self.files if file.path.startswith(layer.folder))
        return tuple(file for file in self.files if not file.path.startswith(("layers/", "quarantine/")))

    @property
    def all_inputs(self) -> dict[str, str]:
        """Digest to name of every file that was prepared or appended."""
        inputs = [self.inputs, *(generation.inputs for generation in self.generations)]
        return {digest: name for each in inputs for name, digest in each.items()}

    def save(self, folder: Path) -> None:
        (folder / CARD_FILE).write_text(dumps(self) + "\n")

    @staticmethod
    def load(folder: Path, generation: int | None = None) -> "DatasetCard":
        """Read and check the card of a dataset's folder, as it is or as it was in an earlier generation."""
        path = folder / CARD_FILE
        if generation is not None and (kept := folder / card_of_generation(generation)).is_file():
            path = kept
        if not path.is_file():
            remedy = "name a folder written by `nestrec prepare`"
            raise DataError(
                "is not a prepared dataset: it has no card.json", option="dataset", value=str(folder), remedy=remedy
            )
        try:
            plain = json.loads(path.read_text())
            version = plain["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, f"cannot be parsed: {error}") from error
        if version not in range(1, FORMAT_VERSION + 1):
            raise DataError(
                f"has format version {version}, this nestrec reads 1 to {FORMAT_VERSION}",
                option="dataset",
                value=str(folder),
                remedy="prepare it again",
            )
        try:
            return from_plain(DatasetCard, plain if version > 1 else _from_version_1(plain))
        except UserError as error:
            raise _damaged(path, str(error)) from error


def card_of_generation(number: int) -> str:
    """Where the card of an earlier generation is kept, relative to the dataset's folder."""
    return f"cards/{number:06d}.json"


def describe_file(folder: Path, path: Path, num_rows: int = 0) -> DataFile:
    """Entry of a file for the card."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    relative = path.relative_to(folder).as_posix()
    return DataFile(path=relative, num_bytes=path.stat().st_size, sha256=digest, num_rows=num_rows)


def _from_version_1(plain: dict[str, Any]) -> dict[str, Any]:
    """Features of version 1 did not say whose they are; numbers of events were what users did; nothing read them."""
    owned = {}
    for owner in ("event", "item", "user"):
        features = plain.get(f"{owner}_features", ())
        known = {n: "after" for n in ("number",) if owner == "event"}
        owned[f"{owner}_features"] = [
            {**feature, "owner": owner, "known": known.get(feature["kind"], "before")} for feature in features
        ]
    return {**plain, **owned}


def _damaged(path: Path, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="card", value=str(path), remedy="prepare the dataset again")


def length_statistics(lengths: NDArray[Any]) -> LengthStatistics:
    """Of the number of events of each user."""
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
    """Of the number of events of each item; items without events are left out."""
    ranked = np.sort(counts[counts > 0])[::-1]
    if not ranked.size:
        return PopularityStatistics()
    return PopularityStatistics(
        zipf_s=round(zipf_exponent(ranked), 4),
        top_1_percent_share=round(_top_share(ranked, 0.01), 4),
        top_10_percent_share=round(_top_share(ranked, 0.10), 4),
    )


def zipf_exponent(ranked: NDArray[np.int64]) -> float:
    """Maximum likelihood s of p(r) ~ r^-s over exactly the given ranks, by Newton's method.

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
    """Histogram of positive integers in logarithmic bins; zeros are left out."""
    positive = values[values > 0]
    if not positive.size:
        return BinnedCounts()
    top = float(positive.max()) + 1
    num_steps = int(np.ceil(np.log10(top) * bins_per_decade)) + 1
    edges = np.unique(np.round(10 ** (np.arange(num_steps + 1) / bins_per_decade)).astype(np.int64))
    edges = edges[: int(np.searchsorted(edges, top)) + 1]
    counts = np.histogram(positive, bins=edges)[0]
    return BinnedCounts(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


def _top_share(ranked: NDArray[np.int64], share: float) -> float:
    top = max(1, round(ranked.size * share))
    return float(ranked[:top].sum() / ranked.sum())
