"""Histories of a dataset's users, in the ids of a model."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset, Rows
from nestrec.data.schema import ACTIONS, ITEM_IDS, TIMESTAMPS_MS
from nestrec.serving.model.inputs import History
from nestrec.serving.model.servable import Servable


class DatasetUsers:
    """Users by their place in a dataset. Events of items that the model does not know are left out, as a request's."""

    def __init__(self, dataset: Dataset, servable: Servable):
        self._dataset, self._servable = dataset, servable
        keys = dataset.items().column("item_key").to_pylist()
        self._ids = np.concatenate([[0], servable.ids_of(keys)]).astype(np.int64)
        if servable.event_features or servable.user_features:
            names = ", ".join([*servable.event_features, *servable.user_features])
            remedy = "ask a server, whose requests tell them"
            raise UserError(f"the model also reads {names}", field="--users", value="of the dataset", remedy=remedy)

    def histories(self, places: NDArray[np.int64]) -> Iterator[tuple[str, History, int]]:
        """(key, events, moment of the last one) of each user."""
        rows = self._dataset.rows(places)
        for place, key in enumerate(self._dataset.user_keys(places)):
            yield key, *self._history(rows, place)

    def _history(self, rows: Rows, place: int) -> tuple[History, int]:
        items = self._ids[_list(rows, ITEM_IDS, place)]
        times, actions = (
            _list(rows, name, place).astype(np.int64) if name in rows.lists else np.zeros(len(items), np.int64)
            for name in (TIMESTAMPS_MS, ACTIONS)
        )
        now_ms, is_known = int(times.max(initial=0)), items > 0
        times = times if self._servable.reads_times else np.zeros_like(times)
        return History(items=items[is_known], times_ms=times[is_known], actions=actions[is_known]), now_ms


def _list(rows: Rows, name: str, place: int) -> NDArray[np.int64]:
    values, offsets = rows.lists[name]
    found: NDArray[np.int64] = values[offsets[place] : offsets[place + 1]]
    return found
