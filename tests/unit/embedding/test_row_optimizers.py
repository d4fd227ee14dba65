import pytest
import torch

from nestrec.embedding import RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.row_optimizer import RowStep
from nestrec.embedding.table_config import layout_of
from nestrec.embedding.table_shard import TableOptimizer
from nestrec.ops.embedding.row_update import mean_of_squares

KINDS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"]


def table_of(kind: str, dtype: str, dim: int = 37, **options: float) -> TableConfig:
    optimizer = RowOptimizerConfig(kind=kind, **options)
    store = StoreConfig(num_threads=2)
    return TableConfig(name="t", dim=dim, dtype=dtype, optimizer=optimizer, store=store)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_row_optimizer_host_loops_equal_torch_bitwise(kind, dtype):
    table = table_of(kind, dtype, eps=1e-6, moment_scale=3.0)
    layout = layout_of(table)
    torch.manual_seed(0)
    rows = [torch.zeros(50, layout.num_words, dtype=torch.int32) for _ in range(2)]
    start = torch.randn(50, table.dim).to(table.weight_dtype)
    for r in rows:
        layout.view(r, "weight").copy_(start)
    for step in range(1, 20):
        grad = torch.randn(50, table.dim, dtype=table.state_dtype)
        TableOptimizer(table, layout).update_on_device(rows[0], grad, RowStep(step, 0.03, table.optimizer))
        TableOptimizer(table, layout).update_on_host(rows[1], grad, RowStep(step, 0.03, table.optimizer))
        assert torch.equal(rows[0], rows[1])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # a warning of torch 2.11
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_row_optimizer_lazy_updates_equal_torch_optim(kind):
    table = table_of(kind, "float64", dim=5)
    layout = layout_of(table)
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(20, 5, dtype=torch.float64))
    rows = torch.zeros(20, layout.num_words, dtype=torch.int32)
    layout.view(rows, "weight").copy_(weight.detach())
    twin = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.05, eps=1e-8),
        "adam": lambda p: torch.optim.SparseAdam(p, 0.05),
    }[kind]([weight])
    for step in range(1, 101):
        used = torch.randperm(20)[:7]
        grad = torch.randn(7, 5, dtype=torch.float64)
        weight.grad = torch.sparse_coo_tensor(used[None], grad, (20, 5), check_invariants=True)
        with torch.sparse.check_sparse_tensor_invariants():
            twin.step()
        part = rows[used]
        TableOptimizer(table, layout).update_on_device(part, grad, RowStep(step, 0.05, table.optimizer))
        rows[used] = part
    torch.testing.assert_close(layout.view(rows, "weight"), weight.detach(), rtol=1e-12, atol=1e-14)


def test_row_optimizer_lazy_adam_keeps_unused_rows():
    table = table_of("adam", "float64", dim=2)
    layout = layout_of(table)
    rows = torch.zeros(1, layout.num_words, dtype=torch.int32)
    dense = torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.float64))
    adam = torch.optim.Adam([dense], 0.1)
    dense.grad = torch.ones_like(dense)
    adam.step()
    TableOptimizer(table, layout).update_on_device(
        rows, torch.ones(1, 2, dtype=torch.float64), RowStep(1, 0.1, table.optimizer)
    )
    torch.testing.assert_close(layout.view(rows, "weight"), dense.detach())
    dense.grad = torch.zeros_like(dense)
    adam.step()
    assert (layout.view(rows, "weight") - dense.detach()).abs().min() > 0.05


def test_row_optimizer_moment_scale_divides_second_moment():
    table = table_of("rowwise_adagrad", "float64", dim=4, moment_scale=4.0)
    layout = layout_of(table)
    rows = torch.zeros(1, layout.num_words, dtype=torch.int32)
    TableOptimizer(table, layout).update_on_device(
        rows, torch.full((1, 4), 3.0, dtype=torch.float64), RowStep(1, 0.5, table.optimizer)
    )
    assert layout.view(rows, "state_sum").item() == 9.0
    assert layout.view(rows, "weight")[0, 0].item() == pytest.approx(-0.5 * 3 / (1.5 + 1e-8), rel=1e-15)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_row_optimizer_16_bit_weights_are_rounded_float32(kind, dtype):
    half, full = table_of(kind, dtype, dim=7), table_of(kind, "float32", dim=7)
    torch.manual_seed(2)
    weight, grad = torch.randn(9, 7).to(half.weight_dtype), torch.randn(9, 7)
    results = []
    for table in (half, full):
        layout = layout_of(table)
        rows = torch.zeros(9, layout.num_words, dtype=torch.int32)
        layout.view(rows, "weight").copy_(weight)
        TableOptimizer(table, layout).update_on_device(rows, grad, RowStep(1, 0.1, table.optimizer))
        results.append(layout.columns_of(rows))
    assert torch.equal(results[0]["weight"], results[1]["weight"].to(half.weight_dtype))
    for name in set(results[0]) - {"weight"}:
        assert results[0][name].dtype == torch.float32
        assert torch.equal(results[0][name], results[1][name])


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 64, 100, 129])
def test_row_optimizer_mean_of_squares_equals_mean(dim):
    grad = torch.randn(11, dim, dtype=torch.float64)
    torch.testing.assert_close(mean_of_squares(grad), (grad**2).mean(1, keepdim=True), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 3, 128])
def test_row_layout_rows_and_columns_are_inverses(kind, dtype, dim):
    table = table_of(kind, dtype, dim=dim)
    layout = layout_of(table)
    assert layout.row_bytes % 16 == 0
    columns = {c.name: torch.randn(6, c.width).to(c.dtype) for c in layout.columns}
    back = layout.columns_of(layout.rows_of(columns))
    assert all(torch.equal(back[name], values) for name, values in columns.items())
