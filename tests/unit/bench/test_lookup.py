import torch

from nestrec.ops.embedding.row_update import RowRule
from nestrec_bench.kernels.kernel_timing import PATHS, TorchTable
from nestrec_bench.kernels.lookup_bench import LookupBenchConfig, learn, measure_lookup


def test_lookup_bench_compares_nestrec_with_torch():
    bench = LookupBenchConfig(num_rows=500, dim=8, num_keys=(200,), zipf=(0.0, 1.05), rounds=1, device="cpu")
    rows = list(measure_lookup(bench))
    required = {"op", "store", "keys", "dim", "dtype", "gb_per_s", "copy_gb_per_s"}
    assert all(required <= set(row) for row in rows)
    learned = [row for row in rows if row["op"] == "learn"]
    assert [row["store"] for row in learned[:4]] == ["nestrec", *(f"torch {name}" for name in PATHS)]
    assert max(row["of_best_torch"] for row in learned[1:4]) == 1.0
    assert learned[0]["identical_repeats"] == 20


def test_lookup_bench_torch_variants_train_same_rows():
    torch.manual_seed(0)
    keys = torch.randint(0, 30, (200,))
    grad = torch.randn(200, 8)
    weight = torch.randn(40, 8)
    expected = weight.clone()
    state = torch.zeros(40, 1)
    learn(expected, state, keys, grad, RowRule(kind="rowwise_adagrad", learning_rate=0.01, eps=1e-8))
    for path in PATHS.values():
        table = TorchTable(weight.clone(), torch.zeros(40))
        path(table, keys, grad)
        torch.testing.assert_close(table.weight, expected)
        torch.testing.assert_close(table.state, state[:, 0])
