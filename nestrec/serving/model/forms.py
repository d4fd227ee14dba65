"""How each kind of model reads histories and scores candidates: the retrieval form and the ranking form.

    retrieval  one token an event; a candidate's score is its product with the state of the last token, whose query time
               is the request's. So the last event is computed with each request, and the prefix ends before it.
    ranking    content and action tokens of each event; each candidate is one more content token, scored by the head.
               Every token asks at its own time, so the prefix is the whole history.

Legend: T tokens, D model width, C candidates, K tasks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.models.hstu import HSTU
from nestrec.models.ranking import RankingModel
from nestrec.models.retrieval import RetrievalModel
from nestrec.serving.model.can_serve import check_served
from nestrec.serving.model.inputs import Candidates, History, window_start
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.tables import Table
from nestrec.tasks.ranking import RankingTaskConfig
from nestrec.tasks.retrieval import RetrievalTaskConfig

_SPARE = 64
_NEEDS_RETRIEVAL = "serve a retrieval model beside it, or give candidates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
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

    def content(self, num_tokens: int) -> bytes:
        """Everything about the first tokens that enters the model."""
        num_events = num_tokens // self.tokens_an_event
        return b"".join([column[:num_events].tobytes() for column in self.columns])

    @property
    def length(self) -> int:
        return len(self.times_ms) * self.tokens_an_event

    @property
    def time_T(self) -> torch.Tensor:
        """float64 seconds"""
        return _seconds(np.repeat(self.times_ms, self.tokens_an_event))

    @property
    def query_time_T(self) -> torch.Tensor:
        """float64 seconds"""
        return _seconds(np.repeat(self.asked_ms, self.tokens_an_event))


class Form(Protocol):
    """One kind of model. Pure functions of their arguments and the model's weights."""

    servable: Servable
    encoder: HSTU
    tokens_an_event: int
    max_events: int
    """longest history"""
    slide_events: int
    """events by which a full history slides"""
    appends_candidates: bool
    """each is one more token; else they are scored from the last state"""
    outputs: tuple[str, ...]
    """names of a candidate's scores"""

    def tokens(self, history: History, now_ms: int) -> Tokens: ...

    def vectors(self, tokens: Tokens, first: int, end: int) -> torch.Tensor:
        """(end - first, D) input vectors of tokens; both bounds lie between events."""
        ...

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        """(C, D) tokens to be appended, or (0, D) where candidates are scored from the last state."""
        ...

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        """(C, outputs) float32; larger is better."""
        ...

    def best(
        self, candidates: Candidates, last_D: torch.Tensor | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Items and scores of the best of the catalogue, best first."""
        ...


class RetrievalForm:
    tokens_an_event: int = 1
    appends_candidates: bool = False
    outputs: tuple[str, ...] = ("score",)

    def __init__(self, servable: Servable, slide_events: int):
        assert isinstance(servable.model, RetrievalModel)
        assert isinstance(servable.spec.task, RetrievalTaskConfig)
        self.servable, self._model, self.slide_events = servable, servable.model, slide_events
        self.encoder = _hstu(servable)
        self._asks_next = servable.spec.task.history.query_time == "next"
        self._uses_time = servable.reads_times
        self.max_events = servable.spec.task.history.max_length

    def tokens(self, history: History, now_ms: int) -> Tokens:
        history = history.copied(window_start(len(history), self.max_events, self.slide_events))
        times = history.times_ms if self._uses_time else np.zeros(len(history), np.int64)
        asked = times
        if self._asks_next and self._uses_time:
            asked = np.empty_like(times)
            asked[:-1], asked[-1:] = times[1:], now_ms
        return Tokens(
            history=history, columns=(history.items, times, asked), times_ms=times, asked_ms=asked,
            num_cacheable=max(len(history) - 1, 0), tokens_an_event=self.tokens_an_event,
        )  # fmt: skip

    def vectors(self, tokens: Tokens, first: int, end: int) -> torch.Tensor:
        return self._rows(tokens.history.items[first:end])

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self._rows(np.zeros(0, np.int64))

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        if last_D is None:
            return torch.zeros(len(candidates), 1, device=self.encoder.position.device)
        vectors = self._model.item_vectors(self._rows(candidates.items))
        return (vectors.double() @ self.query(last_D).double())[:, None].float()

    def best(
        self, candidates: Candidates, last_D: torch.Tensor | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        index = self.servable.index
        assert index is not None
        query_D = self.query(last_D) if last_D is not None else self.encoder.position.new_zeros(self.encoder.cfg.dim)
        # A first choice in the index's own precision, then the exact order of evaluation among those chosen.
        first = _first_choice(index, query_D, candidates)
        exact = (index.rows(first).double() @ query_D.double()).float().cpu()
        order = exact.sort(descending=True, stable=True).indices[: candidates.num_best]
        return (first[order] + 1).numpy(), exact[order, None].numpy()

    def query(self, last_D: torch.Tensor) -> torch.Tensor:
        """(D,) what is multiplied with item vectors."""
        return self._model.item_vectors(last_D[None])[0] / self._model.similarity.temperature

    def _rows(self, items: NDArray[np.int64]) -> torch.Tensor:
        return self.servable.tables["items"].rows(torch.from_numpy(np.ascontiguousarray(items)))


class RankingForm:
    tokens_an_event: int = 2
    appends_candidates: bool = True

    def __init__(self, servable: Servable, slide_events: int):
        assert isinstance(servable.model, RankingModel)
        assert isinstance(servable.spec.task, RankingTaskConfig)
        self.servable, self._model, self.slide_events = servable, servable.model, slide_events
        self.encoder = _hstu(servable)
        self.outputs = servable.spec.task.inputs.labels
        self.max_events = servable.spec.task.inputs.max_events - 1
        self._columns = [c.name for c in servable.spec.columns]
        self._given = [name for name in self._columns if name not in servable.item_columns]
        self._uses_time = servable.reads_times

    def tokens(self, history: History, now_ms: int) -> Tokens:
        history = history.copied(window_start(len(history), self.max_events, self.slide_events))
        times = history.times_ms if self._uses_time else np.zeros(len(history), np.int64)
        given = [history.features[name] for name in self._given]
        return Tokens(
            history=history, columns=(history.items, history.actions, times, *given), times_ms=times, asked_ms=times,
            num_cacheable=2 * len(history), tokens_an_event=self.tokens_an_event,
        )  # fmt: skip

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
        self, candidates: Candidates, last_D: torch.Tensor | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
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

    def content(self, records: torch.Tensor) -> torch.Tensor:
        """(R, D) sum of the vectors of item and categories, in the order of training."""
        items = records[:, 0]
        total = self.servable.tables["items"].rows(items)
        for name in self._columns:
            is_given = name in self._given
            ids = records[:, 3 + self._given.index(name)] if is_given else self.servable.item_columns[name][items]
            total += self.servable.tables[name].rows(ids)
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


def make_form(servable: Servable, slide_events: int | None = None) -> Form:
    """slide_events: events by which a full history slides; none takes an eighth of the longest history."""
    kind: type[RankingForm | RetrievalForm] = RankingForm if isinstance(servable.model, RankingModel) else RetrievalForm
    task = servable.spec.task
    longest = task.inputs.max_events if isinstance(task, RankingTaskConfig) else task.history.max_length
    return kind(servable, max(1, longest // 8) if slide_events is None else slide_events)


def _hstu(servable: Servable) -> HSTU:
    check_served(servable.spec.task)
    encoder = servable.model.encoder
    assert isinstance(encoder, HSTU)
    return encoder


def _first_choice(index: Table, query_D: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """Rows of the index, in order, that hold the best and some more; on the host. Of a list of allowed ones, all."""
    if candidates.allowed is not None:
        return torch.from_numpy(np.setdiff1d(candidates.allowed[candidates.allowed > 0], candidates.excluded) - 1)
    count = candidates.num_best + _SPARE
    scores, rows = query_D.new_zeros(0), torch.zeros(0, dtype=torch.int64, device=query_D.device)
    excluded = torch.from_numpy(candidates.excluded[candidates.excluded > 0] - 1).to(query_D.device)
    for start, part_ND in index.parts():
        scores_N = part_ND @ query_D
        scores_N[excluded[(excluded >= start) & (excluded < start + len(scores_N))] - start] = -torch.inf
        best = scores_N.topk(min(len(scores_N), count))
        scores, rows = torch.cat([scores, best.values]), torch.cat([rows, best.indices + start])
    best = scores.topk(min(len(scores), count))
    return rows[best.indices[best.values > -torch.inf]].sort().values.cpu()


def _side_by_side(count: int, *columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first values of each, side by side: np.stack without its search for shapes and types."""
    records = np.empty((count, len(columns)), np.int64)
    for number, column in enumerate(columns):
        records[:, number] = column[:count]
    return records


def _seconds(times_ms: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(times_ms / 1000.0)
