"""faiss beside the exact search: what it keeps, finds and refuses."""

import numpy as np
import pytest
import torch

from nestrec.base.errors import CorruptFileError
from nestrec.serving.model.faiss_search import FaissSearch, built, measured_recall
from nestrec.serving.model.item_search import ExactSearch, Excluded, SearchConfig
from nestrec.serving.model.served_tables import DeviceTable

pytest.importorskip("faiss", reason="the extra `faiss` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KINDS = ["faiss_hnsw", "faiss_ivf"]


def made(kind: str) -> tuple[SearchConfig, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    rows, queries = (torch.nn.functional.normalize(torch.randn(n, 8)) for n in (1500, 12))
    return SearchConfig(kind=kind, links=16, build_width=40, width=200, lists=20, probes=10), rows, queries


@pytest.mark.parametrize("kind", KINDS)
def test_most_of_the_best_are_found_in_their_exact_order_and_none_that_is_excluded(kind):
    cfg, rows, queries = made(kind)
    search = FaissSearch(rows, cfg, built(rows, cfg))
    recall = measured_recall(search, rows, queries, "made-up queries")
    assert (recall.kind, recall.k, recall.queries) == (kind, 100, 12)
    assert recall.recall > 0.9
    exact = ExactSearch(DeviceTable(rows))
    best = exact.best(queries, 5, Excluded.of([]))[0]
    excluded = Excluded.of([row + 1 for row in best])
    found, scores = search.best(queries, 20, excluded)
    assert all(not set(a) & set(b) for a, b in zip(found.tolist(), best.tolist(), strict=True))
    assert (np.diff(scores, axis=1) <= 0).all()
    np.testing.assert_array_equal(scores[0], (rows[found[0]].double() @ queries[0].double()).float().numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_who_has_nearly_all_excluded_gets_what_is_left(kind):
    cfg, rows, queries = made(kind)
    excluded = Excluded.of([np.arange(1, 1497), np.zeros(0, np.int64)])
    found, _ = FaissSearch(rows, cfg, built(rows, cfg)).best(queries[:2], 10, excluded)
    assert sorted(found[0].tolist()) == [-1] * 6 + [1496, 1497, 1498, 1499]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("faiss_hnsw", "neighbors", 1500), ("faiss_hnsw", "levels", 60), ("faiss_ivf", "lists", 20)],
)
def test_structures_that_lead_beyond_the_index_are_refused(kind, name, value):
    cfg, rows, _ = made(kind)
    tensors = built(rows, cfg)
    tensors[name][3] = value
    with pytest.raises(CorruptFileError, match="structure of the index"):
        FaissSearch(rows, cfg, tensors)
