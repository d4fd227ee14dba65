"""The batch scheduler: which requests form the next batch, with the engine's options.

Options of an engine.

A work's share of a batch.

The ranking requests of a batch, in the order of `fair_queue`, long ones in pieces.

A request that would take longer than a batch may is cut: its history, as far as it can be cached, then its candidates.
What is computed lies in the user's entry of the cache between two pieces, held for it. Where the cache has no room the
rest is computed at once. At most one request of a user is in a batch, and none begins before one that has begun is
done.

Which work makes up the next batch.

Ranking requests go first, as `rank_planner` chooses them; signals to compute a prefix ahead fill what is left of a
batch, in chunks, so that no request waits behind a long one. A request whose user has a prefix in the cache computes
only what is missing; any other computes everything, and the scores are the same.
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
from nestrec.serving.kv_cache.kv_page_pool import PrefixDtype
from nestrec.serving.kv_cache.prefix_cache import Entry
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig, TieredPrefixCache
from nestrec.serving.model.request_inputs import Candidates


@config
class EngineConfig:
    tiers: PrefixCacheConfig = PrefixCacheConfig()
    """where prefixes are kept"""
    prefix_dtype: PrefixDtype = "model"
    """of the keys and values of prefixes: that of the model, bfloat16, or fp8 (half of that: twice the users in as many
    bytes); what 8 bits cost is measured by `nestrec export`"""
    captured: bool = True
    """on a GPU, batches are captured graphs over pages of prefixes; false: sequence by sequence, in plain operators"""
    max_batch_tokens: Count = 4096
    """new tokens of requests in a batch, candidates included; signals may add as many"""
    max_batch_requests: Count = 32
    """requests and signals of a batch"""
    chunk_ms: NonNegative | None = None
    """device milliseconds of a batch up to which signals fill it, by the learned costs (beside many requests a quarter
    of that all the same); none: a quarter of `trigger.budget_ms`, since a request waits for the rest of one batch and
    then for its own; 0: the tokens alone bound them"""
    max_queue_s: NonNegative = 0.25
    """device seconds of work that may wait; beyond it requests are refused, but for one behind the batch that is
    computed whose deadline allows it: without it the device would be idle at the end of that batch"""
    trigger: TriggerConfig = TriggerConfig()
    """what is computed ahead"""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Its entry is pinned until the batch has ended."""

    work: EngineRequest
    part: BatchItem
    entry: Entry | None
    is_last: bool
    """nothing is left of the work after this step"""

    @staticmethod
    def make(
        tiers: TieredPrefixCache,
        work: EngineRequest,
        entry: Entry | None,
        *,
        end: int,
        candidates: Candidates | None,
        is_last: bool,
    ) -> "ScheduledChunk":
        """Pin or make the user's entry, with room for what can be kept of the tokens before `end`."""
        first = entry.length if entry is not None else 0
        entry, store_until = tiers.reserve(work, entry, min(work.tokens.num_cacheable, end))
        pages = list(entry.pages) if entry is not None else []
        part = BatchItem(
            tokens=work.tokens, first=first, end=end, pages=pages, store_until=store_until, candidates=candidates
        )
        return ScheduledChunk(work, part, entry, is_last)

    @property
    def is_kept(self) -> bool:
        """What can be cached of it will be there for the next step."""
        return self.part.store_until >= min(self.part.end, self.work.tokens.num_cacheable)


FEWEST_TOKENS = 256
"""of a piece that time alone would make smaller: less keeps no device busy"""
LEAST_SHARE = 0.25
"""of the time of a batch that pieces get beside any number of requests, lest they starve"""
_FEWEST_CANDIDATES = 64
"""of a piece after its history"""


@dataclass(slots=True)
class _Batch:
    budget: int
    """tokens"""
    left_s: float
    """until it is as long as a batch may be"""
    steps: list[ScheduledChunk] = field(default_factory=list)
    keys: set[CacheKey] = field(default_factory=set)
    has_piece: bool = False

    def add(self, step: ScheduledChunk, seconds: float) -> None:
        self.steps.append(step)
        self.keys.add(step.work.key)
        self.budget -= step.part.num_new
        self.left_s -= seconds
        self.has_piece |= not step.is_last


class RankScheduler:
    """Used on the engine's thread.

    chunk_s, cut_s: of a piece, and of the longest request that is not cut. is_wanted: False for a work that was given
    up, and so has ended. resume: called with a work whose copy is made.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        tiers: TieredPrefixCache,
        *,
        costs: EngineCostModel,
        chunk_s: float,
        cut_s: float,
        tokens_an_event: int,
        appends_candidates: bool,
        is_wanted: Callable[[EngineRequest], bool],
        resume: Callable[[EngineRequest], None],
    ):
        self._cfg = cfg
        self._tiers = tiers
        self._costs = costs
        self._chunk_s = chunk_s
        self._cut_s = cut_s
        self._tokens_an_event = tokens_an_event
        self._appends_candidates = appends_candidates
        self._is_wanted = is_wanted
        self._resume = resume
        self._begun: dict[CacheKey, EngineRequest] = {}
        self.clear()

    def plan(self) -> tuple[list[ScheduledChunk], bool]:
        """The steps, and whether requests are left that there was no room for."""
        batch = _Batch(self._cfg.max_batch_tokens, self._chunk_s)
        taken: list[tuple[EngineRequest, bool]] = []
        while self.queue and batch.budget > 0 and len(batch.steps) < self._cfg.max_batch_requests:
            work = self.queue.pop()
            is_left, seconds = self._take(work, batch)
            self.queue.charge(work, seconds)
            taken.append((work, is_left))
        is_full = bool(self.queue)
        for work, is_left in taken:
            self.queue.settle(work, is_left=is_left)
        return batch.steps, is_full

    def clear(self) -> None:
        """Forget all works, and what users have had of the device so far."""
        self.queue = FairQueue(lambda work: min(work.estimate_s, self._chunk_s), lambda work: work.estimate_s)
        self._begun.clear()

    def begin_again(self, version: str) -> None:
        """The model is that of another version now."""
        self._begun.clear()
        for work in self.queue:
            work.begin_again(version)

    def forget(self, work: EngineRequest) -> None:
        """It has ended, however."""
        if self._begun.get(work.key) is work:
            del self._begun[work.key]

    def _take(self, work: EngineRequest, batch: _Batch) -> tuple[bool, float]:
        """Add a request, or a piece of it; whether something of it is left here, and the device seconds it gets."""
        if not self._is_wanted(work):
            self._give_up(work)
            return False, 0.0
        if work.key in batch.keys or self._begun.get(work.key, work) is not work:
            return True, 0.0
        source = work.source
        entry = self._tiers.find(work)
        if work.is_begun:  # what is found now it has computed itself
            work.source = source
        behind = len(self.queue)
        if entry is None and self._tiers.reload(work, ahead_s=0.0, behind=behind, resume=self._resume):
            self.forget(work)
            return False, 0.0
        if self._seconds(work, entry) <= self._cut_s:
            step = self._rest(work, entry)
        elif batch.has_piece and batch.left_s <= 0:
            return True, 0.0
        else:
            step = self._piece(work, entry, batch.budget, max(batch.left_s, LEAST_SHARE * self._chunk_s))
        self._begins(step)
        seconds = self._costs.predict_s(*self._costs.work(*step.part.extent), steps=0.0)
        batch.add(step, seconds)
        return not step.is_last, seconds

    def _begins(self, step: ScheduledChunk) -> None:
        work = step.work
        if not work.is_begun:
            work.is_begun = True
            work.num_cached = step.part.first
        work.num_planned += step.part.num_candidates
        if step.is_last:
            self.forget(work)
            return
        self._begun[work.key] = work
        if step.entry is not None:
            self._tiers.device.hold(step.entry, work.deadline_s)

    def _give_up(self, work: EngineRequest) -> None:
        self.forget(work)
        self._tiers.let_go(work)

    def _seconds(self, work: EngineRequest, entry: Entry | None) -> float:
        """Of all that is left of a request."""
        first = entry.length if entry is not None else 0
        candidates = work.candidates_left
        num_candidates = 0 if candidates is None else len(candidates)
        return self._costs.predict_s(*self._costs.work(first, work.tokens.length - first, num_candidates), steps=0.0)

    def _rest(self, work: EngineRequest, entry: Entry | None) -> ScheduledChunk:
        return ScheduledChunk.make(
            self._tiers, work, entry, end=work.tokens.length, candidates=work.candidates_left, is_last=True
        )

    def _piece(self, work: EngineRequest, entry: Entry | None, budget: int, left_s: float) -> ScheduledChunk:
        """As much of a long request as is done in so many seconds."""
        first = entry.length if entry is not None else 0
        in_time = self._costs.tokens_within(left_s, first) // FEWEST_TOKENS * FEWEST_TOKENS
        chunk = max(FEWEST_TOKENS, min(in_time, budget)) // self._tokens_an_event * self._tokens_an_event
        if work.tokens.num_cacheable - first > chunk:
            end = work.tokens.uncut(first + chunk)
            step = ScheduledChunk.make(self._tiers, work, entry, end=end, candidates=None, is_last=False)
            return step if step.is_kept else self._whole(step)
        history_s = self._costs.predict_s(*self._costs.work(first, work.tokens.length - first, 0), steps=0.0)
        candidates = work.candidates_left
        assert candidates is not None
        count = self._candidates_within(work, left_s - history_s)
        if not self._appends_candidates or count >= len(candidates):
            return self._rest(work, entry)
        some = candidates.part(0, count)
        step = ScheduledChunk.make(self._tiers, work, entry, end=work.tokens.length, candidates=some, is_last=False)
        return step if step.is_kept else self._whole(step)

    def _candidates_within(self, work: EngineRequest, seconds: float) -> int:
        each_s = self._costs.predict_s(*self._costs.work(work.tokens.length, 0, 1), steps=0.0)
        return max(_FEWEST_CANDIDATES, int(seconds / each_s))

    def _whole(self, step: ScheduledChunk) -> ScheduledChunk:
        """Without room to keep a piece: all that is left, with the entry that is pinned already."""
        part = replace(step.part, end=step.work.tokens.length, candidates=step.work.candidates_left)
        return replace(step, part=part, is_last=True)


_CHUNK_SHARE = 0.25
"""of the budget of ranking: what a batch may take until signals no longer fill it"""

_CUT_SHARE = 0.5
"""of the budget of ranking: a longer request is computed in pieces, lest others wait too long behind it. Pieces cost
more than the whole, so what is shorter is not cut: then requests take no longer than where nothing is kept"""

End = Callable[[EngineRequest, RankResult | None, Exception | None], None]


class BatchScheduler:
    """The queues of an engine, used on its thread.

    end: answers a work. queued_s: device seconds of everything that waits or runs.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        tiers: TieredPrefixCache,
        clock: Clock,
        *,
        costs: EngineCostModel,
        tokens_an_event: int,
        appends_candidates: bool,
        row_step: int,
        end: End,
        signal_done: Callable[[EngineRequest, Entry], None],
        count: Callable[[str], None],
        queued_s: Callable[[], float],
    ):
        self._cfg = cfg
        self._tiers = tiers
        self._clock = clock
        self._tokens_an_event = tokens_an_event
        self._costs = costs
        self._row_step = row_step
        chunk_ms = cfg.trigger.budget_ms * _CHUNK_SHARE if cfg.chunk_ms is None else cfg.chunk_ms
        self.chunk_s = chunk_ms / 1e3 or math.inf
        """of a batch, up to which signals fill it"""
        self._end = end
        self._signal_done = signal_done
        self._count = count
        self._queued_s = queued_s
        self._ranks = RankScheduler(
            cfg,
            tiers,
            costs=costs,
            chunk_s=self.chunk_s,
            cut_s=(cfg.trigger.budget_ms * _CUT_SHARE / 1e3 or math.inf) if cfg.chunk_ms is None else self.chunk_s,
            tokens_an_event=tokens_an_event,
            appends_candidates=appends_candidates,
            is_wanted=self._is_wanted,
            resume=self._resume,
        )
        self._signals: OrderedDict[CacheKey, EngineRequest] = OrderedDict()
        self._handled: list[EngineRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._ranks.queue or self._signals)

    @property
    def num_waiting(self) -> int:
        """Requests that no batch has all of; any thread asks."""
        return len(self._ranks.queue)

    def add(self, work: EngineRequest) -> None:
        """A signal is of no use once a later request of the user is here; what it has computed so far stays."""
        self.drop_signal(work.key)
        if work.is_rank:
            self._ranks.queue.push(work)
        else:
            self._signals[work.key] = work

    def drop_signal(self, key: CacheKey) -> None:
        """The request that it was for is here, or was refused."""
        signal = self._signals.pop(key, None)
        if signal is not None:
            self._count("signal_superseded")
            self._end(signal, None, UnavailableError("a later request took over", 0.0))

    def plan(self, handled: list[EngineRequest]) -> list[ScheduledChunk]:
        """Return the next batch, which is empty if all that is left waits for copies.

        Every work that is considered for it is added to `handled`, also if an exception ends the call.
        """
        self._handled = handled
        fail_point("serving.plan")
        ranked, is_full = self._ranks.plan()
        return ranked if is_full else ranked + self._plan_signals(ranked)

    def launched(self, step: ScheduledChunk) -> None:
        """The batch is on its way: a signal whose last chunk it holds needs no further one."""
        if not step.work.is_rank and step.is_last:
            self._signals.pop(step.work.key, None)

    def drop(self, work: EngineRequest) -> None:
        """Forget a work that failed."""
        self._ranks.forget(work)
        if self._signals.get(work.key) is work:
            del self._signals[work.key]

    def begin_again(self, version: str) -> None:
        """The model is that of another version now."""
        self._ranks.begin_again(version)
        signals, self._signals = list(self._signals.values()), OrderedDict()
        for work in signals:
            work.begin_again(version)
            self._signals[work.key] = work

    def clear(self) -> None:
        """Forget all works."""
        self._ranks.clear()
        self._signals.clear()

    def _is_wanted(self, work: EngineRequest) -> bool:
        self._handled.append(work)
        if work.is_finished:  # a piece of it failed
            return False
        if work.future.cancelled():
            self._count("cancelled")
            self._end(work, None, None)
            return False
        if self._clock.now_s() > work.deadline_s:
            self._count("refused_deadline")
            self._end(work, None, UnavailableError("its deadline passed in the queue", 0.05))
            return False
        return True

    def _plan_signals(self, ranked: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Chunks that fill a batch up: the more requests it ranks, the less, so that all batches are about as long."""
        busy = {step.work.key for step in ranked}
        steps: list[ScheduledChunk] = []
        budget = self._cfg.max_batch_tokens
        rows = sum(step.part.num_new for step in ranked)
        ranked_s = sum(self._costs.predict_s(*self._costs.work(*step.part.extent), steps=0.0) for step in ranked)
        left_s = max(self.chunk_s - ranked_s, LEAST_SHARE * self.chunk_s)
        for work in [w for w in self._signals.values() if w.key not in busy]:
            if min(budget, left_s) <= 0 or len(ranked) + len(steps) >= self._cfg.max_batch_requests:
                break
            if steps and not self._has_time(work, left_s, rows):
                break
            step = self._plan_signal(work, budget, left_s, rows)
            if step is None:
                del self._signals[work.key]
            else:
                steps.append(step)
                budget, rows = budget - step.part.num_new, rows + step.part.num_new
                left_s -= self._costs.predict_s(*self._costs.work(*step.part.extent), steps=0.0)
        return steps

    def _has_time(self, work: EngineRequest, left_s: float, rows: int) -> bool:
        """Whether another chunk is worth beginning: all of it, or as much as keeps the device busy."""
        missing = work.tokens.num_cacheable - self._tiers.device.length_of(work.key)
        in_time = self._costs.tokens_within(left_s, 0)
        least = self._row_step if rows % self._row_step == 0 else 1
        return in_time >= max(least, min(FEWEST_TOKENS, missing))

    def _plan_signal(self, work: EngineRequest, budget: int, left_s: float, rows: int) -> ScheduledChunk | None:
        """The next chunk of a signal in a batch of so many rows; none where there is nothing to compute."""
        if not self._is_wanted(work):
            self._tiers.let_go(work)
            return None
        entry = self._tiers.find(work)
        if entry is None and self._tiers.reload(work, ahead_s=self._queued_s(), behind=0, resume=self._resume):
            return None
        if entry is not None and entry.length >= work.tokens.num_cacheable:
            self._signal_done(work, entry)
            return None
        first = entry.length if entry is not None else 0
        in_time = self._costs.tokens_within(left_s, first) // FEWEST_TOKENS * FEWEST_TOKENS
        budget = min(budget, max(FEWEST_TOKENS, in_time))
        chunk = max(1, budget // self._tokens_an_event) * self._tokens_an_event
        end = self._cut(first, min(work.tokens.num_cacheable, work.tokens.uncut(first + chunk)), rows)
        is_last = end >= work.tokens.num_cacheable
        step = ScheduledChunk.make(self._tiers, work, entry, end=end, candidates=None, is_last=is_last)
        if not step.is_kept:  # no room to keep it: nothing to compute ahead
            if step.entry is not None:
                self._tiers.device.unpin(step.entry)
            self._tiers.let_go(work)
            self._end(work, None, UnavailableError("no room in the cache", 0.0))
            return None
        return step

    def _cut(self, first: int, end: int, rows: int) -> int:
        """Where a chunk best ends: the rows beyond the last whole step would cost as much as a step."""
        beyond = (rows + end - first) % self._row_step // self._tokens_an_event * self._tokens_an_event
        return end - beyond if end - first - beyond >= FEWEST_TOKENS else end

    def _resume(self, work: EngineRequest) -> None:
        """The copy that a work waited for has ended."""
        if work.is_rank:
            self._ranks.queue.push_first(work)
        elif work.key not in self._signals:
            self._signals[work.key] = work
        else:
            self._end(work, None, UnavailableError("a later request took over", 0.0))
