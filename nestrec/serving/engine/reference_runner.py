"""Reference implementation of the batch runner, the runner protocol, retrieval queries, and warm-up.

A batch contains new tokens of many users, which attend to their cached prefixes. `ReferenceRunner` computes it sequence
by sequence with plain operators, and defines the results of the faster runners.

`user_queries` computes the queries of a retrieval model for many users in one full forward pass, without a KV cache.

`warm_up` runs synthetic batches before the first request, so that memory is allocated, threads exist and costs are
known.

Legend: B users, T events of all users, D model width.
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
from nestrec.serving.model.model_adapter import HistoryTokens, ModelAdapter, make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.retrieval_adapter import RetrievalAdapter
from nestrec.serving.model.servable import Servable


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """Work of one user in a batch."""

    tokens: HistoryTokens
    first: int
    """Number of tokens that are already in the pages; the first token to compute."""
    end: int
    """End of the history tokens to compute."""
    pages: list[int]
    """Pages of the user's cache entry."""
    store_until: int
    """End of the tokens whose keys and values are written to the pages."""
    candidates: Candidates | None = None

    @property
    def num_candidates(self) -> int:
        return len(self.candidates) if self.candidates is not None else 0

    @property
    def num_new(self) -> int:
        """Number of tokens to compute, including candidates."""
        return self.end - self.first + self.num_candidates

    @property
    def extent(self) -> tuple[int, int, int]:
        """Number of prefix, new history and candidate tokens, for the cost model."""
        return self.first, self.end - self.first, self.num_candidates


@dataclass(frozen=True, slots=True)
class BatchItemScores:
    """Scores of the candidates of a batch item, in host memory."""

    items: NDArray[np.int64]
    scores: NDArray[np.float32]
    """Scores with shape (items, outputs)."""


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """Batch that is running on the device."""

    wait: Callable[[], tuple[list[BatchItemScores | None], float]]
    """Blocks until the batch is computed; returns the scores of each item and the device seconds."""
    is_done: Callable[[], bool] = lambda: True
    """Returns whether `wait` would return at once."""


class BatchRunner(Protocol):
    """Protocol of runners, which compute batches sequentially."""

    @property
    def adapter(self) -> ModelAdapter: ...

    @property
    def pool(self) -> PagePool: ...

    depth: int
    """Maximum number of batches in flight."""
    warm_events: int
    """Maximum number of history events in warm-up batches."""
    row_step: int
    """Granularity of the cost in rows: a batch costs as much as one with the next multiple of it."""
    spins: bool
    """Whether the thread that waits for batches busy-waits."""

    def launch(self, items: Sequence[BatchItem]) -> InFlightBatch: ...

    def weights_changed(self) -> None:
        """Refresh derived values after the dense weights were changed in place."""
        ...


class ReferenceRunner:
    """Reference implementation: runs any model on any device, sequence by sequence."""

    depth: int = 1
    warm_events: int = 256
    row_step: int = 1
    spins: bool = False

    def __init__(self, adapter: ModelAdapter, pool: PagePool, forward: Forward | None = None):
        """Create a runner.

        Args:
            adapter: Adapter of the model.
            pool: Pages of the KV cache.
            forward: Replaces the backbone's cached forward pass.
        """
        self.adapter = adapter
        self.pool = pool
        self._forward = forward or adapter.servable.cached_forward.forward

    def launch(self, items: Sequence[BatchItem]) -> InFlightBatch:
        start_s = time.perf_counter()
        results = self.run(items)
        if self.adapter.servable.device.type == "cuda":  # `run` returns early if it copies no results
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start_s
        return InFlightBatch(lambda: (results, seconds))

    def weights_changed(self) -> None:
        """Do nothing: this runner has no values derived from the weights."""

    @torch.inference_mode()
    def run(self, items: Sequence[BatchItem]) -> list[BatchItemScores | None]:
        """Return the scores of each item with candidates, and None for the others."""
        states = self.states(items)
        counts = [item.end - item.first for item in items]
        last = [state[count - 1] if count else None for state, count in zip(states, counts, strict=True)]
        candidates = [state[count:] for state, count in zip(states, counts, strict=True)]
        return score_by_states(self.adapter, items, last, candidates)

    @torch.inference_mode()
    def states(self, items: Sequence[BatchItem]) -> list[torch.Tensor]:
        """Return the (new tokens, D) states of each item: of its history, then of its candidates if they are tokens."""
        appended = int(self.adapter.appends_candidates)
        counts = [item.end - item.first + appended * item.num_candidates for item in items]
        bounds, keys_and_values = list(itertools.accumulate(counts, initial=0)), list[KeysAndValues]()
        servable = self.adapter.servable
        state_TD = torch.zeros(0, servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)
        if bounds[-1]:
            segments = [self._segment(item, count) for item, count in zip(items, counts, strict=True)]
            state_TD, keys_and_values = self._forward(
                self.adapter.encoder,
                torch.cat([self._vectors(item) for item in items]),
                segments,
                lambda layer, b: self.pool.read(layer, items[b].pages if items[b].first else [], items[b].first),
            )
        for item, start in zip(items, bounds[:-1], strict=True):
            self._store(item, start, keys_and_values)
        return [state_TD[start:end] for start, end in itertools.pairwise(bounds)]

    def _vectors(self, item: BatchItem) -> torch.Tensor:
        history = self.adapter.vectors(item.tokens, item.first, item.end)
        if item.candidates is None:
            return history
        return torch.cat([history, self.adapter.candidate_tokens(item.candidates)])

    def _segment(self, item: BatchItem, num_tokens: int) -> NewTokenSegment:
        device = self.adapter.servable.device
        num_history = item.end - item.first
        return NewTokenSegment(
            prefix_length=item.first,
            num_history=num_history,
            num_candidates=num_tokens - num_history,
            time_K=item.tokens.time_T[: item.end].to(device),
            query_time_S=item.tokens.query_time_T[item.first : item.end].to(device),
            candidate_time_s=item.candidates.now_ms / 1000.0 if item.candidates is not None else 0.0,
            cut=item.tokens.cut,
        )

    def _store(self, item: BatchItem, start: int, keys_and_values: list[KeysAndValues]) -> None:
        count = min(item.store_until, item.end) - item.first
        if count > 0:
            for layer, (keys, values) in enumerate(keys_and_values):
                self.pool.write(
                    layer, item.pages, item.first, keys[start : start + count], values[start : start + count]
                )


def score_by_states(
    adapter: ModelAdapter,
    items: Sequence[BatchItem],
    last: Sequence[torch.Tensor | None],
    candidates: Sequence[torch.Tensor] | None = None,
) -> list[BatchItemScores | None]:
    """Score the candidates of each item, and search the catalog once for all items that request the best items.

    Args:
        adapter: Adapter of the model.
        items: Items of the batch.
        last: (D,) state of the last token of each item, or None if it has none.
        candidates: (C, D) states of the candidates of each item, if candidates are tokens.

    Returns:
        The scores of each item, or None for items without candidates.
    """
    searching = [b for b, item in enumerate(items) if item.candidates is not None and item.candidates.num_best]
    searches = [search for b in searching if (search := items[b].candidates) is not None]
    best = dict(zip(searching, adapter.best(searches, [last[b] for b in searching]) if searching else [], strict=True))
    results = list[BatchItemScores | None]()
    for b, item in enumerate(items):
        if item.candidates is None:
            results.append(None)
        elif b in best:
            results.append(BatchItemScores(*best[b]))
        else:
            state_CD = torch.zeros(0) if candidates is None else candidates[b]
            scores = adapter.scores(item.candidates, last[b], state_CD)
            results.append(BatchItemScores(item.candidates.items, scores.cpu().numpy()))
    return results


def plain_runner(servable: Servable, slide_events: int | None = None) -> ReferenceRunner:
    """Return a reference runner without a usable KV cache, for batches of complete histories.

    Args:
        servable: Model to run.
        slide_events: Stride in events by which a full history slides; None uses the stride of the model's evaluation.
    """
    pool = PagePool(servable.cache_spec, num_pages=1, page_tokens=1, device=servable.device, dtype=servable.dtype)
    return ReferenceRunner(make_adapter(servable, slide_events), pool)


@torch.inference_mode()
def user_queries(adapter: RetrievalAdapter, users: Sequence[tuple[History, int]]) -> torch.Tensor:
    """Return the (B, D) query of each user: its dot product with an item's embedding is the item's score.

    Args:
        adapter: Adapter of the model.
        users: History and current time in Unix milliseconds of each user; users without events get zeros.
    """
    device = adapter.servable.device
    tokens = [adapter.tokens(history, now_ms) for history, now_ms in users]
    lengths = np.array([one.length for one in tokens], np.int64)
    queries_BD = torch.zeros(
        len(users), adapter.servable.encoder_config.dim, dtype=adapter.servable.dtype, device=device
    )
    nonempty = np.flatnonzero(lengths)
    if len(nonempty):
        known = [tokens[b] for b in nonempty]
        # One lookup for all users: with one per user, kernel launches would dominate.
        fields = range(adapter.num_fields)
        records = [np.concatenate([_field(one, field) for one in known]) for field in fields]
        x_TD = adapter.content(adapter.records(np.stack(records, axis=1)))
        state_TD = adapter.encoder(x_TD, _info(known, lengths[nonempty], device))
        last = to_device(np.cumsum(lengths[nonempty]) - 1, device)
        queries_BD[to_device(nonempty, device)] = adapter.query(state_TD[last])
    return queries_BD


def _field(tokens: HistoryTokens, field: int) -> NDArray[np.int64]:
    """Return one field of the user-feature records followed by those of the events."""
    own = tokens.columns[field]
    return np.concatenate([tokens.prefix_records[:, field], own]) if len(tokens.prefix_records) else own


def _info(tokens: Sequence[HistoryTokens], lengths: NDArray[np.int64], device: torch.device) -> SequenceInfo:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position_T = to_device(np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths), device)
    return SequenceInfo(
        offsets=to_device(offsets, device),
        max_length=int(lengths.max()),
        position_T=position_T,
        token_key_T=torch.zeros_like(position_T),
        time_T=to_device(np.concatenate([one.token_times_ms(0, one.length) for one in tokens]) / 1000.0, device),
        query_time_T=to_device(
            np.concatenate([one.token_query_times_ms(0, one.length) for one in tokens]) / 1000.0, device
        ),
        cut_B=to_device(np.array([one.cut for one in tokens], np.int64), device),
    )


_ROUNDS = 3
_SIZES = ((1, 1), (8, 16), (64, 32), (256, 16), (16, 256), (1024, 64), (4096, 256))
"""Numbers of events and of candidates of the warm-up batches."""


def warm_up(runner: BatchRunner, costs: EngineCostModel) -> None:
    """Run synthetic batches of several sizes; the cost model does not observe those of the first round."""
    for number in range(_ROUNDS):
        for num_events, num_candidates in _SIZES:
            if num_events > runner.warm_events:
                continue
            item = _make_item(runner.adapter, min(num_events, runner.adapter.max_events), num_candidates)
            _, seconds = runner.launch([item]).wait()
            if number > 0:
                costs.observe(*costs.work(*item.extent), seconds)


def compute_one(runner: BatchRunner) -> None:
    """Run the smallest batch and raise its exception, if any."""
    runner.launch([_make_item(runner.adapter, 1, 1)]).wait()


def _make_item(adapter: ModelAdapter, num_events: int, num_candidates: int) -> BatchItem:
    zeros, candidate_zeros = np.zeros(num_events, np.int64), np.zeros(num_candidates, np.int64)
    servable = adapter.servable
    fields = servable.request_fields
    history = History(items=zeros, times_ms=zeros, actions=zeros, features=dict.fromkeys(fields, zeros))
    tokens = adapter.tokens(history, 0)
    candidates = Candidates(items=candidate_zeros, now_ms=0, features=dict.fromkeys(fields, candidate_zeros))
    if servable.index is not None and servable.device.type == "cuda":  # the captured graphs include the search
        candidates = Candidates(items=candidate_zeros[:0], now_ms=0, num_best=num_candidates)
    return BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
