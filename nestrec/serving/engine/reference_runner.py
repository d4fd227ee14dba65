"""The reference runner: plain operators, sequence by sequence, and warm-up.

A runner that keeps nothing: batches of whole histories.

One batch of serving work on the device: new tokens of many users against their prefixes.

What users are multiplied with items by: the queries of a retrieval model, for many users in one whole pass.

Legend: B users, T events of all of them, D model width.

A few batches of made-up work before the first request: allocations and threads exist, and costs are known.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.cuda import to_device
from nestrec.models.sequence import Forward, KeysAndValues, NewTokenSegment, SequenceInfo
from nestrec.serving.core.cost_model import EngineCostModel
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.model_adapter import HistoryTokens, ModelAdapter, make_form
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.retrieval_adapter import RetrievalAdapter
from nestrec.serving.model.servable import Servable


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """What is computed for one user in a batch."""

    tokens: HistoryTokens
    first: int
    """tokens that the pages hold already"""
    end: int
    """tokens that will have been computed"""
    pages: list[int]
    """of the user's entry"""
    store_until: int
    """new tokens before this one are written to the pages"""
    candidates: Candidates | None = None

    @property
    def num_candidates(self) -> int:
        return len(self.candidates) if self.candidates is not None else 0

    @property
    def num_new(self) -> int:
        """Tokens that are computed, candidates included."""
        return self.end - self.first + self.num_candidates

    @property
    def extent(self) -> tuple[int, int, int]:
        """(prefix, new history, candidates) for the cost model"""
        return self.first, self.end - self.first, self.num_candidates


@dataclass(frozen=True, slots=True)
class BatchItemScores:
    """Scores of a part's candidates, on the host."""

    items: NDArray[np.int64]
    scores: NDArray[np.float32]
    """(items, outputs)"""


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A batch on its way."""

    wait: Callable[[], tuple[list[BatchItemScores | None], float]]
    """its results, once the device is done with it, and the seconds that it took there"""
    is_done: Callable[[], bool] = lambda: True
    """whether `wait` would return at once"""


class BatchRunner(Protocol):
    """Runs batches one after the other."""

    @property
    def form(self) -> ModelAdapter: ...

    @property
    def pool(self) -> PagePool: ...

    depth: int
    """batches that may be on their way at once"""
    warm_events: int
    """longest history to warm up with"""
    row_step: int
    """rows of a batch that cost no more than fewer: whole multiples of it are best"""
    spins: bool
    """whether a thread that waits for batches keeps its core busy"""

    def launch(self, parts: Sequence[BatchItem]) -> InFlightBatch: ...

    def weights_changed(self) -> None:
        """The dense weights have other values, in the same places."""
        ...


class ReferenceRunner:
    """Runs any model anywhere, sequence by sequence inside a batch: the twin of the faster runners."""

    depth: int = 1
    warm_events: int = 256
    row_step: int = 1
    spins: bool = False

    def __init__(self, form: ModelAdapter, pool: PagePool, forward: Forward | None = None):
        """forward: instead of the backbone's cached forward."""
        self.form = form
        self.pool = pool
        self._forward = forward or form.servable.cached.forward

    def launch(self, parts: Sequence[BatchItem]) -> InFlightBatch:
        start_s = time.perf_counter()
        results = self.run(parts)
        if self.form.servable.device.type == "cuda":  # a batch of signals returns before the device is done
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start_s
        return InFlightBatch(lambda: (results, seconds))

    def weights_changed(self) -> None:
        """It holds nothing that was made of them."""

    @torch.inference_mode()
    def run(self, parts: Sequence[BatchItem]) -> list[BatchItemScores | None]:
        """Scores of each part with candidates; none for the others."""
        states = self.states(parts)
        counts = [part.end - part.first for part in parts]
        last = [state[count - 1] if count else None for state, count in zip(states, counts, strict=True)]
        behind = [state[count:] for state, count in zip(states, counts, strict=True)]
        return found_by_states(self.form, parts, last, behind)

    @torch.inference_mode()
    def states(self, parts: Sequence[BatchItem]) -> list[torch.Tensor]:
        """(new tokens, D) of each part: of its history, then of its candidates where they are tokens."""
        appended = int(self.form.appends_candidates)
        counts = [part.end - part.first + appended * part.num_candidates for part in parts]
        bounds, made = list(itertools.accumulate(counts, initial=0)), list[KeysAndValues]()
        servable = self.form.servable
        state_TD = torch.zeros(0, servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)
        if bounds[-1]:
            segments = [self._segment(part, count) for part, count in zip(parts, counts, strict=True)]
            state_TD, made = self._forward(
                self.form.encoder,
                torch.cat([self._vectors(part) for part in parts]),
                segments,
                lambda layer, b: self.pool.read(layer, parts[b].pages if parts[b].first else [], parts[b].first),
            )
        for part, start in zip(parts, bounds[:-1], strict=True):
            self._store(part, start, made)
        return [state_TD[start:end] for start, end in itertools.pairwise(bounds)]

    def _vectors(self, part: BatchItem) -> torch.Tensor:
        history = self.form.vectors(part.tokens, part.first, part.end)
        if part.candidates is None:
            return history
        return torch.cat([history, self.form.candidate_tokens(part.candidates)])

    def _segment(self, part: BatchItem, num_tokens: int) -> NewTokenSegment:
        device = self.form.servable.device
        num_history = part.end - part.first
        return NewTokenSegment(
            prefix_length=part.first,
            num_history=num_history,
            num_candidates=num_tokens - num_history,
            time_K=part.tokens.time_T[: part.end].to(device),
            query_time_S=part.tokens.query_time_T[part.first : part.end].to(device),
            candidate_time_s=part.candidates.now_ms / 1000.0 if part.candidates is not None else 0.0,
            cut=part.tokens.cut,
        )

    def _store(self, part: BatchItem, start: int, made: list[KeysAndValues]) -> None:
        count = min(part.store_until, part.end) - part.first
        if count > 0:
            for layer, (keys, values) in enumerate(made):
                self.pool.write(
                    layer, part.pages, part.first, keys[start : start + count], values[start : start + count]
                )


def found_by_states(
    form: ModelAdapter,
    parts: Sequence[BatchItem],
    last: Sequence[torch.Tensor | None],
    candidates: Sequence[torch.Tensor] | None = None,
) -> list[BatchItemScores | None]:
    """Scores of each part with candidates, and the best of the catalogue for all who ask for them at once.

    last: (D,) state of a user's last token. candidates: (C, D) of those that are tokens of their own.
    """
    asking = [b for b, part in enumerate(parts) if part.candidates is not None and part.candidates.num_best]
    wanted = [asked for b in asking if (asked := parts[b].candidates) is not None]
    best = dict(zip(asking, form.best(wanted, [last[b] for b in asking]) if asking else [], strict=True))
    results = list[BatchItemScores | None]()
    for b, part in enumerate(parts):
        if part.candidates is None:
            results.append(None)
        elif b in best:
            results.append(BatchItemScores(*best[b]))
        else:
            state_CD = torch.zeros(0) if candidates is None else candidates[b]
            scores = form.scores(part.candidates, last[b], state_CD)
            results.append(BatchItemScores(part.candidates.items, scores.cpu().numpy()))
    return results


def plain_runner(servable: Servable, slide_events: int | None = None) -> ReferenceRunner:
    """slide_events: events by which a full history slides; none takes what the model was measured with."""
    pool = PagePool(servable.kept, num_pages=1, page_tokens=1, device=servable.device, dtype=servable.dtype)
    return ReferenceRunner(make_form(servable, slide_events), pool)


@torch.inference_mode()
def user_queries(form: RetrievalAdapter, users: Sequence[tuple[History, int]]) -> torch.Tensor:
    """(B, D) for each (history, moment): its product with an item's vector is the item's score. Zeros for those
    without events."""
    device = form.servable.device
    tokens = [form.tokens(history, now_ms) for history, now_ms in users]
    lengths = np.array([one.length for one in tokens], np.int64)
    queries_BD = torch.zeros(len(users), form.servable.encoder_config.dim, dtype=form.servable.dtype, device=device)
    there = np.flatnonzero(lengths)
    if len(there):
        known = [tokens[b] for b in there]
        # All at once: a look-up a user would take the device's time many times over in launches.
        fields = range(form.num_fields)
        records = [np.concatenate([_field(one, field) for one in known]) for field in fields]
        x_TD = form.content(form.records(np.stack(records, axis=1)))
        state_TD = form.encoder(x_TD, _info(known, lengths[there], device))
        last = to_device(np.cumsum(lengths[there]) - 1, device)
        queries_BD[to_device(there, device)] = form.query(state_TD[last])
    return queries_BD


def _field(tokens: HistoryTokens, field: int) -> NDArray[np.int64]:
    """Of what stands before a history, and of its events."""
    own = tokens.columns[field]
    return np.concatenate([tokens.before[:, field], own]) if len(tokens.before) else own


def _info(tokens: Sequence[HistoryTokens], lengths: NDArray[np.int64], device: torch.device) -> SequenceInfo:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position_T = to_device(np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths), device)
    return SequenceInfo(
        offsets=to_device(offsets, device),
        max_length=int(lengths.max()),
        position_T=position_T,
        token_key_T=torch.zeros_like(position_T),
        time_T=to_device(np.concatenate([one.token_times_ms(0, one.length) for one in tokens]) / 1000.0, device),
        query_time_T=to_device(np.concatenate([one.token_asked_ms(0, one.length) for one in tokens]) / 1000.0, device),
        cut_B=to_device(np.array([one.cut for one in tokens], np.int64), device),
    )


_ROUNDS = 3
_SIZES = ((1, 1), (8, 16), (64, 32), (256, 16), (16, 256), (1024, 64), (4096, 256))
"""(events, candidates)"""


def warm_up(runner: BatchRunner, costs: EngineCostModel) -> None:
    """Run batches of several sizes; those of the first round are not counted."""
    for number in range(_ROUNDS):
        for num_events, num_candidates in _SIZES:
            if num_events > runner.warm_events:
                continue
            part = _part(runner.form, min(num_events, runner.form.max_events), num_candidates)
            _, seconds = runner.launch([part]).wait()
            if number > 0:
                costs.observe(*costs.work(*part.extent), seconds)


def compute_one(runner: BatchRunner) -> None:
    """Run the smallest batch, and raise whatever it raises."""
    runner.launch([_part(runner.form, 1, 1)]).wait()


def _part(form: ModelAdapter, num_events: int, num_candidates: int) -> BatchItem:
    zeros, asked = np.zeros(num_events, np.int64), np.zeros(num_candidates, np.int64)
    servable = form.servable
    fields = servable.given_fields
    history = History(items=zeros, times_ms=zeros, actions=zeros, features=dict.fromkeys(fields, zeros))
    tokens = form.tokens(history, 0)
    candidates = Candidates(items=asked, now_ms=0, features=dict.fromkeys(fields, asked))
    if servable.index is not None and servable.device.type == "cuda":  # what it costs to find items is in their graph
        candidates = Candidates(items=asked[:0], now_ms=0, num_best=num_candidates)
    return BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
