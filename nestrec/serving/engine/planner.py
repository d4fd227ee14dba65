"""Which work makes up the next batch.

Ranking requests go first, as `rank_planner` chooses them; signals to compute a prefix ahead fill what is left of a
batch, in chunks, so that no request waits behind a long one. A request whose user has a prefix in the cache computes
only what is missing; any other computes everything, and the scores are the same.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from nestrec.base.clock import Clock
from nestrec.base.failpoints import fail_point
from nestrec.serving.engine.config import EngineConfig
from nestrec.serving.engine.cost_model import EngineCostModel
from nestrec.serving.engine.rank_planner import FEWEST_TOKENS, LEAST_SHARE, RankPlanner
from nestrec.serving.engine.step import EngineStep
from nestrec.serving.engine.work import Answer, UnavailableError, Work
from nestrec.serving.prefix.cache import CacheKey, Entry
from nestrec.serving.prefix.tiers import PrefixTiers

_CHUNK_SHARE = 0.25
"""of the budget of ranking: what a batch may take until signals no longer fill it"""

_CUT_SHARE = 0.5
"""of the budget of ranking: a longer request is computed in pieces, lest others wait too long behind it. Pieces cost
more than the whole, so what is shorter is not cut: then requests take no longer than where nothing is kept"""

End = Callable[[Work, Answer | None, Exception | None], None]


class Planner:
    """The queues of an engine, used on its thread.

    end: answers a work. queued_s: device seconds of everything that waits or runs.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        tiers: PrefixTiers,
        clock: Clock,
        *,
        costs: EngineCostModel,
        tokens_an_event: int,
        appends_candidates: bool,
        row_step: int,
        end: End,
        signal_done: Callable[[Work, Entry], None],
        count: Callable[[str], None],
        queued_s: Callable[[], float],
    ):
        self._cfg, self._tiers, self._clock, self._tokens_an_event = cfg, tiers, clock, tokens_an_event
        self._costs, self._row_step = costs, row_step
        chunk_ms = cfg.trigger.budget_ms * _CHUNK_SHARE if cfg.chunk_ms is None else cfg.chunk_ms
        self.chunk_s = chunk_ms / 1e3 or math.inf
        """of a batch, up to which signals fill it"""
        self._end, self._signal_done, self._count, self._queued_s = end, signal_done, count, queued_s
        self._ranks = RankPlanner(
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
        self._signals: OrderedDict[CacheKey, Work] = OrderedDict()
        self._handled: list[Work] = []

    @property
    def has_work(self) -> bool:
        return bool(self._ranks.queue or self._signals)

    @property
    def num_waiting(self) -> int:
        """Requests that no batch has all of; any thread asks."""
        return len(self._ranks.queue)

    def add(self, work: Work) -> None:
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

    def plan(self, handled: list[Work]) -> list[EngineStep]:
        """Return the next batch, which is empty if all that is left waits for copies.

        Every work that is considered for it is added to `handled`, also if an exception ends the call.
        """
        self._handled = handled
        fail_point("serving.plan")
        ranked, is_full = self._ranks.plan()
        return ranked if is_full else ranked + self._plan_signals(ranked)

    def launched(self, step: EngineStep) -> None:
        """The batch is on its way: a signal whose last chunk it holds needs no further one."""
        if not step.work.is_rank and step.is_last:
            self._signals.pop(step.work.key, None)

    def drop(self, work: Work) -> None:
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

    def _is_wanted(self, work: Work) -> bool:
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

    def _plan_signals(self, ranked: list[EngineStep]) -> list[EngineStep]:
        """Chunks that fill a batch up: the more requests it ranks, the less, so that all batches are about as long."""
        busy = {step.work.key for step in ranked}
        steps: list[EngineStep] = []
        budget, rows = self._cfg.max_batch_tokens, sum(step.part.num_new for step in ranked)
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

    def _has_time(self, work: Work, left_s: float, rows: int) -> bool:
        """Whether another chunk is worth beginning: all of it, or as much as keeps the device busy."""
        missing = work.tokens.num_cacheable - self._tiers.device.length_of(work.key)
        in_time = self._costs.tokens_within(left_s, 0)
        least = self._row_step if rows % self._row_step == 0 else 1
        return in_time >= max(least, min(FEWEST_TOKENS, missing))

    def _plan_signal(self, work: Work, budget: int, left_s: float, rows: int) -> EngineStep | None:
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
        step = EngineStep.make(self._tiers, work, entry, end=end, candidates=None, is_last=is_last)
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

    def _resume(self, work: Work) -> None:
        """The copy that a work waited for has ended."""
        if work.is_rank:
            self._ranks.queue.push_first(work)
        elif work.key not in self._signals:
            self._signals[work.key] = work
        else:
            self._end(work, None, UnavailableError("a later request took over", 0.0))
