"""Metadata of a servable folder: spec of the model and its inputs, golden request, and manifest with file digests."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from nestrec.artifacts.manifest import FileDigest
from nestrec.base.config import config, to_plain
from nestrec.data.transform import Transform
from nestrec.models.encoder_parts import FeatureProjections
from nestrec.serving.model.item_id_map import KeyedTableSpec
from nestrec.serving.model.item_search import SearchConfig, SearchRecall
from nestrec.tasks.task_registry import TaskConfig

FORMAT = 1
SPEC_FILE, MANIFEST_FILE = "spec.json", "manifest.json"
WEIGHTS_FILE, INDEX_FILE = "weights.safetensors", "index.safetensors"
ITEMS_FILE, COLUMNS_FILE = "item_keys.json", "item_columns.safetensors"
PROBE_FILE, TITLES_FILE = "probe.json", "item_titles.json"
SEARCH_FILE, KEYS_FILE = "search.safetensors", "row_keys.safetensors"
MAX_LIST_LENGTH = 32
"""Maximum number of categories that a request can list per event or user."""


def short_version(version: str) -> str:
    """Shorten the version of a servable to the name shown in responses, logs, metrics and commands.

    That is the name of a published version (`00000012-9f2c41d0`), or the first 12 digits of the digest of an export.
    """
    name, _, digest = version.partition(":")
    return name if digest else version[:12]


@config
class ColumnSpec:
    """Feature column that a model reads in addition to the item id."""

    name: str
    """Name of the feature and of its table, such as `event_tab`."""
    keys: tuple[str, ...] | None
    """Vocabulary: the source key of each category, starting with id 1; none if the dataset has integer categories,
    which requests then contain directly."""
    num_rows: int
    """Number of rows of the embedding table; row 0 is the row of unknown categories."""
    table: str = ""
    """Name of the embedding table, which several columns can share; empty uses the name of the column."""
    kind: Literal["category", "categories", "bag", "number", "vector"] = "category"
    """Type of a value; numbers and vectors have a projection matrix among the weights instead of a table."""
    transform: Transform = Transform()
    """Transformation of a raw value into the value that the model reads."""
    width: int = 0
    """Input width of the projection matrix of a number or vector column."""
    pooling: str = ""
    """Pooling of several values into one vector (`sum` or `mean`)."""
    most_ids: int = 0
    """Maximum number of ids per event or candidate in a list or text column."""
    by_key: KeyedTableSpec | None = None
    """Spec of a table whose rows are addressed by 64-bit keys; none for a table addressed by ids from 1."""

    @property
    def has_several(self) -> bool:
        """Whether one value is a list, a text or a vector."""
        return self.kind in ("categories", "bag", "vector")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the integer fields of the column in a `History`: one, or one per id or vector element."""
        if not self.has_several:
            return (self.name,)
        count = self.width if self.kind == "vector" else self.most_ids
        return tuple(f"{self.name}/{index}" for index in range(count))

    @property
    def table_name(self) -> str:
        return self.table or self.name

    @property
    def has_table(self) -> bool:
        return self.kind not in ("number", "vector")


@config
class InputDefaults:
    """Default values of inputs that the model reads; a request without an input that has no default is rejected."""

    history: tuple[str, ...] | None = None
    """Item ids of the default history, which is used for users without events."""
    times: Literal["now"] | None = None
    """Default time of events; `now` is the time of the request."""
    actions: tuple[str, ...] | None = None
    """Names of the default actions of each event; an empty list means no action."""
    features: Mapping[str, str | None] = field(default_factory=dict)
    """Default category of events and candidates by feature name; none is the unknown category."""
    user_features: Mapping[str, str | None] = field(default_factory=dict)
    """Default category of users by feature name; none is the unknown category."""

    def to_options(self) -> dict[str, str]:
        """Return the defaults other than the history by option (`times`, `features.NAME`), as `export` reads them."""
        options: dict[str, str] = {}
        if self.times is not None:
            options["times"] = self.times
        if self.actions is not None:
            options["actions"] = ",".join(self.actions) or "[]"
        for field_name, values in (("features", self.features), ("user_features", self.user_features)):
            options |= {f"{field_name}.{name}": "none" if value is None else value for name, value in values.items()}
        return options


@config
class ServableSpec:
    """Spec of an exported model: task config, catalog size, feature columns and default values."""

    name: str
    """Name of the trained recipe."""
    step: int
    """Training step of the weights."""
    task: TaskConfig
    """Config of the task, which defines the model and its inputs."""
    num_items: int
    """Number of items in the catalog; item ids are 1 to `num_items`, and 0 is the unknown item."""
    action_bits: Mapping[str, int]
    """Bit value of each action, by name."""
    columns: tuple[ColumnSpec, ...] = ()
    """Feature columns that the model reads in addition to the item id."""
    folds_items: bool = False
    """Whether the item rows already include the item features; item columns are then used for cold-start items only."""
    item_vectors: int = 1
    """Number of vectors per item row: more than one if the item id and each item feature have separate vectors."""
    defaults: InputDefaults = InputDefaults()
    """Default values of inputs that a request omits."""
    search: SearchConfig = SearchConfig()
    """Search options of the retrieval index."""
    recall: SearchRecall | None = None
    """Recall of the ANN search, measured by the export; none for exact search."""
    format: int = FORMAT
    """Format version of the servable folder."""

    def to_width(self, dim: int) -> FeatureProjections:
        """Create the projections of number and vector columns to the model width, with arbitrary weights."""
        return FeatureProjections(
            dim, {}, {column.name: column.width for column in self.columns if not column.has_table}
        )


@config
class GoldenRequest:
    """Recorded request and its expected scores, in source ids; the server checks it before a model goes live."""

    items: tuple[str, ...]
    """Item ids of the events."""
    times_ms: tuple[int, ...]
    """Times of the events in Unix milliseconds."""
    actions: tuple[int, ...]
    """Action bits of the events."""
    candidates: tuple[str, ...]
    """Ids of the scored items."""
    now_ms: int
    """Time of the request in Unix milliseconds."""
    scores: tuple[tuple[float, ...], ...]
    """Scores of each candidate, one value per output of the model."""


@config
class QuantizationReport:
    """Quality loss of a quantized or lower-precision export, measured on held-out validation events."""

    dtype: str
    """Data type of the dense weights and of the computation."""
    tables: str
    """Data type of the embedding tables."""
    prefixes: str
    """Data type of the KV cache in this measurement."""
    num_requests: int
    """Number of requests scored by both models; each is the history of a user before a held-out event."""
    largest_difference: float
    """Largest absolute difference between scores of the export and of the run."""
    mean_difference: float
    """Mean absolute difference between scores of the export and of the run."""
    mean_score: float
    """Mean absolute score of the run, as the scale of the differences."""
    overlap: float
    """Fraction of the top 10 items that are also in the top 10 of the run."""
    metric: str
    """Name of the quality metric: ndcg@10 of held-out items in the catalog, or auc of the first label."""
    before: float | None
    """Metric of the run; none if it is undefined because all events have the same label."""
    after: float | None
    """Metric of the export; none if it is undefined."""


@config
class ServableManifest:
    """Manifest of a servable folder, with the SHA-256 digest of every file."""

    files: tuple[FileDigest, ...]
    """Digests of all other files of the folder, sorted by name."""
    precision: QuantizationReport | None = None
    """Quality loss of a quantized export; none if the export has the precision of the run."""
    format: int = FORMAT
    """Format version of the servable folder."""

    @property
    def version(self) -> str:
        """Version of the model, a SHA-256 digest; two folders with the same version return the same scores."""
        content = {name: value for name, value in to_plain(self).items() if name != "precision" or value is not None}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def table_file(table: str) -> str:
    """Return the file name of an embedding table in a servable folder."""
    return f"table-{table}.safetensors"
