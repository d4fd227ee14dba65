"""The retrieval form: one token an event.

A candidate's score is its product with the state of the last token, whose query time is the request's. So the last
event is computed with each request, and the prefix ends before it.

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
from nestrec.data.samples.feature_inputs import Column, column_of, num_prefix
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX, context_column, features_of
from nestrec.models.heads import RetrievalModel
from nestrec.serving.model.item_search import ExactSearch, Excluded, ItemSearch, exactly_ordered
from nestrec.serving.model.model_adapter import (
    HistoryTokens,
    QueryRows,
    UserPrefixTokens,
    column_vectors,
    of_users,
    places_of,
)
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ServableSpec
from nestrec.serving.model.served_tables import DeviceTable
from nestrec.serving.model.serving_spec import ServingSpec
from nestrec.tasks.retrieval_task import RetrievalTaskConfig


class RetrievalAdapter:
    """Models that multiply states with item vectors: a `RetrievalModel`, and a task with a `history`."""

    tokens_an_event: int = 1
    appends_candidates: bool = False
    outputs: tuple[str, ...] = ("score",)

    def __init__(self, servable: Servable, slide_events: int):
        self.servable = servable
        self.slide_events = slide_events
        self._model, task = cast(RetrievalModel, servable.model), cast(RetrievalTaskConfig, servable.spec.task)
        self.encoder = self._model.encoder
        self._asks_next = task.history.query_time == "next"
        self._uses_time = servable.reads_times
        self.max_events = task.history.max_length
        self._columns = [c for c in servable.spec.columns if not c.name.startswith(ITEM_PREFIX)]
        self._given = [field for column in self._columns for field in column.fields]
        self._places = places_of(self._columns, first=1)
        self._alike = of_users(self._given, first=1)
        self._before = UserPrefixTokens(servable, self._places)

    def follow(self, servable: Servable) -> None:
        if servable.search is not self.servable.search:  # else it reads the index where it lies
            self.__dict__.pop("_search", None)
        self.servable = servable

    def tokens(self, history: History, now_ms: int) -> HistoryTokens:
        history = history.copied(history_start(len(history), self.max_events, self.slide_events))
        times = history.times_ms if self._uses_time else np.zeros(len(history), np.int64)
        asked = times
        if self._asks_next and self._uses_time:
            asked = np.empty_like(times)
            asked[:-1] = times[1:]
            asked[-1:] = now_ms
        given = [self._values(field, history) for field in self._given]
        before = self._before.records(history, self.num_fields)[: None if len(history) else 0]
        return HistoryTokens(
            history=history,
            columns=(history.items, *given, *self._before.numbers(len(history)), times, asked),
            times_ms=times,
            asked_ms=asked,
            num_cacheable=self.servable.cacheable(max(len(before) + len(history) - 1, 0)),
            tokens_an_event=self.tokens_an_event,
            alike=self._alike,
            cut=self.servable.cut(len(before) + len(history)),
            before=before,
            before_ms=int(times[0]) if len(times) else 0,
        )

    def vectors(self, tokens: HistoryTokens, first: int, end: int) -> torch.Tensor:
        columns = tokens.columns[: self.num_fields]
        events = slice(tokens.events_within(first), tokens.events_within(end))
        records = np.stack([column[events] for column in columns], axis=1)
        if first < len(tokens.before):
            records = np.concatenate([tokens.before[first:end], records])
        return self.content(self.records(records))

    def _values(self, name: str, history: History) -> NDArray[np.int64]:
        """Of each event; of the context, those of the event after it, and of the request in the end."""
        if not name.startswith(CONTEXT_PREFIX):
            return history.features[name]
        own = EVENT_PREFIX + name.removeprefix(CONTEXT_PREFIX)
        return np.append(history.features[own], history.asked.get(own, 0))[1:]

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self.rows(np.zeros(0, np.int64))

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        if last_D is None:
            return torch.zeros(len(candidates), 1, device=self.servable.device)
        vectors = self._model.item_vectors(self.rows(candidates.items))
        return (vectors.double() @ self.query(last_D[None])[0].double())[:, None].float()

    def best(
        self, asked: Sequence[Candidates], last: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        return self.best_of_queries(self.queries(last), asked)

    def best_of_queries(
        self, queries_BD: torch.Tensor, asked: Sequence[Candidates]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Items and (items, 1) scores for each request."""
        found: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        open_ones = [b for b, one in enumerate(asked) if one.allowed is None]
        if open_ones:
            excluded = Excluded.of([asked[b].excluded for b in open_ones])
            rows, scores = self._search.best(queries_BD[open_ones], max(asked[b].num_best for b in open_ones), excluded)
            for b, rows_K, scores_K in zip(open_ones, rows, scores, strict=True):
                found[b] = shortened(rows_K, scores_K, asked[b].num_best)
        for b, one in enumerate(asked):
            if one.allowed is not None:
                found[b] = self._best_of_allowed(queries_BD[b : b + 1], one)
        return [found[b] for b in range(len(asked))]

    def _best_of_allowed(
        self, query_1D: torch.Tensor, asked: Candidates
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Of a list all are ordered exactly."""
        assert asked.allowed is not None
        assert self.servable.index is not None
        listed = np.setdiff1d(asked.allowed[asked.allowed > 0], asked.excluded) - 1
        rows_1K = torch.from_numpy(listed).to(query_1D.device)[None]
        rows, scores = exactly_ordered(self.servable.index, query_1D, rows_1K, asked.num_best)
        return shortened(rows[0], scores[0], asked.num_best)

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

    def queries(self, last: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(B, D) what is multiplied with item vectors; zeros where there is no last state."""
        nobody = torch.zeros(self.servable.encoder_config.dim, dtype=self.servable.dtype, device=self.servable.device)
        if not last:
            return nobody.new_zeros(0, len(nobody))
        queries_BD = self.query(torch.stack([nobody if one is None else one for one in last]))
        missing = [b for b, one in enumerate(last) if one is None]
        return queries_BD.index_fill(0, torch.tensor(missing, device=nobody.device), 0.0) if missing else queries_BD

    def query(self, last_BD: torch.Tensor) -> torch.Tensor:
        """(B, D) what is multiplied with item vectors."""
        return self._model.item_vectors(last_BD) / self._model.similarity.temperature

    # The same in steps over the records of many users at once: (R, fields) item, features of the event and its context,
    # and which token before a history it is where there are any.

    @property
    def num_fields(self) -> int:
        """of a record"""
        return 1 + len(self._given) + bool(self._before)

    @property
    def action_vectors(self) -> torch.Tensor:
        """None: events have one token."""
        return torch.zeros(0, self.servable.encoder_config.dim, dtype=self.servable.dtype, device=self.servable.device)

    def asked(self, tokens: HistoryTokens, candidates: Candidates) -> QueryRows | None:
        """The last event, which asks at the time of the request; none of a user without events."""
        if not tokens.length:
            return None
        last = tuple(column[-1:] for column in tokens.columns)
        return QueryRows(last, int(tokens.times_ms[-1]), int(tokens.asked_ms[-1]), is_last_event=True)

    def records(self, records: NDArray[np.int64]) -> torch.Tensor:
        """Records where their ids are looked up."""
        return torch.from_numpy(np.ascontiguousarray(records)).to(self.servable.lookup_device)

    def content(self, records: torch.Tensor) -> torch.Tensor:
        """(R, D) rows of the items, and of what is read beside them"""
        total = self.servable.tables["items"].rows(records[:, 0]).to(self.servable.dtype)
        for column in self._columns:
            if column.name not in self._before.names:
                total += column_vectors(self.servable, column, records[:, self._places[column.name]])
        return self._before.put(self.servable, records, total)

    def outcome(self, state_CD: torch.Tensor, content_CD: torch.Tensor) -> torch.Tensor:
        """The states: what is found with them is the business of `best` and `scores`."""
        return state_CD

    def rows(self, items: NDArray[np.int64]) -> torch.Tensor:
        """(items, D) vectors of items as the encoder reads them."""
        return self.servable.tables["items"].rows(torch.from_numpy(np.ascontiguousarray(items))).to(self.servable.dtype)


def shortened(
    rows_K: NDArray[np.int64], scores_K: NDArray[np.float32], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Items and (items, 1) scores of the best rows that there are."""
    count = min(most, int((rows_K >= 0).sum()))
    return rows_K[:count] + 1, scores_K[:count, None]


def _model(spec: ServableSpec) -> RetrievalModel:
    task = cast(RetrievalTaskConfig, spec.task)
    model = RetrievalModel(task.encoder, task.similarity, _num_prefix(task))
    model.to_width = spec.to_width(task.encoder.dim)
    return model


def _num_prefix(task: RetrievalTaskConfig) -> int:
    return num_prefix(task.inputs.user_tokens, len(task.inputs.user_features))


def _columns(task: RetrievalTaskConfig, card: DatasetCard) -> tuple[Column, ...]:
    features = features_of(card, task.inputs)
    own = [column_of(f) for owner in ("event", "user", "item") for f in features[owner]]
    return (*own, *(context_column(f) for f in features["context"]))


SERVING = ServingSpec(
    role="retrieval",
    model=_model,
    columns=_columns,
    item_content=lambda task, engine, items: task.item_content(engine, items),
    form=RetrievalAdapter,
    longest_history=lambda task: task.history.max_length,
    slide_events=lambda task: task.history.slide_events,
    index=lambda model, rows_ND: model.item_vectors(rows_ND),
    num_prefix=_num_prefix,
    needs_event=True,
    reads_candidate_features=False,
)
