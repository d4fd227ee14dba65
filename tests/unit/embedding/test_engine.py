import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.table_shard import TableShard
from nestrec.jagged import Jagged


def step(engine: EmbeddingEngine, keys: dict, number: int) -> None:
    routed = engine.route(keys)
    working = engine.fetch_rows(routed, step=number)
    vectors = engine.exchange_vectors(routed, working)
    engine.accumulate(routed, working, {n: torch.ones_like(v) for n, v in vectors.items()})
    engine.update(working, learning_rate=0.1)
    engine.write_back(working)


def test_embedding_evaluation_does_not_change_tables():
    engine = EmbeddingEngine([TableConfig(name="t", dim=4)], Topology.single())
    step(engine, {"t": np.array([5, -3])}, 1)
    digest = engine.digest("t")
    vectors = engine.lookup_readonly({"t": np.array([[5, 77], [-3, 77]])})["t"]
    assert vectors.shape == (2, 2, 4)
    assert torch.equal(vectors[0, 1], vectors[1, 1])
    assert engine.digest("t") == digest
    assert engine.shards["t"].key_index.num_rows == 2


def test_table_shard_clear_resets_rows():
    """A shard of a subclass retains its class and its additional attributes."""

    class NamedShard(TableShard):
        def __init__(self, name: str, table: TableConfig):
            super().__init__(table, 0, 1, torch.device("cpu"))
            self.name = name

    shard = NamedShard("first", TableConfig(name="t", dim=2))
    keys = np.array([4, 9])
    fetched = shard.fetch_rows(keys, step=1)
    fetched.rows.add_(1)
    shard.write_back(fetched)
    shard.clear()
    assert shard.name == "first"
    assert shard.key_index.num_rows == 0
    assert torch.equal(shard.read(keys), NamedShard("new", shard.table).read(keys))


@pytest.mark.parametrize("kind", ["device", "dram", "disk"])
def test_top_k_includes_initial_rows_of_static_table(kind, tmp_path):
    table = TableConfig(name="t", dim=4, num_rows=1000, store=StoreConfig(kind=kind, folder=str(tmp_path)))
    used, unused = (EmbeddingEngine([table], Topology.single()) for _ in range(2))
    before = unused.digest("t")
    routed = used.route({"t": np.arange(0, 1000, 3)})
    used.write_back(used.fetch_rows(routed, step=1))
    assert used.digest("t") == before
    step(used, {"t": np.array([7])}, 2)
    assert used.digest("t") != before
    used.close()
    unused.close()


def test_embedding_keys_are_not_trained_until_admitted():
    table = TableConfig(
        name="t",
        dim=2,
        dtype="float64",
        store=StoreConfig(admission_threshold=3),
        optimizer=RowOptimizerConfig(kind="sgd"),
    )
    engine = EmbeddingEngine([table], Topology.single())
    begin = engine.lookup_readonly({"t": np.array([1, 2])})["t"]
    for number in range(1, 5):
        step(engine, {"t": np.array([1]) if number % 2 else np.array([1, 2])}, number)
    end = engine.lookup_readonly({"t": np.array([1, 2])})["t"]
    torch.testing.assert_close(end[0], begin[0] - 0.2)
    assert torch.equal(end[1], begin[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_embedding_vectors_have_dtype_of_table(dtype):
    engine = EmbeddingEngine([TableConfig(name="t", dim=5, dtype=dtype)], Topology.single())
    routed = engine.route({"t": np.array([1, 2])}, {"t": np.array([2, 3])})
    working = engine.fetch_rows(routed, step=1)
    for part in (0, 1):
        vectors = engine.exchange_vectors(routed, working, part)["t"]
        assert vectors.dtype == engine.tables["t"].weight_dtype
        engine.accumulate(routed, working, {"t": torch.ones_like(vectors)}, part)
    assert working.tables["t"].gradient.tolist() == [[1.0] * 5, [2.0] * 5, [1.0] * 5]
    engine.update(working, learning_rate=0.1)
    engine.write_back(working)
    [chunk] = engine.snapshot("t")
    assert chunk["state_sum"].dtype == engine.tables["t"].state_dtype
    assert chunk["state_sum"].flatten().tolist() == [1.0, 4.0, 1.0]


def test_embedding_weights_load_with_initial_optimizer_state():
    optimizer = RowOptimizerConfig(kind="adagrad", initial_accumulator_value=0.5)
    engine = EmbeddingEngine([TableConfig(name="t", dim=3, num_rows=10, optimizer=optimizer)], Topology.single())
    weight = torch.randn(10, 3)
    assert engine.load("t", [{"keys": torch.arange(10), "weight": weight}]) == 10
    assert torch.equal(engine.lookup_readonly({"t": np.arange(10)})["t"], weight)
    [chunk] = engine.snapshot("t")
    assert (chunk["state_sum"] == 0.5).all()


def test_top_k_is_a_stable_sort_of_all_scores():
    engine = EmbeddingEngine([TableConfig(name="t", dim=3, num_rows=500)], Topology.single())
    weight = torch.randint(-2, 3, (500, 3)).float()  # many ties
    engine.load("t", [{"keys": torch.arange(500), "weight": weight}])
    queries = torch.randint(-2, 3, (40, 3)).float()
    history = Jagged.from_rows([torch.randint(0, 500, (n,)) for n in range(40)])
    scores, keys = engine.top_k("t", queries, 10, exclude=history, candidates=range(1, 500))
    every = queries @ weight.T
    every[:, 0] = -torch.inf
    for row, excluded in enumerate(history.rows()):
        every[row, excluded] = -torch.inf
    expected, order = every.sort(dim=1, descending=True, stable=True)
    assert torch.equal(scores, expected[:, :10])
    assert torch.equal(keys, order[:, :10])


def test_top_k_of_dynamic_table_pads_missing_keys():
    engine = EmbeddingEngine([TableConfig(name="t", dim=3)], Topology.single())
    step(engine, {"t": np.array([9, -4])}, 1)
    scores, keys = engine.top_k("t", torch.zeros(1, 3), 3, row_transform=lambda v, k: v + 1)
    assert keys.tolist() == [[-4, 9, -1]]
    assert scores[0, 2] == -torch.inf


def test_static_table_names_key_out_of_range():
    engine = EmbeddingEngine([TableConfig(name="t", dim=3, num_rows=10, features=("a",))], Topology.single())
    for key in (10, -1):
        with pytest.raises(UserError, match=rf"feature 'a'={key}: not a valid key of table 't', whose keys are 0 to 9"):
            engine.route({"a": np.array([3, key])})


def test_embedding_route_requires_exactly_the_features():
    tables = [TableConfig(name="t", dim=3, features=("a", "b")), TableConfig(name="u", dim=2)]
    engine = EmbeddingEngine(tables, Topology.single())
    for names in ("a", "b"), ("a", "b", "u", "c"):
        with pytest.raises(UserError, match=r"feature=[uc]: "):
            engine.route({name: np.array([1]) for name in names})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([TableConfig(name="t", dim=0)], "tables.t.dim"),
        ([TableConfig(name="t", dim=1, num_rows=0)], "tables.t.num_rows"),
        ([TableConfig(name="t", dim=1)] * 2, "used more than once"),
        ([TableConfig(name="t", dim=1), TableConfig(name="u", dim=1, features=("t",))], "features"),
        ([TableConfig(name="t", dim=1, store=StoreConfig(kind="disk"))], "store.folder"),
        (
            [TableConfig(name="t", dim=1, num_rows=4, store=StoreConfig(admission_threshold=2))],
            "t.admission_threshold=2",
        ),
        ([TableConfig(name="t", dim=1, store=StoreConfig(eviction_policy="lru"))], "max_rows"),
        ([TableConfig(name="t", dim=1, store=StoreConfig(eviction_policy="ttl"))], "ttl_steps"),
        ([TableConfig(name="t", dim=1, store=StoreConfig(ttl_steps=4))], "ttl_steps"),
    ],
)
def test_table_config_errors_name_the_field(tables, message):
    with pytest.raises(UserError, match=message):
        EmbeddingEngine(tables, Topology.single())


def test_disk_store_cache_stays_within_its_size(tmp_path):
    store = StoreConfig(kind="disk", folder=str(tmp_path), cache_rows=256)
    engine = EmbeddingEngine([TableConfig(name="t", dim=64, num_rows=20_000, store=store)], Topology.single())
    draw = np.random.default_rng(0)
    for number in range(1, 30):
        step(engine, {"t": draw.integers(0, 20_000, 2000)}, number)
    numbers = engine.shards["t"].store.statistics()
    assert numbers["disk_bytes"] == 20_000 * 272
    assert numbers["cache_misses"] > numbers["cache_reads"] // 2
    cache = engine.shards["t"].store._cache
    assert cache.nbytes == 256 * 272
    engine.close()
    assert not list(tmp_path.iterdir())
