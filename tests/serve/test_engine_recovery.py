"""Exceptions on the engine thread: only requests of that batch fail, all others get their scores, and nothing leaks."""

import contextlib
import itertools
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from serving_sequences import draw_candidates, draw_history

from nestrec.models import HSTUConfig
from nestrec.serving.core.cost_model import EngineCostModel, Histogram
from nestrec.serving.core.rejections import UnavailableError
from nestrec.serving.core.request_limits import RequestSource
from nestrec.serving.engine.admission import QueueEstimate
from nestrec.serving.engine.batch_pacer import BatchPacer
from nestrec.serving.engine.batch_scheduler import BatchScheduler, EngineConfig, RankScheduler, ScheduledChunk
from nestrec.serving.engine.fair_queue import FairQueue
from nestrec.serving.engine.reference_runner import InFlightBatch, ReferenceRunner
from nestrec.serving.engine.serving_engine import Engine, RecentRequests
from nestrec.serving.kv_cache.host_prefix_cache import HostPages, HostPrefixCache
from nestrec.serving.kv_cache.kv_page_pool import pool_for
from nestrec.serving.kv_cache.prefix_cache import PrefixCache
from nestrec.serving.kv_cache.preinfer_trigger import Trigger, TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import Copier, PrefixCacheConfig, TieredPrefixCache
from nestrec.serving.model.model_adapter import make_adapter
from nestrec_bench.harness.random_model import random_ranking
from support.fail_points import armed

ENCODER = HSTUConfig(dim=16, num_layers=2, num_heads=2, max_length=32, head_dim=8, time_bias=True)
TIERS = PrefixCacheConfig(
    device_bytes=3 << 13,
    host_bytes=1 << 15,
    page_tokens=4,
    offload_threshold=0.0,
    reload_policy="always",
    keep_on_device=False,
)
MAX_BATCH_REQUESTS = 4
CONFIG = EngineConfig(
    prefix_cache=TIERS,
    max_queue_delay_s=1e9,
    max_batch_requests=MAX_BATCH_REQUESTS,
    preinfer=TriggerConfig(policy="all", burst_s=1e9),
)
NUM_USERS = 10
TIMEOUT_S = 60.0

POINTS = {
    "mailbox": (Engine, "admit"),
    "idle wait": (BatchPacer, "stay_awake"),
    "arrival": (BatchScheduler, "add"),
    "superseded preinfer": (BatchScheduler, "drop_preinfer"),
    "schedule": (BatchScheduler, "schedule"),
    "rank schedule": (RankScheduler, "_take"),
    "preinfer schedule": (BatchScheduler, "_schedule_preinfer"),
    "rank chunk": (RankScheduler, "_record_chunk"),
    "queue push": (FairQueue, "push"),
    "queue pop": (FairQueue, "pop"),
    "queue charge": (FairQueue, "charge"),
    "queue requeue": (FairQueue, "requeue"),
    "cost prediction": (EngineCostModel, "predict_s"),
    "cost observation": (EngineCostModel, "observe"),
    "scheduled chunk": (ScheduledChunk, "make"),
    "cache lookup": (TieredPrefixCache, "find"),
    "cache reserve": (TieredPrefixCache, "reserve"),
    "cache reload": (TieredPrefixCache, "reload"),
    "cache reload end": (TieredPrefixCache, "_finish_reload"),
    "cache offload": (TieredPrefixCache, "offload"),
    "cache offload end": (TieredPrefixCache, "_finish_offload"),
    "cache create": (PrefixCache, "create"),
    "cache grow": (PrefixCache, "grow"),
    "cache commit": (PrefixCache, "commit"),
    "cache pin": (PrefixCache, "pin"),
    "cache unpin": (PrefixCache, "unpin"),
    "cache reserve_until": (PrefixCache, "reserve_until"),
    "host pages": (HostPages, "allocate"),
    "host cache entry": (HostPrefixCache, "start_offload"),
    "copier queue": (Copier, "submit"),
    "copy": (Copier, "_make"),
    "launch": (ReferenceRunner, "launch"),
    "on_launch": (BatchScheduler, "on_launch"),
    "completion": (Engine, "complete"),
    "pacer": (BatchPacer, "observe_end"),
    "preinfer completion": (Engine, "_complete_preinfer"),
    "trigger": (Trigger, "release_budget"),
    "histogram": (Histogram, "observe"),
    "recent requests": (RecentRequests, "add_rank"),
    "queue estimate": (QueueEstimate, "remove"),
    "future": (Future, "set_result"),
}


@pytest.fixture(scope="module")
def servable():
    return random_ranking(ENCODER, num_items=200)


@pytest.fixture(scope="module")
def requests(servable):
    """Return history, candidates and the scores of an engine without faults, by user."""
    rng = np.random.default_rng(1)
    engine = Engine(make_adapter(servable), CONFIG)
    found = {}
    for number in range(NUM_USERS):
        history = draw_history(rng, 6 + number)
        candidates = draw_candidates(rng, history, 8)
        request = engine.submit_rank(f"u{number}", history, candidates, timeout_s=TIMEOUT_S)
        found[f"u{number}"] = (history, candidates, request.future.result(TIMEOUT_S).scores)
    engine.close()
    return found


class Fault:
    """Fault that makes one call of a method on a thread of the engine raise an exception.

    Args:
        monkeypatch: Fixture that replaces the method.
        owner: Class of the method.
        name: Name of the method.
        is_after: Whether the exception is raised after the method has run instead of before.
    """

    def __init__(self, monkeypatch, owner, name, *, is_after):
        self.has_fired = False
        real = owner.__dict__[name]
        is_static = isinstance(real, staticmethod)
        function = real.__func__ if is_static else real
        # The executor of a copier sets results of futures too, and its thread ends if that raises.
        threads = "nestrec-engine" if owner is Future else "nestrec-"

        def faulty(*args, **options):
            is_due = not self.has_fired and threading.current_thread().name.startswith(threads)
            if is_due and not is_after:
                self._fire()
            result = function(*args, **options)
            if is_due and is_after and not self.has_fired:
                self._fire()
            return result

        monkeypatch.setattr(owner, name, staticmethod(faulty) if is_static else faulty)

    def _fire(self):
        self.has_fired = True
        raise ArithmeticError("injected")


def submit_all(engine, requests):
    """Submit pre-infer requests of every second user and of another one, then all ranking requests.

    Returns:
        The ranking requests in the engine, by user.
    """
    users = list(requests)
    with engine._condition:  # all requests are queued before the first is scheduled
        engine.submit_preinfer("another", requests[users[0]][0], 0, 8, timeout_s=TIMEOUT_S)
        for user in users[::2]:
            engine.submit_preinfer(user, requests[user][0], 0, 8, timeout_s=TIMEOUT_S)
    with engine._condition:
        return {
            user: engine.submit_rank(user, *requests[user][:2], timeout_s=TIMEOUT_S, sender=RequestSource(user[-1]))
            for user in users
        }


def check_scores(submitted, requests):
    """Check the scores of the requests that succeeded, and return the number of those that failed."""
    num_errors = 0
    for user, request in submitted.items():
        error = request.future.exception(TIMEOUT_S)
        if error is None:
            assert np.abs(request.future.result().scores - requests[user][2]).max() <= 1e-5
        else:
            assert "the batch of this request failed" in str(error)
            num_errors += 1
    return num_errors


def check_nothing_leaks(engine):
    tiers = engine.tiers
    assert engine.wait_until_idle(TIMEOUT_S)
    end_s = time.perf_counter() + TIMEOUT_S
    while tiers.host_cache._in_flight or engine._messages or tiers._reloading:
        pending = tiers.host_cache._in_flight, list(engine._messages), tiers._reloading
        assert time.perf_counter() < end_s, pending
        time.sleep(1e-3)  # copies run on real threads
    engine.close()
    assert not engine._unfinished
    assert engine.queued_s == tiers._in.wait_s == tiers._out.wait_s == 0.0
    tiers.device.check()
    tiers.device.drop_all(lambda key: True)
    assert tiers.device.num_free_pages == tiers.device.num_pages
    for entry in tiers.host_cache.entries():
        tiers.host_cache.drop(entry.key)
    assert tiers.host_cache.num_bytes == 0
    assert len(tiers._host_pages._free) == tiers._host_pages._num_used


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_engine_recovers_from_exception(servable, requests, monkeypatch, point, is_after):
    engine = Engine(make_adapter(servable), CONFIG)
    fault = Fault(monkeypatch, *POINTS[point], is_after=is_after)
    num_errors = 0
    for round_number in itertools.count(1):
        num_errors += check_scores(submit_all(engine, requests), requests)
        assert engine.wait_until_idle(TIMEOUT_S)
        if fault.has_fired and round_number >= 3:
            break
        assert round_number < 100, "the fault did not fire"  # a ranking request may overtake its pre-infer request
    assert num_errors <= MAX_BATCH_REQUESTS
    for _ in range(100 // NUM_USERS):
        assert check_scores(submit_all(engine, requests), requests) == 0
    check_nothing_leaks(engine)


def test_engine_completes_in_flight_batch_if_scheduling_fails(servable, requests, monkeypatch):
    class DelayedRunner(ReferenceRunner):
        depth = 2

        def launch(self, items):
            results = self.run(items)
            polls = itertools.count()
            return InFlightBatch(lambda: (results, 1e-3), lambda: next(polls) > 3)

    adapter = make_adapter(servable)
    pool = pool_for(servable, cache_bytes=3 << 13, page_tokens=4)
    engine = Engine(adapter, CONFIG, runner=DelayedRunner(adapter, pool))
    num_in_flight = []

    def fail_during_a_batch(scheduler, handled):
        if engine._in_flight and not num_in_flight:
            num_in_flight.append(len(engine._in_flight))
            raise ArithmeticError("injected")
        return schedule(scheduler, handled)

    schedule = BatchScheduler.schedule
    monkeypatch.setattr(BatchScheduler, "schedule", fail_during_a_batch)
    assert check_scores(submit_all(engine, requests), requests) == 0
    assert num_in_flight == [1]
    check_nothing_leaks(engine)


@pytest.mark.parametrize("cause", ["device", "recovery", "weights", "scheduler"])
def test_engine_unrecoverable_failure_fails_all_requests(servable, requests, monkeypatch, cause):
    lost = threading.Event()
    engine = Engine(make_adapter(servable), CONFIG, on_lost=lost.set)

    def fail(*_, **__):
        raise ArithmeticError("injected")

    with armed("serving.recover", fail) if cause == "recovery" else contextlib.nullcontext():
        if cause == "weights":
            monkeypatch.setattr(engine._runner, "weights_changed", fail)
            with pytest.raises(ArithmeticError):
                engine.apply_between_batches("another", lambda: None).result(TIMEOUT_S)
        else:
            failing = (engine._runner, "launch") if cause == "device" else (engine._scheduler, "schedule")
            monkeypatch.setattr(*failing, fail)
            for request in submit_all(engine, requests).values():
                assert request.future.exception(TIMEOUT_S) is not None
        assert lost.wait(TIMEOUT_S)
    assert not engine.is_alive
    assert engine.wait_until_idle(0.0)
    with pytest.raises(UnavailableError):
        submit_all(engine, requests)
    engine.close()
