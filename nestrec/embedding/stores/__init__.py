"""Stores of rows, found by the name in a table's config."""

from nestrec.embedding.stores.row_store import Slots, Store
from nestrec.embedding.table_shard import make_store

__all__ = ["Slots", "Store", "make_store"]
