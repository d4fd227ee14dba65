"""Sharded embedding tables: table configs, row stores, row optimizers, key routing and the engine that runs them."""

from nestrec.embedding.embedding_engine import EmbeddingEngine
from nestrec.embedding.routing.key_routing import RoutedKeys
from nestrec.embedding.routing.working_set import WorkingSet
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.embedding.table_config import InitConfig, StoreConfig, TableConfig

__all__ = [
    "EmbeddingEngine",
    "InitConfig",
    "RoutedKeys",
    "RowOptimizerConfig",
    "StoreConfig",
    "TableConfig",
    "WorkingSet",
]
