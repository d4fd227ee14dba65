"""The retrieval form: one token an event.

A candidate's score is its product with the state of the last token, whose query time is the request's. So the last
event is computed with each request, and the prefix ends before it.

Legend: D model width, C candidates, N items of the catalogue.
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.models.retrieval import RetrievalModel
from nestrec.serving.model.forms import Tokens
from nestrec.serving.model.inputs import Candidates, History, history_start
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.serving_form import ServingForm
from nestrec.serving.model.tables import ServedTable
from nestrec.tasks.retrieval import RetrievalTaskConfig

_SPARE = 64


class RetrievalForm:
    """Models that multiply states with item vectors: a `RetrievalModel`, and a task with a `history`."""

    tokens_an_event: int = 1
    appends_candidates: bool = False
    outputs: tuple[str, ...] = ("score",)

    def __init__(self, servable: Servable, slide_events: int):
        self.servable, self.slide_events = servable, slide_events
        self._model, task = cast(RetrievalModel, servable.model), cast(RetrievalTaskConfig, servable.spec.task)
        self.encoder = self._model.encoder
        self._asks_next = task.history.query_time == "next"
        self._uses_time = servable.reads_times
        self.max_events = task.history.max_length

    def tokens(self, history: History, now_ms: int) -> Tokens:
        history = history.copied(history_start(len(history), self.max_events, self.slide_events))
        times = history.times_ms if self._uses_time else np.zeros(len(history), np.int64)
        asked = times
        if self._asks_next and self._uses_time:
            asked = np.empty_like(times)
            asked[:-1], asked[-1:] = times[1:], now_ms
        return Tokens(
            history=history,
            columns=(history.items, times, asked),
            times_ms=times,
            asked_ms=asked,
            num_cacheable=max(len(history) - 1, 0),
            tokens_an_event=self.tokens_an_event,
            cut=self.servable.cut(len(history)),
        )

    def vectors(self, tokens: Tokens, first: int, end: int) -> torch.Tensor:
        return self._rows(tokens.history.items[first:end])

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self._rows(np.zeros(0, np.int64))

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        if last_D is None:
            return torch.zeros(len(candidates), 1, device=self.servable.device)
        vectors = self._model.item_vectors(self._rows(candidates.items))
        return (vectors.double() @ self.query(last_D).double())[:, None].float()

    def best(
        self, candidates: Candidates, last_D: torch.Tensor | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        index = self.servable.index
        assert index is not None
        query_D = (
            self.query(last_D)
            if last_D is not None
            else torch.zeros(self.servable.encoder_config.dim, dtype=self.servable.dtype, device=self.servable.device)
        )
        # A first choice in the index's own precision, then the exact order of evaluation among those chosen.
        first = _first_choice(index, query_D, candidates)
        exact = (index.rows(first).double() @ query_D.double()).float().cpu()
        order = exact.sort(descending=True, stable=True).indices[: candidates.num_best]
        return (first[order] + 1).numpy(), exact[order, None].numpy()

    def query(self, last_D: torch.Tensor) -> torch.Tensor:
        """(D,) what is multiplied with item vectors."""
        return self._model.item_vectors(last_D[None])[0] / self._model.similarity.temperature

    def _rows(self, items: NDArray[np.int64]) -> torch.Tensor:
        return self.servable.tables["items"].rows(torch.from_numpy(np.ascontiguousarray(items))).to(self.servable.dtype)


def _first_choice(index: ServedTable, query_D: torch.Tensor, candidates: Candidates) -> torch.Tensor:
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


SERVING = ServingForm(
    role="retrieval",
    model=lambda spec: RetrievalModel(spec.task.encoder, spec.task.similarity),
    form=RetrievalForm,
    longest_history=lambda task: task.history.max_length,
    index=lambda model, rows_ND: model.item_vectors(rows_ND),
    needs_event=True,
)
