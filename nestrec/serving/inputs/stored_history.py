"""Conversion of stored histories into the `history` field of a request to the current model.

Events were validated when they were stored, by the model and the limits of that time. The client of the current request
cannot change them, so values that are no longer valid are dropped instead of rejecting the request.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.history_store.history_codec import newest_events
from nestrec.serving.history_store.history_store import RawHistory
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.model.servable import Servable


def fit_to_model(stored: RawHistory, servable: Servable, limits: LimitsConfig) -> dict[str, Any]:
    """Return the newest stored events within the limits, with the actions and features that the model reads.

    Features that were not stored are null. Actions that were not stored are null if the model has a default for them,
    and no action otherwise. Values are not validated here; see `drop_unreadable`.
    """
    stored, bits = newest_events(stored, limits.max_history_events), servable.spec.action_bits
    nulls = [None] * len(stored["items"])
    features = {name: stored["features"].get(name) for name in servable.event_features}
    missing = None if servable.spec.defaults.actions is not None else 0
    return {
        "items": stored["items"],
        "times_ms": stored["times_ms"],
        "actions": _known_actions(stored["actions"], bits, missing) if servable.reads_actions else None,
        "features": {name: nulls if values is None else values for name, values in features.items()},
    }


def drop_unreadable(history: Mapping[str, Any], servable: Servable, limits: LimitsConfig) -> dict[str, Any]:
    """Drop what the model cannot read or a reduced limit does not allow from a stored history.

    Unreadable feature values become null; events with too long item ids are dropped.
    """
    is_retained = [not isinstance(item, str) or len(item) <= limits.max_item_id_length for item in history["items"]]
    resolver = RequestResolver(servable, limits, RequestNotes())
    columns = servable.event_features
    plain = {
        name: values and [*compress(values, is_retained)] for name, values in history.items() if name != "features"
    }
    features = {
        name: resolver.replace_unreadable([*compress(values, is_retained)], columns[name])
        for name, values in history["features"].items()
    }
    return {**plain, "features": features}


def _known_actions(actions: Sequence[Any], bits: Mapping[str, int], missing: int | None) -> list[Any]:
    """Remove actions that the model does not know."""
    all_bits = sum(bits.values())

    def known(action: Any) -> Any:
        match action:
            case int():
                return action & all_bits
            case str():
                return action if action in bits else 0
            case list():
                return [name for name in action if name in bits]
            case _:
                return missing

    return [known(action) for action in actions]
