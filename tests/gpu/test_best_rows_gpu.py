"""The fused search against its definition. Under TRITON_INTERPRET=1 the same tests run on a CPU."""

import numpy as np
import pytest
import torch

from nestrec.ops.embedding.top_k_search import (
    ExcludedPairs,
    IndexRows,
    best_keys,
    best_keys_reference,
    merged_keys,
    scores_and_rows,
)
from nestrec.ops.kernel_op import IS_INTERPRETED

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16


def whole_numbers(*shape: int) -> torch.Tensor:
    """Few values, so that sums are exact in every order and ties are everywhere."""
    return torch.randint(-3, 4, shape, device=DEVICE).float()


def pairs(num_queries: int, num_rows: int, count: int, first: int = 0) -> ExcludedPairs:
    """Some of them are of no row."""
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
def test_the_best_are_those_of_the_definition_with_ties_and_exclusions(shape, k, dtype, excluded):
    queries, rows, dim = shape
    torch.manual_seed(rows)
    scale = torch.randint(1, 3, (rows,), device=DEVICE).float() if dtype == torch.int8 else None
    index = IndexRows(rows_ND=whole_numbers(rows, dim).to(dtype), scale_N=scale)
    asked = whole_numbers(queries, dim)
    hidden = pairs(queries, rows, excluded) if excluded else None
    found = best_keys(asked, index, k, hidden)
    assert torch.equal(found, best_keys_reference(asked, index, k, hidden))
    scores, numbers = scores_and_rows(found)
    assert torch.equal(numbers < 0, scores == -torch.inf)


def test_parts_of_an_index_give_what_the_whole_gives():
    torch.manual_seed(0)
    rows = whole_numbers(400, 16)
    asked = whole_numbers(3, 16)
    hidden = pairs(3, 400, 30)
    parts = [
        best_keys(asked, IndexRows(rows_ND=rows[first:end], first=first), 30, hidden)
        for first, end in ((0, 100), (100, 101), (101, 400))
    ]
    whole = best_keys(asked, IndexRows(rows_ND=rows), 30, hidden)
    assert torch.equal(merged_keys(parts, 30), whole)


def test_queries_of_several_launches_keep_their_own_exclusions(monkeypatch):
    torch.manual_seed(1)
    rows = whole_numbers(200, 16)
    asked = whole_numbers(3, 16)
    hidden = pairs(3, 200, 60)
    monkeypatch.setattr("nestrec.ops.embedding.top_k_search._MOST_KEYS", 2 * 2 * 128)
    index = IndexRows(rows_ND=rows)
    assert torch.equal(best_keys(asked, index, 9, hidden), best_keys_reference(asked, index, 9, hidden))


def test_what_is_not_a_number_is_never_chosen():
    rows = whole_numbers(200, 16)
    rows[7] = torch.nan
    _, numbers = scores_and_rows(best_keys(whole_numbers(2, 16), IndexRows(rows_ND=rows), 200))
    assert (numbers != 7).all()
    assert (numbers[:, -1] == -1).all()


@pytest.mark.skipif(IS_INTERPRETED, reason="large, and captured by a graph: on a GPU alone")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_real_numbers_and_graphs(dtype):
    torch.manual_seed(2)
    num_rows, k = 300_001, 100
    scale = torch.rand(num_rows, device="cuda") + 0.5 if dtype.itemsize == 1 else None
    index = IndexRows(rows_ND=torch.randn(num_rows, 128, device="cuda").to(dtype), scale_N=scale)
    asked = torch.randn(16, 128, device="cuda").to(index.query_dtype)
    hidden = pairs(16, num_rows, 4096)
    found = best_keys(asked, index, k, hidden)
    scores, numbers = scores_and_rows(found)
    expected, _ = scores_and_rows(best_keys_reference(asked, index, k, hidden))
    torch.testing.assert_close(scores, expected, rtol=2e-6, atol=2e-5)
    assert all(len(set(row)) == k for row in numbers.tolist())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = best_keys(asked, index, k, hidden)
    for _ in range(2):
        graph.replay()
        assert torch.equal(again, found)


@pytest.mark.skipif(IS_INTERPRETED, reason="captured by a graph: on a GPU alone")
def test_captured_searches_are_the_plain_one_batch_after_batch():
    from nestrec.serving.model.item_search import ExactSearch, Excluded, GraphSearch
    from nestrec.serving.model.served_tables import DeviceTable

    torch.manual_seed(3)
    table = DeviceTable(torch.randn(50_000, 64, device="cuda"))
    plain = ExactSearch(table)
    captured = GraphSearch(table)
    rng = np.random.default_rng(3)
    with torch.inference_mode():
        for count, k, seen in ((3, 20, 0), (16, 100, 50), (1, 20, 4), (40, 100, 20), (5, 20, 0), (2, 1000, 900)):
            asked = torch.randn(count, 64, device="cuda")
            excluded = Excluded.of([rng.integers(0, 50_000, seen) for _ in range(count)])
            for found, expected in zip(captured.best(asked, k, excluded), plain.best(asked, k, excluded), strict=True):
                np.testing.assert_array_equal(found, expected)
