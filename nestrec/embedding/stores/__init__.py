"""Stores of rows, found by the name in a table's config."""

from nestrec.embedding.stores.row_store import Slots, Store

__all__ = ["Slots", "Store"]
