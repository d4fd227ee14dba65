"""Resolves requests: source ids and features to the ids that the model reads.

What an answer says about how its request was read: ids that a model does not know, and defaults that were taken.

Requests in the ids of a model. One rule for all that a model reads: it is there, or a default that its export names
is taken and the answer says so, or the request is refused.
"""

import itertools
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestrec.data.prepare.list_cells import category_keys
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig, MissingInputError
from nestrec.serving.core.typed_list import TypedList, types_of
from nestrec.serving.inputs.request_schema import (
    Action,
    Category,
    HistoryFields,
    ItemId,
    RankRequest,
    RecommendRequest,
    Unknown,
    UserRequest,
    Value,
)
from nestrec.serving.inputs.responses import AppliedDefault, Done, UnknownIds
from nestrec.serving.model.request_inputs import (
    LARGEST_NUMBER,
    History,
    buckets_of,
    key_of,
    number_bits,
    packed_ids,
    row_of,
    vector_of,
)
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec

_MOST_SHOWN = 10
"""unknown ids in a refusal"""


class ResponseNotes(TypedDict):
    """The notes as fields of an answer."""

    unknown: list[UnknownIds]
    defaults: list[AppliedDefault]


class RequestNotes:
    """Of one request, by all models that read it."""

    def __init__(self, policy: Unknown | None = None):
        self.policy: Unknown = policy or "last"
        self._unknown: dict[tuple[str, Done], dict[ItemId, None]] = {}
        self._defaults: dict[str, Any] = {}

    def add_unknown(self, field: str, ids: Iterable[ItemId], done: Done) -> None:
        """Raises where unknown ids are to be refused."""
        found = self._unknown.setdefault((field, done), {})
        found.update(dict.fromkeys(ids))
        if self.policy == "refuse":
            shown = ", ".join(repr(key)[:64] for key in list(found)[:_MOST_SHOWN])
            more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
            raise BadRequestError(f"the model does not know {shown}{more}", field)

    def add_default(self, field: str, value: Any) -> None:
        self._defaults[field] = value

    def said(self) -> ResponseNotes:
        return {
            "unknown": [
                {"field": field, "ids": list(ids), "done": done} for (field, done), ids in self._unknown.items()
            ],
            "defaults": [{"field": field, "value": value} for field, value in self._defaults.items()],
        }


Ids = NDArray[np.int64]
Features = dict[str, Ids]
_TOO_LARGE = f"must be numbers within {LARGEST_NUMBER:g}, which the model can compute with"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """What is asked of a model about a user."""

    user: str
    history: History
    """what the model reads"""
    seen: Ids
    """items of the events that the user really has: not those of a default"""
    now_ms: int
    timeout_s: float


def _new_user_remedy(servable: Servable) -> str:
    """Returns what a client or an operator can do, with one export command that names every default of the model."""
    others = {**servable.event_default_examples, **servable.spec.defaults.typed()}
    line = "".join(f" --defaults.{name} {shlex.quote(value)}" for name, value in others.items())
    return (
        "send a history with an item that the model knows, or store events with POST /v1/events; "
        f"to answer for new users, export the model with: nestrec export RUN OUT --defaults.history ITEM,ITEM{line}"
    )


def check_feature_names(request: Any, *servables: Servable) -> None:
    """A mistyped name would be a feature that nobody tells. servables: the models that answer."""
    of_event = {name: column for servable in servables for name, column in servable.event_features.items()}
    of_user = {name: column for servable in servables for name, column in servable.user_features.items()}
    of_history = (request.history.features or {}) if request.history is not None else {}
    _check_names(of_history, of_event, "history.features")
    for field in ("candidate_features", "context"):
        _check_names(getattr(request, field, None) or {}, of_event, field)
    _check_names(getattr(request, "user_features", None) or {}, of_user, "user_features")


class RequestResolver:
    """Reads a request as one model does. What the answer has to say about it goes into the notes."""

    def __init__(self, servable: Servable, limits: LimitsConfig, notes: RequestNotes):
        self.servable = servable
        self.notes = notes
        self._limits = limits
        self._defaults = servable.spec.defaults

    def user(self, request: UserRequest) -> ResolvedRequest:
        """User, history and moment of a request."""
        user = parse_user(request.user, self._limits)
        now_ms = request.now_ms
        if now_ms is None:
            now_ms = int(time.time() * 1000)
            if self.servable.reads_times:
                self.notes.add_default("now_ms", now_ms)
        timeout_ms = self._limits.default_timeout_ms if request.timeout_ms is None else request.timeout_ms
        given = (request.history if self.servable.reads_items else None) or HistoryFields()
        history = self._known_events(given, now_ms)
        seen = history.items
        if not len(history) and self.servable.reads_items:
            history = self._default_events(given.items, now_ms=now_ms)
        of_user = self._user_values(request.user_features, len(history) + 1)
        if of_user:
            of_events = {name: values[:-1] for name, values in of_user.items()}
            history = replace(history, features={**history.features, **of_events})
        asked = self._asked_for(request) | {name: int(values[-1]) for name, values in of_user.items()}
        if asked:
            history = replace(history, asked=asked)
        return ResolvedRequest(user=user, history=history, seen=seen, now_ms=now_ms, timeout_s=timeout_ms / 1000.0)

    def events(self, given: HistoryFields, now_ms: int) -> History:
        """Events as they were given, those of unknown items with id 0; without categories of the user."""
        return self._events(given, self.items(given.items or [], "history.items"), now_ms)

    def readable(self, values: list[Any], column: ColumnSpec) -> list[Any]:
        """Values of events, a null in place of each that the model cannot read; of a list, what it can."""
        return values if self._can_read(values, column) else [self._readable(value, column) for value in values]

    def _readable(self, value: Any, column: ColumnSpec) -> Any:
        if isinstance(value, list) and column.kind == "categories":
            value = [one for one in value if self._can_read([one], column)][: column.most_ids]
        return value if self._can_read([value], column) else None

    def _can_read(self, values: list[Any], column: ColumnSpec) -> bool:
        single = itertools.chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
        if max((len(one) for one in single if isinstance(one, str)), default=0) > self._limits.max_text_characters:
            return False
        try:
            self.values(values, len(values), column, "", is_each=True)
        except BadRequestError:
            return False
        return True

    def candidate_features(self, request: RankRequest | RecommendRequest, count: int) -> Features:
        """Features of so many candidates, in the model's ids; none where it does not read them."""
        if not self.servable.serving.reads_candidate_features:
            return {}
        given = request.candidate_features or {}
        context = request.context or {}
        found: Features = {}
        for name, column in self.servable.event_features.items():
            field = f"candidate_features.{name}"
            value = given.get(name)
            if name in context:
                if name in given:
                    raise BadRequestError("is in context as well; give it once", field)
                field = f"context.{name}"
                value = context[name]
            elif name not in given:
                value = self.default(name, self._defaults.features, field)
            found |= self.values(value, count, column, field, is_each=_is_each(request, name, value))
        return found | self._user_values(request.user_features, count)

    def _asked_for(self, request: UserRequest) -> dict[str, int]:
        """What histories read of the event that is asked for."""
        given = {**(getattr(request, "candidate_features", None) or {}), **(getattr(request, "context", None) or {})}
        found: dict[str, int] = {}
        for name in self.servable.context_features:
            field = f"context.{name}"
            column = self.servable.event_features[name]
            value = given[name] if name in given else self.default(name, self._defaults.features, field)
            values = self.values(value, 1, column, field, is_each=_is_each(request, name, value))
            found |= {its: int(one[0]) for its, one in values.items()}
        return found

    def items(self, keys: Sequence[ItemId], field: str) -> Ids:
        """Unknown ones get id 0."""
        try:
            return self.servable.ids_of(keys)
        except TypeError:
            raise BadRequestError("must be a list of item ids (text or whole numbers)", field) from None

    def _events(self, given: HistoryFields, items: Ids, now_ms: int) -> History:
        return History(
            items=items,
            times_ms=self._times(given.times_ms, len(items), now_ms),
            actions=self.actions(given.actions, len(items)),
            features=self._event_values(given.features or {}, len(items)),
        )

    def _known_events(self, given: HistoryFields, now_ms: int) -> History:
        """Those that the model is to read; none where it knows none of them."""
        keys = given.items or []
        items = self.items(keys, "history.items")
        is_known = items > 0
        if not is_known.all():
            keeps = self.notes.policy == "score" and bool(is_known.any())
            self.notes.add_unknown("history.items", unknown_of(keys, items), "scored" if keeps else "dropped")
            if not keeps:
                given, items = _kept(given, is_known), items[is_known]
        return self._events(given, items, now_ms)

    def _default_events(self, given: Sequence[ItemId] | None, *, now_ms: int) -> History:
        """given: items of the request's or the stored history, none of which the model knows."""
        default = self._defaults.history
        if not default and self.servable.needs_event:
            if given is None:
                message = "is needed: the server has no events of this user yet"
            elif not len(given):
                message = "is empty: the model needs at least one event to recommend from"
            else:
                message = "contains no item that the model knows yet"
            raise BadRequestError(message, "history", remedy=_new_user_remedy(self.servable))
        if default is not None or given is None or len(given):
            self.notes.add_default("history", {"items": list(default or ())})
        return self.events(HistoryFields(items=list(default or ())), now_ms)

    def _times(self, given: Sequence[int] | None, count: int, now_ms: int) -> Ids:
        field = "history.times_ms"
        if given is not None:
            _check_count(given, count, field)
            times = given.values if isinstance(given, TypedList) else np.array(given, np.int64)
            if (times[1:] < times[:-1]).any():
                raise BadRequestError("must not go back in time; oldest event first", field)
            return times
        if not (count and self.servable.reads_times):
            return np.zeros(count, np.int64)
        if self._defaults.times is None:
            raise MissingInputError(field)
        self.notes.add_default(field, now_ms)
        return np.full(count, now_ms)

    def actions(self, given: Sequence[Action] | None, count: int) -> Ids:
        """Action bits of events: from their sum, a name or a list of names."""
        field = "history.actions"
        bits = self.servable.spec.action_bits
        if given is not None:
            _check_count(given, count, field)
        if not (self.servable.reads_actions and count):
            return np.zeros(count, np.int64)
        if given is None:
            given = TypedList("words", np.zeros(count, np.int64), (None,))
        kinds = types_of(given)
        default = self._defaults.actions
        if type(None) in kinds:
            if default is None:
                raise MissingInputError(field)
            self.notes.add_default(field, list(default))

        def sum_of(action: Action) -> int:
            return _sum_of_bits(list(default or ()) if action is None else action, bits)

        try:
            if isinstance(given, TypedList):
                actions = given.values if kinds == {int} else given.numbered(sum_of)
            elif kinds == {str}:
                actions = np.array([*map(bits.__getitem__, cast(Sequence[str], given))], np.int64)
            else:
                actions = np.array(given if kinds == {int} else [*map(sum_of, given)], np.int64)
        except (KeyError, OverflowError):
            actions = np.full(count, -1)
        if (actions & ~sum(bits.values())).any():
            names = ", ".join(f"{name} ({bit})" for name, bit in bits.items())
            raise BadRequestError(f"must be names of actions, lists of them, or sums of their bits: {names}", field)
        return actions

    def _event_values(self, given: Mapping[str, list[Value] | None], count: int) -> Features:
        found: Features = {}
        for name, column in self.servable.event_features.items():
            field = f"history.features.{name}"
            value = given.get(name)
            default = self.default(name, self._defaults.features, field) if value is None and count else None
            is_each = value is not None
            found |= self.values(value if is_each else default, count, column, field, is_each=is_each)
        return found

    def _user_values(self, given: Mapping[str, Value] | None, count: int) -> Features:
        found: Features = {}
        for name, column in self.servable.user_features.items():
            field = f"user_features.{name}"
            is_given = given is not None and name in given
            value = given[name] if given is not None and is_given else None
            if not is_given:
                value = self.default(name, self._defaults.user_features, field)
            found |= self.values(value, count, column, field, is_each=False)
        return found

    def default(self, name: str, defaults: Mapping[str, str | None], field: str) -> str | None:
        if name not in defaults:
            raise MissingInputError(field)
        self.notes.add_default(field, defaults[name])
        return defaults[name]

    def values(self, given: Any, count: int, column: ColumnSpec, field: str, *, is_each: bool) -> Features:
        """What histories and candidates hold of a column. is_each: a value for each of so many, else one for all."""
        if not column.has_several:
            if isinstance(given, list | TypedList) and not is_each:
                raise BadRequestError("must be one value", field)
            if is_each and list in types_of(given):
                raise BadRequestError("must be one value for each, and no lists", field)
            return {column.name: self._categories(given, count, column, field)}
        given = list(given) if isinstance(given, TypedList) else given  # also one that is the value of all
        values = given if is_each else [given]
        if is_each:
            _check_count(values, count, field)
        by_field = np.ascontiguousarray(self._several(values, column, field).T)
        if not is_each:  # wide vectors would be many numbers at each of many events
            by_field = np.broadcast_to(by_field, (len(by_field), count))
        return dict(zip(column.fields, by_field, strict=True))

    def _several(self, values: Sequence[Any], column: ColumnSpec, field: str) -> Ids:
        """(values, fields of the column) of lists of categories, texts or vectors; nothing of a null."""
        match column.kind:
            case "vector":
                return number_bits(self._vectors(values, column.width, field))
            case "bag":
                if not all(value is None or isinstance(value, str) for value in values):
                    raise BadRequestError("must be text or null", field)
                try:
                    texts = pa.array(values, pa.string())
                except UnicodeEncodeError as error:  # half of a surrogate pair, which only Python's texts can hold
                    raise BadRequestError(f"must be text in Unicode ({error.reason})", field) from None
                return packed_ids(*column.transform.bags(texts), column.most_ids)
        lists = [[] if value is None else value if isinstance(value, list) else [value] for value in values]
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        if counts.max(initial=0) > column.most_ids:
            raise BadRequestError(f"must have at most {column.most_ids} values", field)
        listed = [*itertools.chain.from_iterable(lists)]
        ids = self._categories(listed, len(listed), column, field)
        known = np.bincount(np.repeat(np.arange(len(lists)), counts)[ids > 0], minlength=len(lists))
        return packed_ids(ids[ids > 0], known, column.most_ids)

    def _vectors(self, values: Sequence[Any], width: int, field: str) -> NDArray[np.float32]:
        found = np.zeros((len(values), width), np.float32)
        for place, value in enumerate(values):
            if value is None:
                continue
            is_fit = isinstance(value, list) and len(value) == width and not types_of(value) - {int, float}
            numbers = vector_of(value) if is_fit else found[place]
            if not is_fit or np.isnan(numbers).any():
                raise BadRequestError(f"must be a list of {width} numbers, or null", field)
            found[place] = numbers
        if (np.abs(found) > LARGEST_NUMBER).any():
            raise BadRequestError(_TOO_LARGE, field)
        return found

    def _categories(
        self, given: TypedList | list[Category] | Category, count: int, column: ColumnSpec, field: str
    ) -> Ids:
        """Of a value for each, or one for all. Row 0 is that of an unknown category, and of one that nobody knows."""
        if isinstance(given, TypedList):
            _check_count(given, count, field)
            if given.kind == "words":
                return self._categories(list(given.words), len(given.words), column, field)[given.values]
            given = list(given)
        values = given if isinstance(given, list) else [given]
        if isinstance(given, list):
            _check_count(values, count, field)
        if not column.has_table:
            numbers = number_bits(self._transformed(values, column, field))
            return numbers if isinstance(given, list) else np.full(count, numbers[0])
        ids = self.servable.column_ids.get(column.name)
        if column.transform.kind != "quantiles" and float in types_of(values):
            raise BadRequestError("must be a category: text, a whole number or null", field)
        if column.by_key is not None:
            keys = self._keys(values, column.by_key.hash_key, field)
            return keys if isinstance(given, list) else np.full(count, keys[0])
        if column.transform.kind == "quantiles" and not any(isinstance(value, str) for value in values):
            found = column.transform.bucket_ids(self._numbers(values, field))
        elif column.transform.kind == "quantiles":
            found = buckets_of(values, column.transform, ids or {})
        elif ids is not None:
            found = np.fromiter((0 if v is None else ids.get(key_of(v), 0) for v in values), np.int64, len(values))
        else:
            found = np.fromiter((row_of(v, column.num_rows) for v in values), np.int64, len(values))
        if not found.all():
            unknown = [values[i] for i in np.flatnonzero(found == 0)]
            named = [value for value in unknown if value is not None and not (ids is None and value in (0, "0"))]
            if named:
                self.notes.add_unknown(field, named, "scored")
        return found if isinstance(given, list) else np.full(count, found[0])

    @staticmethod
    def _keys(values: Sequence[Category], hash_key: int | None, field: str) -> Ids:
        """Of rows by key; 0 of what nobody knows."""
        if hash_key is not None:
            return category_keys(pa.array(["" if value is None else key_of(value) for value in values]), hash_key)
        try:
            return np.array([0 if value is None else int(value) for value in values], np.int64)
        except (ValueError, OverflowError):
            raise BadRequestError("must be keys: whole numbers of 64 bits", field) from None

    def _transformed(self, values: Sequence[Category], column: ColumnSpec, field: str) -> NDArray[np.float32]:
        found = column.transform.numbers(self._numbers(values, field))
        if (np.abs(found) > LARGEST_NUMBER).any():
            raise BadRequestError(_TOO_LARGE, field)
        return found

    @staticmethod
    def _numbers(values: Sequence[Category], field: str) -> NDArray[np.float64]:
        """NaN where nobody knows one."""
        try:
            return np.array([np.nan if value is None else float(value) for value in values])
        except (ValueError, OverflowError):
            raise BadRequestError("must be numbers", field) from None


def _is_each(request: Any, name: str, value: Any) -> bool:
    """A list of what is told of candidates, and not a list that is one value for all of them."""
    is_of_candidates = hasattr(request, "candidates") and name not in (request.context or {})
    return is_of_candidates and isinstance(value, list | TypedList)


def unknown_of(keys: Sequence[ItemId], ids: Ids) -> list[ItemId]:
    """The keys that have no id."""
    return [keys[i] for i in np.flatnonzero(ids == 0)]


def _sum_of_bits(action: Action, bits: Mapping[str, int]) -> int:
    match action:
        case int():
            return action
        case str():
            return bits[action]
        case list():
            return sum({bits[name] for name in action})
        case None:
            raise KeyError


def _kept(given: HistoryFields, is_kept: NDArray[np.bool_]) -> HistoryFields:
    """Without the events that are not marked, and all that is told of them."""

    def of(values: Any, field: str) -> Any:
        if values is None:
            return None
        _check_count(values, len(is_kept), field)
        if isinstance(values, TypedList):
            return values.where(is_kept)
        return [*itertools.compress(values, is_kept)]

    features = {name: of(values, f"history.features.{name}") for name, values in (given.features or {}).items()}
    return HistoryFields(
        items=of(given.items, "history.items"),
        times_ms=of(given.times_ms, "history.times_ms"),
        actions=of(given.actions, "history.actions"),
        features=features,
    )


def _check_names(given: Mapping[str, Any], known: Mapping[str, Any], field: str) -> None:
    for name in given:
        if name not in known:
            names = f"; it has {', '.join(known)}" if known else ""
            raise BadRequestError(f"the model has no such feature{names}", f"{field}.{name[:64]}")


def _check_count(values: Sequence[Any], count: int, field: str) -> None:
    if len(values) != count:
        raise BadRequestError(f"must have {count} values, one for each", field)


def parse_user(value: Any, limits: LimitsConfig) -> str:
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= limits.max_user_characters:
        raise BadRequestError(f"must be text of 1 to {limits.max_user_characters} characters", "user")
    return value
