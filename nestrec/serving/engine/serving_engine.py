"""The serving engine: one thread that owns the device and computes requests in batches, one turn after the other.

    turn    admit what has arrived, then complete the oldest batch in flight, or schedule and launch the next one

Requests arrive from any thread through `rank` and `preinfer`. The scheduler decides which of them form a batch. On a
GPU the next batch is scheduled and launched while the device computes the one before. Batches run in order, so a
prefix counts as cached as soon as the batch that computes it is launched; results, pins and copies to host memory wait
for the end of that batch.

An exception on the thread fails the requests of that turn. Queues and cache entries may be half changed by then, so
they are rebuilt, the other requests start over, and the engine continues. If it cannot continue, all requests fail and
`on_lost` is called.
"""

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from nestrec.base.clock import Clock, RealClock
from nestrec.base.failpoints import fail_point
from nestrec.base.lazy import import_attribute
from nestrec.ops.attention.paged.query_blocks import can_be_paged
from nestrec.serving.core.cost_model import EngineCostModel, Histogram
from nestrec.serving.core.rejections import OverloadedError, UnavailableError
from nestrec.serving.core.request_limits import NOBODY, RequestSource
from nestrec.serving.core.slot_router import KeyedHash
from nestrec.serving.engine.admission import AdmissionEstimator, QueueEstimate
from nestrec.serving.engine.batch_pacer import BatchPacer
from nestrec.serving.engine.batch_scheduler import BatchScheduler, EngineConfig, ScheduledChunk
from nestrec.serving.engine.golden_request import check_probe
from nestrec.serving.engine.reference_runner import (
    BatchItemScores,
    BatchRunner,
    InFlightBatch,
    ReferenceRunner,
    compute_one,
    warm_up,
)
from nestrec.serving.inputs.engine_request import CacheKey, EngineRequest, RankResult
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.kv_cache.prefix_cache import Entry
from nestrec.serving.kv_cache.preinfer_trigger import Decision, Trigger
from nestrec.serving.kv_cache.tiered_prefix_cache import Copier, TieredPrefixCache
from nestrec.serving.model.model_adapter import HistoryTokens, ModelAdapter, PagedModelAdapter, lengths_of
from nestrec.serving.model.ranking_adapter import RankingAdapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.retrieval_adapter import RetrievalAdapter

__all__ = ["Engine", "EngineConfig", "RecentRequests", "make_runner"]

_LOG = logging.getLogger(__name__)
_STALE_A_TURN = 32
_MOST_FAILURES = 16
"""turns in a row that may fail without a completed batch in between"""
_NO_ITEMS = np.zeros(0, np.int64)
_NO_SCORES = np.zeros((0, 0), np.float32)


@dataclass(slots=True, kw_only=True)
class _Batch:
    steps: list[ScheduledChunk]
    work: tuple[int, int]
    """(tokens, pairs) for the cost model"""
    planned_s: float
    is_alone: bool
    """no other batch was in flight when it was scheduled"""
    launched: InFlightBatch = field(init=False)
    """the batch on the device, once it has been launched"""


class _CannotContinueError(Exception):
    """Every further batch would fail or be wrong."""


class Engine:
    """Requests can be submitted from any thread; `close` ends the engine's thread.

    The methods are listed in the order in which a request meets them: submit, admit, schedule, launch, complete. After
    them come new versions of the model, failures, and the end.
    """

    def __init__(
        self,
        form: ModelAdapter,
        cfg: EngineConfig,
        *,
        keyed: KeyedHash | None = None,
        clock: Clock | None = None,
        runner: BatchRunner | None = None,
        has_thread: bool = True,
        on_lost: Callable[[], None] = lambda: None,
        make_copier: Callable[[torch.device], Copier] = Copier,
    ):
        """Returns when the engine is warm, or raises what went wrong.

        Args:
            form: Reads histories and scores candidates for one kind of model.
            cfg: Options of `nestrec serve` under `service.engine`.
            keyed: Hashes users to cache buckets.
            clock: Gives the time; simulations bring their own.
            runner: Runner of an engine that was closed, which is used again with its memory and graphs.
            has_thread: If false, the caller calls `turn` repeatedly, as simulations do.
            on_lost: Called on the engine's thread if the engine cannot continue.
            make_copier: Makes the copiers between device and host memory, see `TieredPrefixCache`.
        """
        self.form = form
        self.cfg = cfg
        self.keyed = keyed or KeyedHash()
        self.clock = clock or RealClock()
        self._version = form.servable.version
        self._slide = f"slide={form.slide_events}"

        self.counts: dict[str, int] = {}
        self.device_s = 0.0
        """seconds for which the device has computed"""
        self.queue_times = Histogram()
        self.compute_times = Histogram()
        """of ranking requests that were answered; a request computes while a batch does that it has a part in"""
        self.recent = RecentRequests()
        self.answered_s: float | None = None
        """Unix seconds of the first ranking response of the version in service"""

        self._condition = threading.Condition()
        self._inbox: deque[EngineRequest] = deque()
        self._messages: deque[Callable[[], None]] = deque()
        """calls that the copiers and other threads want made on the engine's thread"""
        self._unfinished: dict[
            EngineRequest, None
        ] = {}  # all accepted works in order of arrival, under the condition's lock
        self._in_flight: deque[_Batch] = deque()
        self._handled: list[EngineRequest] = []
        """works that the current turn deals with: an exception fails them"""
        self._num_failures = 0
        self._failure: BaseException | None = None
        self._on_lost = on_lost
        self._is_draining = False
        self._is_closed = False
        self._has_ended = False
        self._is_warm = threading.Event()
        self._thread: threading.Thread | None = None

        self._build(runner, make_copier)
        self._start(has_thread=has_thread)

    def _build(self, runner: BatchRunner | None, make_copier: Callable[[torch.device], Copier]) -> None:
        """Make the parts that know one another: cache, runner, scheduler and estimates."""
        form = self.form
        self.costs = EngineCostModel(most_seen=form.servable.cached.most_seen(form.servable.encoder_config))
        self.tiers = TieredPrefixCache(
            form,
            self.cfg.tiers,
            keyed=self.keyed,
            clock=self.clock,
            costs=self.costs,
            post=self._post,
            count=self._count,
            pool=runner.pool if runner is not None else None,
            prefix_dtype=self.cfg.prefix_dtype,
            make_copier=make_copier,
        )
        self._runner = runner or make_runner(form, self.tiers.pool, self.cfg)
        self.trigger = Trigger(self.cfg.trigger, self.clock, cache_bytes=self.tiers.num_bytes)
        self._planner = BatchScheduler(
            self.cfg,
            self.tiers,
            self.clock,
            costs=self.costs,
            tokens_an_event=form.tokens_an_event,
            appends_candidates=form.appends_candidates,
            row_step=self._runner.row_step,
            end=self._finish,
            signal_done=self._signal_done,
            count=self._count,
            queued_s=lambda: self.queued_s,
        )
        self.pace = BatchPacer(spins=self._runner.spins, clock=self.clock)
        self._backlog = QueueEstimate(self._planner.chunk_s)
        self._outlook = AdmissionEstimator(self.costs, self.pace, self._backlog)

    def _start(self, *, has_thread: bool) -> None:
        if has_thread:
            self._thread = threading.Thread(target=self.run, name="nestrec-engine", daemon=True)
            self._thread.start()
            self._is_warm.wait()
        else:
            self._warm_up()
        if self._failure is not None:
            self.close()
            raise self._failure

    # Submit: called by any thread.

    def rank(
        self, user: str, history: History, candidates: Candidates, *, timeout_s: float, sender: RequestSource = NOBODY
    ) -> EngineRequest:
        """Queue a ranking request, whose result will be that of `work.future`.

        Raises:
            OverloadedError: The request could not be in time.
            UnavailableError: The engine is stopping.
        """
        tokens = self.form.tokens(history, candidates.now_ms)
        work = self._work(user, tokens, candidates.copied(), timeout_s, sender)
        with self._condition:
            self._check_open()
            self._outlook.told(sender, work.estimate_s)
            if sender.began_s:
                self.trigger.came(work.arrived_s - sender.began_s + sender.back_s)
            self.trigger.offered(self._outlook.full_rank_s(tokens.length, len(candidates)) + self.pace.host_s)
            # If no other request waits, this one may use all of its time: see `_does_any_wait`.
            most_s = min(timeout_s, self.cfg.max_queue_s) if self._does_any_wait else timeout_s
            if self._backlog.num_works and self._outlook.ends_in_s(sender, user, work.estimate_s) > most_s:
                if self._backlog.signals_s:
                    self._post(lambda: self._planner.drop_signal(work.key))  # nothing would read the prefix
                raise self.refuse()
            self._enqueue(work)
        return work

    def is_full_for(self, sender: RequestSource) -> bool:
        """A request of so many bytes, whatever is in them, would be refused."""
        return self._does_any_wait and self._outlook.unread_ends_in_s(sender) > self.cfg.max_queue_s

    def refuse(self) -> OverloadedError:
        """Count a refusal, and say when to come back."""
        self._count("refused_overload")
        return OverloadedError("more work waits than can be done in time", max(0.05, self.queued_s))

    def refused_unread(self, count: int) -> None:
        """Requests were refused elsewhere, by what `is_full_for` has said."""
        self.counts["refused_overload"] = self.counts.get("refused_overload", 0) + count

    def preinfer(
        self,
        user: str,
        history: History,
        now_ms: int,
        num_candidates: int,
        *,
        timeout_s: float,
        sender: RequestSource = NOBODY,
    ) -> tuple[Decision, EngineRequest | None]:
        """Decide on a signal, and queue it where it is admitted. The history is not looked into before that."""
        key = self._key(user)
        (length, cached) = lengths_of(self.form, len(history))
        there = min(self.tiers.device.length_of(key), cached) if cached else 0
        with self._condition:
            self._check_open()
            decision = self.trigger.decide(
                key,
                tail=self.costs.tail,
                wait_s=self._outlook.device_wait_s,
                host_s=self.pace.host_s,
                preinfer_s=self.costs.share_s(*self.costs.work(there, cached - there, 0)),
                full_rank_s=self._outlook.full_rank_s(length, num_candidates),
                rank_s=self._outlook.rank_s(length, cached, num_candidates),
                num_bytes=cached * self.tiers.bytes_a_token,
            )
            self._count(f"signal_{decision.reason}")
        if not decision.is_admitted or not cached or not self.cfg.tiers.keeps_prefix:
            return decision, None
        work = self._work(user, self.form.tokens(history, now_ms), None, timeout_s, sender)
        with self._condition:
            self._check_open()
            self._enqueue(work)
        return decision, work

    def foresee(self, num_events: int, num_candidates: int) -> Decision:
        """Whether a signal of a user with so many events would be of use now."""
        length, cached = lengths_of(self.form, num_events)
        with self._condition:
            decision = self.trigger.foresee(
                full_rank_s=self._outlook.full_rank_s(length, num_candidates),
                rank_s=self._outlook.rank_s(length, cached, num_candidates),
                tail=self.costs.tail,
                wait_s=self._outlook.device_wait_s,
                host_s=self.pace.host_s,
            )
        return decision if cached and self.cfg.tiers.keeps_prefix else Decision(False, "never")

    def signals_from(self, num_candidates: int) -> int:
        """Events of the shortest history whose signal would be of use now; more than the longest where none would."""
        low = 1
        high = self.form.max_events + 1
        while low < high:
            middle = (low + high) // 2
            if self.foresee(middle, num_candidates).reason == "wanted":
                high = middle
            else:
                low = middle + 1
        return low

    @property
    def _does_any_wait(self) -> bool:
        """Whether a request waits for the time after the batch that is computed now.

        If none does, the next one is admitted whatever that batch takes: otherwise the device would be idle after it,
        and an overloaded engine would do less than it can.
        """
        return bool(self._inbox) or self._planner.num_waiting > 0

    def _check_open(self) -> None:
        if self._is_draining or self._is_closed:
            raise UnavailableError("the engine is stopping", 1.0)

    def _work(
        self, user: str, tokens: HistoryTokens, candidates: Candidates | None, timeout_s: float, sender: RequestSource
    ) -> EngineRequest:
        key = self._key(user)
        prefix = min(self.tiers.device.length_of(key), tokens.num_cacheable) if tokens.num_cacheable else 0
        end = tokens.num_cacheable if candidates is None else tokens.length
        num_candidates = 0 if candidates is None else len(candidates)
        now_s = self.clock.now_s()
        return EngineRequest(
            key=key,
            tokens=tokens,
            candidates=candidates,
            arrived_s=now_s,
            deadline_s=now_s + timeout_s,
            estimate_s=self.costs.share_s(*self.costs.work(prefix, end - prefix, num_candidates)),
            sender=sender,
        )

    def _key(self, user: str) -> CacheKey:
        return CacheKey(user, self._version, self._slide)

    def _enqueue(self, work: EngineRequest) -> None:
        self._add_to_backlog(work)
        self._unfinished[work] = None
        self._inbox.append(work)
        self._wake()

    def _add_to_backlog(self, work: EngineRequest) -> None:
        if work.is_rank:
            self._backlog.add(work.client, work.key.user, work.estimate_s)
        else:
            self._backlog.add_signal(work.estimate_s)

    def _remove_from_backlog(self, work: EngineRequest) -> None:
        if work.is_rank:
            self._backlog.remove(work.client, work.key.user, work.estimate_s)
        else:
            self._backlog.remove_signal(work.estimate_s)

    def _post(self, message: Callable[[], None]) -> None:
        """Have a function called on the engine's thread, between two batches."""
        with self._condition:
            self._messages.append(message)
            self._wake()

    def _wake(self) -> None:
        self.pace.call()  # a thread that spins does not look at the condition
        self._condition.notify_all()

    # The loop: the engine's thread.

    def run(self) -> None:
        """Run turns until the engine is closed or cannot continue; the body of the engine's thread."""
        is_lost = False
        try:
            self._warm_up()
            while self._turn_or_recovery():
                pass
        except BaseException:
            _LOG.critical("an engine cannot continue; its requests go elsewhere", exc_info=True)
            is_lost = True
        try:
            self._fail_all()
        finally:
            if is_lost:
                self._on_lost()

    def _warm_up(self) -> None:
        """Get ready for requests, or record why that failed."""
        try:
            warm_up(self._runner, self.costs)
            check_probe(self._runner)
        except BaseException as error:
            self._failure = error
            self._is_closed = True
        finally:
            self._is_warm.set()

    def _turn_or_recovery(self) -> bool:
        try:
            return self.turn()
        except _CannotContinueError:
            raise
        except Exception:
            _LOG.exception("a turn of an engine failed, and with it %d requests", len(self._handled))
            self._recover()
            return True

    def turn(self) -> bool:
        """Run one iteration of the engine. Simulations call it in place of the thread.

        Returns:
            False if the engine is to end.
        """
        if not self.admit():
            return False
        # Results come before the next batch, since clients wait for them.
        if self._is_answer_due:
            self.complete(self._in_flight.popleft())
        elif batch := self.schedule():
            self.launch(batch)
        return True

    def admit(self) -> bool:
        """Make the calls that other threads have posted and queue the requests that have arrived.

        Waits while there is nothing to do. Returns false if the engine is to end.
        """
        self._handled = []
        if self._in_flight and not self._is_answer_due:
            self.pace.wait(has_work=self._outlook.is_device_busy and (self._planner.has_work or bool(self._inbox)))
        self.pace.stay_awake(lambda: self.has_something_to_do)
        with self._condition:
            while not self.has_something_to_do:
                self._condition.wait()
            if self._is_closed:
                return False
            # What arrives from here on, as from a message that posts itself again, is for the next turn.
            num_messages = len(self._messages)
            num_arrived = len(self._inbox)
        for _ in range(num_messages):  # one at a time: if one raises, the others are still there
            self._messages.popleft()()
        for _ in range(num_arrived):
            work = self._inbox.popleft()
            self._handled = [work]
            if work.key.version != self._version:  # it was submitted before the model changed
                work.begin_again(self._version)
            self._planner.add(work)
        self._handled = []
        return True

    @property
    def has_something_to_do(self) -> bool:
        """Whether the next turn would not wait for another thread."""
        return bool(self._in_flight or self._planner.has_work or self._inbox or self._messages or self._is_closed)

    @property
    def _is_answer_due(self) -> bool:
        """Whether the oldest batch has ended, or as many are in flight as the runner takes."""
        flying = self._in_flight
        return bool(flying) and (len(flying) >= self._runner.depth or flying[0].launched.is_done())

    def schedule(self) -> _Batch | None:
        """Choose the next batch and pin its cache entries.

        Returns:
            None if there is no work, if it pays to wait for more requests first, or if all work waits for copies.
        """
        if not self._planner.has_work:
            return None
        # While one is in flight, the next is scheduled as late as keeps the device busy: so it holds more requests.
        if self._in_flight and (not self._outlook.is_device_busy or self.pace.turn_in_s > 0):
            return None
        planned_s = self.clock.now_s()
        steps = self._planner.plan(self._handled)
        self._handled = [step.work for step in steps]
        if not steps:
            return None
        return _Batch(steps=steps, work=self._work_of(steps), planned_s=planned_s, is_alone=not self._in_flight)

    def _work_of(self, steps: Sequence[ScheduledChunk]) -> tuple[int, int]:
        tokens = 0
        pairs = 0
        for step in steps:
            more_tokens, more_pairs = self.costs.work(*step.part.extent)
            tokens += more_tokens
            pairs += more_pairs
        return tokens, pairs

    def launch(self, batch: _Batch) -> None:
        """Start a batch on the device. Its new keys and values are in the cache for every later batch."""
        try:
            batch.launched = self._runner.launch([step.part for step in batch.steps])
        except Exception:
            self._fail_batch(batch.steps)
            return
        self._in_flight.append(batch)
        launched_s = self.clock.now_s()
        self.pace.launched(batch.planned_s, launched_s, self.costs.predict_s(*batch.work))
        for step in batch.steps:
            step.work.planned_s = batch.planned_s
            step.work.launched_s = launched_s
            self._commit(step)
            self._planner.launched(step)

    def _commit(self, step: ScheduledChunk) -> None:
        """Count the new tokens as cached. Batches run in order, so none can read their pages too early."""
        if step.entry is not None and not step.entry.is_dropped and step.part.store_until > step.part.first:
            content = step.work.content_of(step.part.store_until)
            assert content is not None
            self.tiers.device.commit(step.entry, step.part.store_until, content)

    def complete(self, batch: _Batch) -> None:
        """Read the results of a batch, learn its cost, and answer the requests that it ends."""
        self._handled = [step.work for step in batch.steps]
        try:
            results, seconds = batch.launched.wait()
        except Exception:
            self._fail_batch(batch.steps)
            return
        ended_s = self.clock.now_s()
        self._count("batches")
        self.device_s += seconds
        self.pace.worked(ended_s, seconds)
        # Before the futures are set: the threads that wait for them need the interpreter at once.
        self.costs.observe(*batch.work, seconds, len(batch.steps))
        for step, scored in zip(batch.steps, results, strict=True):
            step.work.computed_s += seconds
            if scored is not None:
                step.work.scored.append(scored.scores)
            self._complete_step(step, scored)
        self._observe_pace(batch, ended_s, seconds)
        self._num_failures = 0

    def _complete_step(self, step: ScheduledChunk, scored: BatchItemScores | None) -> None:
        """Answer the request of a step, unless more steps of it follow, and unpin its cache entry."""
        if step.work.candidates is not None and step.is_last and scored is not None:
            self._answer(step, scored)
            return
        if step.work.candidates is None and step.is_last and step.entry is not None:
            self._signal_done(step.work, step.entry)
        self._unpin(step)

    def _answer(self, step: ScheduledChunk, scored: BatchItemScores) -> None:
        work = step.work
        assert work.candidates is not None
        if work.num_cached == 0:  # what came back was forgotten or evicted before it was read, or is another version's
            work.source = "none"
        with self._condition:
            self.trigger.consumed(work.key)
        self._count(f"rank_{work.source}")
        if step.entry is not None:
            self.tiers.device.hold(step.entry, float("-inf"))
            if step.entry.pins == 1:  # else another batch is still writing to it, and spills it when it ends
                self.tiers.spill(step.entry, work, ahead_s=self.queued_s)
        self._unpin(step)
        work.ended_s = self.clock.now_s()
        if self.answered_s is None:
            self.answered_s = time.time()
        self.compute_times.observe(work.computed_s)
        self.queue_times.observe(max(0.0, work.ended_s - work.arrived_s - work.computed_s))
        self.recent.ranked(work, work.ended_s)
        items = scored.items
        scores = scored.scores
        if len(work.scored) > 1:  # the candidates were scored in several batches
            items = work.candidates.items
            scores = np.concatenate(work.scored)
        self._finish(work, RankResult(items, scores, work.key.version, work.source, work.num_cached), None)

    def _signal_done(self, work: EngineRequest, entry: Entry) -> None:
        """End a signal, and hold its prefix for as long as its ranking request may take to come."""
        with self._condition:
            life_s = self.trigger.life_s
        self.tiers.device.hold(entry, self.clock.now_s() + life_s)
        self._count("signal_done")
        self.recent.signalled(work, self.clock.now_s())
        self._finish(work, RankResult(_NO_ITEMS, _NO_SCORES, work.key.version, work.source, entry.length), None)

    def _unpin(self, step: ScheduledChunk) -> None:
        if step.entry is not None:
            self.tiers.device.unpin(step.entry)

    def _finish(self, work: EngineRequest, answer: RankResult | None, error: Exception | None) -> None:
        """Answer a work, or fail it. A second call does nothing, unless an exception has ended the first."""
        if work.is_finished and work.future.done():
            return
        work.is_finished = True
        with self._condition:
            if work in self._unfinished:
                del self._unfinished[work]
                self._remove_from_backlog(work)
            if self._backlog.num_works == 0:
                self._condition.notify_all()  # `drain` waits for an empty backlog
        if answer is None and error is None:  # it was cancelled
            return
        if work.future.running() or work.future.set_running_or_notify_cancel():
            if answer is not None:
                work.future.set_result(answer)
            else:
                work.future.set_exception(error)

    def _observe_pace(self, batch: _Batch, ended_s: float, seconds: float) -> None:
        answered_s = sum(step.work.estimate_s for step in batch.steps if step.work.is_finished)
        if batch.is_alone and not self._in_flight:
            self.pace.answered_alone(self.clock.now_s() - batch.planned_s - seconds)
        self.pace.done(ended_s, answered_s, has_more=self._backlog.num_works > 0)
        self.pace.ended(ended_s, sum(self.costs.predict_s(*later.work) for later in self._in_flight))

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    # Other versions of the model, and what is dropped.

    def forget(self, user: str) -> None:
        """Drop the cached prefixes of a user, on the device and in host memory."""
        self._post(lambda: self.tiers.drop(self._key(user)))

    def change(self, version: str, change: Callable[[], None]) -> "Future[None]":
        """Make the model that of another version between two batches, with none in flight.

        Requests that have begun start over, and prefixes of the version before are not used any more.

        Args:
            version: The new version.
            change: Changes the model, or raises and leaves it as it was.
        """
        done: Future[None] = Future()
        self._post(lambda: self._change(version, change, done))
        return done

    def _change(self, version: str, change: Callable[[], None], done: "Future[None]") -> None:
        while self._in_flight:
            self.complete(self._in_flight.popleft())
        try:
            change()
        except BaseException as error:
            done.set_exception(error)
            return
        try:
            self._runner.weights_changed()
            self._version = version
            self.answered_s = None
            self._planner.begin_again(version)
            for work in self.tiers.waiting():
                work.begin_again(version)
        except BaseException as error:  # answers would mix two versions
            done.set_exception(error)
            raise _CannotContinueError("the model is of another version than the engine") from error
        done.set_result(None)
        self._post(self._drop_stale)  # with the next turns: requests wait while the version changes

    def _drop_stale(self) -> None:
        """Drop prefixes of other versions, a few between two batches, since there may be many."""
        if self.tiers.drop_stale(self._version, _STALE_A_TURN):
            self._post(self._drop_stale)

    # Failures.

    def _fail_batch(self, steps: Sequence[ScheduledChunk]) -> None:
        """Fail a batch that the runner did not compute. Queues and cache are intact, so other requests continue."""
        _LOG.exception("a batch failed")
        for step in steps:
            self._planner.drop(step.work)
            self.tiers.device.drop(step.work.key)
            self._unpin(step)
        self._fail_works([step.work for step in steps])
        self._check_device()

    def _recover(self) -> None:
        """Fail the works of the turn that failed, and start over with the others.

        The turn may have ended between any two changes, so all book-keeping of queues and caches is rebuilt: a page
        that was taken and not yet given to an entry would otherwise be missing until the process ends.
        """
        fail_point("serving.recover")
        self._count("recovered")
        self._num_failures += 1
        if self._num_failures >= _MOST_FAILURES:
            raise _CannotContinueError(f"{_MOST_FAILURES} turns in a row have failed")
        self._fail_works(self._handled)
        self._complete_or_fail_in_flight()
        self.tiers.clear()
        self._planner.clear()
        self._restart_unfinished()
        self._check_device()

    def _complete_or_fail_in_flight(self) -> None:
        """Batches in flight use pages until they end, so the cache cannot be cleared before."""
        while self._in_flight:
            batch = self._in_flight.popleft()
            try:
                self.complete(batch)
            except _CannotContinueError:
                raise
            except Exception:
                _LOG.exception("a batch in flight failed as well")
                self._fail_works([step.work for step in batch.steps])

    def _restart_unfinished(self) -> None:
        with self._condition:
            self._inbox.clear()
            waiting = list(self._unfinished)
            self._backlog.clear()
            for work in waiting:
                self._add_to_backlog(work)
            self._condition.notify_all()  # `drain` waits for an empty backlog
        for work in waiting:
            work.begin_again(self._version)
            self._planner.add(work)

    def _check_device(self) -> None:
        """An error of a GPU may leave it unable to compute for as long as the process lives."""
        try:
            compute_one(self._runner)
        except Exception as error:
            raise _CannotContinueError("the device does not compute any more") from error

    def _fail_works(self, works: Sequence[EngineRequest]) -> None:
        for work in works:
            if not work.is_finished or not work.future.done():
                self._count("failed")
                self._finish(work, None, RuntimeError("the batch of this request failed"))

    def _fail_all(self) -> None:
        with self._condition:
            self._is_closed = True
            self._has_ended = True
            works = list(self._unfinished)
            self._unfinished.clear()
            self._inbox.clear()
            self._backlog.clear()
        for work in [*works, *self._handled]:
            self._finish(work, None, UnavailableError("the engine has ended", 1.0))

    # State and end: called by any thread.

    @property
    def queued_s(self) -> float:
        """Estimated device seconds of the work that waits or runs."""
        return self._backlog.seconds

    @property
    def is_alive(self) -> bool:
        """Whether the engine has not ended. Every request asks, so this does not ask the thread, which is slow."""
        return not self._has_ended

    def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for what was accepted; returns whether all of it was done in time."""
        with self._condition:
            self._is_draining = True
        return self.wait_until_idle(timeout_s)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Returns whether all accepted work was done in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._backlog.num_works == 0, timeout_s)

    def close(self) -> None:
        """End the thread; requests that are not answered yet fail."""
        with self._condition:
            self._is_closed = True
            self._wake()
        if self._thread is not None:
            self._thread.join()
        else:
            self._fail_all()
        self.tiers.close()


def make_runner(form: ModelAdapter, pool: PagePool, cfg: EngineConfig) -> BatchRunner:
    """Captured graphs over pages where a GPU and the model allow it, else sequence by sequence."""
    servable = form.servable
    paged = servable.cached.paged
    has_graphs = (
        cfg.captured
        and servable.device.type == "cuda"
        and can_be_paged(pool.tensor.shape[-1], servable.dtype.itemsize, pool.page_tokens)
    )
    if has_graphs and paged is not None and isinstance(form, RankingAdapter | RetrievalAdapter):
        from nestrec.serving.engine.graph_runner import GraphRunner

        encoder = import_attribute(paged)(form.encoder, pool.kept_pages)
        max_length = servable.encoder_config.max_length
        max_tokens = 2 * cfg.max_batch_tokens + max_length
        if isinstance(form, RetrievalAdapter):  # candidates are not tokens: large graphs would never be filled
            max_tokens = min(max_tokens, cfg.max_batch_requests * max_length)
        return GraphRunner(cast(PagedModelAdapter, form), encoder, pool, max_tokens=max_tokens)
    return ReferenceRunner(form, pool)


_MOST = 64


class RecentRequests:
    """The last requests of an engine, for the picture of the relay: when each arrived, waited and was computed.

    It contains neither users nor items: a ranking request refers to its signal by a running number. One thread writes,
    any may read.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._done: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self._signals: OrderedDict[CacheKey, int] = OrderedDict()
        """numbers of those whose ranking request may still come"""

    def signalled(self, work: EngineRequest, now_s: float) -> None:
        """A prefix was computed ahead."""
        self._signals[work.key] = self._add("signal", work, now_s, None)
        while len(self._signals) > _MOST:
            self._signals.popitem(last=False)

    def ranked(self, work: EngineRequest, now_s: float) -> None:
        """A request was answered."""
        self._add("rank", work, now_s, self._signals.pop(work.key, None))

    def told(self, now_s: float) -> list[dict[str, Any]]:
        """Newest last; now_s: `perf_counter`, from which times are counted back."""
        return [
            {**one, "came_s": round(one["came_s"] - now_s, 6), "ended_s": round(one["ended_s"] - now_s, 6)}
            for one in list(self._done)
        ]

    def _add(self, kind: str, work: EngineRequest, now_s: float, signal: int | None) -> int:
        number = next(self._numbers)
        one = {
            "number": number,
            "kind": kind,
            "signal": signal,
            "came_s": work.arrived_s,
            "ended_s": now_s,
            "computed_s": round(work.computed_s, 6),
            "parts_ms": parts_ms(work, now_s),
            "prefix": work.source,
            "tokens": work.tokens.length,
            "cached": work.num_cached,
            "candidates": 0 if work.candidates is None else len(work.candidates),
        }
        self._done.append(one)
        return number


def parts_ms(work: EngineRequest, ended_s: float) -> dict[str, float]:
    """Returns the milliseconds that a request spent in each part of its way, except on the network.

    `in` is from its front, which had read all of it, to the engine; `queue` until its last batch was begun; `launch`
    until the device had that batch; `compute` until its result, with the batches' work on the device; `back` to the
    front, as long as the result before it took. Parts that are not known are left out.
    """
    if not work.launched_s:  # a signal of what was there
        return {}
    sender = work.sender
    parts = {
        "in": work.arrived_s - sender.began_s if sender.began_s else None,
        "queue": work.planned_s - work.arrived_s,
        "launch": work.launched_s - work.planned_s,
        "compute": ended_s - work.launched_s,
        "back": sender.back_s or None,
    }
    return {name: round(1e3 * seconds, 3) for name, seconds in parts.items() if seconds is not None}
