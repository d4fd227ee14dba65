"""The exact search of a GPU as captured graphs: one copy there, one launch, one copy back.

Batches are padded to one of a few numbers of queries, of best rows and of excluded pairs; for each triple everything
from queries to ordered keys is captured when it is first asked for. What is larger is launched kernel by kernel.

Legend: B queries, D elements, K best, P excluded pairs.
"""

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.capturing import capturing
from nestrec.ops.rows.best import ExcludedPairs, scores_and_rows
from nestrec.serving.model.item_search import ExactSearch, Excluded
from nestrec.serving.model.tables import ResidentTable

_QUERIES = (16, 64)
_BEST = (32, 128, 512, 1024)
_PAIRS = (0, 4096, 65536)


class GraphSearch:
    """An index that lies whole on a GPU. Threads take turns."""

    def __init__(self, table: ResidentTable):
        self._table, self._plain = table, ExactSearch(table)
        self._graphs: dict[tuple[int, int, int], _Captured] = {}
        self._num_rows = table.num_rows
        self._memory, self._lock = torch.cuda.graph_pool_handle(), threading.Lock()

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: Excluded
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        needed = ((len(queries_BD), _QUERIES), (k, _BEST), (len(excluded.row_P), _PAIRS))
        sizes = [next((size for size in known if size >= count), -1) for count, known in needed]
        if min(sizes) < 0:
            return self._plain.best(queries_BD, k, excluded)
        size = (sizes[0], sizes[1], sizes[2])
        with self._lock:
            if self._num_rows != self._table.num_rows:  # a model that follows a run has learnt of new items
                self._graphs, self._num_rows = {}, self._table.num_rows
            if size not in self._graphs:
                self._graphs[size] = _Captured(self._table, queries_BD.dtype, size, self._memory)
            scores_BK, rows_BK = scores_and_rows(self._graphs[size].run(queries_BD, excluded)[:, :k])
        return rows_BK.numpy(), scores_BK.numpy()


class _Captured:
    def __init__(self, table: ResidentTable, dtype: torch.dtype, size: tuple[int, int, int], memory: Any):
        """size: queries, best rows, excluded pairs"""
        num_queries, self._k, num_pairs = size
        device = table.weight.device
        self._search, self._graph = ExactSearch(table), torch.cuda.CUDAGraph()
        self._queries_BD = torch.zeros(num_queries, table.weight.shape[1], dtype=dtype, device=device)
        self._pairs_2P = torch.full((2, num_pairs), -1, device=device)
        self._sent_2P = torch.full((2, num_pairs), -1).pin_memory()
        self._forward()  # compiles and loads what a capture may not
        torch.cuda.synchronize()
        with capturing(self._graph, memory):
            self._keys_BK = self._forward()
        self._host_BK = torch.empty(self._keys_BK.shape, dtype=torch.int64).pin_memory()

    def run(self, queries_BD: torch.Tensor, excluded: Excluded) -> torch.Tensor:
        """(B, K) keys on the host; valid until the next batch."""
        self._queries_BD[: len(queries_BD)] = queries_BD
        if self._sent_2P.numel():
            self._sent_2P[:, len(excluded.row_P) :] = -1  # rows that there are none of
            self._sent_2P[0, : len(excluded.row_P)] = torch.from_numpy(excluded.query_P)
            self._sent_2P[1, : len(excluded.row_P)] = torch.from_numpy(excluded.row_P)
            self._pairs_2P.copy_(self._sent_2P, non_blocking=True)
        self._graph.replay()
        self._host_BK.copy_(self._keys_BK, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._host_BK[: len(queries_BD)]

    def _forward(self) -> torch.Tensor:
        pairs = ExcludedPairs.of(*self._pairs_2P) if self._pairs_2P.numel() else None
        return self._search.best_keys(self._queries_BD, self._k, pairs)
