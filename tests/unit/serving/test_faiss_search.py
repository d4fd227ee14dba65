"""faiss search: recall, exclusions and rejected structures, compared with exact search."""

import numpy as np
import pytest
import torch

from nestrec.base.errors import CorruptFileError
from nestrec.serving.model.faiss_search import FaissSearch, build_index, measure_recall
from nestrec.serving.model.item_search import ExactSearch, ExcludedRows, SearchConfig
from nestrec.serving.model.served_tables import DeviceTable

pytest.importorskip("faiss", reason="the extra `faiss` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KINDS = ["faiss_hnsw", "faiss_ivf"]


def make_case(kind: str) -> tuple[SearchConfig, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    rows, queries = (torch.nn.functional.normalize(torch.randn(n, 8)) for n in (1500, 12))
    return (
        SearchConfig(kind=kind, hnsw_m=16, hnsw_ef_construction=40, hnsw_ef_search=200, ivf_nlist=20, ivf_nprobe=10),
        rows,
        queries,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_faiss_search_recall_order_and_exclusions(kind):
    cfg, rows, queries = make_case(kind)
    search = FaissSearch(rows, cfg, build_index(rows, cfg))
    recall = measure_recall(search, rows, queries, "random queries")
    assert (recall.kind, recall.k, recall.queries) == (kind, 100, 12)
    assert recall.recall > 0.9
    exact = ExactSearch(DeviceTable(rows))
    best = exact.best(queries, 5, ExcludedRows.of([]))[0]
    excluded = ExcludedRows.of([row + 1 for row in best])
    found, scores = search.best(queries, 20, excluded)
    assert all(not set(a) & set(b) for a, b in zip(found.tolist(), best.tolist(), strict=True))
    assert (np.diff(scores, axis=1) <= 0).all()
    np.testing.assert_array_equal(scores[0], (rows[found[0]].double() @ queries[0].double()).float().numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_faiss_search_with_nearly_all_items_excluded(kind):
    cfg, rows, queries = make_case(kind)
    excluded = ExcludedRows.of([np.arange(1, 1497), np.zeros(0, np.int64)])
    found, _ = FaissSearch(rows, cfg, build_index(rows, cfg)).best(queries[:2], 10, excluded)
    assert sorted(found[0].tolist()) == [-1] * 6 + [1496, 1497, 1498, 1499]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("faiss_hnsw", "neighbors", 1500), ("faiss_hnsw", "levels", 60), ("faiss_ivf", "lists", 20)],
)
def test_faiss_search_rejects_structure_outside_of_index(kind, name, value):
    cfg, rows, _ = make_case(kind)
    tensors = build_index(rows, cfg)
    tensors[name][3] = value
    with pytest.raises(CorruptFileError, match="search structure of this index"):
        FaissSearch(rows, cfg, tensors)
