"""Stores of rows, found by the name in a table's config."""

from nestrec.embedding.stores.factory import make_store
from nestrec.embedding.stores.store import Slots, Store

__all__ = ["Slots", "Store", "make_store"]
