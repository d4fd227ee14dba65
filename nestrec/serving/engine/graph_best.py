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

from nestrec.ops.rows.best import MOST_ROWS, ExcludedPairs
from nestrec.serving.engine.runner import Part, Scored
from nestrec.serving.model.inputs import Candidates
from nestrec.serving.model.item_search import ExactSearch
from nestrec.serving.model.retrieval_form import RetrievalForm, shortened
from nestrec.serving.model.tables import ResidentTable

MOST_BEST, MOST_PAIRS = 128, 8192
"""of a request, and of a batch"""
_NEGATIVE_INFINITY = -0x800000
"""its bits as a whole number"""


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
    scores_CK, rows_CK = scores_and_rows_at_once(keys_CK.numpy())
    results: list[Scored | None] = []
    place = 0
    for part in parts:
        if part.candidates is None:
            results.append(None)
            continue
        results.append(Scored(*shortened(rows_CK[place], scores_CK[place], part.candidates.num_best)))
        place += 1
    return results


def scores_and_rows_at_once(keys_CK: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """`scores_and_rows` on the host, in one call that keeps the interpreter: operators give it up one by one, and wait
    for the front to hand it back as often."""
    bits_CK, rows_CK = np.empty(keys_CK.shape, np.int32), np.empty_like(keys_CK)
    _split(keys_CK, bits_CK, rows_CK)
    return bits_CK.view(np.float32), rows_CK


@njit(cache=True)
def _split(keys: NDArray[np.int64], bits: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
    for c in range(keys.shape[0]):
        for k in range(keys.shape[1]):
            ordered = keys[c, k] >> 32
            found = np.int32(ordered) if ordered >= 0 else np.int32(ordered ^ 0x7FFFFFFF)
            bits[c, k] = found
            rows[c, k] = -1 if found == _NEGATIVE_INFINITY else MOST_ROWS - (keys[c, k] & 0xFFFFFFFF)
