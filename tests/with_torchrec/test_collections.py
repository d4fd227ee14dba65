"""Tables go to TorchRec's collections and come back, and both look up the same vectors."""

import pytest
import torch

from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.embedding.torchrec_state import export_embedding_collection, import_embedding_collection
from nestrec.jagged import Jagged, offsets_of, to_keyed_jagged

SIZES = {"item_rows": (50, 8), "user_rows": (30, 8)}
"""An EmbeddingCollection asks for one dim in all its tables."""
FEATURES = {"item_rows": ("clicked", "bought"), "user_rows": ("user",)}


def engine_of(seed: int) -> EmbeddingEngine:
    tables = [
        TableConfig(name=name, num_rows=rows, dim=dim, features=FEATURES[name], seed=seed)
        for name, (rows, dim) in SIZES.items()
    ]
    return EmbeddingEngine(tables, Topology.single())


def collection_of(kind: str) -> torch.nn.Module:
    import torchrec

    config, collection = {
        "embeddings": (torchrec.EmbeddingConfig, torchrec.EmbeddingCollection),
        "embedding_bags": (torchrec.EmbeddingBagConfig, torchrec.EmbeddingBagCollection),
    }[kind]
    tables = [
        config(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(FEATURES[name]))
        for name, (rows, dim) in SIZES.items()
    ]
    return collection(tables=tables)


def features() -> dict[str, Jagged]:
    draw = torch.Generator().manual_seed(1)
    lengths = {"clicked": [3, 0, 2], "bought": [1, 1, 0], "user": [1, 1, 1]}
    rows_of = {feature: SIZES[table][0] for table, names in FEATURES.items() for feature in names}
    return {
        name: Jagged(torch.randint(rows_of[name], (sum(n),), generator=draw), offsets_of(torch.tensor(n)))
        for name, n in lengths.items()
    }


@pytest.mark.parametrize("kind", ["embeddings", "embedding_bags"])
def test_an_export_loads_strictly_and_weights_are_equal(kind):
    engine, collection = engine_of(seed=3), collection_of(kind)
    state = export_embedding_collection(engine, kind)
    collection.load_state_dict(state, strict=True)
    for name, weight in collection.state_dict().items():
        assert torch.equal(weight, state[name])


@pytest.mark.parametrize("kind", ["embeddings", "embedding_bags"])
def test_an_import_takes_every_weight(kind):
    engine, collection = engine_of(seed=3), collection_of(kind)
    import_embedding_collection(engine, collection.state_dict(), kind)
    exported = export_embedding_collection(engine, kind)
    assert exported.keys() == collection.state_dict().keys()
    for name, weight in collection.state_dict().items():
        assert torch.equal(exported[name], weight)


def test_a_collection_and_the_engine_look_up_the_same_vectors():
    engine, collection = engine_of(seed=3), collection_of("embeddings")
    import_embedding_collection(engine, collection.state_dict())
    given = features()
    theirs = collection(to_keyed_jagged(given))
    ours = engine.lookup_readonly({name: jagged.values for name, jagged in given.items()})
    for name in given:
        assert torch.equal(ours[name], theirs[name].values())


def test_bags_are_sums_of_the_rows_that_the_engine_looks_up():
    engine, collection = engine_of(seed=3), collection_of("embedding_bags")
    collection.load_state_dict(export_embedding_collection(engine, "embedding_bags"))
    given = features()
    theirs = collection(to_keyed_jagged(given)).to_dict()
    ours = engine.lookup_readonly({name: jagged.values for name, jagged in given.items()})
    for name, jagged in given.items():
        sums = torch.stack([row.sum(0) for row in jagged.with_values(ours[name]).rows()])
        torch.testing.assert_close(sums, theirs[name])
