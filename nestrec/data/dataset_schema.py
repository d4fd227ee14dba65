"""Schema of a prepared dataset: names and types of its columns.

A dataset is a folder. `card.json` describes it. `users/part-*.parquet` has one row per user (or, for kind "rows", one
row per labeled example), `items.parquet` one row per item. `vocabularies/` maps category ids to source keys,
`vectors/*.npy` has dense vectors (one row per item id, or one row per user), and `quarantine.csv` the rejected input
rows. Item id 0 is never an item: it means padding or unknown.

An event feature is a list column with one value per event. If an event has several values, the column contains the
concatenated values of all events of the user, and a second column, `event_<name>_counts`, the number of values per
event.
"""

import pyarrow as pa

FORMAT_VERSION = 2
"""Version of the on-disk format. Version 1, which has categories, numbers and texts only, can still be read."""

USER_ID = "user_id"
"""Column of dense int64 user ids from 0, equal to the global row index."""
USER_KEY = "user_key"
"""Column of source user ids, as text."""
LENGTH = "length"
"""Column with the int32 number of events of the row."""
ITEM_IDS = "item_ids"
TIMESTAMPS_MS = "timestamps_ms"
ACTIONS = "actions"
EVENT_PREFIX = "event_"
USER_PREFIX = "user_"
ITEM_PREFIX = "item_"
COUNTS_SUFFIX = "_counts"
"""Suffix of the column with the number of list values per event."""

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
"""Action bits in the order of the HSTU reference mask, plus one for random exposures."""

LATEST_TIME_MS = 7_258_118_400_000
"""2200-01-01 UTC in Unix milliseconds; later times are treated as errors of unit or value."""


def list_of(element: pa.DataType) -> pa.DataType:
    """Return a list type without null elements, which decodes faster."""
    return pa.list_(pa.field("element", element, nullable=False))


def sequence_fields(*, has_timestamps: bool, has_actions: bool, features: dict[str, pa.DataType]) -> list[pa.Field]:
    """Return the columns of a user's row, without user features."""
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
    """Return the columns of a labeled example (Criteo): 13 numbers (blank: NaN) and 26 hashed categories (blank: 0)."""
    return [
        pa.field(LABEL, pa.int8(), nullable=False),
        pa.field(DENSE, list_of(pa.float32()), nullable=False),
        pa.field(CATEGORIES, list_of(pa.int64()), nullable=False),
    ]
