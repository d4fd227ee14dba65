"""The ranking form: content and action tokens of each event, and each candidate is one more content token.

The head scores candidates. Every token asks at its own time, so the prefix is the whole history.

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
from nestrec.data.samples.feature_inputs import num_prefix
from nestrec.data.samples.ranking_collator import checked_columns
from nestrec.models.dlrm import Interactions
from nestrec.models.heads import RankingModel
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
from nestrec.serving.model.servable_spec import ColumnSpec, ServableSpec
from nestrec.serving.model.serving_spec import ServingSpec
from nestrec.tasks.ranking_task import RankingTaskConfig

_NEEDS_RETRIEVAL = "serve a retrieval model beside it, or give candidates"


class RankingAdapter:
    """Models that score each candidate as one more token: a `RankingModel`, and a task with `inputs`."""

    tokens_an_event: int = 2
    appends_candidates: bool = True

    def __init__(self, servable: Servable, slide_events: int):
        self.servable = servable
        self.slide_events = slide_events
        self._model, task = cast(RankingModel, servable.model), cast(RankingTaskConfig, servable.spec.task)
        self.encoder = self._model.encoder
        self.outputs = task.inputs.labels
        self.max_events = task.inputs.max_events - 1
        folded = ITEM_PREFIX if servable.spec.folds_items else "\0"
        self._columns = [c for c in servable.spec.columns if not c.name.startswith(folded)]
        given = [c for c in self._columns if c.name not in servable.item_columns]
        self._given = [field for column in given for field in column.fields]
        self._places = places_of(given, first=3)
        self._alike = of_users(self._given, first=3)
        self._before = UserPrefixTokens(servable, self._places)
        self._uses_time = servable.reads_times

    def follow(self, servable: Servable) -> None:
        self.servable = servable

    def tokens(self, history: History, now_ms: int) -> HistoryTokens:
        history = history.copied(history_start(len(history), self.max_events, self.slide_events))
        times = history.times_ms if self._uses_time else np.zeros(len(history), np.int64)
        given = [history.features[name] for name in self._given]
        length = len(self._before) + 2 * len(history)
        first_ms = int(times[0]) if len(times) else now_ms * self._uses_time
        return HistoryTokens(
            history=history,
            columns=(history.items, history.actions, times, *given, *self._before.numbers(len(history))),
            times_ms=times,
            asked_ms=times,
            # What stands before no event at all has the time of the request.
            num_cacheable=self.servable.cacheable(length if len(history) else 0),
            tokens_an_event=self.tokens_an_event,
            alike=self._alike,
            cut=self.servable.cut(length + 2),
            before=self._before.records(history, self.num_fields),
            before_ms=first_ms,
        )

    def vectors(self, tokens: HistoryTokens, first: int, end: int) -> torch.Tensor:
        since, until = tokens.events_within(first), tokens.events_within(end)
        records = self.records(_side_by_side(until - since, *(column[since:] for column in tokens.columns)))
        found = self.event_tokens(records, self._content(records))
        if first >= len(tokens.before):
            return found
        before = self._before.vectors(self.servable, self.records(tokens.before[first:end]))
        return torch.cat([before, found])

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self._of_candidates(candidates)[:, : self.servable.encoder_config.dim]

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        return self.logits(state_CD, self._of_candidates(candidates))

    def _of_candidates(self, candidates: Candidates) -> torch.Tensor:
        return self._content(self.records(_side_by_side(len(candidates), *self.candidate_columns(candidates))))

    def best(
        self, asked: Sequence[Candidates], last: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        raise UserError("has no retrieval index", option="model", value=self.servable.spec.name, remedy=_NEEDS_RETRIEVAL)

    # The same in steps over the records of many users at once: (R, fields) item, action bits, time, given features,
    # and which token before a history it is where there are any.

    @property
    def num_fields(self) -> int:
        """of a record"""
        return 3 + len(self._given) + bool(self._before)

    def candidate_columns(self, candidates: Candidates) -> tuple[NDArray[np.int64], ...]:
        """Of candidates, like those of events."""
        none = np.zeros(len(candidates), np.int64)
        given = [candidates.features[name] for name in self._given]
        return candidates.items, none, none, *given, *self._before.numbers(len(candidates))

    def asked(self, tokens: HistoryTokens, candidates: Candidates) -> QueryRows:
        """The candidates, which ask when they would be shown."""
        now_ms = candidates.now_ms
        return QueryRows(self.candidate_columns(candidates), now_ms, now_ms, is_last_event=False)

    def outcome(self, state_CD: torch.Tensor, content_CD: torch.Tensor) -> torch.Tensor:
        return self.logits(state_CD, content_CD)

    def content(self, records: torch.Tensor) -> torch.Tensor:
        """(R, D or more) of records of any kind; see `_content`."""
        return self._before.put(self.servable, records, self._content(records))

    def _content(self, records: torch.Tensor) -> torch.Tensor:
        """(R, D or more) sum of the vectors of item and categories, in the order of training, and behind it their
        interactions where the head reads them."""
        if self._model.interactions is not None:
            return self._with_interactions(records, self._model.interactions)
        total = self.servable.tables["items"].rows(records[:, 0]).to(self.servable.dtype)
        for column in self._columns:
            if column.name not in self._before.names:
                total += self._vectors(column, records)
        return total

    def _with_interactions(self, records: torch.Tensor, interactions: Interactions) -> torch.Tensor:
        """Features in the order of training: the item's id, events, users, and what else is known of the item."""
        servable = self.servable
        item_RW = servable.tables["items"].rows(records[:, 0]).to(servable.dtype)
        item_id, *of_item = item_RW.split(servable.encoder_config.dim, dim=1)
        given = {column.name: self._vectors(column, records).to(item_RW) for column in self._columns}
        total = item_id + 0
        for vectors in (*(v for name, v in given.items() if name not in self._before.names), *of_item):
            total += vectors
        return torch.cat([total, interactions(torch.stack([item_id, *given.values(), *of_item], dim=1))], dim=1)

    def _vectors(self, column: ColumnSpec, records: torch.Tensor) -> torch.Tensor:
        where = self._places.get(column.name)
        if where is None:
            return column_vectors(self.servable, column, self.servable.item_columns[column.name][records[:, :1]])
        return column_vectors(self.servable, column, records[:, where])

    def event_tokens(self, records: torch.Tensor, content_EW: torch.Tensor) -> torch.Tensor:
        """(2E, D) content and action tokens of events by turns."""
        action_ED = self.action(records)
        return torch.stack([content_EW[:, : action_ED.shape[1]], action_ED], dim=1).flatten(0, 1)

    def action(self, records: torch.Tensor) -> torch.Tensor:
        """(R, D) sum of the vectors of the bits that are set."""
        weight = self._model.action
        bit = torch.arange(weight.shape[0], device=weight.device)
        return ((records[:, 1, None].to(weight.device) >> bit) & 1).to(weight.dtype) @ weight

    @property
    def action_vectors(self) -> torch.Tensor:
        """(bits, D) of which `action` takes sums"""
        return self._model.action

    def logits(self, state_CD: torch.Tensor, content_CW: torch.Tensor) -> torch.Tensor:
        """(C, outputs) float32"""
        logits: torch.Tensor = self._model.head(torch.cat([state_CD, content_CW], dim=1))
        return logits.float()

    def records(self, records: NDArray[np.int64]) -> torch.Tensor:
        """Records where their ids are looked up."""
        return torch.from_numpy(np.ascontiguousarray(records)).to(self.servable.lookup_device)


def _side_by_side(count: int, *columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first values of each, side by side: np.stack without its search for shapes and types."""
    records = np.empty((count, len(columns)), np.int64)
    for number, column in enumerate(columns):
        records[:, number] = column[:count]
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
    return num_prefix(task.inputs.user_tokens, len(task.inputs.user_features))


SERVING = ServingSpec(
    role="ranking",
    model=_model,
    form=RankingAdapter,
    longest_history=lambda task: task.inputs.max_events,
    slide_events=lambda task: task.inputs.slide_events,
    columns=lambda task, card: checked_columns(card, task.inputs),
    item_content=lambda task, engine, items: task.item_content(engine, items),
    keeps_item_parts=lambda task: task.head.interactions,
    num_prefix=_num_prefix,
    reads_actions=True,
)
