"""What a servable folder says of itself: the model, its inputs, and its files with their digests."""

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
LONGEST_LIST = 32
"""categories of one event or user that a request may tell"""


def shown_version(version: str) -> str:
    """Shorten the version of a servable to the name that answers, logs, metrics and commands show.

    That is the name of a published version (`00000012-9f2c41d0`), or the first 12 digits of the digest of an export.
    """
    name, _, digest = version.partition(":")
    return name if digest else version[:12]


@config
class ColumnSpec:
    name: str
    """feature and table name, such as `event_tab`"""
    keys: tuple[str, ...] | None
    """key of each category from 1; none where the dataset has numbers only, which are then given as they are"""
    num_rows: int
    """rows of its table, row 0 for unknown"""
    table: str = ""
    """table that it reads, which another column may read too; '': one of its own name"""
    kind: Literal["category", "categories", "bag", "number", "vector"] = "category"
    """what a value of it is; numbers and vectors have no table, but a matrix among the weights"""
    transform: Transform = Transform()
    """from a raw value to what the model reads"""
    width: int = 0
    """of the matrix of numbers and vectors"""
    pooling: str = ""
    """how several values become one vector"""
    most_ids: int = 0
    """of a list or a text, the most that a request may tell of one place"""
    by_key: KeyedTableSpec | None = None
    """of a table whose rows are found by keys of any size; none: by ids from 1"""

    @property
    def has_several(self) -> bool:
        """A place has a list, a text or a vector of it."""
        return self.kind in ("categories", "bag", "vector")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names under which histories and candidates hold it: its own, or one for each id or number of a place."""
        if not self.has_several:
            return (self.name,)
        count = self.width if self.kind == "vector" else self.most_ids
        return tuple(f"{self.name}/{place}" for place in range(count))

    @property
    def table_name(self) -> str:
        return self.table or self.name

    @property
    def has_table(self) -> bool:
        return self.kind not in ("number", "vector")


@config
class InputDefaults:
    """What stands in for something that the model reads and a request does not tell; without one it is refused."""

    history: tuple[str, ...] | None = None
    """items of the events that a user without any is taken to have"""
    times: Literal["now"] | None = None
    """now: events happened when the request came"""
    actions: tuple[str, ...] | None = None
    """what the user did at each event; an empty list: nothing"""
    features: Mapping[str, str | None] = field(default_factory=dict)
    """category of events and candidates, by name; none: an unknown one"""
    user_features: Mapping[str, str | None] = field(default_factory=dict)
    """category of users, by name; none: an unknown one"""

    def typed(self) -> dict[str, str]:
        """Returns the defaults other than the history by option (`times`, `features.NAME`), as `export` reads them."""
        found: dict[str, str] = {}
        if self.times is not None:
            found["times"] = self.times
        if self.actions is not None:
            found["actions"] = ",".join(self.actions) or "[]"
        for field_name, values in (("features", self.features), ("user_features", self.user_features)):
            found |= {f"{field_name}.{name}": "none" if value is None else value for name, value in values.items()}
        return found


@config
class ServableSpec:
    name: str
    """recipe that was trained"""
    step: int
    """training step of the weights"""
    task: TaskConfig
    """the model and its inputs"""
    num_items: int
    """item ids run from 1 to it; 0 is an unknown item"""
    action_bits: Mapping[str, int]
    """action name to its bit value"""
    columns: tuple[ColumnSpec, ...] = ()
    """features beside the item's id"""
    folds_items: bool = False
    """rows of items hold their features, too: columns of items are then for new items alone"""
    item_vectors: int = 1
    """in a row of an item: more than one where they are its id's and, apart, those of its features"""
    defaults: InputDefaults = InputDefaults()
    """of inputs that a request leaves out"""
    search: SearchConfig = SearchConfig()
    """of the index (retrieval)"""
    recall: SearchRecall | None = None
    """of a search that does not look at every row, as the export measured it"""
    format: int = FORMAT
    """version of this layout"""

    def to_width(self, dim: int) -> FeatureProjections:
        """The matrices of columns of numbers, with any weights."""
        return FeatureProjections(
            dim, {}, {column.name: column.width for column in self.columns if not column.has_table}
        )


@config
class GoldenRequest:
    """A request and its scores, in the keys of the source."""

    items: tuple[str, ...]
    """of the events"""
    times_ms: tuple[int, ...]
    """of the events"""
    actions: tuple[int, ...]
    """action bits of the events"""
    candidates: tuple[str, ...]
    """items that are scored"""
    now_ms: int
    """when it was asked"""
    scores: tuple[tuple[float, ...], ...]
    """of each candidate, one value an output"""


@config
class QuantizationReport:
    """What an export in fewer bits costs, on events that validate."""

    dtype: str
    """of the dense weights and of all computation"""
    tables: str
    """of the rows of tables"""
    prefixes: str
    """of the keys and values that are kept, in this measurement"""
    num_requests: int
    """that were asked of both models, each the history of a user before a held-out event"""
    largest_difference: float
    """of scores from those of the run"""
    mean_difference: float
    """the same, a mean over all scores"""
    mean_score: float
    """of the run, without signs: what the differences are to be compared with"""
    overlap: float
    """share of the ten best that are among the ten best of the run"""
    metric: str
    """ndcg@10 of held-out items among the catalogue, or auc of the first label"""
    before: float | None
    """of the run; none where nothing could be measured: no event of a label, or none without it"""
    after: float | None
    """of the export"""


@config
class ServableManifest:
    files: tuple[FileDigest, ...]
    """every other file of the folder, by name"""
    precision: QuantizationReport | None = None
    """what fewer bits cost; none where the export has those of the run"""
    format: int = FORMAT
    """version of this layout"""

    @property
    def version(self) -> str:
        """Identity of the model: two folders with the same version give the same scores."""
        told = {name: value for name, value in to_plain(self).items() if name != "precision" or value is not None}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def table_file(table: str) -> str:
    return f"table-{table}.safetensors"
