"""Adapter of ranking models: content and action tokens per event, and one content token per candidate.

The head scores the candidate tokens. The query time of every token is its own time, so the complete history can be
cached as a prefix.

Legend: T tokens, D model width, C candidates, R records, E events.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.dataset_schema import ITEM_PREFIX
from nestrec.data.flat_arrays import history_start
from nestrec.data.samples.feature_inputs import num_prefix_tokens
from nestrec.data.samples.ranking_collator import feature_columns
from nestrec.models.dlrm import Interactions
from nestrec.models.heads import RankingModel
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
from nestrec.serving.model.servable_spec import ColumnSpec, ServableSpec
from nestrec.serving.model.serving_spec import ServingSpec
from nestrec.tasks.ranking_task import RankingTaskConfig

_NEEDS_RETRIEVAL = "serve a retrieval model as well, or send candidates"


class RankingAdapter:
    """Adapter of models that score each candidate as an appended token: a `RankingModel` of a task with `inputs`."""

    tokens_per_event: int = 2
    appends_candidates: bool = True

    def __init__(self, servable: Servable, slide_events: int):
        self.servable = servable
        self.slide_events = slide_events
        self._model, task = cast(RankingModel, servable.model), cast(RankingTaskConfig, servable.spec.task)
        self.encoder = self._model.encoder
        self.outputs = task.inputs.labels
        self.max_events = task.history.max_events - 1
        excluded_prefix = ITEM_PREFIX if servable.spec.folds_items else "\0"
        self._columns = [c for c in servable.spec.columns if not c.name.startswith(excluded_prefix)]
        record_columns = [c for c in self._columns if c.name not in servable.item_columns]
        self._feature_fields = [field for column in record_columns for field in column.fields]
        self._field_slices = field_slices(record_columns, first=3)
        self._constant_columns = user_column_indices(self._feature_fields, first=3)
        self._user_prefix = UserPrefixTokens(servable, self._field_slices)
        self._uses_time = servable.reads_times

    def follow(self, servable: Servable) -> None:
        self.servable = servable

    def tokens(self, history: History, now_ms: int) -> HistoryTokens:
        history = history.copied(history_start(len(history), self.max_events, self.slide_events))
        times = history.times_ms if self._uses_time else np.zeros(len(history), np.int64)
        features = [history.features[name] for name in self._feature_fields]
        length = len(self._user_prefix) + 2 * len(history)
        first_ms = int(times[0]) if len(times) else now_ms * self._uses_time
        return HistoryTokens(
            history=history,
            columns=(
                history.items,
                history.actions,
                times,
                *features,
                *self._user_prefix.token_number_columns(len(history)),
            ),
            times_ms=times,
            query_times_ms=times,
            # Without events, the time of the user tokens is the time of the request, so they are not cacheable.
            num_cacheable=self.servable.num_cacheable_tokens(length if len(history) else 0),
            tokens_per_event=self.tokens_per_event,
            constant_columns=self._constant_columns,
            cut=self.servable.cut(length + 2),
            prefix_records=self._user_prefix.records(history, self.num_fields),
            prefix_time_ms=first_ms,
        )

    def vectors(self, tokens: HistoryTokens, first: int, end: int) -> torch.Tensor:
        first_event, end_event = tokens.num_events_within(first), tokens.num_events_within(end)
        records = self.records(
            _stack_columns(end_event - first_event, *(column[first_event:] for column in tokens.columns))
        )
        event_vectors = self.event_tokens(records, self._content(records))
        if first >= len(tokens.prefix_records):
            return event_vectors
        prefix_vectors = self._user_prefix.vectors(self.servable, self.records(tokens.prefix_records[first:end]))
        return torch.cat([prefix_vectors, event_vectors])

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self._candidate_content(candidates)[:, : self.servable.encoder_config.dim]

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        return self.logits(state_CD, self._candidate_content(candidates))

    def _candidate_content(self, candidates: Candidates) -> torch.Tensor:
        return self._content(self.records(_stack_columns(len(candidates), *self.candidate_columns(candidates))))

    def best(
        self, requests: Sequence[Candidates], last_states: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        raise UserError(
            "does not have a retrieval index", option="model", value=self.servable.spec.name, remedy=_NEEDS_RETRIEVAL
        )

    # `PagedModelAdapter`. Fields of a record: item, action bits, time, features, and the number of the user token if
    # the model has user tokens.

    @property
    def num_fields(self) -> int:
        """Number of fields of a record."""
        return 3 + len(self._feature_fields) + bool(self._user_prefix)

    def candidate_columns(self, candidates: Candidates) -> tuple[NDArray[np.int64], ...]:
        """Return the model inputs of candidates, in the same columns as those of events."""
        zeros = np.zeros(len(candidates), np.int64)
        features = [candidates.features[name] for name in self._feature_fields]
        return candidates.items, zeros, zeros, *features, *self._user_prefix.token_number_columns(len(candidates))

    def query_rows(self, tokens: HistoryTokens, candidates: Candidates) -> QueryRows:
        """Return the candidates, with the time of the request as time and query time."""
        now_ms = candidates.now_ms
        return QueryRows(self.candidate_columns(candidates), now_ms, now_ms, is_last_event=False)

    def outcome(self, state_CD: torch.Tensor, content_CD: torch.Tensor) -> torch.Tensor:
        return self.logits(state_CD, content_CD)

    def content(self, records: torch.Tensor) -> torch.Tensor:
        """Return the input vectors of events, candidates and user tokens, (R, D or more); see `_content`."""
        return self._user_prefix.insert_prefix_vectors(self.servable, records, self._content(records))

    def _content(self, records: torch.Tensor) -> torch.Tensor:
        """Return the sums of item and feature vectors, (R, D or more), followed by feature interactions if the head
        reads them.

        The order of summation is that of training, so that the results are bitwise identical.
        """
        if self._model.interactions is not None:
            return self._with_interactions(records, self._model.interactions)
        total = self.servable.tables["items"].rows(records[:, 0]).to(self.servable.dtype)
        for column in self._columns:
            if column.name not in self._user_prefix.names:
                total += self._vectors(column, records)
        return total

    def _with_interactions(self, records: torch.Tensor, interactions: Interactions) -> torch.Tensor:
        """Return sums and interactions of features in the order of training: item id, events, users, item features."""
        servable = self.servable
        item_RW = servable.tables["items"].rows(records[:, 0]).to(servable.dtype)
        item_id, *item_features = item_RW.split(servable.encoder_config.dim, dim=1)
        features = {column.name: self._vectors(column, records).to(item_RW) for column in self._columns}
        total = item_id + 0
        for vectors in (*(v for name, v in features.items() if name not in self._user_prefix.names), *item_features):
            total += vectors
        return torch.cat(
            [total, interactions(torch.stack([item_id, *features.values(), *item_features], dim=1))], dim=1
        )

    def _vectors(self, column: ColumnSpec, records: torch.Tensor) -> torch.Tensor:
        column_slice = self._field_slices.get(column.name)
        if column_slice is None:
            return column_vectors(self.servable, column, self.servable.item_columns[column.name][records[:, :1]])
        return column_vectors(self.servable, column, records[:, column_slice])

    def event_tokens(self, records: torch.Tensor, content_EW: torch.Tensor) -> torch.Tensor:
        """Return the alternating content and action tokens of events, of shape (2E, D)."""
        action_ED = self.action(records)
        return torch.stack([content_EW[:, : action_ED.shape[1]], action_ED], dim=1).flatten(0, 1)

    def action(self, records: torch.Tensor) -> torch.Tensor:
        """Return the action tokens of records, (R, D): the sums of the embeddings of the set action bits."""
        weight = self._model.action
        bit = torch.arange(weight.shape[0], device=weight.device)
        return ((records[:, 1, None].to(weight.device) >> bit) & 1).to(weight.dtype) @ weight

    @property
    def action_vectors(self) -> torch.Tensor:
        """Action embeddings of shape (bits, D), which `action` sums."""
        return self._model.action

    def logits(self, state_CD: torch.Tensor, content_CW: torch.Tensor) -> torch.Tensor:
        """Return the scores of candidates, float32 of shape (C, outputs)."""
        logits: torch.Tensor = self._model.head(torch.cat([state_CD, content_CW], dim=1))
        return logits.float()

    def records(self, records: NDArray[np.int64]) -> torch.Tensor:
        """Copy records to the device on which their ids are looked up."""
        return torch.from_numpy(np.ascontiguousarray(records)).to(self.servable.lookup_device)


def _stack_columns(count: int, *columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Stack the first `count` values of columns as records; faster than `np.stack`, which checks shapes and types."""
    records = np.empty((count, len(columns)), np.int64)
    for index, column in enumerate(columns):
        records[:, index] = column[:count]
    return records


def _model(spec: ServableSpec) -> RankingModel:
    task = cast(RankingTaskConfig, spec.task)
    num_bits = max(spec.action_bits.values()).bit_length()
    model = RankingModel(
        task.encoder,
        task.head,
        num_tasks=len(task.inputs.labels),
        num_action_bits=num_bits,
        num_prefix=_num_prefix(task),
        num_features=1 + len(spec.columns),
    )
    model.to_width = spec.to_width(task.encoder.dim)
    return model


def _num_prefix(task: RankingTaskConfig) -> int:
    return num_prefix_tokens(task.inputs.user_feature_mode, len(task.inputs.user_features))


SERVING = ServingSpec(
    role="ranking",
    model=_model,
    make_adapter=RankingAdapter,
    max_history_events=lambda task: task.history.max_events,
    slide_events=lambda task: task.history.slide_events,
    columns=lambda task, card: feature_columns(card, task.inputs),
    item_content=lambda task, engine, items: task.item_content(engine, items),
    stores_item_parts=lambda task: task.head.interactions,
    num_prefix=_num_prefix,
    reads_actions=True,
)
