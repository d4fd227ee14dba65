"""Batch scheduler of the engine: continuous batching with chunked prefill, and the options of an engine.

Each engine step forms one batch. Ranking requests are scheduled first, by `RankScheduler` in the order of `fair_queue`;
pre-infer requests, which prefill a user's history ahead of the ranking request, fill the rest of the batch in chunks,
so that no ranking request waits for a long one. A request with a prefix in the KV cache computes only the missing
tokens; without one, it computes everything, with the same scores.

A ranking request that would take longer than the time limit of a batch is split into chunks (chunked prefill): first
its history, as far as it can be cached, then its candidates. Between two chunks the results are in the user's cache
entry, which is reserved for the request. If the cache has no capacity, the rest is computed at once. A batch contains
at most one request per user, and no other request of a user starts until a started one is completed.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nestrec.base.clock import Clock
from nestrec.base.config import config
from nestrec.base.config_values import Count, NonNegative
from nestrec.base.failpoints import fail_point
from nestrec.serving.core.cost_model import EngineCostModel
from nestrec.serving.core.rejections import UnavailableError
from nestrec.serving.engine.fair_queue import FairQueue
from nestrec.serving.engine.reference_runner import BatchItem
from nestrec.serving.inputs.engine_request import CacheKey, EngineRequest, RankResult
from nestrec.serving.kv_cache.kv_page_pool import KVCacheDtype
from nestrec.serving.kv_cache.prefix_cache import Entry
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig, TieredPrefixCache
from nestrec.serving.model.request_inputs import Candidates


@config
class EngineConfig:
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()
    """Options of the prefix cache."""
    kv_cache_dtype: KVCacheDtype = "model"
    """Data type of the KV cache: that of the model, bfloat16, or fp8, which takes half the memory of bfloat16 and so
    caches twice as many users; `nestrec export` measures its quality loss."""
    cuda_graphs: bool = True
    """Whether to run batches as captured CUDA graphs over the paged KV cache on a GPU; if false, sequences are computed
    one by one with plain operators."""
    max_batch_tokens: Count = 4096
    """Maximum number of new tokens of ranking requests in a batch, including candidates; pre-infer requests may add as
    many again."""
    max_batch_requests: Count = 32
    """Maximum number of ranking and pre-infer requests in a batch."""
    preinfer_chunk_ms: NonNegative | None = None
    """Predicted device milliseconds up to which pre-infer requests fill a batch; with many ranking requests they still
    get a quarter of it. Unset, it is a quarter of `preinfer.latency_budget_ms`, because a request waits for the rest of
    one batch and then for its own; 0 limits them by the number of tokens only."""
    max_queue_delay_s: NonNegative = 0.25
    """Maximum queue delay in device seconds; requests beyond it are rejected (load shedding). If no other request is
    queued, one is admitted whenever its deadline allows, so that the device is not idle after the current batch."""
    preinfer: TriggerConfig = TriggerConfig()
    """Options of pre-infer requests."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Share of a request in a batch; its cache entry is pinned until the batch has ended."""

    request: EngineRequest
    item: BatchItem
    entry: Entry | None
    is_last: bool
    """Whether this chunk completes the request."""

    @staticmethod
    def make(
        tiers: TieredPrefixCache,
        request: EngineRequest,
        entry: Entry | None,
        *,
        end: int,
        candidates: Candidates | None,
        is_last: bool,
    ) -> "ScheduledChunk":
        """Pin or create the user's cache entry, with capacity for the cacheable tokens before `end`."""
        first = entry.length if entry is not None else 0
        entry, store_until = tiers.reserve(request, entry, min(request.tokens.num_cacheable, end))
        pages = list(entry.pages) if entry is not None else []
        item = BatchItem(
            tokens=request.tokens, first=first, end=end, pages=pages, store_until=store_until, candidates=candidates
        )
        return ScheduledChunk(request, item, entry, is_last)

    @property
    def will_be_cached(self) -> bool:
        """Whether all cacheable tokens of the chunk will be in the cache for the next chunk."""
        return self.item.store_until >= min(self.item.end, self.request.tokens.num_cacheable)


MIN_CHUNK_TOKENS = 256
"""Minimum tokens of a chunk, even if it exceeds its time: smaller chunks do not keep a device busy."""
MIN_CHUNK_FRACTION = 0.25
"""Minimum fraction of the batch time for chunks, regardless of the number of other requests; prevents starvation."""
_MIN_CANDIDATES = 64
"""Minimum number of candidates in a chunk."""


@dataclass(slots=True)
class _Batch:
    budget: int
    """Remaining tokens."""
    left_s: float
    """Remaining device seconds."""
    chunks: list[ScheduledChunk] = field(default_factory=list)
    keys: set[CacheKey] = field(default_factory=set)
    has_partial: bool = False

    def add(self, chunk: ScheduledChunk, seconds: float) -> None:
        self.chunks.append(chunk)
        self.keys.add(chunk.request.key)
        self.budget -= chunk.item.num_new
        self.left_s -= seconds
        self.has_partial |= not chunk.is_last


class RankScheduler:
    """Scheduler of ranking requests with chunked prefill; used on the engine's thread only.

    Args:
        cfg: Options of the engine.
        tiers: Prefix cache.
        costs: Cost model of the engine.
        chunk_s: Device seconds of a chunk.
        max_unsplit_s: Device seconds of the longest request that is not split.
        tokens_per_event: Tokens per history event.
        appends_candidates: Whether candidates are tokens of the model.
        is_needed: Returns whether a request is still needed; if not, it has been ended.
        resume: Called with a request when the cache copy that it waits for has ended.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        tiers: TieredPrefixCache,
        *,
        costs: EngineCostModel,
        chunk_s: float,
        max_unsplit_s: float,
        tokens_per_event: int,
        appends_candidates: bool,
        is_needed: Callable[[EngineRequest], bool],
        resume: Callable[[EngineRequest], None],
    ):
        self._cfg = cfg
        self._tiers = tiers
        self._costs = costs
        self._chunk_s = chunk_s
        self._max_unsplit_s = max_unsplit_s
        self._tokens_per_event = tokens_per_event
        self._appends_candidates = appends_candidates
        self._is_needed = is_needed
        self._resume = resume
        self._started: dict[CacheKey, EngineRequest] = {}
        self.clear()

    def schedule(self) -> tuple[list[ScheduledChunk], bool]:
        """Return the chunks of the next batch, and whether ranking requests remain that did not fit."""
        batch = _Batch(self._cfg.max_batch_tokens, self._chunk_s)
        chosen: list[tuple[EngineRequest, bool]] = []
        while self.queue and batch.budget > 0 and len(batch.chunks) < self._cfg.max_batch_requests:
            request = self.queue.pop()
            is_unfinished, seconds = self._take(request, batch)
            self.queue.charge(request, seconds)
            chosen.append((request, is_unfinished))
        is_full = bool(self.queue)
        for request, is_unfinished in chosen:
            self.queue.requeue(request, is_unfinished=is_unfinished)
        return batch.chunks, is_full

    def clear(self) -> None:
        """Remove all requests and reset the virtual time of all users."""
        self.queue = FairQueue(
            lambda request: min(request.estimate_s, self._chunk_s), lambda request: request.estimate_s
        )
        self._started.clear()

    def restart_requests(self, version: str) -> None:
        """Restart all requests, because the model has changed to another version."""
        self._started.clear()
        for request in self.queue:
            request.restart(version)

    def remove(self, request: EngineRequest) -> None:
        """Remove the state of a request that has ended."""
        if self._started.get(request.key) is request:
            del self._started[request.key]

    def _take(self, request: EngineRequest, batch: _Batch) -> tuple[bool, float]:
        """Add a request, or a chunk of it, to the batch.

        Returns:
            Whether the request stays in the queue, and the device seconds that it gets in this batch.
        """
        if not self._is_needed(request):
            self._give_up(request)
            return False, 0.0
        if request.key in batch.keys or self._started.get(request.key, request) is not request:
            return True, 0.0
        source = request.source
        entry = self._tiers.find(request)
        if request.is_started:  # the cached tokens are from its own earlier chunks
            request.source = source
        num_waiting = len(self.queue)
        if entry is None and self._tiers.reload(request, ahead_s=0.0, num_behind=num_waiting, resume=self._resume):
            self.remove(request)
            return False, 0.0
        if self._seconds(request, entry) <= self._max_unsplit_s:
            chunk = self._last_chunk(request, entry)
        elif batch.has_partial and batch.left_s <= 0:
            return True, 0.0
        else:
            chunk = self._next_chunk(
                request, entry, batch.budget, max(batch.left_s, MIN_CHUNK_FRACTION * self._chunk_s)
            )
        self._record_chunk(chunk)
        seconds = self._costs.predict_s(*self._costs.work(*chunk.item.extent), steps=0.0)
        batch.add(chunk, seconds)
        return not chunk.is_last, seconds

    def _record_chunk(self, chunk: ScheduledChunk) -> None:
        request = chunk.request
        if not request.is_started:
            request.is_started = True
            request.num_cached = chunk.item.first
        request.num_planned += chunk.item.num_candidates
        if chunk.is_last:
            self.remove(request)
            return
        self._started[request.key] = request
        if chunk.entry is not None:
            self._tiers.device.reserve_until(chunk.entry, request.deadline_s)

    def _give_up(self, request: EngineRequest) -> None:
        self.remove(request)
        self._tiers.release(request)

    def _seconds(self, request: EngineRequest, entry: Entry | None) -> float:
        """Return the device seconds of everything that remains of a request."""
        first = entry.length if entry is not None else 0
        candidates = request.remaining_candidates
        num_candidates = 0 if candidates is None else len(candidates)
        return self._costs.predict_s(*self._costs.work(first, request.tokens.length - first, num_candidates), steps=0.0)

    def _last_chunk(self, request: EngineRequest, entry: Entry | None) -> ScheduledChunk:
        return ScheduledChunk.make(
            self._tiers,
            request,
            entry,
            end=request.tokens.length,
            candidates=request.remaining_candidates,
            is_last=True,
        )

    def _next_chunk(self, request: EngineRequest, entry: Entry | None, budget: int, left_s: float) -> ScheduledChunk:
        """Schedule as much of a long request as can be computed in `left_s` seconds."""
        first = entry.length if entry is not None else 0
        in_time = self._costs.tokens_within(left_s, first) // MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS
        num_tokens = max(MIN_CHUNK_TOKENS, min(in_time, budget)) // self._tokens_per_event * self._tokens_per_event
        if request.tokens.num_cacheable - first > num_tokens:
            end = request.tokens.event_boundary(first + num_tokens)
            chunk = ScheduledChunk.make(self._tiers, request, entry, end=end, candidates=None, is_last=False)
            return chunk if chunk.will_be_cached else self._extend_to_end(chunk)
        history_s = self._costs.predict_s(*self._costs.work(first, request.tokens.length - first, 0), steps=0.0)
        candidates = request.remaining_candidates
        assert candidates is not None
        count = self._candidates_within(request, left_s - history_s)
        if not self._appends_candidates or count >= len(candidates):
            return self._last_chunk(request, entry)
        chunk_candidates = candidates.part(0, count)
        chunk = ScheduledChunk.make(
            self._tiers, request, entry, end=request.tokens.length, candidates=chunk_candidates, is_last=False
        )
        return chunk if chunk.will_be_cached else self._extend_to_end(chunk)

    def _candidates_within(self, request: EngineRequest, seconds: float) -> int:
        each_s = self._costs.predict_s(*self._costs.work(request.tokens.length, 0, 1), steps=0.0)
        return max(_MIN_CANDIDATES, int(seconds / each_s))

    def _extend_to_end(self, chunk: ScheduledChunk) -> ScheduledChunk:
        """Extend a chunk that cannot be cached to everything that remains, with the entry that is already pinned."""
        item = replace(chunk.item, end=chunk.request.tokens.length, candidates=chunk.request.remaining_candidates)
        return replace(chunk, item=item, is_last=True)


_CHUNK_FRACTION = 0.25
"""Fraction of the latency budget up to which pre-infer requests fill a batch."""

_SPLIT_FRACTION = 0.5
"""Fraction of the latency budget above which a request is split into chunks, so that others do not wait too long.

Chunks cost more than the unsplit request. Shorter requests are therefore not split, and take no longer than without a
prefix cache."""

End = Callable[[EngineRequest, RankResult | None, Exception | None], None]


class BatchScheduler:
    """Forms the batches of an engine from its queues; used on the engine's thread only.

    Args:
        cfg: Options of the engine.
        tiers: Prefix cache.
        clock: Source of time.
        costs: Cost model of the engine.
        tokens_per_event: Tokens per history event.
        appends_candidates: Whether candidates are tokens of the model.
        row_step: Rows to whose multiples a batch should be filled, see `BatchRunner.row_step`.
        end: Completes a request with a result or an exception.
        preinfer_done: Completes a pre-infer request.
        count: Counts an event for the metrics.
        queued_s: Returns the device seconds of all queued and running requests.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        tiers: TieredPrefixCache,
        clock: Clock,
        *,
        costs: EngineCostModel,
        tokens_per_event: int,
        appends_candidates: bool,
        row_step: int,
        end: End,
        preinfer_done: Callable[[EngineRequest, Entry], None],
        count: Callable[[str], None],
        queued_s: Callable[[], float],
    ):
        self._cfg = cfg
        self._tiers = tiers
        self._clock = clock
        self._tokens_per_event = tokens_per_event
        self._costs = costs
        self._row_step = row_step
        chunk_ms = (
            cfg.preinfer.latency_budget_ms * _CHUNK_FRACTION if cfg.preinfer_chunk_ms is None else cfg.preinfer_chunk_ms
        )
        self.chunk_s = chunk_ms / 1e3 or math.inf
        """Device seconds up to which pre-infer requests fill a batch."""
        self._end = end
        self._preinfer_done = preinfer_done
        self._count = count
        self._queued_s = queued_s
        self._ranks = RankScheduler(
            cfg,
            tiers,
            costs=costs,
            chunk_s=self.chunk_s,
            max_unsplit_s=(cfg.preinfer.latency_budget_ms * _SPLIT_FRACTION / 1e3 or math.inf)
            if cfg.preinfer_chunk_ms is None
            else self.chunk_s,
            tokens_per_event=tokens_per_event,
            appends_candidates=appends_candidates,
            is_needed=self._is_needed,
            resume=self._resume,
        )
        self._preinfer: OrderedDict[CacheKey, EngineRequest] = OrderedDict()
        self._handled: list[EngineRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._ranks.queue or self._preinfer)

    @property
    def num_waiting(self) -> int:
        """Number of ranking requests that are not completely scheduled. Callable from any thread."""
        return len(self._ranks.queue)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. It replaces a queued pre-infer request of the user, whose cached tokens remain."""
        self.drop_preinfer(request.key)
        if request.is_rank:
            self._ranks.queue.push(request)
        else:
            self._preinfer[request.key] = request

    def drop_preinfer(self, key: CacheKey) -> None:
        """End the queued pre-infer request of a user, because its ranking request arrived or was rejected."""
        preinfer = self._preinfer.pop(key, None)
        if preinfer is not None:
            self._count("preinfer_superseded")
            self._end(preinfer, None, UnavailableError("a later request took over", 0.0))

    def schedule(self, handled: list[EngineRequest]) -> list[ScheduledChunk]:
        """Return the chunks of the next batch; empty if all remaining requests wait for cache copies.

        Every request that is considered is added to `handled`, even if an exception ends the call.
        """
        self._handled = handled
        fail_point("serving.plan")
        ranked, is_full = self._ranks.schedule()
        return ranked if is_full else ranked + self._schedule_preinfer(ranked)

    def on_launch(self, chunk: ScheduledChunk) -> None:
        """Remove a pre-infer request from the queue if the batch of its last chunk was launched."""
        if not chunk.request.is_rank and chunk.is_last:
            self._preinfer.pop(chunk.request.key, None)

    def remove(self, request: EngineRequest) -> None:
        """Remove a request that failed."""
        self._ranks.remove(request)
        if self._preinfer.get(request.key) is request:
            del self._preinfer[request.key]

    def restart_requests(self, version: str) -> None:
        """Restart all requests, because the model has changed to another version."""
        self._ranks.restart_requests(version)
        preinfer_requests, self._preinfer = list(self._preinfer.values()), OrderedDict()
        for request in preinfer_requests:
            request.restart(version)
            self._preinfer[request.key] = request

    def clear(self) -> None:
        """Remove all requests."""
        self._ranks.clear()
        self._preinfer.clear()

    def _is_needed(self, request: EngineRequest) -> bool:
        self._handled.append(request)
        if request.is_finished:  # an earlier chunk of it failed
            return False
        if request.future.cancelled():
            self._count("cancelled")
            self._end(request, None, None)
            return False
        if self._clock.now_s() > request.deadline_s:
            self._count("shed_deadline")
            self._end(request, None, UnavailableError("the deadline of the request passed in the queue", 0.05))
            return False
        return True

    def _schedule_preinfer(self, ranked: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Fill the batch with chunks of pre-infer requests.

        The more ranking requests it contains, the fewer chunks are added, so that batches take about equally long.
        """
        busy = {chunk.request.key for chunk in ranked}
        chunks: list[ScheduledChunk] = []
        budget = self._cfg.max_batch_tokens
        rows = sum(chunk.item.num_new for chunk in ranked)
        ranked_s = sum(self._costs.predict_s(*self._costs.work(*chunk.item.extent), steps=0.0) for chunk in ranked)
        left_s = max(self.chunk_s - ranked_s, MIN_CHUNK_FRACTION * self.chunk_s)
        for request in [w for w in self._preinfer.values() if w.key not in busy]:
            if min(budget, left_s) <= 0 or len(ranked) + len(chunks) >= self._cfg.max_batch_requests:
                break
            if chunks and not self._has_time(request, left_s, rows):
                break
            chunk = self._schedule_preinfer_chunk(request, budget, left_s, rows)
            if chunk is None:
                del self._preinfer[request.key]
            else:
                chunks.append(chunk)
                budget, rows = budget - chunk.item.num_new, rows + chunk.item.num_new
                left_s -= self._costs.predict_s(*self._costs.work(*chunk.item.extent), steps=0.0)
        return chunks

    def _has_time(self, request: EngineRequest, left_s: float, rows: int) -> bool:
        """Return whether there is time for all missing tokens, or for enough of them to keep the device busy."""
        missing = request.tokens.num_cacheable - self._tiers.device.length_of(request.key)
        in_time = self._costs.tokens_within(left_s, 0)
        minimum = self._row_step if rows % self._row_step == 0 else 1
        return in_time >= max(minimum, min(MIN_CHUNK_TOKENS, missing))

    def _schedule_preinfer_chunk(
        self, request: EngineRequest, budget: int, left_s: float, rows: int
    ) -> ScheduledChunk | None:
        """Return the next chunk of a pre-infer request in a batch of `rows` rows, or None if none is needed."""
        if not self._is_needed(request):
            self._tiers.release(request)
            return None
        entry = self._tiers.find(request)
        if entry is None and self._tiers.reload(request, ahead_s=self._queued_s(), num_behind=0, resume=self._resume):
            return None
        if entry is not None and entry.length >= request.tokens.num_cacheable:
            self._preinfer_done(request, entry)
            return None
        first = entry.length if entry is not None else 0
        in_time = self._costs.tokens_within(left_s, first) // MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS
        budget = min(budget, max(MIN_CHUNK_TOKENS, in_time))
        num_tokens = max(1, budget // self._tokens_per_event) * self._tokens_per_event
        end = self._cut(
            first, min(request.tokens.num_cacheable, request.tokens.event_boundary(first + num_tokens)), rows
        )
        is_last = end >= request.tokens.num_cacheable
        chunk = ScheduledChunk.make(self._tiers, request, entry, end=end, candidates=None, is_last=is_last)
        if not chunk.will_be_cached:  # prefill ahead of the request is useless if the cache has no capacity
            if chunk.entry is not None:
                self._tiers.device.unpin(chunk.entry)
            self._tiers.release(request)
            self._end(request, None, UnavailableError("the KV cache is full", 0.0))
            return None
        return chunk

    def _cut(self, first: int, end: int, rows: int) -> int:
        """Round the end of a chunk down to a multiple of `row_step` rows, since the rest would cost a full step."""
        beyond = (rows + end - first) % self._row_step // self._tokens_per_event * self._tokens_per_event
        return end - beyond if end - first - beyond >= MIN_CHUNK_TOKENS else end

    def _resume(self, request: EngineRequest) -> None:
        """Queue a request again after the cache copy that it waited for has ended."""
        if request.is_rank:
            self._ranks.queue.push_first(request)
        elif request.key not in self._preinfer:
            self._preinfer[request.key] = request
        else:
            self._end(request, None, UnavailableError("a later request took over", 0.0))
