"""Stores of rows: device memory, host memory (host offload) and disk; `store.kind` of a table's config selects one."""

from nestrec.embedding.stores.row_store import Slots, Store

__all__ = ["Slots", "Store"]
