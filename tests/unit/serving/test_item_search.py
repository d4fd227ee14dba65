"""The best of the catalogue: for many at once, part by part or over devices, what one look at everything gives."""

import numpy as np
import pytest
import torch

from nestrec.ops.embedding.top_k_search import packed, scores_and_rows, scores_and_rows_reference
from nestrec.serving.engine.graph_runner import write_pairs
from nestrec.serving.model import item_search
from nestrec.serving.model.item_search import ExactSearch, Excluded
from nestrec.serving.model.request_inputs import Candidates, distinct
from nestrec.serving.model.served_tables import DeviceTable, MultiDeviceTable

NUM_ROWS, DIM = 500, 8
NONE = np.zeros(0, np.int64)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(item_search, "_CHUNK_ROWS", 150)


def made(*, is_whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and rows. is_whole: few values, so that ties are everywhere."""
    torch.manual_seed(int(is_whole))
    queries, rows = torch.randn(5, DIM), torch.randn(NUM_ROWS, DIM)
    return (queries.round(), rows.round()) if is_whole else (queries, rows)


def definition(queries: torch.Tensor, rows: torch.Tensor, k: int, excluded: list[np.ndarray]) -> list[np.ndarray]:
    """Rows by (highest score, smallest row) without the excluded items."""
    best = []
    for query, items in zip(queries, excluded, strict=True):
        scores = (rows.double() @ query.double()).float().numpy()
        scores[items[items > 0] - 1] = -np.inf
        order = np.lexsort((np.arange(NUM_ROWS), -scores))
        best.append(order[np.isfinite(scores[order])][:k])
    return best


@pytest.mark.parametrize("chunk_queries", [2, 64])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("k", [1, 40, 450])
def test_all_that_is_asked_at_once_is_the_definition(is_whole, k, chunk_queries, monkeypatch):
    monkeypatch.setattr(item_search, "_CHUNK_QUERIES", chunk_queries)
    queries, rows = made(is_whole=is_whole)
    excluded = [np.arange(1, 1 + 100 * i) for i in range(5)]
    expected = definition(queries, rows, k, excluded)
    parts = [rows[:7], rows[7:200], rows[200:]]
    for table in (DeviceTable(rows), MultiDeviceTable(parts)):
        search = ExactSearch(table)
        found, scores = search.best(queries, k, Excluded.of(excluded))
        for query in range(5):
            there = found[query] >= 0
            assert found[query][there].tolist() == expected[query].tolist()
            assert np.isinf(scores[query][~there]).all()
            wanted = (rows[expected[query]].double() @ queries[query].double()).float().numpy()
            np.testing.assert_array_equal(scores[query][there], wanted)


@pytest.mark.parametrize("ids", [[], [4], [3, 1, 3, 3, 0], [2, 2]])
def test_distinct_ids_are_each_once_and_ascending(ids):
    found = distinct(np.array(ids, np.int64))
    assert (found.tolist(), found.dtype) == (sorted(set(ids)), np.int64)


def test_pairs_of_a_batch_are_those_of_the_search():
    asked = [Candidates(items=NONE, now_ms=0, num_best=1, excluded=np.array(e, np.int64)) for e in ([5, 0], [], [1, 9])]
    found = np.full((2, 6), 7, np.int32)
    write_pairs(asked, found)
    wanted = Excluded.of([one.excluded for one in asked])
    assert found[:, :3].tolist() == [wanted.query_P.tolist(), wanted.row_P.tolist()]
    assert (found[:, 3:] == -1).all()


def test_item_0_is_no_item_and_excludes_nothing():
    excluded = Excluded.of([np.array([0, 3]), np.array([0])])
    assert (excluded.query_P.tolist(), excluded.row_P.tolist()) == ([0], [2])


def test_rows_of_a_divided_index_are_put_and_read_where_they_lie():
    rows = torch.arange(20.0).view(10, 2)
    table = MultiDeviceTable([rows[:3].clone(), rows[3:].clone()])
    ids = torch.tensor([9, 2, 3, 2])
    assert torch.equal(table.rows(ids), rows[ids])
    table.put(torch.tensor([4, 0]), torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]))
    assert table.rows(torch.tensor([0, 4])).tolist() == [[-3.0, -4.0], [-1.0, -2.0]]


def test_keys_on_the_host_are_taken_apart_as_operators_do_it():
    scores = torch.tensor([[1.5, -2.25, 0.0, -torch.inf], [-1e-30, 3e38, 7.0, -1.0]])
    keys = packed(scores, torch.tensor([[3, 0, 2**31 - 2, 9], [1, 2, 3, 4]]))
    for some in (keys, keys[:, :2], keys.T, keys[:0], keys[:, :0]):
        for found, wanted in zip(scores_and_rows(some), scores_and_rows_reference(some), strict=True):
            assert (found.dtype, found.tolist()) == (wanted.dtype, wanted.tolist())
    assert scores_and_rows(keys)[1].tolist()[0] == [3, 0, 2**31 - 2, -1]
