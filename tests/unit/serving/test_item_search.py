"""Batched top-k search of the catalog, in chunks and over several devices, equals a full scan."""

import numpy as np
import pytest
import torch

from nestrec.ops.embedding.top_k_search import pack_score_keys, scores_and_rows, scores_and_rows_reference
from nestrec.serving.engine.graph_runner import write_pairs
from nestrec.serving.model import item_search
from nestrec.serving.model.item_search import ExactSearch, ExcludedRows
from nestrec.serving.model.request_inputs import Candidates, sorted_unique
from nestrec.serving.model.served_tables import DeviceTable, MultiDeviceTable

NUM_ROWS, DIM = 500, 8
NONE = np.zeros(0, np.int64)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(item_search, "_CHUNK_ROWS", 150)


def random_case(*, has_ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and rows; with `has_ties`, values are integers, so that ties are frequent."""
    torch.manual_seed(int(has_ties))
    queries, rows = torch.randn(5, DIM), torch.randn(NUM_ROWS, DIM)
    return (queries.round(), rows.round()) if has_ties else (queries, rows)


def reference_search(queries: torch.Tensor, rows: torch.Tensor, k: int, excluded: list[np.ndarray]) -> list[np.ndarray]:
    """Return the rows in the order (highest score, smallest row), without excluded items."""
    best = []
    for query, items in zip(queries, excluded, strict=True):
        scores = (rows.double() @ query.double()).float().numpy()
        scores[items[items > 0] - 1] = -np.inf
        order = np.lexsort((np.arange(NUM_ROWS), -scores))
        best.append(order[np.isfinite(scores[order])][:k])
    return best


@pytest.mark.parametrize("chunk_queries", [2, 64])
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("k", [1, 40, 450])
def test_item_search_equals_reference(has_ties, k, chunk_queries, monkeypatch):
    monkeypatch.setattr(item_search, "_CHUNK_QUERIES", chunk_queries)
    queries, rows = random_case(has_ties=has_ties)
    excluded = [np.arange(1, 1 + 100 * i) for i in range(5)]
    expected = reference_search(queries, rows, k, excluded)
    parts = [rows[:7], rows[7:200], rows[200:]]
    for table in (DeviceTable(rows), MultiDeviceTable(parts)):
        search = ExactSearch(table)
        found, scores = search.best(queries, k, ExcludedRows.of(excluded))
        for query in range(5):
            is_valid = found[query] >= 0
            assert found[query][is_valid].tolist() == expected[query].tolist()
            assert np.isinf(scores[query][~is_valid]).all()
            expected_scores = (rows[expected[query]].double() @ queries[query].double()).float().numpy()
            np.testing.assert_array_equal(scores[query][is_valid], expected_scores)


@pytest.mark.parametrize("ids", [[], [4], [3, 1, 3, 3, 0], [2, 2]])
def test_sorted_unique_ids_are_ascending(ids):
    found = sorted_unique(np.array(ids, np.int64))
    assert (found.tolist(), found.dtype) == (sorted(set(ids)), np.int64)


def test_item_search_batch_pairs_equal_excluded_rows():
    requests = [
        Candidates(items=NONE, now_ms=0, num_best=1, excluded=np.array(e, np.int64)) for e in ([5, 0], [], [1, 9])
    ]
    found = np.full((2, 6), 7, np.int32)
    write_pairs(requests, found)
    expected_scores = ExcludedRows.of([one.excluded for one in requests])
    assert found[:, :3].tolist() == [expected_scores.query_P.tolist(), expected_scores.row_P.tolist()]
    assert (found[:, 3:] == -1).all()


def test_item_search_ignores_exclusion_of_item_zero():
    excluded = ExcludedRows.of([np.array([0, 3]), np.array([0])])
    assert (excluded.query_P.tolist(), excluded.row_P.tolist()) == ([0], [2])


def test_multi_device_table_writes_and_reads_rows():
    rows = torch.arange(20.0).view(10, 2)
    table = MultiDeviceTable([rows[:3].clone(), rows[3:].clone()])
    ids = torch.tensor([9, 2, 3, 2])
    assert torch.equal(table.rows(ids), rows[ids])
    table.put(torch.tensor([4, 0]), torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]))
    assert table.rows(torch.tensor([0, 4])).tolist() == [[-3.0, -4.0], [-1.0, -2.0]]


def test_search_keys_on_host_equal_operators():
    scores = torch.tensor([[1.5, -2.25, 0.0, -torch.inf], [-1e-30, 3e38, 7.0, -1.0]])
    keys = pack_score_keys(scores, torch.tensor([[3, 0, 2**31 - 2, 9], [1, 2, 3, 4]]))
    for some in (keys, keys[:, :2], keys.T, keys[:0], keys[:, :0]):
        for found, expected_scores in zip(scores_and_rows(some), scores_and_rows_reference(some), strict=True):
            assert (found.dtype, found.tolist()) == (expected_scores.dtype, expected_scores.tolist())
    assert scores_and_rows(keys)[1].tolist()[0] == [3, 0, 2**31 - 2, -1]
