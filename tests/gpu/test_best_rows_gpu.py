"""The fused top-k search equals its reference. Under TRITON_INTERPRET=1 the same tests run on a CPU."""

import numpy as np
import pytest
import torch

from nestrec.ops.embedding.top_k_search import (
    ExcludedPairs,
    IndexRows,
    merge_keys,
    scores_and_rows,
    top_k_keys,
    top_k_keys_reference,
)
from nestrec.ops.kernel_op import IS_INTERPRETED

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16


def small_integers(*shape: int) -> torch.Tensor:
    """Return integers from -3 to 3 as floats, so that sums are exact in every order and ties are frequent."""
    return torch.randint(-3, 4, shape, device=DEVICE).float()


def random_pairs(num_queries: int, num_rows: int, count: int, first: int = 0) -> ExcludedPairs:
    """Return random exclusions; some of them refer to rows that do not exist."""
    rows = torch.randint(-1, num_rows + 2, (count,), device=DEVICE) + first
    return ExcludedPairs.of(torch.randint(0, num_queries, (count,), device=DEVICE), rows)


@pytest.mark.parametrize(
    ("shape", "k", "dtype", "excluded"),
    [
        ((1, 1, 5), 3, torch.float32, 0),
        ((3, 600, 16), 10, torch.float32, 30),
        ((17, 140, 37), 40, HALF, 40),
        ((2, 260, 200), 8, HALF, 0),
        ((2, 40, 8), 40, torch.float32, 40),
        ((3, 200, 24), 20, torch.int8, 20),
    ],
)
def test_top_k_equals_reference_with_ties_and_exclusions(shape, k, dtype, excluded):
    queries, rows, dim = shape
    torch.manual_seed(rows)
    scale = torch.randint(1, 3, (rows,), device=DEVICE).float() if dtype == torch.int8 else None
    index = IndexRows(rows_ND=small_integers(rows, dim).to(dtype), scale_N=scale)
    query = small_integers(queries, dim)
    hidden = random_pairs(queries, rows, excluded) if excluded else None
    found = top_k_keys(query, index, k, hidden)
    assert torch.equal(found, top_k_keys_reference(query, index, k, hidden))
    scores, numbers = scores_and_rows(found)
    assert torch.equal(numbers < 0, scores == -torch.inf)


def test_top_k_merged_parts_equal_full_index():
    torch.manual_seed(0)
    rows = small_integers(400, 16)
    query = small_integers(3, 16)
    hidden = random_pairs(3, 400, 30)
    parts = [
        top_k_keys(query, IndexRows(rows_ND=rows[first:end], first=first), 30, hidden)
        for first, end in ((0, 100), (100, 101), (101, 400))
    ]
    full = top_k_keys(query, IndexRows(rows_ND=rows), 30, hidden)
    assert torch.equal(merge_keys(parts, 30), full)


def test_top_k_several_launches_exclude_per_query(monkeypatch):
    torch.manual_seed(1)
    rows = small_integers(200, 16)
    query = small_integers(3, 16)
    hidden = random_pairs(3, 200, 60)
    monkeypatch.setattr("nestrec.ops.embedding.top_k_search._MAX_KEYS", 2 * 2 * 128)
    index = IndexRows(rows_ND=rows)
    assert torch.equal(top_k_keys(query, index, 9, hidden), top_k_keys_reference(query, index, 9, hidden))


def test_top_k_never_selects_nan():
    rows = small_integers(200, 16)
    rows[7] = torch.nan
    _, numbers = scores_and_rows(top_k_keys(small_integers(2, 16), IndexRows(rows_ND=rows), 200))
    assert (numbers != 7).all()
    assert (numbers[:, -1] == -1).all()


@pytest.mark.skipif(IS_INTERPRETED, reason="large, and uses a CUDA graph")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_top_k_cuda_graph_equals_reference(dtype):
    torch.manual_seed(2)
    num_rows, k = 300_001, 100
    scale = torch.rand(num_rows, device="cuda") + 0.5 if dtype.itemsize == 1 else None
    index = IndexRows(rows_ND=torch.randn(num_rows, 128, device="cuda").to(dtype), scale_N=scale)
    query = torch.randn(16, 128, device="cuda").to(index.query_dtype)
    hidden = random_pairs(16, num_rows, 4096)
    found = top_k_keys(query, index, k, hidden)
    scores, numbers = scores_and_rows(found)
    expected, _ = scores_and_rows(top_k_keys_reference(query, index, k, hidden))
    torch.testing.assert_close(scores, expected, rtol=2e-6, atol=2e-5)
    assert all(len(set(row)) == k for row in numbers.tolist())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = top_k_keys(query, index, k, hidden)
    for _ in range(2):
        graph.replay()
        assert torch.equal(again, found)


@pytest.mark.skipif(IS_INTERPRETED, reason="uses a CUDA graph")
def test_item_search_cuda_graph_equals_exact_search():
    from nestrec.serving.model.item_search import ExactSearch, ExcludedRows, GraphSearch
    from nestrec.serving.model.served_tables import DeviceTable

    torch.manual_seed(3)
    table = DeviceTable(torch.randn(50_000, 64, device="cuda"))
    plain = ExactSearch(table)
    captured = GraphSearch(table)
    rng = np.random.default_rng(3)
    with torch.inference_mode():
        for count, k, seen in ((3, 20, 0), (16, 100, 50), (1, 20, 4), (40, 100, 20), (5, 20, 0), (2, 1000, 900)):
            query = torch.randn(count, 64, device="cuda")
            excluded = ExcludedRows.of([rng.integers(0, 50_000, seen) for _ in range(count)])
            for found, expected in zip(captured.best(query, k, excluded), plain.best(query, k, excluded), strict=True):
                np.testing.assert_array_equal(found, expected)
