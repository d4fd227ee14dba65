"""The store that a table's config names."""

from pathlib import Path
from urllib.parse import quote

import torch

from nestrec.embedding.stores.device import DeviceStore
from nestrec.embedding.stores.disk import DiskStore
from nestrec.embedding.stores.dram import DramStore
from nestrec.embedding.stores.row_file import remove_leftovers
from nestrec.embedding.stores.store import Store
from nestrec.embedding.table import RowLayout, TableConfig


def make_store(table: TableConfig, layout: RowLayout, device: torch.device, shard: int) -> Store:
    """An empty store for one shard of a table."""
    config = table.store
    if config.kind == "dram":
        return DramStore(layout.num_words, device, config.num_threads)
    if config.kind == "disk":
        folder, name = Path(config.folder), quote(table.name, safe="")
        remove_leftovers(folder, name)
        path = folder / f"{name}.{shard}"
        return DiskStore(path, layout.num_words, device, config.cache_rows, config.num_threads)
    return DeviceStore(layout.num_words, device, config.num_threads)
