"""Prefixes that come back from DRAM: who asked for the copy reads it, however small the cache is."""

import random
import time

import numpy as np
import pytest
from serving_sequences import TIMEOUT_S, appended, draw_candidates, draw_history

from nestrec.models import HSTUConfig
from nestrec.serving.core.request_limits import RequestSource
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec.serving.model.model_adapter import make_form
from nestrec_bench.harness.clocks import ManualClock
from nestrec_bench.harness.random_model import random_ranking

ENCODER = HSTUConfig(dim=16, num_layers=2, num_heads=2, max_length=32, head_dim=8, time_bias=True)
NUM_USERS = 5


@pytest.fixture(scope="module")
def servable():
    return random_ranking(ENCODER, num_items=200)


def make_engine(servable, cache_bytes):
    tiers = PrefixCacheConfig(
        cache_bytes=cache_bytes, dram_bytes=1 << 15, page_tokens=4, spill_above=0.0, reload="always"
    )
    cfg = EngineConfig(tiers=tiers, max_queue_s=1e9, trigger=TriggerConfig(policy="all", burst_s=1e9))
    return Engine(make_form(servable), cfg, clock=ManualClock())


class Bursts:
    """Requests of several clients at once, for prefixes of which the device has room for two or three."""

    def __init__(self, servable, seed):
        self.rng = np.random.default_rng(seed)
        self.py = random.Random(seed)
        self.engine = make_engine(servable, self.py.randrange(2 << 12, 5 << 12))
        self.histories = [draw_history(self.rng, self.py.randrange(4, 14)) for _ in range(NUM_USERS)]

    def run(self, num_bursts):
        for _ in range(num_bursts):
            with self.engine._condition:  # all of them wait before any is planned
                works = [self.ask(user) for user in self.py.sample(range(NUM_USERS), self.py.randrange(2, NUM_USERS))]
            for work in works:
                work.future.result(TIMEOUT_S)
            self.wait_for_copies()
        self.engine.close()
        self.engine.tiers.device.check()

    def ask(self, user):
        history = self.histories[user] = appended(self.rng, self.histories[user], self.py.choice([0, 0, 1, 2]))
        candidates = draw_candidates(self.rng, history)
        return self.engine.rank(str(user), history, candidates, timeout_s=1e9, sender=RequestSource(str(user)))

    def wait_for_copies(self):
        end_s = time.perf_counter() + TIMEOUT_S
        while self.engine.tiers.dram._in_flight or self.engine._messages:
            assert time.perf_counter() < end_s
            time.sleep(1e-3)


def test_no_copy_is_made_in_vain_over_random_bursts(servable):
    """What came back for one request was evicted for another before it was read: copied, and computed after all."""
    num_reloaded = 0
    for seed in range(12):
        bursts = Bursts(servable, seed)
        bursts.run(20)
        counts = bursts.engine.counts
        assert counts.get("rank_dram", 0) == counts.get("reloaded", 0)
        held = [entry for entry in bursts.engine.tiers.device.entries() if entry.held_until_s > 0]
        assert not held, "of requests that were answered"
        num_reloaded += counts.get("reloaded", 0)
    assert num_reloaded > 100


@pytest.mark.parametrize("is_rank", [True, False])
def test_what_came_back_for_a_request_that_was_given_up_is_held_for_nobody(servable, is_rank, monkeypatch):
    rng = np.random.default_rng(1)
    engine = make_engine(servable, 1 << 14)
    history = draw_history(rng, 9)
    tiers = engine.tiers
    resume = engine._planner._resume
    engine.rank("a", history, draw_candidates(rng, history), timeout_s=1e9).future.result(TIMEOUT_S)
    while tiers.dram._in_flight or engine._messages:
        time.sleep(1e-3)
    held = []

    def cancelled_on_its_way(work):
        held.append(tiers.device.entries()[0].held_until_s)
        work.future.cancel()
        resume(work)

    monkeypatch.setattr(engine._planner, "_resume", cancelled_on_its_way)
    monkeypatch.setattr(engine._planner._ranks, "_resume", cancelled_on_its_way)
    engine._post(lambda: tiers.device.drop(engine._key("a")))
    if is_rank:
        work = engine.rank("a", history, draw_candidates(rng, history), timeout_s=1e9)
    else:
        _, work = engine.preinfer("a", history, 0, 3, timeout_s=1e9)
    assert engine.wait_until_idle(TIMEOUT_S)
    assert held == [work.deadline_s]
    assert [entry.held_until_s for entry in tiers.device.entries()] == [float("-inf")]
    engine.close()
