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
from nestrec.data.samples.ranking import checked_columns
from nestrec.data.schema import ITEM_PREFIX
from nestrec.models.ranking import RankingModel
from nestrec.serving.model.forms import AskedRows, Tokens
from nestrec.serving.model.inputs import Candidates, History, history_start, numbers_of
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.serving_form import ServingForm
from nestrec.serving.model.spec import ServableSpec
from nestrec.tasks.ranking import RankingTaskConfig

_NEEDS_RETRIEVAL = "serve a retrieval model beside it, or give candidates"


class RankingForm:
    """Models that score each candidate as one more token: a `RankingModel`, and a task with `inputs`."""

    tokens_an_event: int = 2
    appends_candidates: bool = True

    def __init__(self, servable: Servable, slide_events: int):
        self.servable, self.slide_events = servable, slide_events
        self._model, task = cast(RankingModel, servable.model), cast(RankingTaskConfig, servable.spec.task)
        self.encoder = self._model.encoder
        self.outputs = task.inputs.labels
        self.max_events = task.inputs.max_events - 1
        folded = ITEM_PREFIX if servable.spec.folds_items else "\0"
        self._columns = [c for c in servable.spec.columns if not c.name.startswith(folded)]
        self._given = [c.name for c in self._columns if c.name not in servable.item_columns]
        self._uses_time = servable.reads_times

    def follow(self, servable: Servable) -> None:
        self.servable = servable

    def tokens(self, history: History, now_ms: int) -> Tokens:
        history = history.copied(history_start(len(history), self.max_events, self.slide_events))
        times = history.times_ms if self._uses_time else np.zeros(len(history), np.int64)
        given = [history.features[name] for name in self._given]
        return Tokens(
            history=history,
            columns=(history.items, history.actions, times, *given),
            times_ms=times,
            asked_ms=times,
            num_cacheable=self.servable.cacheable(2 * len(history)),
            tokens_an_event=self.tokens_an_event,
            cut=self.servable.cut(2 * len(history) + 2),
        )

    def vectors(self, tokens: Tokens, first: int, end: int) -> torch.Tensor:
        records = self.records(
            _side_by_side(end // 2 - first // 2, *(column[first // 2 :] for column in tokens.columns))
        )
        return self.event_tokens(records, self.content(records))

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self.content(self.records(_side_by_side(len(candidates), *self.candidate_columns(candidates))))

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        return self.logits(state_CD, self.candidate_tokens(candidates))

    def best(
        self, asked: Sequence[Candidates], last: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        raise UserError("has no retrieval index", field="model", value=self.servable.spec.name, remedy=_NEEDS_RETRIEVAL)

    # The same in steps over the records of many users at once: (R, fields) item, action bits, time, given categories.

    @property
    def num_fields(self) -> int:
        """of a record"""
        return 3 + len(self._given)

    def candidate_columns(self, candidates: Candidates) -> tuple[NDArray[np.int64], ...]:
        """Of candidates, like those of events."""
        none = np.zeros(len(candidates), np.int64)
        return candidates.items, none, none, *(candidates.features[name] for name in self._given)

    def asked(self, tokens: Tokens, candidates: Candidates) -> AskedRows:
        """The candidates, which ask when they would be shown."""
        now_ms = candidates.now_ms
        return AskedRows(self.candidate_columns(candidates), now_ms, now_ms, is_last_event=False)

    def outcome(self, state_CD: torch.Tensor, content_CD: torch.Tensor) -> torch.Tensor:
        return self.logits(state_CD, content_CD)

    def content(self, records: torch.Tensor) -> torch.Tensor:
        """(R, D) sum of the vectors of item and categories, in the order of training."""
        items = records[:, 0]
        total = self.servable.tables["items"].rows(items).to(self.servable.dtype)
        for column in self._columns:
            name = column.name
            is_given = name in self._given
            ids = records[:, 3 + self._given.index(name)] if is_given else self.servable.item_columns[name][items]
            if column.has_table:
                total += self.servable.tables[name].rows(ids)
            else:
                numbers = numbers_of(ids).to(device=total.device, dtype=total.dtype)
                total += self._model.to_width(name, numbers)
        return total

    def event_tokens(self, records: torch.Tensor, content_ED: torch.Tensor) -> torch.Tensor:
        """(2E, D) content and action tokens of events by turns."""
        return torch.stack([content_ED, self.action(records)], dim=1).flatten(0, 1)

    def action(self, records: torch.Tensor) -> torch.Tensor:
        """(R, D) sum of the vectors of the bits that are set."""
        weight = self._model.action
        bit = torch.arange(weight.shape[0], device=weight.device)
        return ((records[:, 1, None].to(weight.device) >> bit) & 1).to(weight.dtype) @ weight

    @property
    def action_vectors(self) -> torch.Tensor:
        """(bits, D) of which `action` takes sums"""
        return self._model.action

    def logits(self, state_CD: torch.Tensor, content_CD: torch.Tensor) -> torch.Tensor:
        """(C, outputs) float32"""
        logits: torch.Tensor = self._model.head(torch.cat([state_CD, content_CD], dim=1))
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
    task, num_bits = cast(RankingTaskConfig, spec.task), max(spec.action_bits.values()).bit_length()
    model = RankingModel(task.encoder, task.head, num_tasks=len(task.inputs.labels), num_action_bits=num_bits)
    model.to_width = spec.to_width(task.encoder.dim)
    return model


SERVING = ServingForm(
    role="ranking",
    model=_model,
    form=RankingForm,
    longest_history=lambda task: task.inputs.max_events,
    columns=lambda task, card: checked_columns(card, task.inputs),
    item_content=lambda task, engine, items: task.item_content(engine, items),
    reads_actions=True,
)
