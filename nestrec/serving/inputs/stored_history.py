"""Events that the server keeps, as the present model can read them.

They were checked when they came, by the model and the limits of that time. Whoever asks now cannot change them, so what
does not fit any more is cut and never refused.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.history_store.history_codec import newest
from nestrec.serving.history_store.history_store import RawHistory
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.model.servable import Servable


def fitted(kept: RawHistory, servable: Servable, limits: LimitsConfig) -> dict[str, Any]:
    """The newest events that a request may hold, with the actions that the model knows and the features that it reads.
    A feature that was not told is one that nobody knows; where actions were not told and the model names no default,
    none was. Whether it can read the values is found out as it reads them: see `readable`."""
    kept, bits = newest(kept, limits.max_history), servable.spec.action_bits
    unknown = [None] * len(kept["items"])
    features = {name: kept["features"].get(name) for name in servable.event_features}
    missing = None if servable.spec.defaults.actions is not None else 0
    return {
        "items": kept["items"],
        "times_ms": kept["times_ms"],
        "actions": _known(kept["actions"], bits, missing) if servable.reads_actions else None,
        "features": {name: unknown if values is None else values for name, values in features.items()},
    }


def readable(history: Mapping[str, Any], servable: Servable, limits: LimitsConfig) -> dict[str, Any]:
    """The same without what the model or a lower limit has turned out not to allow: values of features, which then
    nobody knows, and events of items whose ids are too long."""
    keeps = [not isinstance(item, str) or len(item) <= limits.max_id_characters for item in history["items"]]
    reader = RequestResolver(servable, limits, RequestNotes())
    columns = servable.event_features
    plain = {name: values and [*compress(values, keeps)] for name, values in history.items() if name != "features"}
    features = {
        name: reader.readable([*compress(values, keeps)], columns[name]) for name, values in history["features"].items()
    }
    return {**plain, "features": features}


def _known(actions: Sequence[Any], bits: Mapping[str, int], missing: int | None) -> list[Any]:
    """Without the actions that a model does not know."""
    every = sum(bits.values())

    def known(action: Any) -> Any:
        match action:
            case int():
                return action & every
            case str():
                return action if action in bits else 0
            case list():
                return [name for name in action if name in bits]
            case _:
                return missing

    return [known(action) for action in actions]
