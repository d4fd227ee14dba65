"""Resolves requests: maps source ids and feature values to the ids that a model reads.

One rule applies to every input of a model: the request contains it, or the default value of the export is used and
listed in the response, or the request is rejected. `RequestNotes` collects what the response reports: unknown ids and
applied defaults.
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
    bucket_values,
    category_key,
    category_row,
    number_bits,
    pad_ids,
    parse_vector,
)
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec

_MAX_SHOWN_IDS = 10
"""Maximum number of unknown ids in an error message."""


class ResponseNotes(TypedDict):
    """Notes as fields of a response."""

    unknown_ids: list[UnknownIds]
    defaults_used: list[AppliedDefault]


class RequestNotes:
    """Unknown ids and applied defaults of one request, collected by all models that read it.

    Args:
        policy: Handling of unknown ids that the request asks for; `last` by default.
    """

    def __init__(self, policy: Unknown | None = None):
        self.policy: Unknown = policy or "last"
        self._unknown: dict[tuple[str, Done], dict[ItemId, None]] = {}
        self._defaults: dict[str, Any] = {}

    def add_unknown(self, field: str, ids: Iterable[ItemId], done: Done) -> None:
        """Record unknown ids of a field.

        Raises:
            BadRequestError: The request asks to be rejected if it contains unknown ids.
        """
        unknown = self._unknown.setdefault((field, done), {})
        unknown.update(dict.fromkeys(ids))
        if self.policy == "reject":
            shown = ", ".join(repr(key)[:64] for key in list(unknown)[:_MAX_SHOWN_IDS])
            more = f" and {len(unknown) - _MAX_SHOWN_IDS} more" if len(unknown) > _MAX_SHOWN_IDS else ""
            raise BadRequestError(f"the model does not know {shown}{more}", field)

    def add_default(self, field: str, value: Any) -> None:
        """Add the default value of a field to the notes of the response."""
        self._defaults[field] = value

    def to_response(self) -> ResponseNotes:
        """Return the notes as fields of the response."""
        return {
            "unknown_ids": [
                {"field": field, "ids": list(ids), "action": done} for (field, done), ids in self._unknown.items()
            ],
            "defaults_used": [{"field": field, "value": value} for field, value in self._defaults.items()],
        }


Ids = NDArray[np.int64]
Features = dict[str, Ids]
_TOO_LARGE = f"must be numbers from -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}; larger ones overflow in the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """Request of a user in the ids of one model."""

    user: str
    history: History
    """History that the model reads, which can be the default history."""
    seen: Ids
    """Items of the actual events of the user, without those of a default history."""
    now_ms: int
    timeout_s: float


def _new_user_remedy(servable: Servable) -> str:
    """Return what a client or an operator can do, with an export command that sets every default of the model."""
    others = {**servable.event_default_examples, **servable.spec.defaults.to_options()}
    options = "".join(f" --defaults.{name} {shlex.quote(value)}" for name, value in others.items())
    return (
        "send a history with an item that the model knows, or store events with POST /v1/events; "
        f"to serve new users, export the model with: nestrec export RUN OUT --defaults.history ITEM,ITEM{options}"
    )


def check_feature_names(request: Any, *servables: Servable) -> None:
    """Raise `BadRequestError` for feature names that none of the models knows; a typo would otherwise be ignored.

    Args:
        request: The request.
        servables: The models that process the request.
    """
    event_features = {name: column for servable in servables for name, column in servable.event_features.items()}
    user_features = {name: column for servable in servables for name, column in servable.user_features.items()}
    history_features = (request.history.features or {}) if request.history is not None else {}
    _check_names(history_features, event_features, "history.features")
    for field in ("candidate_features", "context"):
        _check_names(getattr(request, field, None) or {}, event_features, field)
    _check_names(getattr(request, "user_features", None) or {}, user_features, "user_features")


class RequestResolver:
    """Converts requests to the ids of one model.

    All methods raise `BadRequestError` for invalid values and `MissingInputError` for missing inputs without a default.

    Args:
        servable: The model.
        limits: Limits of the server.
        notes: Collects unknown ids and applied defaults for the response.
    """

    def __init__(self, servable: Servable, limits: LimitsConfig, notes: RequestNotes):
        self.servable = servable
        self.notes = notes
        self._limits = limits
        self._defaults = servable.spec.defaults

    def user(self, request: UserRequest) -> ResolvedRequest:
        """Resolve the user, history, time and timeout of a request."""
        user = parse_user(request.user, self._limits)
        now_ms = request.now_ms
        if now_ms is None:
            now_ms = int(time.time() * 1000)
            if self.servable.reads_times:
                self.notes.add_default("now_ms", now_ms)
        timeout_ms = self._limits.default_timeout_ms if request.timeout_ms is None else request.timeout_ms
        fields = (request.history if self.servable.reads_items else None) or HistoryFields()
        history = self._known_events(fields, now_ms)
        seen = history.items
        if not len(history) and self.servable.reads_items:
            history = self._default_events(fields.items, now_ms=now_ms)
        user_values = self._user_values(request.user_features, len(history) + 1)  # one per event, and one for the query
        if user_values:
            event_values = {name: values[:-1] for name, values in user_values.items()}
            history = replace(history, features={**history.features, **event_values})
        query_features = self._query_values(request) | {name: int(values[-1]) for name, values in user_values.items()}
        if query_features:
            history = replace(history, query_features=query_features)
        return ResolvedRequest(user=user, history=history, seen=seen, now_ms=now_ms, timeout_s=timeout_ms / 1000.0)

    def events(self, fields: HistoryFields, now_ms: int) -> History:
        """Resolve all events of a history, without user features; unknown items get id 0."""
        return self._events(fields, self.items(fields.items or [], "history.items"), now_ms)

    def replace_unreadable(self, values: list[Any], column: ColumnSpec) -> list[Any]:
        """Replace values of events that the model cannot read by null; lists keep their readable elements."""
        return values if self._can_read(values, column) else [self._readable(value, column) for value in values]

    def _readable(self, value: Any, column: ColumnSpec) -> Any:
        if isinstance(value, list) and column.kind == "categories":
            value = [element for element in value if self._can_read([element], column)][: column.most_ids]
        return value if self._can_read([value], column) else None

    def _can_read(self, values: list[Any], column: ColumnSpec) -> bool:
        elements = itertools.chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
        if (
            max((len(element) for element in elements if isinstance(element, str)), default=0)
            > self._limits.max_text_length
        ):
            return False
        try:
            self.values(values, len(values), column, "", is_each=True)
        except BadRequestError:
            return False
        return True

    def candidate_features(self, request: RankRequest | RecommendRequest, count: int) -> Features:
        """Resolve the features of `count` candidates; empty if the model does not read them."""
        if not self.servable.serving.reads_candidate_features:
            return {}
        candidate_values = request.candidate_features or {}
        context = request.context or {}
        features: Features = {}
        for name, column in self.servable.event_features.items():
            field = f"candidate_features.{name}"
            value = candidate_values.get(name)
            if name in context:
                if name in candidate_values:
                    raise BadRequestError("the feature is also in context; send it in one of them only", field)
                field = f"context.{name}"
                value = context[name]
            elif name not in candidate_values:
                value = self.default(name, self._defaults.features, field)
            features |= self.values(value, count, column, field, is_each=_is_each(request, name, value))
        return features | self._user_values(request.user_features, count)

    def _query_values(self, request: UserRequest) -> dict[str, int]:
        """Resolve the features of the query event that the model reads with the history."""
        query = {**(getattr(request, "candidate_features", None) or {}), **(getattr(request, "context", None) or {})}
        features: dict[str, int] = {}
        for name in self.servable.context_features:
            field = f"context.{name}"
            column = self.servable.event_features[name]
            value = query[name] if name in query else self.default(name, self._defaults.features, field)
            values = self.values(value, 1, column, field, is_each=_is_each(request, name, value))
            features |= {field_name: int(field_values[0]) for field_name, field_values in values.items()}
        return features

    def items(self, keys: Sequence[ItemId], field: str) -> Ids:
        """Resolve item ids; unknown ones get id 0."""
        try:
            return self.servable.ids_of(keys)
        except TypeError:
            raise BadRequestError("must be a list of item ids (text or integers)", field) from None

    def _events(self, fields: HistoryFields, items: Ids, now_ms: int) -> History:
        return History(
            items=items,
            times_ms=self._times(fields.times_ms, len(items), now_ms),
            actions=self.actions(fields.actions, len(items)),
            features=self._event_values(fields.features or {}, len(items)),
        )

    def _known_events(self, fields: HistoryFields, now_ms: int) -> History:
        """Resolve events; those of unknown items are dropped, unless the policy is to score them."""
        keys = fields.items or []
        items = self.items(keys, "history.items")
        is_known = items > 0
        if not is_known.all():
            scores_unknown = self.notes.policy == "score" and bool(is_known.any())
            self.notes.add_unknown(
                "history.items", unknown_keys(keys, items), "scored" if scores_unknown else "dropped"
            )
            if not scores_unknown:
                fields, items = _select_events(fields, is_known), items[is_known]
        return self._events(fields, items, now_ms)

    def _default_events(self, keys: Sequence[ItemId] | None, *, now_ms: int) -> History:
        """Resolve the default history.

        Args:
            keys: Items of the history in the request or the store, none of which the model knows; None without one.
            now_ms: Time of the request in Unix milliseconds.
        """
        default = self._defaults.history
        if not default and self.servable.needs_event:
            if keys is None:
                message = "is required: the server has no events of this user yet"
            elif not len(keys):
                message = "must not be empty: the model needs at least one event to recommend items"
            else:
                message = "must contain at least one item that the model knows"
            raise BadRequestError(message, "history", remedy=_new_user_remedy(self.servable))
        if default is not None or keys is None or len(keys):
            self.notes.add_default("history", {"items": list(default or ())})
        return self.events(HistoryFields(items=list(default or ())), now_ms)

    def _times(self, values: Sequence[int] | None, count: int, now_ms: int) -> Ids:
        field = "history.times_ms"
        if values is not None:
            _check_count(values, count, field)
            times = values.values if isinstance(values, TypedList) else np.array(values, np.int64)
            if (times[1:] < times[:-1]).any():
                raise BadRequestError("must be in ascending order, oldest event first", field)
            return times
        if not (count and self.servable.reads_times):
            return np.zeros(count, np.int64)
        if self._defaults.times is None:
            raise MissingInputError(field)
        self.notes.add_default(field, now_ms)
        return np.full(count, now_ms)

    def actions(self, values: Sequence[Action] | None, count: int) -> Ids:
        """Resolve the actions of events to action bits; a value is a sum of bits, a name or a list of names."""
        field = "history.actions"
        bits = self.servable.spec.action_bits
        if values is not None:
            _check_count(values, count, field)
        if not (self.servable.reads_actions and count):
            return np.zeros(count, np.int64)
        if values is None:
            values = TypedList("words", np.zeros(count, np.int64), (None,))
        kinds = types_of(values)
        default = self._defaults.actions
        if type(None) in kinds:
            if default is None:
                raise MissingInputError(field)
            self.notes.add_default(field, list(default))

        def sum_of(action: Action) -> int:
            return _sum_of_bits(list(default or ()) if action is None else action, bits)

        try:
            if isinstance(values, TypedList):
                actions = values.values if kinds == {int} else values.numbered(sum_of)
            elif kinds == {str}:
                actions = np.array([*map(bits.__getitem__, cast(Sequence[str], values))], np.int64)
            else:
                actions = np.array(values if kinds == {int} else [*map(sum_of, values)], np.int64)
        except (KeyError, OverflowError):
            actions = np.full(count, -1)
        if (actions & ~sum(bits.values())).any():
            names = ", ".join(f"{name} ({bit})" for name, bit in bits.items())
            raise BadRequestError(f"must be names of actions, lists of them, or sums of their bits: {names}", field)
        return actions

    def _event_values(self, values_by_name: Mapping[str, list[Value] | None], count: int) -> Features:
        features: Features = {}
        for name, column in self.servable.event_features.items():
            field = f"history.features.{name}"
            value = values_by_name.get(name)
            default = self.default(name, self._defaults.features, field) if value is None and count else None
            is_each = value is not None
            features |= self.values(value if is_each else default, count, column, field, is_each=is_each)
        return features

    def _user_values(self, values_by_name: Mapping[str, Value] | None, count: int) -> Features:
        features: Features = {}
        for name, column in self.servable.user_features.items():
            field = f"user_features.{name}"
            is_present = values_by_name is not None and name in values_by_name
            value = values_by_name[name] if values_by_name is not None and is_present else None
            if not is_present:
                value = self.default(name, self._defaults.user_features, field)
            features |= self.values(value, count, column, field, is_each=False)
        return features

    def default(self, name: str, defaults: Mapping[str, str | None], field: str) -> str | None:
        """Return the default value of a feature and record its use.

        Raises:
            MissingInputError: The export does not define a default for the feature.
        """
        if name not in defaults:
            raise MissingInputError(field)
        self.notes.add_default(field, defaults[name])
        return defaults[name]

    def values(self, value: Any, count: int, column: ColumnSpec, field: str, *, is_each: bool) -> Features:
        """Resolve the values of a feature column.

        Args:
            value: List of values, or one value for all events or candidates.
            count: Number of events or candidates.
            column: The feature column.
            field: Field of the request, for error messages.
            is_each: Whether `value` is a list with one value per event or candidate.

        Returns:
            Arrays of `count` values by field of the column (`ColumnSpec.fields`).
        """
        if not column.has_several:
            if isinstance(value, list | TypedList) and not is_each:
                raise BadRequestError("must be one value, not a list", field)
            if is_each and list in types_of(value):
                raise BadRequestError("must be one value per event or candidate, not a list", field)
            return {column.name: self._categories(value, count, column, field)}
        value = list(value) if isinstance(value, TypedList) else value  # including a list that is one value for all
        values = value if is_each else [value]
        if is_each:
            _check_count(values, count, field)
        by_field = np.ascontiguousarray(self._multi_values(values, column, field).T)
        if not is_each:  # a view: copies of a long vector for every event would need much memory
            by_field = np.broadcast_to(by_field, (len(by_field), count))
        return dict(zip(column.fields, by_field, strict=True))

    def _multi_values(self, values: Sequence[Any], column: ColumnSpec, field: str) -> Ids:
        """Resolve lists of categories, texts or vectors to an array of shape (values, fields); null becomes zeros."""
        match column.kind:
            case "vector":
                return number_bits(self._vectors(values, column.width, field))
            case "bag":
                if not all(value is None or isinstance(value, str) for value in values):
                    raise BadRequestError("must be text or null", field)
                try:
                    texts = pa.array(values, pa.string())
                except UnicodeEncodeError as error:  # a lone surrogate, which is valid in a Python string only
                    raise BadRequestError(f"must be valid Unicode text ({error.reason})", field) from None
                return pad_ids(*column.transform.bags(texts), column.most_ids)
        lists = [_as_list(value) for value in values]
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        if counts.max(initial=0) > column.most_ids:
            raise BadRequestError(f"must have at most {column.most_ids} values", field)
        elements = [*itertools.chain.from_iterable(lists)]
        ids = self._categories(elements, len(elements), column, field)
        known = np.bincount(np.repeat(np.arange(len(lists)), counts)[ids > 0], minlength=len(lists))
        return pad_ids(ids[ids > 0], known, column.most_ids)

    def _vectors(self, values: Sequence[Any], width: int, field: str) -> NDArray[np.float32]:
        vectors = np.zeros((len(values), width), np.float32)
        for i, value in enumerate(values):
            if value is None:
                continue
            is_valid = isinstance(value, list) and len(value) == width and not types_of(value) - {int, float}
            numbers = parse_vector(value) if is_valid else vectors[i]
            if not is_valid or np.isnan(numbers).any():
                raise BadRequestError(f"must be a list of {width} numbers, or null", field)
            vectors[i] = numbers
        if (np.abs(vectors) > LARGEST_NUMBER).any():
            raise BadRequestError(_TOO_LARGE, field)
        return vectors

    def _categories(
        self, value: TypedList | list[Category] | Category, count: int, column: ColumnSpec, field: str
    ) -> Ids:
        """Resolve single categories or numbers: a list of one per event, or one for all events.

        Unknown and missing categories get row 0.
        """
        if isinstance(value, TypedList):
            _check_count(value, count, field)
            if value.kind == "words":
                return self._categories(list(value.words), len(value.words), column, field)[value.values]
            value = list(value)
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list):
            _check_count(values, count, field)
        if not column.has_table:
            numbers = number_bits(self._transform(values, column, field))
            return numbers if isinstance(value, list) else np.full(count, numbers[0])
        ids = self.servable.column_ids.get(column.name)
        if column.transform.kind != "quantiles" and float in types_of(values):
            raise BadRequestError("must be a category: text, an integer or null", field)
        if column.by_key is not None:
            keys = self._keys(values, column.by_key.hash_key, field)
            return keys if isinstance(value, list) else np.full(count, keys[0])
        if column.transform.kind == "quantiles" and not any(isinstance(v, str) for v in values):
            rows = column.transform.bucket_ids(self._numbers(values, field))
        elif column.transform.kind == "quantiles":
            rows = bucket_values(values, column.transform, ids or {})
        elif ids is not None:
            rows = np.fromiter((0 if v is None else ids.get(category_key(v), 0) for v in values), np.int64, len(values))
        else:
            rows = np.fromiter((category_row(v, column.num_rows) for v in values), np.int64, len(values))
        if not rows.all():
            unknown = [values[i] for i in np.flatnonzero(rows == 0)]
            reported = [v for v in unknown if v is not None and not (ids is None and v in (0, "0"))]
            if reported:
                self.notes.add_unknown(field, reported, "scored")
        return rows if isinstance(value, list) else np.full(count, rows[0])

    @staticmethod
    def _keys(values: Sequence[Category], hash_key: int | None, field: str) -> Ids:
        """Resolve values of a table addressed by keys; null gets key 0."""
        if hash_key is not None:
            return category_keys(pa.array(["" if value is None else category_key(value) for value in values]), hash_key)
        try:
            return np.array([0 if value is None else int(value) for value in values], np.int64)
        except (ValueError, OverflowError):
            raise BadRequestError("must be keys: 64-bit integers", field) from None

    def _transform(self, values: Sequence[Category], column: ColumnSpec, field: str) -> NDArray[np.float32]:
        numbers = column.transform.numbers(self._numbers(values, field))
        if (np.abs(numbers) > LARGEST_NUMBER).any():
            raise BadRequestError(_TOO_LARGE, field)
        return numbers

    @staticmethod
    def _numbers(values: Sequence[Category], field: str) -> NDArray[np.float64]:
        """Convert values to numbers; null becomes NaN."""
        try:
            return np.array([np.nan if value is None else float(value) for value in values])
        except (ValueError, OverflowError):
            raise BadRequestError("must be numbers", field) from None


def _is_each(request: Any, name: str, value: Any) -> bool:
    """Return whether a list has one value per candidate; a list in `context` is one value for all candidates."""
    is_candidate_feature = hasattr(request, "candidates") and name not in (request.context or {})
    return is_candidate_feature and isinstance(value, list | TypedList)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def unknown_keys(keys: Sequence[ItemId], ids: Ids) -> list[ItemId]:
    """Return the keys whose id is 0 (unknown)."""
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


def _select_events(fields: HistoryFields, is_selected: NDArray[np.bool_]) -> HistoryFields:
    """Return the selected events with all their columns."""

    def select(values: Any, field: str) -> Any:
        if values is None:
            return None
        _check_count(values, len(is_selected), field)
        if isinstance(values, TypedList):
            return values.where(is_selected)
        return [*itertools.compress(values, is_selected)]

    features = {name: select(values, f"history.features.{name}") for name, values in (fields.features or {}).items()}
    return HistoryFields(
        items=select(fields.items, "history.items"),
        times_ms=select(fields.times_ms, "history.times_ms"),
        actions=select(fields.actions, "history.actions"),
        features=features,
    )


def _check_names(features: Mapping[str, Any], known: Mapping[str, Any], field: str) -> None:
    for name in features:
        if name not in known:
            names = f"; known features: {', '.join(known)}" if known else ""
            raise BadRequestError(f"the model does not have this feature{names}", f"{field}.{name[:64]}")


def _check_count(values: Sequence[Any], count: int, field: str) -> None:
    if len(values) != count:
        raise BadRequestError(f"must have {count} values, one per event or candidate", field)


def parse_user(value: Any, limits: LimitsConfig) -> str:
    """Return the user id of a request as text; an integer id is converted.

    Raises:
        BadRequestError: The id is not text or an integer, or too long.
    """
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= limits.max_user_id_length:
        raise BadRequestError(f"must be text of 1 to {limits.max_user_id_length} characters", "user")
    return value
