"""Users of a dataset, as a model reads them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.data.schema import ACTIONS, ITEM_IDS, TIMESTAMPS_MS
from nestrec.serving.model.servable import Servable
from nestrec.serving.users.columns import Ints, UserColumns, known_bounds, of_last_events, reader_of, told_context
from nestrec.serving.users.dataset_features import DatasetFeatures, Values


class DatasetUsers:
    """Users by their place in a dataset. Events of items that the model does not know are left out, as a request's."""

    def __init__(self, dataset: Dataset, servable: Servable, context: Mapping[str, Any] | None):
        """context: of the event that is asked for, by name of a feature; none: as at the user's last event."""
        self._reader, self._servable, self._context = reader_of(servable), servable, context
        keys = dataset.items().column("item_key").to_pylist()
        self._ids = np.concatenate([[0], servable.ids_of(keys)]).astype(np.int64)
        self._features = DatasetFeatures(dataset, self._reader)
        if servable.reads_times and not dataset.card.has_timestamps:
            remedy = "name a dataset of events with times"
            raise UserError(
                "has no times, which the model reads", field="data", value=str(dataset.folder), remedy=remedy
            )
        wanted = (ITEM_IDS, TIMESTAMPS_MS, ACTIONS, *self._features.columns)
        self._dataset = dataset.only(wanted)

    def read(self, places: NDArray[np.int64]) -> UserColumns:
        """The users at these places, asked for at the moments of their last events."""
        rows = self._dataset.rows(places)
        of_items, offsets = rows.lists[ITEM_IDS]
        bounds, items = offsets.astype(np.int64), self._ids[of_items]
        times, actions = (
            rows.lists[name][0].astype(np.int64) if name in rows.lists else np.zeros(len(items), np.int64)
            for name in (TIMESTAMPS_MS, ACTIONS)
        )
        is_known, of_events = items > 0, self._features.of_events(rows, len(items))
        return UserColumns(
            servable=self._servable,
            keys=self._dataset.user_keys(places),
            items=items[is_known],
            bounds=known_bounds(bounds, is_known),
            times_ms=times[is_known] * self._servable.reads_times,
            actions=actions[is_known] * self._servable.reads_actions,
            now_ms=of_last_events(times, bounds),
            of_events={name: values[is_known] for name, values in of_events.items()},
            of_users=self._features.of_users(rows),
            asked=self._asked(of_events, bounds),
        )

    def _asked(self, of_events: Values, bounds: Ints) -> Values:
        if self._context is not None:
            return told_context(self._reader, self._context, len(bounds) - 1)
        columns = [self._servable.event_features[name] for name in self._servable.context_features]
        return {field: of_last_events(of_events[field], bounds) for column in columns for field in column.fields}
