"""The search of an index as the end of a captured batch: one graph from ids to the items that were found.

It takes batches whose requests all ask for the best of the catalogue, for few enough and with few enough exclusions;
of any other batch the states are captured, and the search comes after them.

Legend: C rows that are asked for, D model width, K best, P excluded pairs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.rows.best import ExcludedPairs, scores_and_rows
from nestrec.serving.engine.runner import Part, Scored
from nestrec.serving.model.inputs import Candidates
from nestrec.serving.model.item_search import ExactSearch
from nestrec.serving.model.retrieval_form import RetrievalForm, shortened
from nestrec.serving.model.tables import ResidentTable

MOST_BEST, MOST_PAIRS = 128, 8192
"""of a request, and of a batch"""


class GraphBest:
    """Of an index that lies whole on the device of its model."""

    def __init__(self, form: RetrievalForm):
        assert isinstance(form.servable.index, ResidentTable)
        self._form, self._table = form, form.servable.index
        self._num_rows, self._search = self._table.num_rows, ExactSearch(self._table)

    @property
    def num_best(self) -> int:
        """K"""
        return min(MOST_BEST, self._num_rows)

    @property
    def is_current(self) -> bool:
        """What was captured searches the index as it is: a model that follows a run learns of new items."""
        return self._form.servable.index is self._table and self._table.num_rows == self._num_rows

    def keys(self, state_CD: torch.Tensor, pairs_2P: torch.Tensor) -> torch.Tensor:
        """(C, K) of rows by exact scores, best first."""
        pairs = ExcludedPairs.of(*pairs_2P.long())
        return self._search.best_keys(self._form.query(state_CD), self.num_best, pairs)


def are_found_inside(parts: Sequence[Part]) -> bool:
    """Whether a batch can end with the search."""
    asked = [part.candidates for part in parts if part.candidates is not None]
    return (
        bool(asked)
        and all(0 < one.num_best <= MOST_BEST and one.allowed is None for one in asked)
        and all(part.tokens.length for part in parts)
        and sum(len(one.excluded) for one in asked) <= MOST_PAIRS
    )


def write_pairs(asked: Sequence[Candidates], pairs_2P: NDArray[np.int32]) -> None:
    """What requests exclude; the rest names rows that there are none of."""
    counts = np.array([len(one.excluded) for one in asked], np.int64)
    _write_pairs(counts, np.concatenate([one.excluded for one in asked]), pairs_2P)


@njit(cache=True)  # in one call that keeps the interpreter
def _write_pairs(counts: NDArray[np.int64], items: NDArray[np.int64], pairs: NDArray[np.int32]) -> None:
    place = count = 0
    for query in range(len(counts)):
        for _ in range(counts[query]):
            if items[place] > 0:  # 0 is no item
                pairs[0, count], pairs[1, count] = query, items[place] - 1
                count += 1
            place += 1
    pairs[:, count:] = -1


def found_of(parts: Sequence[Part], keys_CK: torch.Tensor) -> list[Scored | None]:
    """What requests have found, by keys on the host."""
    scores_CK, rows_CK = (found.numpy() for found in scores_and_rows(keys_CK))
    results: list[Scored | None] = []
    place = 0
    for part in parts:
        if part.candidates is None:
            results.append(None)
            continue
        results.append(Scored(*shortened(rows_CK[place], scores_CK[place], part.candidates.num_best)))
        place += 1
    return results
