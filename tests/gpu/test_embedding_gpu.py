"""The embedding engine on a GPU is bitwise identical to the engine on a CPU."""

import contextlib

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.initial import initial_vectors, initial_vectors_torch
from nestrec.embedding.routing.deduplicated_keys import MIN_KEYS
from nestrec.embedding.stores.device_store import DeviceStore
from nestrec.jagged import Jagged, offsets_of
from nestrec.ops.embedding.row_gather import gather_rows, pool_rows
from nestrec.ops.embedding.row_sum import sum_by_index, sum_by_index_reference

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def digests(device: str, kind: str, dtype: str, store: StoreConfig) -> list[str]:
    """Return the digests of all tables after training steps of two micro-batches each with random gradients."""
    optimizer = RowOptimizerConfig(kind=kind)
    tables = [
        TableConfig(
            name="static",
            dim=37,
            num_rows=500,
            dtype=dtype,
            optimizer=optimizer,
            store=StoreConfig(kind=store.kind, folder=store.folder, cache_rows=store.cache_rows),
        ),
        TableConfig(name="dynamic", dim=16, dtype=dtype, optimizer=optimizer, store=store),
    ]
    engine = EmbeddingEngine(tables, Topology.single(device), device)
    draw = np.random.default_rng(0)
    for step in range(1, 20):
        parts = [{"static": draw.integers(0, 500, 60), "dynamic": draw.integers(-90, 90, 40)} for _ in range(2)]
        routed = engine.route(*parts)
        working = engine.fetch_rows(routed, step=step)
        for part in (0, 1):
            vectors = engine.exchange_vectors(routed, working, part)
            grads = {n: torch.from_numpy(draw.standard_normal(v.shape)).to(device) for n, v in vectors.items()}
            engine.accumulate(routed, working, grads, part)
        engine.update(working, learning_rate=0.05)
        engine.write_back(working)
    found = [engine.digest(name) for name in engine.tables]
    engine.close()
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"])
def test_embedding_training_on_gpu_equals_cpu_bitwise(kind, dtype):
    assert digests("cuda", kind, dtype, StoreConfig()) == digests("cpu", kind, dtype, StoreConfig())


@pytest.mark.parametrize("store", ["device", "dram", "disk"])
def test_embedding_stores_are_bitwise_identical(store, tmp_path):
    bounded = StoreConfig(
        kind=store, folder=str(tmp_path), cache_rows=32, eviction_policy="lru", max_rows=100, admission_threshold=2
    )
    on_cpu = StoreConfig(eviction_policy="lru", max_rows=100, admission_threshold=2)
    assert digests("cuda", "adam", "float32", bounded) == digests("cpu", "adam", "float32", on_cpu)


def test_initial_vectors_on_gpu_equal_cpu_bitwise():
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200_000)
    table = TableConfig(name="t", dim=33, seed=7)
    found = initial_vectors_torch(torch.from_numpy(keys).cuda(), table)
    assert torch.equal(found.cpu(), initial_vectors(keys, table))


def test_gather_gradients_are_summed_in_position_order():
    torch.manual_seed(0)
    index = torch.randint(0, 50, (3000,), dtype=torch.int32)
    grad = torch.randn(3000, 24)
    assert torch.equal(sum_by_index(grad.cuda(), index.cuda(), 60).cpu(), sum_by_index_reference(grad, index, 60))
    rows = torch.randn(60, 24, device="cuda", requires_grad=True)
    out = gather_rows(rows, index.cuda())
    out.backward(grad.cuda())
    assert torch.equal(rows.grad.cpu(), sum_by_index_reference(grad, index, 60))


def test_pool_rows_on_gpu_equals_cpu():
    lengths = torch.tensor([3, 0, 500, 7])
    index = torch.randint(0, 90, (510,), dtype=torch.int32)
    rows = torch.randn(90, 8)
    on_gpu = pool_rows(rows.cuda(), index.cuda(), offsets_of(lengths).cuda())
    torch.testing.assert_close(on_gpu.cpu(), pool_rows(rows, index, offsets_of(lengths)))


def test_embedding_top_k_on_gpu_equals_cpu():
    found = []
    for device in ("cpu", "cuda"):
        engine = EmbeddingEngine([TableConfig(name="t", dim=8, num_rows=3000)], Topology.single(device), device)
        queries = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)).to(device)
        exclude = Jagged.from_rows([torch.arange(n, 40 + n) for n in range(50)])
        found.append(engine.top_k("t", queries, 20, exclude=exclude)[1].cpu())
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("store", ["device", "dram"])
def test_embedding_step_never_synchronizes(store):
    """Only the write-back of a host store may synchronize: rows must arrive on the host before they are stored."""
    table = TableConfig(name="t", dim=32, num_rows=2000, store=StoreConfig(kind=store))
    engine = EmbeddingEngine([table], Topology.single("cuda"), "cuda")

    def step(number: int) -> None:
        keys = np.random.default_rng(number).integers(0, 2000, 5000)
        torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
        routed = engine.route({"t": keys})
        working = engine.fetch_rows(routed, step=number)
        rows = engine.exchange_vectors(routed, working)["t"].requires_grad_()
        gather_rows(rows, routed.index["t"]).square().sum().backward()
        assert rows.grad is not None
        engine.accumulate(routed, working, {"t": rows.grad})
        engine.update(working, learning_rate=0.1)
        if store == "dram":
            torch.cuda.set_sync_debug_mode("default")
        engine.write_back(working)

    try:
        for number in range(1, 6):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "half", [{}, {"half_precision_features": ("b",), "half_dtype": "float16"}], ids=["float32", "half"]
)
@pytest.mark.parametrize("num_rows", [None, 9000])
def test_embedding_gpu_deduplication_equals_host(num_rows, half):
    """Keys are deduplicated in another order than on a CPU; final rows are bitwise identical."""
    digests_found = []
    for device in ("cpu", "cuda"):
        table = TableConfig(name="t", dim=8, num_rows=num_rows, features=("a", "b"), **half)
        engine = EmbeddingEngine([table], Topology.single(device), device)
        draw = np.random.default_rng(0)
        for step in range(1, 4):
            keys = {"a": draw.integers(0, 50, (30, 20)), "b": draw.integers(0, 9000, MIN_KEYS)}
            routed = engine.route(keys)
            working = engine.fetch_rows(routed, step=step)
            rows = engine.exchange_vectors(routed, working)["t"].requires_grad_()
            for feature in keys:
                (gather_rows(rows, routed.index[feature]) * 0.25).square().sum().backward()
            engine.accumulate(routed, working, {"t": rows.grad})
            engine.update(working, learning_rate=0.1)
            engine.write_back(working)
        digests_found.append(engine.digest("t"))
        with pytest.raises(UserError, match="9000") if num_rows else contextlib.nullcontext():
            engine.route({"a": np.zeros(1, np.int64), "b": np.arange(MIN_KEYS) % 9001})
    assert digests_found[0] == digests_found[1]


def test_finite_row_check_never_synchronizes():
    engine = EmbeddingEngine(
        [TableConfig(name="t", dim=8, num_rows=100, dtype="bfloat16")], Topology.single("cuda"), CUDA
    )
    layout = engine.shards["t"].layout
    rows = torch.zeros(50, engine.shards["t"].layout.num_words, dtype=torch.int32)
    rows = rows.to(CUDA)
    layout.view(rows, "weight").fill_(1000.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.finite_row_check.check_rows(0, layout, rows[:40:2])
        fine = engine.finite_row_check.non_finite_markers()
        layout.view(rows, "state_sum")[7] = float("inf")
        engine.finite_row_check.check_rows(0, layout, rows)
        bad = engine.finite_row_check.non_finite_markers()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (fine.tolist(), bad.isnan().tolist()) == ([0.0], [True])


def test_embedding_table_growth_on_side_stream_keeps_rows():
    """The old memory was allocated on the compute stream, as in a resumed run, and is reused there when it is freed."""
    store = DeviceStore(4, CUDA)
    slots = np.arange(1 << 20)
    rows = torch.arange(4 << 20, dtype=torch.int32, device=CUDA).view(-1, 4)
    store.reserve(len(slots))
    store.scatter(slots, rows)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # delays the copy of `reserve`
        store.reserve(2 * len(slots))
    taken = [torch.full_like(rows, -1) for _ in range(4)]
    torch.cuda.synchronize()
    found = torch.empty_like(rows)
    store.gather(slots, found)
    assert torch.equal(found, rows)
    assert len(taken) == 4
