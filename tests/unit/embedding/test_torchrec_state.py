import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.embedding.torchrec_state import export_embedding_collection, import_embedding_collection


def engine_of(*tables: TableConfig) -> EmbeddingEngine:
    return EmbeddingEngine(list(tables), Topology.single())


def test_an_export_is_the_state_of_plain_embeddings_and_comes_back():
    table = TableConfig(name="t", dim=3, num_rows=7)
    source, target = engine_of(table), engine_of(TableConfig(name="t", dim=3, num_rows=7, seed=9))
    state = export_embedding_collection(source)
    module = torch.nn.ModuleDict({"embeddings": torch.nn.ModuleDict({"t": torch.nn.Embedding(7, 3)})})
    module.load_state_dict(state)
    import_embedding_collection(target, module.state_dict())
    keys = {"t": np.arange(7)}
    assert torch.equal(target.lookup_readonly(keys)["t"], source.lookup_readonly(keys)["t"])
    assert list(export_embedding_collection(source, "embedding_bags")) == ["embedding_bags.t.weight"]


def test_what_does_not_fit_is_named():
    engine = engine_of(TableConfig(name="t", dim=3, num_rows=7))
    with pytest.raises(UserError, match=r"embeddings\.t\.weight"):
        import_embedding_collection(engine, {"embeddings.u.weight": torch.zeros(7, 3)})
    with pytest.raises(UserError, match="another shape"):
        import_embedding_collection(engine, {"embeddings.t.weight": torch.zeros(8, 3)})
    with pytest.raises(UserError, match="dynamic"):
        export_embedding_collection(engine_of(TableConfig(name="t", dim=3)))
