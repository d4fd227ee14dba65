"""Adapters between a servable model and the engine: histories as tokens.

Records of tokens that stand before a history: what is known of its user, a token each.

A record of one has the value of its column in that column's fields and, in the last field, the number of the token from
1; those of events have 0 there. So batches hold both alike.

Legend: P tokens before a history, R records, F fields of a column, D model width.

How a kind of model reads histories and scores candidates, and which form a model has: its task says so.

Legend: T tokens, D model width, C candidates, K tasks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.data.dataset_schema import USER_PREFIX
from nestrec.data.flat_arrays import history_start, slide_of
from nestrec.serving.model.request_inputs import Candidates, History, numbers_of, values_of
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec

Ints = NDArray[np.int64]


def places_of(columns: Iterable[ColumnSpec], first: int) -> dict[str, slice]:
    """Where records hold each column, from a field on."""
    found = {}
    for column in columns:
        found[column.name] = slice(first, first + len(column.fields))
        first += len(column.fields)
    return found


class UserPrefixTokens:
    """Of one model. places: where records hold each of its columns."""

    def __init__(self, servable: Servable, places: Mapping[str, slice]):
        self._columns = servable.prefix_columns
        self._places = [places[column.name] for column in self._columns]
        self._fields = [column.fields for column in self._columns]
        self.names = frozenset(column.name for column in self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def numbers(self, count: int) -> Sequence[Ints]:
        """The last field of so many events; none where nothing stands before them."""
        return [np.zeros(count, np.int64)] if self._columns else []

    def records(self, history: History, num_fields: int) -> Ints:
        """(P, fields) of a user."""
        found = np.zeros((len(self), num_fields if self._columns else 0), np.int64)
        for place, (fields, where) in enumerate(zip(self._fields, self._places, strict=True)):
            for column, name in enumerate(fields, start=where.start):
                of_events = history.features.get(name, found[:0, -1])  # all of them alike
                found[place, column] = history.asked.get(name, of_events[-1] if len(of_events) else 0)
            found[place, -1] = place + 1
        return found

    def vectors(self, servable: Servable, records: torch.Tensor) -> torch.Tensor:
        """(R, D) of records that are all of such tokens."""
        nothing = torch.zeros(len(records), servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)
        return self.put(servable, records, nothing)

    def put(self, servable: Servable, records: torch.Tensor, content_RD: torch.Tensor) -> torch.Tensor:
        """(R, D or more) what records of events have, and of the others their own vectors."""
        for place, (column, where) in enumerate(zip(self._columns, self._places, strict=True)):
            is_own = (records[:, -1] == place + 1).to(content_RD.device)
            # What other records have in these fields need not be rows of its table.
            values_RF = torch.where((records[:, -1] == place + 1)[:, None], records[:, where], 0)
            own_RD = column_vectors(servable, column, values_RF).to(content_RD.dtype)
            wide = torch.nn.functional.pad(own_RD, (0, content_RD.shape[1] - own_RD.shape[1]))
            content_RD = torch.where(is_own[:, None], wide, content_RD)
        return content_RD


def column_vectors(servable: Servable, column: ColumnSpec, values_RF: torch.Tensor) -> torch.Tensor:
    """(R, D) what a column says, by what records have in its fields: ids, or bits of numbers."""
    if column.has_table and column.has_several:
        return _pooled(servable, column, values_RF)
    if column.has_table:
        return servable.tables[column.name].rows(values_RF[:, 0])
    numbers = values_of(values_RF) if column.kind == "vector" else numbers_of(values_RF[:, 0])
    numbers = numbers.to(device=servable.device, dtype=servable.dtype)
    return servable.model.to_width(column.name, numbers)  # type: ignore[no-any-return, operator]


def _pooled(servable: Servable, column: ColumnSpec, ids_RF: torch.Tensor) -> torch.Tensor:
    """Field by field: all rows of a text at once would be a batch of many times the width."""
    table = servable.tables[column.name]
    is_there_RF = ids_RF > 0
    if ids_RF.device.type == "cpu":  # a captured batch cannot know how long its lists are
        longest = int(is_there_RF.sum(1).max()) if len(ids_RF) else 0
        ids_RF, is_there_RF = ids_RF[:, :longest], is_there_RF[:, :longest]
    shape = len(ids_RF), servable.encoder_config.dim
    total_RD = torch.zeros(shape, dtype=servable.dtype, device=servable.device)
    for ids_R, is_there_R in zip(ids_RF.unbind(1), is_there_RF.unbind(1), strict=True):
        total_RD += table.rows(ids_R).to(total_RD) * is_there_R.to(total_RD)[:, None]
    if column.pooling == "sum":
        return total_RD
    return total_RD / is_there_RF.sum(1).clamp(min=1).to(total_RD)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTokens:
    """A history as the model sees it."""

    history: History
    """a copy of what is left of it after sliding"""
    columns: tuple[NDArray[np.int64], ...]
    """everything about the events that enters the model, one value an event in each"""
    times_ms: NDArray[np.int64]
    """of the events; zeros where the model does not look at them"""
    asked_ms: NDArray[np.int64]
    """when the events ask"""
    num_cacheable: int
    """tokens that do not depend on the request"""
    tokens_an_event: int
    alike: frozenset[int] = frozenset()
    """columns of what is known of the user, which have the same value at all events"""
    cut: int = 0
    """first token that all layers compute: keys and values of the others' depend on it"""
    before: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """(tokens, fields) records of what stands before the history: a token each, of what is known of the user"""
    before_ms: int = 0
    """when those happened, and ask: with the first event"""

    def content(self, num_tokens: int) -> bytes:
        """Everything about the first tokens that enters the model."""
        num_events = self.events_within(num_tokens)
        cut = self.cut.to_bytes(8, "little") if self.cut else b""
        if len(self.before):
            cut += self.before.tobytes() + self.before_ms.to_bytes(8, "little", signed=True)
        once = min(1, num_events)
        counts = [once if place in self.alike else num_events for place in range(len(self.columns))]
        columns = zip(self.columns, counts, strict=True)
        return b"".join([cut, *(column[:count].tobytes() for column, count in columns)])

    @property
    def length(self) -> int:
        return len(self.before) + len(self.times_ms) * self.tokens_an_event

    def events_within(self, num_tokens: int) -> int:
        """Whole events among the first tokens."""
        return max(0, num_tokens - len(self.before)) // self.tokens_an_event

    def uncut(self, end: int) -> int:
        """The last token at or before this one where a batch can end: between two events."""
        beyond = max(0, end - len(self.before)) % self.tokens_an_event
        return end - beyond

    def token_times_ms(self, first: int, end: int) -> NDArray[np.int64]:
        """Of some tokens."""
        return self._of_tokens(self.times_ms, first, end)

    def token_asked_ms(self, first: int, end: int) -> NDArray[np.int64]:
        """When some tokens ask."""
        return self._of_tokens(self.asked_ms, first, end)

    def write_seconds(self, of_events_ms: NDArray[np.int64], first: int, end: int, to: NDArray[np.float64]) -> None:
        """Of some tokens, from times of events: `token_times_ms` or `token_asked_ms`, without arrays in between."""
        if first < len(self.before):
            np.divide(self._of_tokens(of_events_ms, first, end), 1000.0, out=to)
            return
        events = of_events_ms[self.events_within(first) : self.events_within(end)]
        np.divide(events, 1000.0, out=to[:: self.tokens_an_event])
        for token in range(1, self.tokens_an_event):
            to[token :: self.tokens_an_event] = to[:: self.tokens_an_event]

    @property
    def time_T(self) -> torch.Tensor:
        """float64 seconds"""
        return _seconds(self.token_times_ms(0, self.length))

    @property
    def query_time_T(self) -> torch.Tensor:
        """float64 seconds"""
        return _seconds(self.token_asked_ms(0, self.length))

    def _of_tokens(self, of_events: NDArray[np.int64], first: int, end: int) -> NDArray[np.int64]:
        """first, end: tokens between which no event is cut."""
        found = of_events[self.events_within(first) : self.events_within(end)]
        if self.tokens_an_event > 1:
            found = np.repeat(found, self.tokens_an_event)
        if first >= len(self.before):
            return found
        return np.concatenate([np.full(min(end, len(self.before)) - first, self.before_ms), found])


def of_users(fields: Sequence[str], first: int) -> frozenset[int]:
    """Which of the columns from `first` on, which hold these fields, are `HistoryTokens.alike`."""
    return frozenset(place for place, field in enumerate(fields, start=first) if field.startswith(USER_PREFIX))


class ModelAdapter(Protocol):
    """One kind of model. Pure functions of their arguments and the model's weights."""

    servable: Servable
    encoder: nn.Module
    """the backbone of the model"""
    tokens_an_event: int
    max_events: int
    """longest history"""
    slide_events: int
    """events by which a full history slides"""
    appends_candidates: bool
    """each is one more token; else they are scored from the last state"""
    outputs: tuple[str, ...]
    """names of a candidate's scores"""

    def follow(self, servable: Servable) -> None:
        """Read a later version of the model, which has the same tables in memory."""
        ...

    def tokens(self, history: History, now_ms: int) -> HistoryTokens: ...

    def vectors(self, tokens: HistoryTokens, first: int, end: int) -> torch.Tensor:
        """(end - first, D) input vectors of tokens; no bound lies inside an event."""
        ...

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        """(C, D) tokens to be appended, or (0, D) where candidates are scored from the last state."""
        ...

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        """(C, outputs) float32; larger is better."""
        ...

    def best(
        self, asked: Sequence[Candidates], last: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Items and scores of the best of the catalogue for each of several requests, best first.

        last: (D,) state of a request's last token; none of one without events"""
        ...


def lengths_of(form: ModelAdapter, num_events: int) -> tuple[int, int]:
    """(tokens, tokens that can be cached) of a history of so many events, as `ModelAdapter.tokens` makes them."""
    kept = num_events - history_start(num_events, form.max_events, form.slide_events)
    before = len(form.servable.prefix_columns) if kept or form.appends_candidates else 0
    length = before + kept * form.tokens_an_event
    known = length if form.appends_candidates else length - 1
    return length, form.servable.cacheable(known if kept else 0)


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Rows of a request whose states are asked for; they share place and time."""

    columns: tuple[NDArray[np.int64], ...]
    """like those of events"""
    time_ms: int
    asked_ms: int
    """when they ask"""
    is_last_event: bool
    """it is the last event of the history"""

    @property
    def count(self) -> int:
        return len(self.columns[0])


class PagedModelAdapter(ModelAdapter, Protocol):
    """A form whose batches can be computed in one pass, in steps over the records of many users at once.

    A record is one of an event or of what is asked for, (R, fields) of the first columns of `HistoryTokens`.
    """

    @property
    def num_fields(self) -> int:
        """of a record"""
        ...

    @property
    def action_vectors(self) -> torch.Tensor:
        """(bits, D); an action token is the sum of those of the bits in the second field of its record"""
        ...

    def asked(self, tokens: HistoryTokens, candidates: Candidates) -> QueryRows | None:
        """None where there is no row to ask: a user without events."""
        ...

    def records(self, records: NDArray[np.int64]) -> torch.Tensor:
        """Records where their ids are looked up."""
        ...

    def content(self, records: torch.Tensor) -> torch.Tensor:
        """(R, D or more) vectors of records, and behind them what scores are made of beside states"""
        ...

    def outcome(self, state_CD: torch.Tensor, content_CD: torch.Tensor) -> torch.Tensor:
        """(C, outputs) scores of candidates, or the states that are searched with"""
        ...


def make_form(servable: Servable, slide_events: int | None = None) -> ModelAdapter:
    """The form of a model that an engine can serve; a UserError where its task has none.

    slide_events: events by which a full history slides; none takes what the model was measured with.
    """
    serving = servable.serving
    task = servable.spec.task
    if slide_events is None:
        slide_events = serving.slide_events(task)
    form: ModelAdapter = serving.form(servable, slide_of(serving.longest_history(task), slide_events))
    return form


def _seconds(times_ms: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(times_ms / 1000.0)
