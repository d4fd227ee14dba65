"""Tables, stores, row optimisers, routing and the engine that joins them."""

from nestrec.embedding.engine import EmbeddingEngine
from nestrec.embedding.flight.routing import Routed
from nestrec.embedding.flight.working_set import WorkingSet
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.embedding.table import InitConfig, StoreConfig, TableConfig

__all__ = [
    "EmbeddingEngine",
    "InitConfig",
    "Routed",
    "RowOptimizerConfig",
    "StoreConfig",
    "TableConfig",
    "WorkingSet",
]
