"""Names and types of the columns of a prepared dataset.

A dataset is a folder. `card.json` describes it, `users/part-*.parquet` holds one row a user (or, for kind "rows", one
row a labelled example), `items.parquet` one row an item, `vocabularies/` the keys behind the category ids,
`vectors/*.npy` dense vectors (a row an item id, or a row a user), `quarantine.csv` the input rows that were set aside.
Item id 0 is never an item: padding or unknown.

A feature of an event has a list column with one value an event. Where an event has several values, the column holds
those of all events of the user one after the other, and a second one, `event_<name>_counts`, how many each event has.
"""

import pyarrow as pa

FORMAT_VERSION = 2
"""1 had categories, numbers and texts alone; it is still read."""

USER_ID = "user_id"
"""int64, dense from 0, equal to the global row index."""
USER_KEY = "user_key"
"""The user's id in the source, as text."""
LENGTH = "length"
"""int32, number of events of the row."""
ITEM_IDS = "item_ids"
TIMESTAMPS_MS = "timestamps_ms"
ACTIONS = "actions"
EVENT_PREFIX = "event_"
USER_PREFIX = "user_"
ITEM_PREFIX = "item_"
COUNTS_SUFFIX = "_counts"
"""Of the column that says how many values of a list each event has."""

LABEL = "label"
DENSE = "dense"
CATEGORIES = "categories"

KUAIRAND_BITS = {
    "click": 1,
    "like": 2,
    "follow": 4,
    "comment": 8,
    "forward": 16,
    "hate": 32,
    "long_view": 64,
    "profile_enter": 128,
    "random": 256,
}
"""Action bits in the order of the HSTU reference mask, and one more for exposures made at random."""

LATEST_TIME_MS = 7_258_118_400_000
"""2200-01-01 UTC; a later time is taken for an error of unit or value."""


def list_of(element: pa.DataType) -> pa.DataType:
    """List type without null elements, which decodes faster."""
    return pa.list_(pa.field("element", element, nullable=False))


def sequence_fields(*, has_timestamps: bool, has_actions: bool, features: dict[str, pa.DataType]) -> list[pa.Field]:
    """Columns of a user's row, without user features."""
    fields = [
        pa.field(USER_ID, pa.int64(), nullable=False),
        pa.field(USER_KEY, pa.string(), nullable=False),
        pa.field(LENGTH, pa.int32(), nullable=False),
        pa.field(ITEM_IDS, list_of(pa.int64()), nullable=False),
    ]
    if has_timestamps:
        fields.append(pa.field(TIMESTAMPS_MS, list_of(pa.int64()), nullable=False))
    if has_actions:
        fields.append(pa.field(ACTIONS, list_of(pa.int32()), nullable=False))
    fields += [pa.field(EVENT_PREFIX + name, list_of(kind), nullable=False) for name, kind in features.items()]
    return fields


def row_fields() -> list[pa.Field]:
    """Columns of a labelled example (Criteo): 13 numbers, NaN for a blank, and 26 hashed categories, 0 for a blank."""
    return [
        pa.field(LABEL, pa.int8(), nullable=False),
        pa.field(DENSE, list_of(pa.float32()), nullable=False),
        pa.field(CATEGORIES, list_of(pa.int64()), nullable=False),
    ]
