"""The engine: one thread that owns the device and repeats plan, run, complete.

Ranking requests go first, in order of arrival; signals to compute a prefix ahead fill what is left of a batch, in
chunks, so that no request waits behind a long one. A request whose user has a prefix in the cache computes only what is
missing; any other computes everything, and the scores are the same. At most one request of a user is in a batch, so a
user's requests keep their order and share what they compute.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nestrec.base.clock import Clock, RealClock
from nestrec.base.config import config
from nestrec.serving.cost_model import CostModel, work_of
from nestrec.serving.forms import Form, Tokens
from nestrec.serving.inputs import Candidates, History
from nestrec.serving.keyed_hash import KeyedHash
from nestrec.serving.prefix_cache import CacheKey, Entry
from nestrec.serving.runner import Part, Runner, Scored
from nestrec.serving.tiers import PrefixTiers, TiersConfig
from nestrec.serving.trigger import Decision, Trigger, TriggerConfig
from nestrec.serving.warm_up import warm_up
from nestrec.serving.work import Answer, OverloadedError, UnavailableError, Work

_LOG = logging.getLogger(__name__)
_NO_ITEMS, _NO_SCORES = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)


@config
class EngineConfig:
    tiers: TiersConfig = TiersConfig()
    """where prefixes are kept"""
    max_batch_tokens: int = 4096
    """new tokens of a batch, candidates included"""
    chunk_tokens: int = 1024
    """new tokens of signals in a batch that ranks nothing; what a request may have to wait for"""
    mixed_chunk_tokens: int = 256
    """new tokens of signals in a batch that also ranks"""
    max_queue_s: float = 0.25
    """device seconds of work that may wait; beyond it requests are refused"""
    trigger: TriggerConfig = TriggerConfig()
    """what is computed ahead"""


@dataclass(frozen=True, slots=True)
class _Step:
    work: Work
    part: Part
    entry: Entry | None


class Engine:
    """Submit from any thread. `close` ends the thread."""

    def __init__(self, form: Form, cfg: EngineConfig, *, keyed: KeyedHash | None = None, clock: Clock | None = None):
        self.form, self.cfg, self.keyed, self.clock = form, cfg, keyed or KeyedHash(), clock or RealClock()
        self.counts: dict[str, int] = {}
        self.costs = CostModel()
        self.tiers = PrefixTiers(
            form, cfg.tiers, keyed=self.keyed, clock=self.clock, costs=self.costs, post=self._post, count=self._count
        )
        self._runner = Runner(form, self.tiers.pool)
        self.trigger = Trigger(cfg.trigger, self.clock, cache_bytes=self.tiers.num_bytes)
        self._condition = threading.Condition()
        self._inbox: deque[Work] = deque()
        self._messages: deque[Callable[[], None]] = deque()  # from the copier and other threads, to run on this one
        self._ranks: deque[Work] = deque()
        self._signals: OrderedDict[CacheKey, Work] = OrderedDict()
        self._queued_s = 0.0
        self._num_pending = 0
        self._is_draining = self._is_closed = False
        self._is_warm = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="nestrec-engine", daemon=True)
        self._thread.start()
        self._is_warm.wait()

    # Submitting: any thread.

    def rank(self, user: str, history: History, candidates: Candidates, *, timeout_s: float) -> Work:
        """Queue a ranking request; `work.future` gives its answer. Refused at once where it could not be in time."""
        tokens = self.form.tokens(history, candidates.now_ms)
        work = self._work(user, tokens, candidates, timeout_s)
        with self._condition:
            self._check_open()
            wait_s = self._queued_s
            if wait_s + work.estimate_s > min(timeout_s, self.cfg.max_queue_s) and self._num_pending:
                self._count("refused_overload")
                raise OverloadedError("more work waits than can be done in time", max(0.05, wait_s))
            self._enqueue(work)
        return work

    def preinfer(
        self, user: str, history: History, now_ms: int, num_candidates: int, *, timeout_s: float
    ) -> tuple[Decision, Work | None]:
        """Decide on a signal, and queue it where it is admitted."""
        tokens = self.form.tokens(history, now_ms)
        work = self._work(user, tokens, None, timeout_s)
        cached = tokens.num_cacheable
        with self._condition:
            self._check_open()
            decision = self.trigger.decide(
                work.key, tail=self.costs.tail, wait_s=self._queued_s, preinfer_s=work.estimate_s,
                full_rank_s=self.costs.predict_s(*work_of(0, tokens.length, num_candidates)),
                num_bytes=cached * self.tiers.bytes_a_token,
            )  # fmt: skip
            self._count(f"signal_{decision.reason}")
            if not decision.is_admitted or not cached or not self.cfg.tiers.keeps_prefix:
                return decision, None
            self._enqueue(work)
        return decision, work

    def forget(self, user: str) -> None:
        """Drop what is kept of a user, in both tiers."""

        self._post(lambda: self.tiers.drop(self._key(user)))

    def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for what was accepted; whether all of it was done."""
        with self._condition:
            self._is_draining = True
        return self.wait_until_idle(timeout_s)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether all accepted work was done in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._num_pending == 0, timeout_s)

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join()
        self.tiers.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def queued_s(self) -> float:
        """Estimated device seconds of the work that waits or runs."""
        return self._queued_s

    def _check_open(self) -> None:
        if self._is_draining or self._is_closed or not self._thread.is_alive():
            raise UnavailableError("the engine is stopping", 1.0)

    def _work(self, user: str, tokens: Tokens, candidates: Candidates | None, timeout_s: float) -> Work:
        key = self._key(user)
        prefix = tokens.num_cacheable if self.tiers.device.has(key) else 0
        end = tokens.num_cacheable if candidates is None else tokens.length
        work = work_of(min(prefix, end), end - min(prefix, end), len(candidates) if candidates is not None else 0)

        def digest(num_tokens: int) -> bytes:
            return self.keyed.digest("prefix", tokens.records[: num_tokens // self.form.tokens_an_event].tobytes())

        return Work(
            key=key, tokens=tokens, candidates=candidates, deadline_s=self.clock.now_s() + timeout_s,
            estimate_s=self.costs.predict_s(*work, steps=0), digest=digest,
        )  # fmt: skip

    def _key(self, user: str) -> CacheKey:
        return CacheKey(user, self.form.servable.version, f"slide={self.form.slide_events}")

    def _enqueue(self, work: Work) -> None:
        self._queued_s += work.estimate_s
        self._num_pending += 1
        self._inbox.append(work)
        self._condition.notify_all()

    def _post(self, message: Callable[[], None]) -> None:
        with self._condition:
            self._messages.append(message)
            self._condition.notify_all()

    # The engine's thread.

    def _loop(self) -> None:
        try:
            warm_up(self._runner, self.costs)
            self._is_warm.set()
            while (steps := self._plan()) is not None:
                if steps:
                    results, seconds = self._run(steps)
                    self._complete(steps, results, seconds)
        except BaseException:
            _LOG.exception("an engine failed; its requests go elsewhere")
            raise
        finally:
            self._is_warm.set()
            self._fail_all()

    def _plan(self) -> list[_Step] | None:
        """The next batch; waits until there is something to do. None at the end."""
        if not self._take_new():
            return None
        budget = self.cfg.max_batch_tokens
        steps: list[_Step] = []
        later: deque[Work] = deque()
        while self._ranks and budget > 0:
            work = self._ranks.popleft()
            if not self._is_wanted(work):
                continue
            if any(step.work.key == work.key for step in steps):
                later.append(work)
                continue
            step = self._plan_rank(work)
            if step is not None:
                steps.append(step)
                budget -= _num_new(step.part)
        self._ranks.extendleft(reversed(later))
        chunk = self.cfg.mixed_chunk_tokens if steps else self.cfg.chunk_tokens
        steps += self._plan_signals(min(budget, chunk), {step.work.key for step in steps})
        return steps

    def _take_new(self) -> bool:
        """Move what has arrived to this thread; False when the engine is to end."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._inbox or self._messages or self._ranks or self._signals or self._is_closed
            )
            if self._is_closed:
                return False
            arrived, self._inbox = list(self._inbox), deque()
            messages, self._messages = list(self._messages), deque()
        for message in messages:
            message()
        for work in arrived:
            if work.is_rank:
                self._supersede(work.key)
                self._ranks.append(work)
            else:
                self._supersede(work.key)
                self._signals[work.key] = work
        return True

    def _supersede(self, key: CacheKey) -> None:
        """A signal is of no use once a later request of the user is here; what it has computed so far stays."""
        signal = self._signals.pop(key, None)
        if signal is not None:
            self._count("signal_superseded")
            self._finish(signal, None, UnavailableError("a later request took over", 0.0))

    def _is_wanted(self, work: Work) -> bool:
        if work.future.cancelled():
            self._count("cancelled")
            self._finish(work, None, None)
            return False
        if self.clock.now_s() > work.deadline_s:
            self._count("refused_deadline")
            self._finish(work, None, UnavailableError("its deadline passed in the queue", max(0.05, self._queued_s)))
            return False
        return True

    def _plan_rank(self, work: Work) -> _Step | None:
        """How to compute a request; none where it waits for a copy from DRAM."""
        entry = self.tiers.find(work)
        if entry is None and self.tiers.reload(work, self._pressure(), self._resume):
            return None
        return self._step(work, entry, work.tokens.length)

    def _plan_signals(self, budget: int, busy: set[CacheKey]) -> list[_Step]:
        steps = []
        for work in [w for w in self._signals.values() if w.key not in busy]:
            if budget <= 0:
                break
            if not self._is_wanted(work):
                del self._signals[work.key]
                continue
            entry = self.tiers.find(work)
            if entry is None and self.tiers.reload(work, self._pressure(), self._resume):
                del self._signals[work.key]
                continue
            if entry is not None and entry.length >= work.tokens.num_cacheable:
                del self._signals[work.key]
                self._signal_done(work, entry)
                continue
            first = entry.length if entry is not None else 0
            chunk = max(1, budget // self.form.tokens_an_event) * self.form.tokens_an_event
            end = min(work.tokens.num_cacheable, first + chunk)
            step = self._step(work, entry, end)
            if step.part.store_until < end:  # no room to keep it: nothing to compute ahead
                del self._signals[work.key]
                self._release(step)
                self._finish(work, None, UnavailableError("no room in the cache", 0.0))
                continue
            steps.append(step)
            budget -= end - first
        return steps

    def _pressure(self) -> float:
        """How scarce device time is: 1 where nothing waits."""
        return 1.0 + self._queued_s / self.cfg.max_queue_s

    def _resume(self, work: Work) -> None:
        """The copy that a work waited for has ended."""
        if work.is_rank:
            self._ranks.appendleft(work)
        elif work.key not in self._signals:
            self._signals[work.key] = work
        else:
            self._finish(work, None, UnavailableError("a later request took over", 0.0))

    def _step(self, work: Work, entry: Entry | None, end: int) -> _Step:
        """Pin or make the user's entry, with room for what can be kept of the tokens before `end`."""
        first = entry.length if entry is not None else 0
        entry, store_until = self.tiers.reserve(work, entry, min(work.tokens.num_cacheable, end))
        pages = list(entry.pages) if entry is not None else []
        part = Part(
            tokens=work.tokens, first=first, end=end, pages=pages, store_until=store_until, candidates=work.candidates
        )
        return _Step(work, part, entry)

    def _run(self, steps: list[_Step]) -> tuple[list[Scored | None] | Exception, float]:
        start_s = time.perf_counter()
        try:
            results: list[Scored | None] | Exception = self._runner.run([step.part for step in steps])
        except Exception as error:
            _LOG.exception("a batch failed")
            results = error
        if self.form.encoder.position.is_cuda:  # a batch of signals returns before the device is done
            torch.cuda.synchronize()
        return results, time.perf_counter() - start_s

    def _complete(self, steps: list[_Step], results: list[Scored | None] | Exception, seconds: float) -> None:
        if isinstance(results, Exception):
            for step in steps:
                self._fail(step)
            return
        works = [_work_of(step.part) for step in steps]
        self.costs.observe(sum(w[0] for w in works), sum(w[1] for w in works), seconds)
        self._count("batches")
        for step, scores in zip(steps, results, strict=True):
            self._keep(step)
            if scores is not None:
                self._answer(step, scores)
            else:
                self._signal_advanced(step)

    def _keep(self, step: _Step) -> None:
        """The new tokens are in the pages now."""
        if step.entry is not None and step.part.store_until > step.part.first:
            digest = step.work.digest_of(step.part.store_until)
            assert digest is not None
            self.tiers.device.commit(step.entry, step.part.store_until, digest)

    def _answer(self, step: _Step, scored: Scored) -> None:
        work = step.work
        with self._condition:
            self.trigger.consumed(work.key)
        self._count(f"rank_{work.source}")
        if step.entry is not None:
            self.tiers.device.hold(step.entry, float("-inf"))
            self.tiers.spill(step.entry)
        self._release(step)
        self._finish(work, Answer(scored.items, scored.scores, work.key.version, work.source, step.part.first), None)

    def _signal_advanced(self, step: _Step) -> None:
        self._release(step)
        if step.part.end >= step.work.tokens.num_cacheable:
            self._signals.pop(step.work.key, None)
            assert step.entry is not None
            self._signal_done(step.work, step.entry)

    def _signal_done(self, work: Work, entry: Entry) -> None:
        with self._condition:
            life_s = self.trigger.life_s
        self.tiers.device.hold(entry, self.clock.now_s() + life_s)
        self._count("signal_done")
        self._finish(work, Answer(_NO_ITEMS, _NO_SCORES, work.key.version, work.source, entry.length), None)

    def _release(self, step: _Step) -> None:
        if step.entry is not None:
            self.tiers.device.unpin(step.entry)

    def _fail(self, step: _Step) -> None:
        self._signals.pop(step.work.key, None)
        self.tiers.device.drop(step.work.key)
        self._release(step)
        self._count("failed")
        self._finish(step.work, None, RuntimeError("the batch of this request failed"))

    def _finish(self, work: Work, answer: Answer | None, error: Exception | None) -> None:
        with self._condition:
            self._queued_s = max(0.0, self._queued_s - work.estimate_s)
            self._num_pending -= 1
            if self._num_pending == 0:
                self._queued_s = 0.0
                self._condition.notify_all()
        if answer is not None and work.future.set_running_or_notify_cancel():
            work.future.set_result(answer)
        elif error is not None and work.future.set_running_or_notify_cancel():
            work.future.set_exception(error)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _fail_all(self) -> None:
        with self._condition:
            self._is_closed = True
            waiting = [*self._inbox, *self._ranks, *self._signals.values(), *self.tiers.waiting()]
            self._inbox.clear()
        for work in waiting:
            self._finish(work, None, UnavailableError("the engine has ended", 1.0))


def _num_new(part: Part) -> int:
    return part.end - part.first + (len(part.candidates) if part.candidates is not None else 0)


def _work_of(part: Part) -> tuple[int, int]:
    num_candidates = len(part.candidates) if part.candidates is not None else 0
    return work_of(part.first, part.end - part.first, num_candidates)
