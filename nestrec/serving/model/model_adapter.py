"""Model adapters: how the engine turns histories into tokens and scores candidates with a servable model.

The serving spec of a task selects the adapter of its models. An adapter converts a history to `HistoryTokens`. A
*record* is a row of integer fields that describes an event, a candidate or a user token; batches of records from many
users are computed together.

User features can be tokens before the history, one token per feature. The record of such a user token has the value of
the feature in the fields of its column and the number of the token (from 1) in the last field. Records of events have 0
in the last field, so one batch can contain both kinds.

Legend: P user tokens before a history, R records, F fields of a column, T tokens, D model width, C candidates, K tasks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.data.dataset_schema import USER_PREFIX
from nestrec.data.flat_arrays import history_start, resolve_slide_events
from nestrec.serving.model.request_inputs import Candidates, History, floats_from_bits, number_features
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec

Ints = NDArray[np.int64]


def field_slices(columns: Iterable[ColumnSpec], first: int) -> dict[str, slice]:
    """Return the fields of each column in a record, if the columns start at field `first`."""
    slices = {}
    for column in columns:
        slices[column.name] = slice(first, first + len(column.fields))
        first += len(column.fields)
    return slices


class UserPrefixTokens:
    """User tokens before the history of one model; empty if the model has none.

    Args:
        servable: The model.
        slices: Fields of each column in a record, by column name.
    """

    def __init__(self, servable: Servable, slices: Mapping[str, slice]):
        self._columns = servable.prefix_columns
        self._slices = [slices[column.name] for column in self._columns]
        self._fields = [column.fields for column in self._columns]
        self.names = frozenset(column.name for column in self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def token_number_columns(self, count: int) -> Sequence[Ints]:
        """Return the last field of `count` event records as a list of one column; empty without user tokens."""
        return [np.zeros(count, np.int64)] if self._columns else []

    def records(self, history: History, num_fields: int) -> Ints:
        """Return the records of the user tokens of a history, of shape (P, num_fields)."""
        records = np.zeros((len(self), num_fields if self._columns else 0), np.int64)
        for token, (fields, column_slice) in enumerate(zip(self._fields, self._slices, strict=True)):
            for column, name in enumerate(fields, start=column_slice.start):
                event_values = history.features.get(name, records[:0, -1])  # user features: equal for all events
                records[token, column] = history.query_features.get(name, event_values[-1] if len(event_values) else 0)
            records[token, -1] = token + 1
        return records

    def vectors(self, servable: Servable, records: torch.Tensor) -> torch.Tensor:
        """Return the input vectors of records that are all user tokens, of shape (R, D)."""
        zeros_RD = torch.zeros(len(records), servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)
        return self.insert_prefix_vectors(servable, records, zeros_RD)

    def insert_prefix_vectors(
        self, servable: Servable, records: torch.Tensor, content_RD: torch.Tensor
    ) -> torch.Tensor:
        """Replace the vectors of user tokens in `content_RD`, of shape (R, D or more); keep those of other records."""
        for token, (column, column_slice) in enumerate(zip(self._columns, self._slices, strict=True)):
            is_token = (records[:, -1] == token + 1).to(content_RD.device)
            # Values of other records in these fields may be out of range for the table.
            values_RF = torch.where((records[:, -1] == token + 1)[:, None], records[:, column_slice], 0)
            token_RD = column_vectors(servable, column, values_RF).to(content_RD.dtype)
            padded_RD = torch.nn.functional.pad(token_RD, (0, content_RD.shape[1] - token_RD.shape[1]))
            content_RD = torch.where(is_token[:, None], padded_RD, content_RD)
        return content_RD


def column_vectors(servable: Servable, column: ColumnSpec, values_RF: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of a feature column, of shape (R, D).

    Args:
        servable: The model.
        column: The feature column.
        values_RF: Fields of the column in the records: ids, or the bits of float32 numbers.
    """
    if column.has_table and column.has_several:
        return _pooled(servable, column, values_RF)
    if column.has_table:
        return servable.tables[column.name].rows(values_RF[:, 0])
    numbers = floats_from_bits(values_RF) if column.kind == "vector" else number_features(values_RF[:, 0])
    numbers = numbers.to(device=servable.device, dtype=servable.dtype)
    return servable.model.to_width(column.name, numbers)  # type: ignore[no-any-return, operator]


def _pooled(servable: Servable, column: ColumnSpec, ids_RF: torch.Tensor) -> torch.Tensor:
    """Pool the embeddings of a list of ids, field by field, which needs less memory than all fields at once."""
    table = servable.tables[column.name]
    is_present_RF = ids_RF > 0
    if ids_RF.device.type == "cpu":  # in a CUDA graph, list lengths must not influence shapes
        max_count = int(is_present_RF.sum(1).max()) if len(ids_RF) else 0
        ids_RF, is_present_RF = ids_RF[:, :max_count], is_present_RF[:, :max_count]
    shape = len(ids_RF), servable.encoder_config.dim
    total_RD = torch.zeros(shape, dtype=servable.dtype, device=servable.device)
    for ids_R, is_present_R in zip(ids_RF.unbind(1), is_present_RF.unbind(1), strict=True):
        total_RD += table.rows(ids_R).to(total_RD) * is_present_R.to(total_RD)[:, None]
    if column.pooling == "sum":
        return total_RD
    return total_RD / is_present_RF.sum(1).clamp(min=1).to(total_RD)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryTokens:
    """Tokens of a history, as the model reads them."""

    history: History
    """Copy of the events that remain after the oldest events were dropped."""
    columns: tuple[NDArray[np.int64], ...]
    """All model inputs of the events, one column per input, with one value per event."""
    times_ms: NDArray[np.int64]
    """Times of the events in Unix milliseconds; zeros if the model does not read times."""
    query_times_ms: NDArray[np.int64]
    """Query time of each event in Unix milliseconds: the time for which its state predicts."""
    num_cacheable: int
    """Number of tokens whose keys and values do not depend on the request, so that the KV cache can store them."""
    tokens_per_event: int
    constant_columns: frozenset[int] = frozenset()
    """Indices of columns of user features, which have the same value for all events."""
    cut: int = 0
    """First token that all layers compute, if attention truncation drops older tokens in upper layers; the keys and
    values of later tokens depend on it."""
    prefix_records: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Records of the user tokens before the history, of shape (tokens, fields)."""
    prefix_time_ms: int = 0
    """Time and query time of the user tokens in Unix milliseconds: the time of the first event."""

    def content(self, num_tokens: int) -> bytes:
        """Serialize all model inputs of the first tokens; equal bytes mean equal cached keys and values."""
        num_events = self.num_events_within(num_tokens)
        cut = self.cut.to_bytes(8, "little") if self.cut else b""
        if len(self.prefix_records):
            cut += self.prefix_records.tobytes() + self.prefix_time_ms.to_bytes(8, "little", signed=True)
        constant_count = min(1, num_events)
        counts = [constant_count if i in self.constant_columns else num_events for i in range(len(self.columns))]
        columns = zip(self.columns, counts, strict=True)
        return b"".join([cut, *(column[:count].tobytes() for column, count in columns)])

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.prefix_records) + len(self.times_ms) * self.tokens_per_event

    def num_events_within(self, num_tokens: int) -> int:
        """Return the number of complete events in the first `num_tokens` tokens."""
        return max(0, num_tokens - len(self.prefix_records)) // self.tokens_per_event

    def event_boundary(self, end: int) -> int:
        """Round `end` down to an event boundary, at which a prefill chunk can end."""
        num_excess = max(0, end - len(self.prefix_records)) % self.tokens_per_event
        return end - num_excess

    def token_times_ms(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the times of tokens `first` to `end`, which must be event boundaries, in Unix milliseconds."""
        return self._per_token(self.times_ms, first, end)

    def token_query_times_ms(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the query times of tokens `first` to `end`, which must be event boundaries, in Unix milliseconds."""
        return self._per_token(self.query_times_ms, first, end)

    def write_seconds(self, event_times_ms: NDArray[np.int64], first: int, end: int, out: NDArray[np.float64]) -> None:
        """Write the times of tokens `first` to `end` to `out`, in seconds, without temporary arrays.

        Args:
            event_times_ms: `times_ms` or `query_times_ms`.
            first: First token.
            end: End of the tokens.
            out: Output, one value per token.
        """
        if first < len(self.prefix_records):
            np.divide(self._per_token(event_times_ms, first, end), 1000.0, out=out)
            return
        events = event_times_ms[self.num_events_within(first) : self.num_events_within(end)]
        np.divide(events, 1000.0, out=out[:: self.tokens_per_event])
        for token in range(1, self.tokens_per_event):
            out[token :: self.tokens_per_event] = out[:: self.tokens_per_event]

    @property
    def time_T(self) -> torch.Tensor:
        """Times of all tokens, float64 in seconds."""
        return _seconds(self.token_times_ms(0, self.length))

    @property
    def query_time_T(self) -> torch.Tensor:
        """Query times of all tokens, float64 in seconds."""
        return _seconds(self.token_query_times_ms(0, self.length))

    def _per_token(self, event_times_ms: NDArray[np.int64], first: int, end: int) -> NDArray[np.int64]:
        """Expand times of events to times of tokens `first` to `end`, which must be event boundaries."""
        times = event_times_ms[self.num_events_within(first) : self.num_events_within(end)]
        if self.tokens_per_event > 1:
            times = np.repeat(times, self.tokens_per_event)
        if first >= len(self.prefix_records):
            return times
        return np.concatenate([np.full(min(end, len(self.prefix_records)) - first, self.prefix_time_ms), times])


def user_column_indices(fields: Sequence[str], first: int) -> frozenset[int]:
    """Return the indices of user feature columns (`HistoryTokens.constant_columns`); `fields` start at `first`."""
    return frozenset(index for index, field in enumerate(fields, start=first) if field.startswith(USER_PREFIX))


class ModelAdapter(Protocol):
    """Adapter of one kind of model. Results are functions of the arguments and the weights of the model only."""

    servable: Servable
    encoder: nn.Module
    """Backbone of the model."""
    tokens_per_event: int
    max_events: int
    """Maximum number of history events."""
    slide_events: int
    """Stride of a full history: number of oldest events that are dropped at once."""
    appends_candidates: bool
    """Whether candidates are appended to the history as tokens; otherwise they are scored from the last state."""
    outputs: tuple[str, ...]
    """Names of the scores of a candidate."""

    def follow(self, servable: Servable) -> None:
        """Switch to a later version of the model, which shares the tables in memory."""
        ...

    def tokens(self, history: History, now_ms: int) -> HistoryTokens:
        """Convert a history to tokens for a request at `now_ms` (Unix milliseconds)."""
        ...

    def vectors(self, tokens: HistoryTokens, first: int, end: int) -> torch.Tensor:
        """Return the input vectors of tokens `first` to `end`, of shape (end - first, D).

        Both bounds must be event boundaries.
        """
        ...

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        """Return the input vectors of candidates, (C, D), or (0, D) if candidates are scored from the last state."""
        ...

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        """Return the scores of candidates, float32 of shape (C, outputs); larger is better.

        Args:
            candidates: The candidates.
            last_D: State of the last history token; None for a user without events.
            state_CD: States of the candidate tokens; unused if candidates are not appended.
        """
        ...

    def best(
        self, requests: Sequence[Candidates], last_states: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Return the best items of the catalog and their scores for each of several requests, best first.

        Args:
            requests: Number of items and filters of each request.
            last_states: State of the last history token of each request, (D,); None for a user without events.
        """
        ...


def lengths_of(adapter: ModelAdapter, num_events: int) -> tuple[int, int]:
    """Return (number of tokens, number of cacheable tokens) of a history of `num_events` events.

    The result equals that of `ModelAdapter.tokens`, but needs no history.
    """
    num_retained = num_events - history_start(num_events, adapter.max_events, adapter.slide_events)
    num_prefix = len(adapter.servable.prefix_columns) if num_retained or adapter.appends_candidates else 0
    length = num_prefix + num_retained * adapter.tokens_per_event
    num_independent = length if adapter.appends_candidates else length - 1
    return length, adapter.servable.num_cacheable_tokens(num_independent if num_retained else 0)


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Query rows of a request: the rows whose output states are needed. They share one position and time."""

    columns: tuple[NDArray[np.int64], ...]
    """Model inputs of the rows, in the same columns as those of events."""
    time_ms: int
    query_time_ms: int
    """Query time in Unix milliseconds."""
    is_last_event: bool
    """Whether the single row is the last event of the history."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.columns[0])


class PagedModelAdapter(ModelAdapter, Protocol):
    """Adapter whose batches are computed in one pass over the paged KV cache, on the records of many users at once.

    Records have shape (R, fields) and describe an event or a query row by the first columns of `HistoryTokens`.
    """

    @property
    def num_fields(self) -> int:
        """Number of fields of a record."""
        ...

    @property
    def action_vectors(self) -> torch.Tensor:
        """Action embeddings of shape (bits, D); an action token is the sum over the bits in field 1 of its record."""
        ...

    def query_rows(self, tokens: HistoryTokens, candidates: Candidates) -> QueryRows | None:
        """Return the query rows of a request, or None if there are none (a user without events)."""
        ...

    def records(self, records: NDArray[np.int64]) -> torch.Tensor:
        """Copy records to the device on which their ids are looked up."""
        ...

    def content(self, records: torch.Tensor) -> torch.Tensor:
        """Return the input vectors of records, (R, D or more); further columns are inputs of the scoring head."""
        ...

    def outcome(self, state_CD: torch.Tensor, content_CD: torch.Tensor) -> torch.Tensor:
        """Return the scores of candidates, (C, outputs), or the states with which the index is searched."""
        ...


def make_adapter(servable: Servable, slide_events: int | None = None) -> ModelAdapter:
    """Create the adapter of a model.

    Args:
        servable: The model.
        slide_events: Stride of a full history in events; None uses the stride with which the model was evaluated.

    Raises:
        UserError: The task of the model cannot be served.
    """
    serving = servable.serving
    task = servable.spec.task
    if slide_events is None:
        slide_events = serving.slide_events(task)
    adapter: ModelAdapter = serving.make_adapter(
        servable, resolve_slide_events(serving.max_history_events(task), slide_events)
    )
    return adapter


def _seconds(times_ms: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(times_ms / 1000.0)
