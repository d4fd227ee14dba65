"""Tables, stores, row optimisers, routing and the engine that joins them."""

from nestrec.embedding.engine import EmbeddingEngine
from nestrec.embedding.routing import Routed
from nestrec.embedding.table import InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.working_set import WorkingSet

__all__ = [
    "EmbeddingEngine",
    "InitConfig",
    "Routed",
    "RowOptimizerConfig",
    "StoreConfig",
    "TableConfig",
    "WorkingSet",
]
