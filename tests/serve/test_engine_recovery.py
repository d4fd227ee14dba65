"""Exceptions on the engine's thread: requests of that turn fail, all others are answered, and nothing leaks."""

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
from nestrec.serving.model.model_adapter import make_form
from nestrec_bench.harness.random_model import random_ranking
from support.fail_points import armed

ENCODER = HSTUConfig(dim=16, num_layers=2, num_heads=2, max_length=32, head_dim=8, time_bias=True)
TIERS = PrefixCacheConfig(
    cache_bytes=3 << 13, dram_bytes=1 << 15, page_tokens=4, spill_above=0.0, reload="always", keeps_on_device=False
)
MOST_REQUESTS = 4
CONFIG = EngineConfig(
    tiers=TIERS, max_queue_s=1e9, max_batch_requests=MOST_REQUESTS, trigger=TriggerConfig(policy="all", burst_s=1e9)
)
NUM_USERS = 10
TIMEOUT_S = 60.0

POINTS = {
    "mailbox": (Engine, "admit"),
    "waiting for work": (BatchPacer, "stay_awake"),
    "arrival": (BatchScheduler, "add"),
    "superseded signal": (BatchScheduler, "drop_signal"),
    "plan": (BatchScheduler, "plan"),
    "plan of rankings": (RankScheduler, "_take"),
    "plan of signals": (BatchScheduler, "_plan_signals"),
    "start of a ranking": (RankScheduler, "_begins"),
    "queue push": (FairQueue, "push"),
    "queue pop": (FairQueue, "pop"),
    "queue charge": (FairQueue, "charge"),
    "queue settle": (FairQueue, "settle"),
    "prediction": (EngineCostModel, "predict_s"),
    "observation": (EngineCostModel, "observe"),
    "step": (ScheduledChunk, "make"),
    "lookup": (TieredPrefixCache, "find"),
    "reservation": (TieredPrefixCache, "reserve"),
    "reload": (TieredPrefixCache, "reload"),
    "end of a reload": (TieredPrefixCache, "_reloaded"),
    "spill": (TieredPrefixCache, "spill"),
    "end of a spill": (TieredPrefixCache, "_spilled"),
    "cache create": (PrefixCache, "create"),
    "cache grow": (PrefixCache, "grow"),
    "cache commit": (PrefixCache, "commit"),
    "cache pin": (PrefixCache, "pin"),
    "cache unpin": (PrefixCache, "unpin"),
    "cache hold": (PrefixCache, "hold"),
    "host pages": (HostPages, "take"),
    "DRAM entry": (HostPrefixCache, "begin_spill"),
    "copier queue": (Copier, "submit"),
    "copy": (Copier, "_make"),
    "launch": (ReferenceRunner, "launch"),
    "after the launch": (BatchScheduler, "launched"),
    "completion": (Engine, "complete"),
    "pace": (BatchPacer, "ended"),
    "end of a signal": (Engine, "_signal_done"),
    "trigger": (Trigger, "consumed"),
    "histogram": (Histogram, "observe"),
    "recent requests": (RecentRequests, "ranked"),
    "backlog": (QueueEstimate, "remove"),
    "future": (Future, "set_result"),
}


@pytest.fixture(scope="module")
def servable():
    return random_ranking(ENCODER, num_items=200)


@pytest.fixture(scope="module")
def asked(servable):
    """By user: history, candidates and the scores of an engine in which nothing fails."""
    rng = np.random.default_rng(1)
    engine = Engine(make_form(servable), CONFIG)
    found = {}
    for number in range(NUM_USERS):
        history = draw_history(rng, 6 + number)
        candidates = draw_candidates(rng, history, 8)
        work = engine.rank(f"u{number}", history, candidates, timeout_s=TIMEOUT_S)
        found[f"u{number}"] = (history, candidates, work.future.result(TIMEOUT_S).scores)
    engine.close()
    return found


class Fault:
    """Makes one call of a method on a thread of the engine raise, before or after its work is done."""

    def __init__(self, monkeypatch, owner, name, *, is_after):
        self.has_fired = False
        real = owner.__dict__[name]
        is_static = isinstance(real, staticmethod)
        function = real.__func__ if is_static else real
        # The executor of a copier sets results of futures too, and its thread ends if that raises.
        threads = "nestrec-engine" if owner is Future else "nestrec-"

        def planted(*given, **options):
            is_due = not self.has_fired and threading.current_thread().name.startswith(threads)
            if is_due and not is_after:
                self._fire()
            result = function(*given, **options)
            if is_due and is_after and not self.has_fired:
                self._fire()
            return result

        monkeypatch.setattr(owner, name, staticmethod(planted) if is_static else planted)

    def _fire(self):
        self.has_fired = True
        raise ArithmeticError("planted")


def ask_together(engine, asked, users):
    """Send signals for some users and for one without a ranking, then all rankings; returns the works by user."""
    with engine._condition:  # all of them wait before any is planned
        engine.preinfer("another", asked[users[0]][0], 0, 8, timeout_s=TIMEOUT_S)
        for user in users[::2]:
            engine.preinfer(user, asked[user][0], 0, 8, timeout_s=TIMEOUT_S)
    with engine._condition:
        return {
            user: engine.rank(user, *asked[user][:2], timeout_s=TIMEOUT_S, sender=RequestSource(user[-1]))
            for user in users
        }


def check_answers(works, asked):
    """Returns the number of requests that failed."""
    num_errors = 0
    for user, work in works.items():
        error = work.future.exception(TIMEOUT_S)
        if error is None:
            assert np.abs(work.future.result().scores - asked[user][2]).max() <= 1e-5
        else:
            assert "the batch of this request failed" in str(error)
            num_errors += 1
    return num_errors


def check_nothing_leaks(engine):
    tiers = engine.tiers
    assert engine.wait_until_idle(TIMEOUT_S)
    end_s = time.perf_counter() + TIMEOUT_S
    while tiers.dram._in_flight or engine._messages or tiers._reloading:
        left = tiers.dram._in_flight, list(engine._messages), tiers._reloading
        assert time.perf_counter() < end_s, left
        time.sleep(1e-3)  # copies run on real threads
    engine.close()
    assert not engine._unfinished
    assert engine.queued_s == tiers._in.wait_s == tiers._out.wait_s == 0.0
    tiers.device.check()
    tiers.device.drop_all(lambda key: True)
    assert tiers.device.num_free_pages == tiers.device.num_pages
    for kept in tiers.dram.entries():
        tiers.dram.drop(kept.key)
    assert tiers.dram.num_bytes == 0
    assert len(tiers._host._free) == tiers._host._num_seen


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_engine_answers_after_an_exception(servable, asked, monkeypatch, point, is_after):
    engine = Engine(make_form(servable), CONFIG)
    fault = Fault(monkeypatch, *POINTS[point], is_after=is_after)
    users = list(asked)
    num_errors = 0
    for round_number in itertools.count(1):
        num_errors += check_answers(ask_together(engine, asked, users), asked)
        assert engine.wait_until_idle(TIMEOUT_S)
        if fault.has_fired and round_number >= 3:
            break
        assert round_number < 100, "the fault has not fired"  # a signal may always be overtaken by its ranking
    assert num_errors <= MOST_REQUESTS
    for _ in range(100 // NUM_USERS):
        assert check_answers(ask_together(engine, asked, users), asked) == 0
    check_nothing_leaks(engine)


def test_engine_answers_in_flight_batch_if_the_next_plan_fails(servable, asked, monkeypatch):
    class LateRunner(ReferenceRunner):
        depth = 2

        def launch(self, parts):
            results = self.run(parts)
            looks = itertools.count()
            return InFlightBatch(lambda: (results, 1e-3), lambda: next(looks) > 3)

    form = make_form(servable)
    engine = Engine(form, CONFIG, runner=LateRunner(form, pool_for(servable, cache_bytes=3 << 13, page_tokens=4)))
    planted = []

    def fail_beside_a_batch(planner, handled):
        if engine._in_flight and not planted:
            planted.append(len(engine._in_flight))
            raise ArithmeticError("planted")
        return plan(planner, handled)

    plan = BatchScheduler.plan
    monkeypatch.setattr(BatchScheduler, "plan", fail_beside_a_batch)
    assert check_answers(ask_together(engine, asked, list(asked)), asked) == 0
    assert planted == [1]
    check_nothing_leaks(engine)


@pytest.mark.parametrize("how", ["device", "recovery", "weights", "every turn"])
def test_engine_that_cannot_continue_says_so_and_fails_all(servable, asked, monkeypatch, how):
    lost = threading.Event()
    engine = Engine(make_form(servable), CONFIG, on_lost=lost.set)

    def fail(*_, **__):
        raise ArithmeticError("planted")

    with armed("serving.recover", fail) if how == "recovery" else contextlib.nullcontext():
        if how == "weights":
            monkeypatch.setattr(engine._runner, "weights_changed", fail)
            with pytest.raises(ArithmeticError):
                engine.change("another", lambda: None).result(TIMEOUT_S)
        else:
            monkeypatch.setattr(*{"device": (engine._runner, "launch")}.get(how, (engine._planner, "plan")), fail)
            for work in ask_together(engine, asked, list(asked)).values():
                assert work.future.exception(TIMEOUT_S) is not None
        assert lost.wait(TIMEOUT_S)
    assert not engine.is_alive
    assert engine.wait_until_idle(0.0)
    with pytest.raises(UnavailableError):
        ask_together(engine, asked, list(asked))
    engine.close()
