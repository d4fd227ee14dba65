"""The store that a table's config names."""

import torch

from nestrec.embedding.layout import RowLayout
from nestrec.embedding.stores.device import DeviceStore
from nestrec.embedding.stores.store import Store
from nestrec.embedding.table import TableConfig


def make_store(table: TableConfig, layout: RowLayout, device: torch.device, shard: int) -> Store:
    """An empty store for one shard of a table."""
    config = table.store
    return DeviceStore(layout.num_words, device, config.num_threads)
