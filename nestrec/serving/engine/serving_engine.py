"""The serving engine: one thread that owns the device and computes requests in batches, step by step.

    step    admit new requests, then complete the oldest batch in flight, or schedule and launch the next one

Any thread can submit requests with `submit_rank` and `submit_preinfer`. The scheduler forms the batches (continuous
batching). On a GPU, the next batch is scheduled and launched while the device computes the previous one. Batches run in
order, so a prefix counts as cached as soon as the batch that computes it is launched; results, unpinning and copies to
host memory wait for the end of that batch.

An exception on the thread fails the requests of that step. Queues and cache entries may be inconsistent after it, so
they are rebuilt, the other requests are restarted, and the engine continues. If it cannot continue, all requests fail
and `on_lost` is called.
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
from nestrec.serving.core.request_limits import UNKNOWN_SOURCE, RequestSource
from nestrec.serving.core.slot_router import KeyedHash
from nestrec.serving.engine.admission import AdmissionEstimator, QueueEstimate
from nestrec.serving.engine.batch_pacer import BatchPacer
from nestrec.serving.engine.batch_scheduler import BatchScheduler, EngineConfig, ScheduledChunk
from nestrec.serving.engine.golden_request import check_golden_request
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
_STALE_PER_STEP = 32
_MAX_FAILURES = 16
"""Number of failed steps without a completed batch in between at which the engine gives up."""
_NO_ITEMS = np.zeros(0, np.int64)
_NO_SCORES = np.zeros((0, 0), np.float32)


@dataclass(slots=True, kw_only=True)
class _Batch:
    chunks: list[ScheduledChunk]
    size: tuple[int, int]
    """Numbers of tokens and attention pairs, for the cost model."""
    planned_s: float
    is_alone: bool
    """Whether no other batch was in flight when this one was scheduled."""
    launched: InFlightBatch = field(init=False)
    """The batch on the device; set at launch."""


class _CannotContinueError(Exception):
    """Every further batch would fail or return wrong results."""


class Engine:
    """Serving engine of one model. Any thread can submit requests; `close` ends the engine's thread.

    The methods are listed in the order in which a request passes through them: submit, admit, schedule, launch,
    complete. They are followed by model updates, failure handling and shutdown.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        cfg: EngineConfig,
        *,
        keyed: KeyedHash | None = None,
        clock: Clock | None = None,
        runner: BatchRunner | None = None,
        has_thread: bool = True,
        on_lost: Callable[[], None] = lambda: None,
        make_copier: Callable[[torch.device], Copier] = Copier,
    ):
        """Start the engine; return after warm-up, or raise its exception.

        Args:
            adapter: Adapter of the model: encodes histories and scores candidates.
            cfg: Options of `nestrec serve` under `service.engine`.
            keyed: Hashes users to cache buckets.
            clock: Source of time; simulations pass their own.
            runner: Runner of a closed engine, whose memory and graphs are reused.
            has_thread: If false, the caller calls `step` repeatedly, as simulations do.
            on_lost: Called on the engine's thread if the engine cannot continue.
            make_copier: Creates the copiers between device and host memory, see `TieredPrefixCache`.
        """
        self.adapter = adapter
        self.cfg = cfg
        self.keyed = keyed or KeyedHash()
        self.clock = clock or RealClock()
        self._version = adapter.servable.version
        self._slide = f"slide={adapter.slide_events}"

        self.counts: dict[str, int] = {}
        self.device_s = 0.0
        """Total device seconds of all batches."""
        self.queue_times = Histogram()
        """Queue times of completed ranking requests: their total time in the engine without the compute time."""
        self.compute_times = Histogram()
        """Compute times of completed ranking requests: the device time of all batches with a chunk of the request."""
        self.recent = RecentRequests()
        self.first_response_s: float | None = None
        """Time of the first ranking response of the current model version, in Unix seconds."""

        self._condition = threading.Condition()
        self._inbox: deque[EngineRequest] = deque()
        self._messages: deque[Callable[[], None]] = deque()
        """Callbacks that copiers and other threads post for the engine's thread."""
        # All accepted requests in order of arrival; guarded by the condition's lock.
        self._unfinished: dict[EngineRequest, None] = {}
        self._in_flight: deque[_Batch] = deque()
        self._handled: list[EngineRequest] = []
        """Requests that the current step handles; an exception fails them."""
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
        """Create the cache, runner, scheduler and estimates, which depend on each other."""
        adapter = self.adapter
        self.costs = EngineCostModel(
            max_keys_per_layer=adapter.servable.cached_forward.max_attended(adapter.servable.encoder_config)
        )
        self.tiers = TieredPrefixCache(
            adapter,
            self.cfg.prefix_cache,
            keyed=self.keyed,
            clock=self.clock,
            costs=self.costs,
            post=self._post,
            count=self._count,
            pool=runner.pool if runner is not None else None,
            kv_cache_dtype=self.cfg.kv_cache_dtype,
            make_copier=make_copier,
        )
        self._runner = runner or make_runner(adapter, self.tiers.pool, self.cfg)
        self.trigger = Trigger(self.cfg.preinfer, self.clock, cache_bytes=self.tiers.num_bytes)
        self._scheduler = BatchScheduler(
            self.cfg,
            self.tiers,
            self.clock,
            costs=self.costs,
            tokens_per_event=adapter.tokens_per_event,
            appends_candidates=adapter.appends_candidates,
            row_step=self._runner.row_step,
            end=self._finish,
            preinfer_done=self._complete_preinfer,
            count=self._count,
            queued_s=lambda: self.queued_s,
        )
        self.pacer = BatchPacer(spins=self._runner.spins, clock=self.clock)
        self._queue = QueueEstimate(self._scheduler.chunk_s)
        self._estimator = AdmissionEstimator(self.costs, self.pacer, self._queue)

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

    def submit_rank(
        self,
        user: str,
        history: History,
        candidates: Candidates,
        *,
        timeout_s: float,
        sender: RequestSource = UNKNOWN_SOURCE,
    ) -> EngineRequest:
        """Queue a ranking request; the `future` of the returned request gets the result.

        Args:
            user: User id.
            history: History of the user.
            candidates: Items to score, or a search for the best items.
            timeout_s: Seconds until the deadline of the request.
            sender: Source of the request.

        Raises:
            OverloadedError: The request would not be completed before its deadline or within the queue limit.
            UnavailableError: The engine is stopping.
        """
        tokens = self.adapter.tokens(history, candidates.now_ms)
        request = self._make_request(user, tokens, candidates.copied(), timeout_s, sender)
        with self._condition:
            self._check_open()
            self._estimator.observe(sender, request.estimate_s)
            if sender.received_s:
                self.trigger.record_transit(request.arrived_s - sender.received_s + sender.return_transit_s)
            self.trigger.record_arrival(self._estimator.full_rank_s(tokens.length, len(candidates)) + self.pacer.host_s)
            # Without other waiting requests, only the deadline limits this one: see `_does_any_wait`.
            limit_s = min(timeout_s, self.cfg.max_queue_delay_s) if self._does_any_wait else timeout_s
            if self._queue.num_requests and self._estimator.completion_s(sender, user, request.estimate_s) > limit_s:
                if self._queue.preinfer_s:
                    self._post(lambda: self._scheduler.drop_preinfer(request.key))  # no request would read its prefix
                raise self.reject()
            self._enqueue(request)
        return request

    def is_overloaded_for(self, sender: RequestSource) -> bool:
        """Return whether a ranking request of this source would be rejected, judging by its size alone."""
        return self._does_any_wait and self._estimator.unread_completion_s(sender) > self.cfg.max_queue_delay_s

    def reject(self) -> OverloadedError:
        """Count a rejection and return the error with the time after which to retry."""
        self._count("shed_overload")
        return OverloadedError("more work waits than can be done in time", max(0.05, self.queued_s))

    def count_unread_rejections(self, count: int) -> None:
        """Count requests that frontends rejected before parsing them, based on `is_overloaded_for`."""
        self.counts["shed_overload"] = self.counts.get("shed_overload", 0) + count

    def submit_preinfer(
        self,
        user: str,
        history: History,
        now_ms: int,
        num_candidates: int,
        *,
        timeout_s: float,
        sender: RequestSource = UNKNOWN_SOURCE,
    ) -> tuple[Decision, EngineRequest | None]:
        """Decide on a pre-infer request and queue it if admitted; the history is encoded only then.

        Args:
            user: User id.
            history: History of the user.
            now_ms: Current time in Unix milliseconds.
            num_candidates: Number of candidates that the ranking request is expected to have.
            timeout_s: Seconds until the deadline of the request.
            sender: Source of the request.

        Returns:
            The decision, and the queued request if there is anything to compute.

        Raises:
            UnavailableError: The engine is stopping.
        """
        key = self._key(user)
        (length, cached) = lengths_of(self.adapter, len(history))
        num_present = min(self.tiers.device.length_of(key), cached) if cached else 0
        with self._condition:
            self._check_open()
            decision = self.trigger.decide(
                key,
                tail=self.costs.tail,
                wait_s=self._estimator.device_wait_s,
                host_s=self.pacer.host_s,
                preinfer_s=self.costs.share_s(*self.costs.work(num_present, cached - num_present, 0)),
                full_rank_s=self._estimator.full_rank_s(length, num_candidates),
                rank_s=self._estimator.rank_s(length, cached, num_candidates),
                num_bytes=cached * self.tiers.bytes_per_token,
            )
            self._count(f"preinfer_{decision.reason}")
        if not decision.is_admitted or not cached or not self.cfg.prefix_cache.enabled:
            return decision, None
        request = self._make_request(user, self.adapter.tokens(history, now_ms), None, timeout_s, sender)
        with self._condition:
            self._check_open()
            self._enqueue(request)
        return decision, request

    def would_admit_preinfer(self, num_events: int, num_candidates: int) -> Decision:
        """Decide whether pre-inference would pay off now for a user with `num_events` events; charges nothing."""
        length, cached = lengths_of(self.adapter, num_events)
        with self._condition:
            decision = self.trigger.would_admit(
                full_rank_s=self._estimator.full_rank_s(length, num_candidates),
                rank_s=self._estimator.rank_s(length, cached, num_candidates),
                tail=self.costs.tail,
                wait_s=self._estimator.device_wait_s,
                host_s=self.pacer.host_s,
            )
        return decision if cached and self.cfg.prefix_cache.enabled else Decision(False, "never")

    def min_preinfer_events(self, num_candidates: int) -> int:
        """Return the minimum history length in events for which pre-inference pays off now.

        If it pays off for no history, the result exceeds the maximum history length.
        """
        low = 1
        high = self.adapter.max_events + 1
        while low < high:
            middle = (low + high) // 2
            if self.would_admit_preinfer(middle, num_candidates).reason == "history_required":
                high = middle
            else:
                low = middle + 1
        return low

    @property
    def _does_any_wait(self) -> bool:
        """Whether a ranking request waits for a later batch than the one that is computed now.

        If none does, the next request is admitted regardless of the queue limit: otherwise the device would be idle
        after the current batch, and an overloaded engine would lose throughput.
        """
        return bool(self._inbox) or self._scheduler.num_waiting > 0

    def _check_open(self) -> None:
        if self._is_draining or self._is_closed:
            raise UnavailableError("the engine is stopping", 1.0)

    def _make_request(
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

    def _enqueue(self, request: EngineRequest) -> None:
        self._add_to_queue(request)
        self._unfinished[request] = None
        self._inbox.append(request)
        self._wake()

    def _add_to_queue(self, request: EngineRequest) -> None:
        if request.is_rank:
            self._queue.add(request.client, request.key.user, request.estimate_s)
        else:
            self._queue.add_preinfer(request.estimate_s)

    def _remove_from_queue(self, request: EngineRequest) -> None:
        if request.is_rank:
            self._queue.remove(request.client, request.key.user, request.estimate_s)
        else:
            self._queue.remove_preinfer(request.estimate_s)

    def _post(self, message: Callable[[], None]) -> None:
        """Schedule a callback on the engine's thread, between two batches."""
        with self._condition:
            self._messages.append(message)
            self._wake()

    def _wake(self) -> None:
        self.pacer.notify()  # a spinning thread does not wait on the condition
        self._condition.notify_all()

    # The loop: the engine's thread.

    def run(self) -> None:
        """Run steps until the engine is closed or cannot continue; target of the engine's thread."""
        is_lost = False
        try:
            self._warm_up()
            while self._step_or_recover():
                pass
        except BaseException:
            _LOG.critical("an engine failed and cannot continue; requests are routed to other engines", exc_info=True)
            is_lost = True
        try:
            self._fail_all()
        finally:
            if is_lost:
                self._on_lost()

    def _warm_up(self) -> None:
        """Warm up and check the golden request; record the exception if that fails."""
        try:
            warm_up(self._runner, self.costs)
            check_golden_request(self._runner)
        except BaseException as error:
            self._failure = error
            self._is_closed = True
        finally:
            self._is_warm.set()

    def _step_or_recover(self) -> bool:
        try:
            return self.step()
        except _CannotContinueError:
            raise
        except Exception:
            _LOG.exception("an engine step failed; failing its %d requests, restarting others", len(self._handled))
            self._recover()
            return True

    def step(self) -> bool:
        """Run one step of the engine. Simulations call it instead of running the thread.

        Returns:
            False if the engine has been closed.
        """
        if not self.admit():
            return False
        # Complete before scheduling, because clients wait for the results.
        if self._is_result_due:
            self.complete(self._in_flight.popleft())
        elif batch := self.schedule():
            self.launch(batch)
        return True

    def admit(self) -> bool:
        """Run the posted callbacks and queue the new requests; wait while there is nothing to do.

        Returns:
            False if the engine has been closed.
        """
        self._handled = []
        if self._in_flight and not self._is_result_due:
            self.pacer.wait(has_work=self._estimator.is_device_busy and (self._scheduler.has_work or bool(self._inbox)))
        self.pacer.stay_awake(lambda: self.has_work)
        with self._condition:
            while not self.has_work:
                self._condition.wait()
            if self._is_closed:
                return False
            # Everything that arrives from here on, also from a callback that posts itself again, is for the next step.
            num_messages = len(self._messages)
            num_arrived = len(self._inbox)
        for _ in range(num_messages):  # one at a time: if one raises, the others stay in the queue
            self._messages.popleft()()
        for _ in range(num_arrived):
            request = self._inbox.popleft()
            self._handled = [request]
            if request.key.version != self._version:  # submitted before the model changed
                request.restart(self._version)
            self._scheduler.add(request)
        self._handled = []
        return True

    @property
    def has_work(self) -> bool:
        """Whether the next step has work, and would not wait for another thread."""
        return bool(self._in_flight or self._scheduler.has_work or self._inbox or self._messages or self._is_closed)

    @property
    def _is_result_due(self) -> bool:
        """Whether the oldest batch has ended, or the maximum number of batches is in flight."""
        in_flight = self._in_flight
        return bool(in_flight) and (len(in_flight) >= self._runner.depth or in_flight[0].launched.is_done())

    def schedule(self) -> _Batch | None:
        """Choose the next batch and pin its cache entries.

        Returns:
            The batch, or None if no request is queued, if waiting for more requests pays off, or if all queued requests
            wait for cache copies.
        """
        if not self._scheduler.has_work:
            return None
        # While a batch is in flight, the next one is scheduled as late as possible, so that it includes more requests.
        if self._in_flight and (not self._estimator.is_device_busy or self.pacer.next_batch_in_s > 0):
            return None
        planned_s = self.clock.now_s()
        chunks = self._scheduler.schedule(self._handled)
        self._handled = [chunk.request for chunk in chunks]
        if not chunks:
            return None
        return _Batch(chunks=chunks, size=self._batch_work(chunks), planned_s=planned_s, is_alone=not self._in_flight)

    def _batch_work(self, chunks: Sequence[ScheduledChunk]) -> tuple[int, int]:
        tokens = 0
        pairs = 0
        for chunk in chunks:
            step_tokens, step_pairs = self.costs.work(*chunk.item.extent)
            tokens += step_tokens
            pairs += step_pairs
        return tokens, pairs

    def launch(self, batch: _Batch) -> None:
        """Start a batch on the device. All later batches can use its keys and values from the KV cache."""
        try:
            batch.launched = self._runner.launch([chunk.item for chunk in batch.chunks])
        except Exception:
            self._fail_batch(batch.chunks)
            return
        self._in_flight.append(batch)
        launched_s = self.clock.now_s()
        self.pacer.observe_launch(batch.planned_s, launched_s, self.costs.predict_s(*batch.size))
        for chunk in batch.chunks:
            chunk.request.planned_s = batch.planned_s
            chunk.request.launched_s = launched_s
            self._commit(chunk)
            self._scheduler.on_launch(chunk)

    def _commit(self, chunk: ScheduledChunk) -> None:
        """Mark the new tokens as cached. Batches run in order, so no batch can read their pages too early."""
        if chunk.entry is not None and not chunk.entry.is_dropped and chunk.item.store_until > chunk.item.first:
            content = chunk.request.content_of(chunk.item.store_until)
            assert content is not None
            self.tiers.device.commit(chunk.entry, chunk.item.store_until, content)

    def complete(self, batch: _Batch) -> None:
        """Read the results of a batch, learn its cost, and complete its finished requests."""
        self._handled = [chunk.request for chunk in batch.chunks]
        try:
            results, seconds = batch.launched.wait()
        except Exception:
            self._fail_batch(batch.chunks)
            return
        ended_s = self.clock.now_s()
        self._count("batches")
        self.device_s += seconds
        self.pacer.observe_device_time(ended_s, seconds)
        # Before the futures are set, because the threads that wait for them then compete for the GIL.
        self.costs.observe(*batch.size, seconds, len(batch.chunks))
        for chunk, scored in zip(batch.chunks, results, strict=True):
            chunk.request.computed_s += seconds
            if scored is not None:
                chunk.request.scored.append(scored.scores)
            self._complete_step(chunk, scored)
        self._observe_pace(batch, ended_s, seconds)
        self._num_failures = 0

    def _complete_step(self, chunk: ScheduledChunk, scored: BatchItemScores | None) -> None:
        """Complete the request of a chunk if it is the last one, and unpin its cache entry."""
        if chunk.request.candidates is not None and chunk.is_last and scored is not None:
            self._complete_rank(chunk, scored)
            return
        if chunk.request.candidates is None and chunk.is_last and chunk.entry is not None:
            self._complete_preinfer(chunk.request, chunk.entry)
        self._unpin(chunk)

    def _complete_rank(self, chunk: ScheduledChunk, scored: BatchItemScores) -> None:
        request = chunk.request
        assert request.candidates is not None
        if request.num_cached == 0:  # a reloaded prefix was evicted before it was read, or belongs to another version
            request.source = "none"
        with self._condition:
            self.trigger.release_budget(request.key)
        self._count(f"rank_{request.source}")
        if chunk.entry is not None:
            self.tiers.device.reserve_until(chunk.entry, float("-inf"))
            if chunk.entry.pins == 1:  # otherwise another batch still writes to it and will offload it at its end
                self.tiers.offload(chunk.entry, request, ahead_s=self.queued_s)
        self._unpin(chunk)
        request.ended_s = self.clock.now_s()
        if self.first_response_s is None:
            self.first_response_s = time.time()
        self.compute_times.observe(request.computed_s)
        self.queue_times.observe(max(0.0, request.ended_s - request.arrived_s - request.computed_s))
        self.recent.add_rank(request, request.ended_s)
        items = scored.items
        scores = scored.scores
        if len(request.scored) > 1:  # the candidates were scored in several batches
            items = request.candidates.items
            scores = np.concatenate(request.scored)
        self._finish(request, RankResult(items, scores, request.key.version, request.source, request.num_cached), None)

    def _complete_preinfer(self, request: EngineRequest, entry: Entry) -> None:
        """Complete a pre-infer request and reserve its prefix for the expected delay of the ranking request."""
        with self._condition:
            life_s = self.trigger.lifetime_s
        self.tiers.device.reserve_until(entry, self.clock.now_s() + life_s)
        self._count("preinfer_done")
        self.recent.add_preinfer(request, self.clock.now_s())
        self._finish(
            request, RankResult(_NO_ITEMS, _NO_SCORES, request.key.version, request.source, entry.length), None
        )

    def _unpin(self, chunk: ScheduledChunk) -> None:
        if chunk.entry is not None:
            self.tiers.device.unpin(chunk.entry)

    def _finish(self, request: EngineRequest, result: RankResult | None, error: Exception | None) -> None:
        """Complete or fail a request. A second call has no effect, unless the first was ended by an exception."""
        if request.is_finished and request.future.done():
            return
        request.is_finished = True
        with self._condition:
            if request in self._unfinished:
                del self._unfinished[request]
                self._remove_from_queue(request)
            if self._queue.num_requests == 0:
                self._condition.notify_all()  # `drain` waits until nothing is queued
        if result is None and error is None:  # cancelled
            return
        if request.future.running() or request.future.set_running_or_notify_cancel():
            if result is not None:
                request.future.set_result(result)
            else:
                request.future.set_exception(error)

    def _observe_pace(self, batch: _Batch, ended_s: float, seconds: float) -> None:
        completed_s = sum(chunk.request.estimate_s for chunk in batch.chunks if chunk.request.is_finished)
        if batch.is_alone and not self._in_flight:
            self.pacer.observe_host_time(self.clock.now_s() - batch.planned_s - seconds)
        self.pacer.observe_completed(ended_s, completed_s, has_more=self._queue.num_requests > 0)
        self.pacer.observe_end(ended_s, sum(self.costs.predict_s(*later.size) for later in self._in_flight))

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    # Model updates and invalidation of cached prefixes.

    def forget(self, user: str) -> None:
        """Drop the cached prefixes of a user, on the device and in host memory."""
        self._post(lambda: self.tiers.drop(self._key(user)))

    def apply_between_batches(self, version: str, change: Callable[[], None]) -> "Future[None]":
        """Change the model to another version between two batches, with no batch in flight.

        Started requests are restarted, and cached prefixes of the previous version are no longer used.

        Args:
            version: New version.
            change: Updates the model in place, or raises and leaves it unchanged.

        Returns:
            A future that is completed after the change, or fails with its exception.
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
            self.first_response_s = None
            self._scheduler.restart_requests(version)
            for request in self.tiers.waiting():
                request.restart(version)
        except BaseException as error:  # responses would mix two versions
            done.set_exception(error)
            raise _CannotContinueError("the model has a different version than the engine") from error
        done.set_result(None)
        self._post(self._drop_stale)  # in later steps, because requests wait while the version changes

    def _drop_stale(self) -> None:
        """Drop prefixes of other versions, a few per step, because there may be many."""
        if self.tiers.drop_stale(self._version, _STALE_PER_STEP):
            self._post(self._drop_stale)

    # Failures.

    def _fail_batch(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Fail the requests of a batch whose computation failed; queues and cache are intact, so others continue."""
        _LOG.exception("a batch failed; failing its requests")
        for chunk in chunks:
            self._scheduler.remove(chunk.request)
            self.tiers.device.evict(chunk.request.key)
            self._unpin(chunk)
        self._fail_requests([chunk.request for chunk in chunks])
        self._check_device()

    def _recover(self) -> None:
        """Fail the requests of the failed step, and restart the others.

        The step may have been interrupted anywhere, so the state of queues and caches is rebuilt: a page that was
        allocated but not yet assigned to an entry would otherwise be lost until the process ends.
        """
        fail_point("serving.recover")
        self._count("recovered")
        self._num_failures += 1
        if self._num_failures >= _MAX_FAILURES:
            raise _CannotContinueError(f"{_MAX_FAILURES} consecutive steps have failed")
        self._fail_requests(self._handled)
        self._complete_or_fail_in_flight()
        self.tiers.clear()
        self._scheduler.clear()
        self._restart_unfinished()
        self._check_device()

    def _complete_or_fail_in_flight(self) -> None:
        """Wait for the batches in flight, whose pages are in use until they end; the cache is cleared after that."""
        while self._in_flight:
            batch = self._in_flight.popleft()
            try:
                self.complete(batch)
            except _CannotContinueError:
                raise
            except Exception:
                _LOG.exception("a batch in flight failed during recovery; failing its requests")
                self._fail_requests([chunk.request for chunk in batch.chunks])

    def _restart_unfinished(self) -> None:
        with self._condition:
            self._inbox.clear()
            waiting = list(self._unfinished)
            self._queue.clear()
            for request in waiting:
                self._add_to_queue(request)
            self._condition.notify_all()  # `drain` waits until nothing is queued
        for request in waiting:
            request.restart(self._version)
            self._scheduler.add(request)

    def _check_device(self) -> None:
        """Check that the device still computes: some GPU errors disable it for the lifetime of the process."""
        try:
            compute_one(self._runner)
        except Exception as error:
            raise _CannotContinueError("the device no longer computes") from error

    def _fail_requests(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            if not request.is_finished or not request.future.done():
                self._count("failed")
                self._finish(request, None, RuntimeError("the batch of this request failed"))

    def _fail_all(self) -> None:
        with self._condition:
            self._is_closed = True
            self._has_ended = True
            requests = list(self._unfinished)
            self._unfinished.clear()
            self._inbox.clear()
            self._queue.clear()
        for request in [*requests, *self._handled]:
            self._finish(request, None, UnavailableError("the engine has ended", 1.0))

    # State and shutdown: called by any thread.

    @property
    def queued_s(self) -> float:
        """Estimated device seconds of queued and running requests."""
        return self._queue.seconds

    @property
    def is_alive(self) -> bool:
        """Whether the engine has not ended; a flag, because checking the thread for every request would be slow."""
        return not self._has_ended

    def drain(self, timeout_s: float) -> bool:
        """Reject new requests and wait for the accepted ones; return whether all were completed within `timeout_s`."""
        with self._condition:
            self._is_draining = True
        return self.wait_until_idle(timeout_s)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait for all accepted requests; return whether all were completed within `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: self._queue.num_requests == 0, timeout_s)

    def close(self) -> None:
        """End the engine's thread; unfinished requests fail."""
        with self._condition:
            self._is_closed = True
            self._wake()
        if self._thread is not None:
            self._thread.join()
        else:
            self._fail_all()
        self.tiers.close()


def make_runner(adapter: ModelAdapter, pool: PagePool, cfg: EngineConfig) -> BatchRunner:
    """Return a runner with CUDA graphs if the device and the model support it, and else the reference runner."""
    servable = adapter.servable
    paged = servable.cached_forward.paged
    has_graphs = (
        cfg.cuda_graphs
        and servable.device.type == "cuda"
        and can_be_paged(pool.tensor.shape[-1], servable.dtype.itemsize, pool.page_tokens)
    )
    if has_graphs and paged is not None and isinstance(adapter, RankingAdapter | RetrievalAdapter):
        from nestrec.serving.engine.graph_runner import GraphRunner

        encoder = import_attribute(paged)(adapter.encoder, pool.paged_kv_cache)
        max_length = servable.encoder_config.max_length
        max_tokens = 2 * cfg.max_batch_tokens + max_length
        if isinstance(adapter, RetrievalAdapter):  # candidates are not tokens, so large graphs would never be filled
            max_tokens = min(max_tokens, cfg.max_batch_requests * max_length)
        return GraphRunner(cast(PagedModelAdapter, adapter), encoder, pool, max_tokens=max_tokens)
    return ReferenceRunner(adapter, pool)


_MAX_RECENT = 64


class RecentRequests:  # language: allow british-spelling
    """Times of the most recent requests of an engine, for the live page: arrival, queue, compute.

    It contains no users and no items: a ranking request refers to its pre-infer request by a sequence number. One
    thread may write; any thread may read.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._done: deque[dict[str, Any]] = deque(maxlen=_MAX_RECENT)
        self._preinfer_numbers: OrderedDict[CacheKey, int] = OrderedDict()
        """Numbers of pre-infer requests whose ranking request has not completed yet."""

    def add_preinfer(self, request: EngineRequest, now_s: float) -> None:
        """Add a completed pre-infer request."""
        self._preinfer_numbers[request.key] = self._add("preinfer", request, now_s, None)
        while len(self._preinfer_numbers) > _MAX_RECENT:
            self._preinfer_numbers.popitem(last=False)

    def add_rank(self, request: EngineRequest, now_s: float) -> None:
        """Add a completed ranking request."""
        self._add("rank", request, now_s, self._preinfer_numbers.pop(request.key, None))

    def to_json(self, now_s: float) -> list[dict[str, Any]]:
        """Return the requests as JSON objects, newest last, with times in seconds relative to `now_s`."""
        return [
            {**entry, "arrived_s": round(entry["arrived_s"] - now_s, 6), "ended_s": round(entry["ended_s"] - now_s, 6)}
            for entry in list(self._done)
        ]

    def _add(self, kind: str, request: EngineRequest, now_s: float, preinfer_number: int | None) -> int:
        number = next(self._numbers)
        entry = {
            "number": number,
            "kind": kind,
            "preinfer": preinfer_number,
            "arrived_s": request.arrived_s,
            "ended_s": now_s,
            "computed_s": round(request.computed_s, 6),
            "parts_ms": stage_times_ms(request, now_s),
            "cache_source": request.source,
            "tokens": request.tokens.length,
            "cached": request.num_cached,
            "candidates": 0 if request.candidates is None else len(request.candidates),
        }
        self._done.append(entry)
        return number


def stage_times_ms(request: EngineRequest, ended_s: float) -> dict[str, float]:
    """Return the milliseconds that a request spent in each stage, without the network.

    Stages are `in` (from the frontend, which has received the complete request, to the engine), `queue` (until its last
    batch was scheduled), `launch` (until that batch was launched), `compute` (until its result), and `back` (to the
    frontend, estimated by the previous response). Unknown stages are omitted.
    """
    if not request.launched_s:  # a pre-infer request whose prefix was already cached
        return {}
    sender = request.sender
    parts = {
        "in": request.arrived_s - sender.received_s if sender.received_s else None,
        "queue": request.planned_s - request.arrived_s,
        "launch": request.launched_s - request.planned_s,
        "compute": ended_s - request.launched_s,
        "back": sender.return_transit_s or None,
    }
    return {name: round(1e3 * seconds, 3) for name, seconds in parts.items() if seconds is not None}
