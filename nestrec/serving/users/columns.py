"""Many users one after the other, in the ids of a model, and each of them as a request would have told it.

Legend: U users, E events of all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.api.answers import Done
from nestrec.serving.api.notes import Notes
from nestrec.serving.api.reading import Reader
from nestrec.serving.api.requests import HistoryFields, ItemId
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.model.inputs import History
from nestrec.serving.model.servable import Servable

Ints = NDArray[np.int64]
NO_LIMITS = LimitsConfig(max_history=1 << 40, max_id_characters=1 << 20, max_text_characters=1 << 30)


class _Unsaid(Notes):
    """Of very many users: nobody is told what of theirs is unknown or a default."""

    def add_unknown(self, field: str, ids: Iterable[ItemId], done: Done) -> None: ...

    def add_default(self, field: str, value: Any) -> None: ...


def reader_of(servable: Servable) -> Reader:
    """Reads what is told of users as a server does."""
    return Reader(servable, NO_LIMITS, _Unsaid())


@dataclass(frozen=True, slots=True)
class ReadUser:
    """What is asked of a model about a user."""

    key: str
    history: History
    """what the model reads: where it knows no event of the user, the events that its export names for such users"""
    seen: Ints
    """items that the user really has"""
    now_ms: int


@dataclass(frozen=True, kw_only=True)
class UserColumns:
    """Users with their events, as far as the model knows these."""

    servable: Servable
    keys: Sequence[str]
    items: Ints
    """(E,) known ones"""
    bounds: Ints
    """(U + 1,) where the events of each user begin, and where the last ones end"""
    times_ms: Ints
    """(E,) zeros where the model does not look at them"""
    actions: Ints
    """(E,) action bits, likewise"""
    now_ms: Ints
    """(U,) when each is asked for"""
    of_events: Mapping[str, Ints]
    """(E,) by `ColumnSpec.fields` of features of events"""
    of_users: Mapping[str, Ints]
    """(U,) likewise of users"""
    asked: Mapping[str, Ints]
    """(U,) of what histories read of the event that is asked for"""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> Ints:
        """(U,) events of each"""
        return np.diff(self.bounds)

    def users(self, first: int, end: int) -> list[ReadUser]:
        """Those from `first` on, before `end`."""
        return [self._user(place) for place in range(first, end)]

    def _user(self, place: int) -> ReadUser:
        now_ms, of_user = int(self.now_ms[place]), {name: values[place] for name, values in self.of_users.items()}
        own = self._own(slice(self.bounds[place], self.bounds[place + 1]))
        history = own if len(own) else self._of_nobody(now_ms)
        of_events = {name: np.broadcast_to(value, len(history)) for name, value in of_user.items()}
        asked = {name: int(values[place]) for name, values in self.asked.items()}
        asked |= {name: int(value) for name, value in of_user.items()}
        history = replace(history, features={**history.features, **of_events}, asked=asked)
        return ReadUser(self.keys[place], history, own.items, now_ms)

    def _own(self, events: slice) -> History:
        features = {name: values[events] for name, values in self.of_events.items()}
        items, times_ms, actions = (column[events] for column in (self.items, self.times_ms, self.actions))
        return History(items=items, times_ms=times_ms, actions=actions, features=features)

    def _of_nobody(self, now_ms: int) -> History:
        default = self.servable.spec.defaults.history or ()
        return self._reader.events(HistoryFields(items=list(default)), now_ms)

    @cached_property
    def _reader(self) -> Reader:
        return reader_of(self.servable)


def known_bounds(bounds: Ints, is_known: NDArray[np.bool_]) -> Ints:
    """Bounds of users once only the known events are left."""
    found: Ints = np.concatenate([[0], np.cumsum(is_known)]).astype(np.int64)[bounds]
    return found


def of_last_events(values: Ints, bounds: Ints) -> Ints:
    """(U,) of each user; 0 of one without events."""
    has_events = np.diff(bounds) > 0
    found = np.zeros(len(bounds) - 1, np.int64)
    found[has_events] = values[bounds[1:][has_events] - 1]
    return found


def spread(values: Mapping[str, Ints], count: int) -> dict[str, Ints]:
    """One value of each field, for so many places."""
    return {name: np.broadcast_to(one[0], count) for name, one in values.items()}


def told_context(reader: Reader, context: Mapping[str, Any], count: int, *, but: Sequence[str] = ()) -> dict[str, Ints]:
    """What an option or the export's default tells of the event that so many users are asked for, by the features that
    histories read of it; but those that are known otherwise. `BadRequestError` where neither tells one."""
    servable, found = reader.servable, dict[str, Ints]()
    for name in (name for name in servable.context_features if name not in but):
        field, column = f"context.{name}", servable.event_features[name]
        given = context[name] if name in context else reader.default(name, servable.spec.defaults.features, field)
        found |= spread(reader.values(given, 1, column, field, is_each=False), count)
    return found
