"""Adapter of retrieval models: one token per event, and a search of the item index.

The score of an item is the product of its vector with the state of the last token, whose query time is the time of the
request. Therefore the last event is computed for each request, and the cached prefix ends before it.

Legend: D model width, C candidates, B requests, K best.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.data.dataset_card import DatasetCard
from nestrec.data.dataset_schema import EVENT_PREFIX, ITEM_PREFIX
from nestrec.data.flat_arrays import history_start
from nestrec.data.samples.feature_inputs import Column, feature_column, num_prefix_tokens
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX, context_column, retrieval_features
from nestrec.models.heads import RetrievalModel
from nestrec.serving.model.item_search import ExactSearch, ExcludedRows, ItemSearch, order_exactly
from nestrec.serving.model.model_adapter import (
    HistoryTokens,
    QueryRows,
    UserPrefixTokens,
    column_vectors,
    field_slices,
    user_column_indices,
)
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ServableSpec
from nestrec.serving.model.served_tables import DeviceTable
from nestrec.serving.model.serving_spec import ServingSpec
from nestrec.tasks.retrieval_task import RetrievalTaskConfig


class RetrievalAdapter:
    """Adapter of models that multiply states with item vectors: a `RetrievalModel` of a task with a `history`."""

    tokens_per_event: int = 1
    appends_candidates: bool = False
    outputs: tuple[str, ...] = ("score",)

    def __init__(self, servable: Servable, slide_events: int):
        self.servable = servable
        self.slide_events = slide_events
        self._model, task = cast(RetrievalModel, servable.model), cast(RetrievalTaskConfig, servable.spec.task)
        self.encoder = self._model.encoder
        self._queries_next = task.history.query_time == "next"
        self._uses_time = servable.reads_times
        self.max_events = task.history.max_events
        self._columns = [c for c in servable.spec.columns if not c.name.startswith(ITEM_PREFIX)]
        self._feature_fields = [field for column in self._columns for field in column.fields]
        self._field_slices = field_slices(self._columns, first=1)
        self._constant_columns = user_column_indices(self._feature_fields, first=1)
        self._user_prefix = UserPrefixTokens(servable, self._field_slices)

    def follow(self, servable: Servable) -> None:
        if servable.search is not self.servable.search:  # otherwise the search reads the shared index
            self.__dict__.pop("_search", None)
        self.servable = servable

    def tokens(self, history: History, now_ms: int) -> HistoryTokens:
        history = history.copied(history_start(len(history), self.max_events, self.slide_events))
        times = history.times_ms if self._uses_time else np.zeros(len(history), np.int64)
        query_times = times
        if self._queries_next and self._uses_time:
            query_times = np.empty_like(times)
            query_times[:-1] = times[1:]
            query_times[-1:] = now_ms
        features = [self._values(field, history) for field in self._feature_fields]
        prefix_records = self._user_prefix.records(history, self.num_fields)[: None if len(history) else 0]
        return HistoryTokens(
            history=history,
            columns=(
                history.items,
                *features,
                *self._user_prefix.token_number_columns(len(history)),
                times,
                query_times,
            ),
            times_ms=times,
            query_times_ms=query_times,
            num_cacheable=self.servable.num_cacheable_tokens(max(len(prefix_records) + len(history) - 1, 0)),
            tokens_per_event=self.tokens_per_event,
            constant_columns=self._constant_columns,
            cut=self.servable.cut(len(prefix_records) + len(history)),
            prefix_records=prefix_records,
            prefix_time_ms=int(times[0]) if len(times) else 0,
        )

    def vectors(self, tokens: HistoryTokens, first: int, end: int) -> torch.Tensor:
        columns = tokens.columns[: self.num_fields]
        events = slice(tokens.num_events_within(first), tokens.num_events_within(end))
        records = np.stack([column[events] for column in columns], axis=1)
        if first < len(tokens.prefix_records):
            records = np.concatenate([tokens.prefix_records[first:end], records])
        return self.content(self.records(records))

    def _values(self, name: str, history: History) -> NDArray[np.int64]:
        """Return a field of all events; for context features, the value of the following event or of the request."""
        if not name.startswith(CONTEXT_PREFIX):
            return history.features[name]
        event_name = EVENT_PREFIX + name.removeprefix(CONTEXT_PREFIX)
        return np.append(history.features[event_name], history.query_features.get(event_name, 0))[1:]

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self.rows(np.zeros(0, np.int64))

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        if last_D is None:
            return torch.zeros(len(candidates), 1, device=self.servable.device)
        vectors = self._model.item_vectors(self.rows(candidates.items))
        return (vectors.double() @ self.query(last_D[None])[0].double())[:, None].float()

    def best(
        self, requests: Sequence[Candidates], last_states: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        return self.best_of_queries(self.queries(last_states), requests)

    def best_of_queries(
        self, queries_BD: torch.Tensor, requests: Sequence[Candidates]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Return the best items and their scores, of shape (items, 1), for each request."""
        results: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        unfiltered = [b for b, request in enumerate(requests) if request.allowed is None]
        if unfiltered:
            excluded = ExcludedRows.of([requests[b].excluded for b in unfiltered])
            rows, scores = self._search.best(
                queries_BD[unfiltered], max(requests[b].num_best for b in unfiltered), excluded
            )
            for b, rows_K, scores_K in zip(unfiltered, rows, scores, strict=True):
                results[b] = trim_results(rows_K, scores_K, requests[b].num_best)
        for b, request in enumerate(requests):
            if request.allowed is not None:
                results[b] = self._best_of_allowed(queries_BD[b : b + 1], request)
        return [results[b] for b in range(len(requests))]

    def _best_of_allowed(
        self, query_1D: torch.Tensor, request: Candidates
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Score all allowed items exactly, without a search of the index."""
        assert request.allowed is not None
        assert self.servable.index is not None
        allowed_rows = np.setdiff1d(request.allowed[request.allowed > 0], request.excluded) - 1
        rows_1K = torch.from_numpy(allowed_rows).to(query_1D.device)[None]
        rows, scores = order_exactly(self.servable.index, query_1D, rows_1K, request.num_best)
        return trim_results(rows[0], scores[0], request.num_best)

    @cached_property
    def _search(self) -> ItemSearch:
        index = self.servable.index
        assert index is not None
        if isinstance(index, DeviceTable) and index.weight.is_cuda:
            from nestrec.serving.model.item_search import GraphSearch

            return GraphSearch(index)
        if isinstance(index, DeviceTable) and self.servable.search is not None:
            from nestrec.serving.model.faiss_search import FaissSearch

            return FaissSearch(index.weight, self.servable.spec.search, self.servable.search)
        return ExactSearch(index)

    def queries(self, last_states: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the query vectors of requests, (B, D); zeros for users without events."""
        zeros_D = torch.zeros(self.servable.encoder_config.dim, dtype=self.servable.dtype, device=self.servable.device)
        if not last_states:
            return zeros_D.new_zeros(0, len(zeros_D))
        queries_BD = self.query(torch.stack([zeros_D if state is None else state for state in last_states]))
        missing = [b for b, state in enumerate(last_states) if state is None]
        return queries_BD.index_fill(0, torch.tensor(missing, device=zeros_D.device), 0.0) if missing else queries_BD

    def query(self, last_BD: torch.Tensor) -> torch.Tensor:
        """Return the query vectors of last states, (B, D); their products with item vectors are the scores."""
        return self._model.item_vectors(last_BD) / self._model.similarity.temperature

    # `PagedModelAdapter`. Fields of a record: item, features of the event and its context, and the number of the user
    # token if the model has user tokens.

    @property
    def num_fields(self) -> int:
        """Number of fields of a record."""
        return 1 + len(self._feature_fields) + bool(self._user_prefix)

    @property
    def action_vectors(self) -> torch.Tensor:
        """Empty tensor: events have no action tokens."""
        return torch.zeros(0, self.servable.encoder_config.dim, dtype=self.servable.dtype, device=self.servable.device)

    def query_rows(self, tokens: HistoryTokens, candidates: Candidates) -> QueryRows | None:
        """Return the last event, with the time of the request as query time; None for a user without events."""
        if not tokens.length:
            return None
        last = tuple(column[-1:] for column in tokens.columns)
        return QueryRows(last, int(tokens.times_ms[-1]), int(tokens.query_times_ms[-1]), is_last_event=True)

    def records(self, records: NDArray[np.int64]) -> torch.Tensor:
        """Copy records to the device on which their ids are looked up."""
        return torch.from_numpy(np.ascontiguousarray(records)).to(self.servable.lookup_device)

    def content(self, records: torch.Tensor) -> torch.Tensor:
        """Return the sums of the item vectors and the feature vectors of records, of shape (R, D)."""
        total = self.servable.tables["items"].rows(records[:, 0]).to(self.servable.dtype)
        for column in self._columns:
            if column.name not in self._user_prefix.names:
                total += column_vectors(self.servable, column, records[:, self._field_slices[column.name]])
        return self._user_prefix.insert_prefix_vectors(self.servable, records, total)

    def outcome(self, state_CD: torch.Tensor, content_CD: torch.Tensor) -> torch.Tensor:
        """Return the states; `best` and `scores` search and score with them."""
        return state_CD

    def rows(self, items: NDArray[np.int64]) -> torch.Tensor:
        """Return the input vectors of items, of shape (items, D)."""
        return self.servable.tables["items"].rows(torch.from_numpy(np.ascontiguousarray(items))).to(self.servable.dtype)


def trim_results(
    rows_K: NDArray[np.int64], scores_K: NDArray[np.float32], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Convert index rows to items and drop padding and results beyond `limit`; scores get the shape (items, 1)."""
    count = min(limit, int((rows_K >= 0).sum()))
    return rows_K[:count] + 1, scores_K[:count, None]


def _model(spec: ServableSpec) -> RetrievalModel:
    task = cast(RetrievalTaskConfig, spec.task)
    model = RetrievalModel(task.encoder, task.similarity, _num_prefix(task))
    model.to_width = spec.to_width(task.encoder.dim)
    return model


def _num_prefix(task: RetrievalTaskConfig) -> int:
    return num_prefix_tokens(task.inputs.user_feature_mode, len(task.inputs.user_features))


def _columns(task: RetrievalTaskConfig, card: DatasetCard) -> tuple[Column, ...]:
    features = retrieval_features(card, task.inputs)
    columns = [feature_column(f) for owner in ("event", "user", "item") for f in features[owner]]
    return (*columns, *(context_column(f) for f in features["context"]))


SERVING = ServingSpec(
    role="retrieval",
    model=_model,
    columns=_columns,
    item_content=lambda task, engine, items: task.item_content(engine, items),
    make_adapter=RetrievalAdapter,
    max_history_events=lambda task: task.history.max_events,
    slide_events=lambda task: task.history.slide_events,
    index=lambda model, rows_ND: model.item_vectors(rows_ND),
    num_prefix=_num_prefix,
    needs_event=True,
    reads_candidate_features=False,
)
