"""The ranking requests of a batch, in the order of `fair_queue`, long ones in pieces.

A request that would take longer than a batch may is cut: its history, as far as it can be cached, then its candidates.
What is computed lies in the user's entry of the cache between two pieces, held for it. Where the cache has no room the
rest is computed at once. At most one request of a user is in a batch, and none begins before one that has begun is
done.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nestrec.serving.engine.config import EngineConfig
from nestrec.serving.engine.cost_model import EngineCostModel
from nestrec.serving.engine.fair_queue import FairQueue
from nestrec.serving.engine.step import EngineStep
from nestrec.serving.engine.work import Work
from nestrec.serving.prefix.cache import CacheKey, Entry
from nestrec.serving.prefix.tiers import PrefixTiers

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
    steps: list[EngineStep] = field(default_factory=list)
    keys: set[CacheKey] = field(default_factory=set)
    has_piece: bool = False

    def add(self, step: EngineStep, seconds: float) -> None:
        self.steps.append(step)
        self.keys.add(step.work.key)
        self.budget -= step.part.num_new
        self.left_s -= seconds
        self.has_piece |= not step.is_last


class RankPlanner:
    """Used on the engine's thread.

    chunk_s, cut_s: of a piece, and of the longest request that is not cut. is_wanted: False for a work that was given
    up, and so has ended. resume: called with a work whose copy is made.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        tiers: PrefixTiers,
        *,
        costs: EngineCostModel,
        chunk_s: float,
        cut_s: float,
        tokens_an_event: int,
        appends_candidates: bool,
        is_wanted: Callable[[Work], bool],
        resume: Callable[[Work], None],
    ):
        self._cfg, self._tiers, self._costs, self._chunk_s, self._cut_s = cfg, tiers, costs, chunk_s, cut_s
        self._tokens_an_event, self._appends_candidates = tokens_an_event, appends_candidates
        self._is_wanted, self._resume = is_wanted, resume
        self._begun: dict[CacheKey, Work] = {}
        self.clear()

    def plan(self) -> tuple[list[EngineStep], bool]:
        """The steps, and whether requests are left that there was no room for."""
        batch = _Batch(self._cfg.max_batch_tokens, self._chunk_s)
        taken: list[tuple[Work, bool]] = []
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

    def forget(self, work: Work) -> None:
        """It has ended, however."""
        if self._begun.get(work.key) is work:
            del self._begun[work.key]

    def _take(self, work: Work, batch: _Batch) -> tuple[bool, float]:
        """Add a request, or a piece of it; whether something of it is left here, and the device seconds it gets."""
        if not self._is_wanted(work):
            self._give_up(work)
            return False, 0.0
        if work.key in batch.keys or self._begun.get(work.key, work) is not work:
            return True, 0.0
        source, entry = work.source, self._tiers.find(work)
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

    def _begins(self, step: EngineStep) -> None:
        work = step.work
        if not work.is_begun:
            work.is_begun, work.num_cached = True, step.part.first
        work.num_planned += step.part.num_candidates
        if step.is_last:
            self.forget(work)
            return
        self._begun[work.key] = work
        if step.entry is not None:
            self._tiers.device.hold(step.entry, work.deadline_s)

    def _give_up(self, work: Work) -> None:
        self.forget(work)
        self._tiers.let_go(work)

    def _seconds(self, work: Work, entry: Entry | None) -> float:
        """Of all that is left of a request."""
        first, candidates = entry.length if entry is not None else 0, work.candidates_left
        num_candidates = 0 if candidates is None else len(candidates)
        return self._costs.predict_s(*self._costs.work(first, work.tokens.length - first, num_candidates), steps=0.0)

    def _rest(self, work: Work, entry: Entry | None) -> EngineStep:
        return EngineStep.make(
            self._tiers, work, entry, end=work.tokens.length, candidates=work.candidates_left, is_last=True
        )

    def _piece(self, work: Work, entry: Entry | None, budget: int, left_s: float) -> EngineStep:
        """As much of a long request as is done in so many seconds."""
        first = entry.length if entry is not None else 0
        in_time = self._costs.tokens_within(left_s, first) // FEWEST_TOKENS * FEWEST_TOKENS
        chunk = max(FEWEST_TOKENS, min(in_time, budget)) // self._tokens_an_event * self._tokens_an_event
        if work.tokens.num_cacheable - first > chunk:
            end = work.tokens.uncut(first + chunk)
            step = EngineStep.make(self._tiers, work, entry, end=end, candidates=None, is_last=False)
            return step if step.is_kept else self._whole(step)
        history_s = self._costs.predict_s(*self._costs.work(first, work.tokens.length - first, 0), steps=0.0)
        candidates = work.candidates_left
        assert candidates is not None
        count = self._candidates_within(work, left_s - history_s)
        if not self._appends_candidates or count >= len(candidates):
            return self._rest(work, entry)
        some = candidates.part(0, count)
        step = EngineStep.make(self._tiers, work, entry, end=work.tokens.length, candidates=some, is_last=False)
        return step if step.is_kept else self._whole(step)

    def _candidates_within(self, work: Work, seconds: float) -> int:
        each_s = self._costs.predict_s(*self._costs.work(work.tokens.length, 0, 1), steps=0.0)
        return max(_FEWEST_CANDIDATES, int(seconds / each_s))

    def _whole(self, step: EngineStep) -> EngineStep:
        """Without room to keep a piece: all that is left, with the entry that is pinned already."""
        part = replace(step.part, end=step.work.tokens.length, candidates=step.work.candidates_left)
        return replace(step, part=part, is_last=True)
