"""The engine: one thread that owns the device and repeats plan, launch, complete.

What is in a batch is decided by the planner. On a GPU the next batch is planned and launched while the device is busy
with the one before: batches run in order, so a prefix counts as kept as soon as the batch that computes it is launched,
while answers, holds and copies to DRAM wait for its end.

An exception on the thread fails the requests that it was working on. Whatever it may have left half changed (queues,
cache entries) is rebuilt, the other requests start over, and the engine continues. If it cannot continue, `on_lost` is
called and all requests fail.

Which runner computes a model's batches.

The last requests of an engine, for a picture of the relay: when each came, waited and was computed, and from what.

Nothing of who asked or for what: a ranking request names its signal by a running number alone.

Which runner computes a model's batches.
"""

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from nestrec.base.clock import Clock, RealClock
from nestrec.base.failpoints import fail_point
from nestrec.base.plugins import resolved
from nestrec.ops.attention.paged.query_blocks import can_be_paged
from nestrec.serving.core.cost_model import EngineCostModel, Histogram
from nestrec.serving.core.rejections import OverloadedError, UnavailableError
from nestrec.serving.core.request_limits import NOBODY, Sender
from nestrec.serving.core.slot_router import KeyedHash
from nestrec.serving.engine.admission import Backlog, Outlook
from nestrec.serving.engine.batch_pacer import EnginePace
from nestrec.serving.engine.batch_scheduler import EngineConfig, EngineStep, Planner
from nestrec.serving.engine.golden_request import check_probe
from nestrec.serving.engine.reference_runner import BatchRunner, Launched, Runner, Scored, compute_one, warm_up
from nestrec.serving.inputs.engine_request import Answer, CacheKey, Work
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.kv_cache.prefix_cache import Entry
from nestrec.serving.kv_cache.preinfer_trigger import Decision, Trigger
from nestrec.serving.kv_cache.tiered_prefix_cache import Copier, PrefixTiers
from nestrec.serving.model.model_adapter import Form, PagedForm, Tokens, lengths_of
from nestrec.serving.model.ranking_adapter import RankingForm
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.retrieval_adapter import RetrievalForm

_MOST = 64


class RecentRequests:
    """One thread writes, any may read."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._done: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self._signals: OrderedDict[CacheKey, int] = OrderedDict()
        """numbers of those whose ranking request may still come"""

    def signalled(self, work: Work, now_s: float) -> None:
        """A prefix was computed ahead."""
        self._signals[work.key] = self._add("signal", work, now_s, None)
        while len(self._signals) > _MOST:
            self._signals.popitem(last=False)

    def ranked(self, work: Work, now_s: float) -> None:
        """A request was answered."""
        self._add("rank", work, now_s, self._signals.pop(work.key, None))

    def told(self, now_s: float) -> list[dict[str, Any]]:
        """Newest last; now_s: `perf_counter`, from which times are counted back."""
        return [
            {**one, "came_s": round(one["came_s"] - now_s, 6), "ended_s": round(one["ended_s"] - now_s, 6)}
            for one in list(self._done)
        ]

    def _add(self, kind: str, work: Work, now_s: float, signal: int | None) -> int:
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


def parts_ms(work: Work, ended_s: float) -> dict[str, float]:
    """Where the time of a request went, but for the wire: `in` from its front, which had read all of it, to the engine,
    `queue` until its last batch was begun, `launch` until the device had that, `compute` until it was answered (with
    the batches' work on the device), `back` to the front, as long as the answer before it took. Without what nobody
    knows."""
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


def make_runner(form: Form, pool: PagePool, cfg: EngineConfig) -> BatchRunner:
    """Captured graphs over pages where a GPU and the model allow it, else sequence by sequence."""
    servable, paged = form.servable, form.servable.cached.paged
    has_graphs = (
        cfg.captured
        and servable.device.type == "cuda"
        and can_be_paged(pool.tensor.shape[-1], servable.dtype.itemsize, pool.page_tokens)
    )
    if has_graphs and paged is not None and isinstance(form, RankingForm | RetrievalForm):
        from nestrec.serving.engine.graph_runner import GraphRunner

        encoder = resolved(paged)(form.encoder, pool.kept_pages)
        max_length = servable.encoder_config.max_length
        max_tokens = 2 * cfg.max_batch_tokens + max_length
        if isinstance(form, RetrievalForm):  # candidates are no tokens: many a graph would never be filled
            max_tokens = min(max_tokens, cfg.max_batch_requests * max_length)
        return GraphRunner(cast(PagedForm, form), encoder, pool, max_tokens=max_tokens)
    return Runner(form, pool)


__all__ = ["Engine", "EngineConfig"]

_LOG = logging.getLogger(__name__)
_STALE_A_TURN = 32
_MOST_FAILURES = 16
"""turns in a row that may fail without a completed batch in between"""
_NO_ITEMS, _NO_SCORES = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class _Batch:
    steps: list[EngineStep]
    launched: Launched
    work: tuple[int, int]
    """(tokens, pairs)"""
    planned_s: float
    is_alone: bool
    """no other was on its way when it was planned"""


class _CannotContinueError(Exception):
    """Every further batch would fail or be wrong."""


class Engine:
    """Submit from any thread. `close` ends the thread."""

    def __init__(
        self,
        form: Form,
        cfg: EngineConfig,
        *,
        keyed: KeyedHash | None = None,
        clock: Clock | None = None,
        runner: BatchRunner | None = None,
        has_thread: bool = True,
        on_lost: Callable[[], None] = lambda: None,
        make_copier: Callable[[torch.device], Copier] = Copier,
    ):
        """runner: one of an engine that has been closed, with its memory and graphs. has_thread: else the caller takes
        `turn` after `turn`, as a simulation does. on_lost: called on the engine's thread if it cannot continue.
        make_copier: see `PrefixTiers`."""
        self.form, self.cfg, self.keyed, self.clock = form, cfg, keyed or KeyedHash(), clock or RealClock()
        self._version, self._slide = form.servable.version, f"slide={form.slide_events}"
        self.counts: dict[str, int] = {}
        self.device_s = 0.0
        """seconds for which the device has been at work"""
        self.queue_times, self.compute_times = Histogram(), Histogram()
        """of ranking requests that were answered; a request computes while a batch does that it has a part in"""
        self.recent = RecentRequests()
        self.answered_s: float | None = None
        """when the version in service has first answered a ranking request, in Unix seconds"""
        self.costs = EngineCostModel(most_seen=form.servable.cached.most_seen(form.servable.encoder_config))
        self.tiers = PrefixTiers(
            form,
            cfg.tiers,
            keyed=self.keyed,
            clock=self.clock,
            costs=self.costs,
            post=self._post,
            count=self._count,
            pool=runner.pool if runner is not None else None,
            prefix_dtype=cfg.prefix_dtype,
            make_copier=make_copier,
        )
        self._runner = runner or make_runner(form, self.tiers.pool, cfg)
        self.trigger = Trigger(cfg.trigger, self.clock, cache_bytes=self.tiers.num_bytes)
        self._planner = Planner(
            cfg,
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
        self._condition = threading.Condition()
        self._inbox: deque[Work] = deque()
        self._messages: deque[Callable[[], None]] = deque()  # from the copier and other threads, to run on this one
        self._in_flight: deque[_Batch] = deque()
        self._unfinished: dict[Work, None] = {}  # all accepted works in order of arrival, under the condition's lock
        self._handled: list[Work] = []
        """works that the current turn deals with: an exception fails them"""
        self._num_failures = 0
        self._on_lost = on_lost
        self._pace = EnginePace(spins=self._runner.spins, clock=self.clock)
        self._backlog = Backlog(self._planner.chunk_s)
        self._outlook = Outlook(self.costs, self._pace, self._backlog)
        self._is_draining = self._is_closed = self._has_ended = False
        self._failure: BaseException | None = None
        self._is_warm = threading.Event()
        self._thread: threading.Thread | None = None
        if has_thread:
            self._thread = threading.Thread(target=self._loop, name="nestrec-engine", daemon=True)
            self._thread.start()
            self._is_warm.wait()
        else:
            self._warm_up()
        self._check_warm()

    # Submitting: any thread.

    def rank(
        self, user: str, history: History, candidates: Candidates, *, timeout_s: float, sender: Sender = NOBODY
    ) -> Work:
        """Queue a ranking request; `work.future` gives its answer. Refused at once where it could not be in time."""
        tokens = self.form.tokens(history, candidates.now_ms)
        work = self._work(user, tokens, candidates.copied(), timeout_s, sender)
        with self._condition:
            self._check_open()
            self._outlook.told(sender, work.estimate_s)
            if sender.began_s:
                self.trigger.came(work.arrived_s - sender.began_s + sender.back_s)
            self.trigger.offered(self._outlook.full_rank_s(tokens.length, len(candidates)) + self._pace.host_s)
            most_s = min(timeout_s, self.cfg.max_queue_s) if self._does_any_wait else timeout_s
            if self._backlog.num_works and self._outlook.ends_in_s(sender, user, work.estimate_s) > most_s:
                if self._backlog.signals_s:
                    self._post(lambda: self._planner.drop_signal(work.key))  # nobody would read the prefix
                raise self.refuse()
            self._enqueue(work)
        return work

    def is_full_for(self, sender: Sender) -> bool:
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
        sender: Sender = NOBODY,
    ) -> tuple[Decision, Work | None]:
        """Decide on a signal, and queue it where it is admitted. The history is not looked into before that."""
        key, (length, cached) = self._key(user), lengths_of(self.form, len(history))
        there = min(self.tiers.device.length_of(key), cached) if cached else 0
        with self._condition:
            self._check_open()
            decision = self.trigger.decide(
                key,
                tail=self.costs.tail,
                wait_s=self._outlook.device_wait_s,
                host_s=self._pace.host_s,
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
                host_s=self._pace.host_s,
            )
        return decision if cached and self.cfg.tiers.keeps_prefix else Decision(False, "never")

    def signals_from(self, num_candidates: int) -> int:
        """Events of the shortest history whose signal would be of use now; more than the longest where none would."""
        low, high = 1, self.form.max_events + 1
        while low < high:
            middle = (low + high) // 2
            if self.foresee(middle, num_candidates).reason == "wanted":
                high = middle
            else:
                low = middle + 1
        return low

    def forget(self, user: str) -> None:
        """Drop what is kept of a user, in both tiers."""

        self._post(lambda: self.tiers.drop(self._key(user)))

    def change(self, version: str, change: Callable[[], None]) -> "Future[None]":
        """Between two batches, with none on its way: `change` makes the model that of another version, or raises and
        leaves it. Works that have begun begin again, and no prefix of before is used any more."""
        done: Future[None] = Future()
        self._post(lambda: self._change(version, change, done))
        return done

    def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for what was accepted; whether all of it was done."""
        with self._condition:
            self._is_draining = True
        return self.wait_until_idle(timeout_s)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether all accepted work was done in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._backlog.num_works == 0, timeout_s)

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._called()
        if self._thread is not None:
            self._thread.join()
        else:
            self._fail_all()
        self.tiers.close()

    @property
    def is_alive(self) -> bool:
        """Asked with every request, so not of the thread, which answers slowly."""
        return not self._has_ended

    @property
    def spins(self) -> bool:
        """Whether its thread keeps a core busy while there is work."""
        return self._pace.spins

    @property
    def queued_s(self) -> float:
        """Estimated device seconds of the work that waits or runs."""
        return self._backlog.seconds

    @property
    def host_s(self) -> float:
        """The host's part of a batch, of late."""
        return self._pace.host_s

    @property
    def _does_any_wait(self) -> bool:
        """A request is there for the time after the batch that is computed now. Without one the device would be idle
        until somebody comes, however long that batch is: overloaded, it would do less than it can."""
        return bool(self._inbox) or self._planner.num_waiting > 0

    def _check_warm(self) -> None:
        if self._failure is not None:
            self.close()
            raise self._failure

    def _check_open(self) -> None:
        if self._is_draining or self._is_closed:
            raise UnavailableError("the engine is stopping", 1.0)

    def _work(self, user: str, tokens: Tokens, candidates: Candidates | None, timeout_s: float, sender: Sender) -> Work:
        key = self._key(user)
        prefix = min(self.tiers.device.length_of(key), tokens.num_cacheable) if tokens.num_cacheable else 0
        end = tokens.num_cacheable if candidates is None else tokens.length
        work = self.costs.work(
            min(prefix, end), end - min(prefix, end), len(candidates) if candidates is not None else 0
        )

        now_s = self.clock.now_s()
        return Work(
            key=key,
            tokens=tokens,
            candidates=candidates,
            arrived_s=now_s,
            deadline_s=now_s + timeout_s,
            estimate_s=self.costs.share_s(*work),
            sender=sender,
        )

    def _key(self, user: str) -> CacheKey:
        return CacheKey(user, self._version, self._slide)

    def _enqueue(self, work: Work) -> None:
        self._add_to_backlog(work)
        self._unfinished[work] = None
        self._inbox.append(work)
        self._called()

    def _add_to_backlog(self, work: Work) -> None:
        if work.is_rank:
            self._backlog.add(work.client, work.key.user, work.estimate_s)
        else:
            self._backlog.add_signal(work.estimate_s)

    def _post(self, message: Callable[[], None]) -> None:
        with self._condition:
            self._messages.append(message)
            self._called()

    def _called(self) -> None:
        """The engine's thread has something to do."""
        self._pace.call()
        self._condition.notify_all()

    # The engine's thread.

    def _change(self, version: str, change: Callable[[], None], done: "Future[None]") -> None:
        while self._in_flight:
            self._complete(self._in_flight.popleft())
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
        """Prefixes of other versions, a few between two batches: there may be many."""
        if self.tiers.drop_stale(self._version, _STALE_A_TURN):
            self._post(self._drop_stale)

    def _loop(self) -> None:
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

    def _turn_or_recovery(self) -> bool:
        try:
            return self.turn()
        except _CannotContinueError:
            raise
        except Exception:
            _LOG.exception("a turn of an engine failed, and with it %d requests", len(self._handled))
            self._recover()
            return True

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
        while self._in_flight:  # batches use pages until they end
            batch = self._in_flight.popleft()
            try:
                self._complete(batch)
            except _CannotContinueError:
                raise
            except Exception:
                _LOG.exception("a batch in flight failed as well")
                self._fail_works([step.work for step in batch.steps])
        self.tiers.clear()
        self._planner.clear()
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
        self._check_device()

    def _check_device(self) -> None:
        """An error of a GPU may leave it unable to compute for as long as the process lives."""
        try:
            compute_one(self._runner)
        except Exception as error:
            raise _CannotContinueError("the device does not compute any more") from error

    def turn(self) -> bool:
        """Take what has come, then answer a batch that has ended or launch the next one; waits where there is nothing
        to do. False when the engine is to end."""
        self._handled = []
        if not self._take_new():
            return False
        self._handled = []
        if self._is_answer_due:
            self._complete(self._in_flight.popleft())
        elif self._planner.has_work and (
            not self._in_flight or (self._outlook.is_device_busy and self._pace.turn_in_s <= 0)
        ):
            self._launch_next()
        return True

    def _warm_up(self) -> None:
        """Ready for requests, or known to have failed."""
        try:
            warm_up(self._runner, self.costs)
            check_probe(self._runner)
        except BaseException as error:
            self._failure, self._is_closed = error, True
        finally:
            self._is_warm.set()

    def _take_new(self) -> bool:
        """Move what has arrived to this thread; waits where there is nothing to do. False when the engine is to end."""
        if self._in_flight and not self._is_answer_due:
            self._pace.wait(has_work=self._outlook.is_device_busy and (self._planner.has_work or bool(self._inbox)))
        self._pace.stay_awake(lambda: self.has_something_to_do)
        with self._condition:
            while not self.has_something_to_do:
                self._condition.wait()
            if self._is_closed:
                return False
            num_messages, num_arrived = len(self._messages), len(self._inbox)
        for _ in range(num_messages):  # one at a time: if one raises, the others are still there
            self._messages.popleft()()
        for _ in range(num_arrived):
            work = self._inbox.popleft()
            self._handled = [work]
            if work.key.version != self._version:
                work.begin_again(self._version)
            self._planner.add(work)
        return True

    @property
    def _is_answer_due(self) -> bool:
        """The oldest batch has ended, or no other may join it."""
        flying = self._in_flight
        return bool(flying) and (len(flying) >= self._runner.depth or flying[0].launched.is_done())

    @property
    def has_something_to_do(self) -> bool:
        """The next turn would not wait for somebody else."""
        return bool(self._in_flight or self._planner.has_work or self._inbox or self._messages or self._is_closed)

    def _launch_next(self) -> None:
        planned_s, is_alone = self.clock.now_s(), not self._in_flight
        steps = self._planner.plan(self._handled)
        self._handled = [step.work for step in steps]
        if not steps:
            return
        work = _work_of(steps, self.costs)
        try:
            launched = self._runner.launch([step.part for step in steps])
        except Exception:
            self._fail_batch(steps)
            return
        self._in_flight.append(_Batch(steps, launched, work, planned_s, is_alone))
        launched_s = self.clock.now_s()
        self._pace.launched(planned_s, launched_s, self.costs.predict_s(*work))
        for step in steps:
            step.work.planned_s, step.work.launched_s = planned_s, launched_s
            self._keep(step)
            self._planner.launched(step)

    def _keep(self, step: EngineStep) -> None:
        """The new tokens are in the pages for every batch after this one."""
        if step.entry is not None and not step.entry.is_dropped and step.part.store_until > step.part.first:
            content = step.work.content_of(step.part.store_until)
            assert content is not None
            self.tiers.device.commit(step.entry, step.part.store_until, content)

    def _complete(self, batch: _Batch) -> None:
        self._handled = [step.work for step in batch.steps]
        try:
            results, seconds = batch.launched.wait()
        except Exception:
            self._fail_batch(batch.steps)
            return
        ended_s = self.clock.now_s()
        self._count("batches")
        self.device_s += seconds
        self._pace.worked(ended_s, seconds)
        # Before the answers: whoever waits for them needs the interpreter as soon as they are there.
        self.costs.observe(*batch.work, seconds, len(batch.steps))
        for step, scored in zip(batch.steps, results, strict=True):
            step.work.computed_s += seconds
            if scored is not None:
                step.work.scored.append(scored.scores)
            if step.work.candidates is None:
                self._signal_advanced(step)
            elif step.is_last and scored is not None:
                self._answer(step, scored)
            else:  # a piece of it
                self._release(step)
        answered_s = sum(step.work.estimate_s for step in batch.steps if step.work.is_finished)
        if batch.is_alone and not self._in_flight:
            self._pace.answered_alone(self.clock.now_s() - batch.planned_s - seconds)
        self._pace.done(ended_s, answered_s, has_more=self._backlog.num_works > 0)
        self._pace.ended(ended_s, sum(self.costs.predict_s(*later.work) for later in self._in_flight))
        self._num_failures = 0

    def _answer(self, step: EngineStep, scored: Scored) -> None:
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
        self._release(step)
        work.ended_s = ended_s = self.clock.now_s()
        if self.answered_s is None:
            self.answered_s = time.time()
        self.compute_times.observe(work.computed_s)
        self.queue_times.observe(max(0.0, ended_s - work.arrived_s - work.computed_s))
        self.recent.ranked(work, ended_s)
        items, scores = scored.items, scored.scores
        if len(work.scored) > 1:
            items, scores = work.candidates.items, np.concatenate(work.scored)
        self._finish(work, Answer(items, scores, work.key.version, work.source, work.num_cached), None)

    def _signal_advanced(self, step: EngineStep) -> None:
        if step.is_last and step.entry is not None:
            self._signal_done(step.work, step.entry)
        self._release(step)

    def _signal_done(self, work: Work, entry: Entry) -> None:
        with self._condition:
            life_s = self.trigger.life_s
        self.tiers.device.hold(entry, self.clock.now_s() + life_s)
        self._count("signal_done")
        self.recent.signalled(work, self.clock.now_s())
        self._finish(work, Answer(_NO_ITEMS, _NO_SCORES, work.key.version, work.source, entry.length), None)

    def _release(self, step: EngineStep) -> None:
        if step.entry is not None:
            self.tiers.device.unpin(step.entry)

    def _fail_batch(self, steps: list[EngineStep]) -> None:
        """Fail a batch that the runner did not compute. The book-keeping is intact, so nothing else has to go."""
        _LOG.exception("a batch failed")
        for step in steps:
            self._planner.drop(step.work)
            self.tiers.device.drop(step.work.key)
            self._release(step)
        self._fail_works([step.work for step in steps])
        self._check_device()

    def _fail_works(self, works: Sequence[Work]) -> None:
        for work in works:
            if not work.is_finished or not work.future.done():
                self._count("failed")
                self._finish(work, None, RuntimeError("the batch of this request failed"))

    def _finish(self, work: Work, answer: Answer | None, error: Exception | None) -> None:
        """Answer a work, or fail it. A second call does nothing, unless an exception has ended the first."""
        if work.is_finished and work.future.done():
            return
        work.is_finished = True
        with self._condition:
            if work in self._unfinished:
                del self._unfinished[work]
                if work.is_rank:
                    self._backlog.remove(work.client, work.key.user, work.estimate_s)
                else:
                    self._backlog.remove_signal(work.estimate_s)
            if self._backlog.num_works == 0:
                self._condition.notify_all()
        if answer is None and error is None:  # it was cancelled
            return
        if work.future.running() or work.future.set_running_or_notify_cancel():
            if answer is not None:
                work.future.set_result(answer)
            else:
                work.future.set_exception(error)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _fail_all(self) -> None:
        with self._condition:
            self._is_closed = self._has_ended = True
            works = list(self._unfinished)
            self._unfinished.clear()
            self._inbox.clear()
            self._backlog.clear()
        for work in [*works, *self._handled]:
            self._finish(work, None, UnavailableError("the engine has ended", 1.0))


def _work_of(steps: list[EngineStep], costs: EngineCostModel) -> tuple[int, int]:
    """(tokens, pairs) for the cost model"""
    tokens = pairs = 0
    for step in steps:
        more_tokens, more_pairs = costs.work(*step.part.extent)
        tokens, pairs = tokens + more_tokens, pairs + more_pairs
    return tokens, pairs
