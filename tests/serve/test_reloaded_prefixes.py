"""Prefixes reloaded from host memory: the request that needs the copy reads it, however small the device cache is."""

import random
import time

import numpy as np
import pytest
from serving_sequences import TIMEOUT_S, draw_candidates, draw_history, extend_history

from nestrec.models import HSTUConfig
from nestrec.serving.core.request_limits import RequestSource
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec.serving.model.model_adapter import make_adapter
from nestrec_bench.harness.clocks import ManualClock
from nestrec_bench.harness.random_model import random_ranking

ENCODER = HSTUConfig(dim=16, num_layers=2, num_heads=2, max_length=32, head_dim=8, time_bias=True)
NUM_USERS = 5


@pytest.fixture(scope="module")
def servable():
    return random_ranking(ENCODER, num_items=200)


def make_engine(servable, cache_bytes):
    tiers = PrefixCacheConfig(
        device_bytes=cache_bytes, host_bytes=1 << 15, page_tokens=4, offload_threshold=0.0, reload_policy="always"
    )
    cfg = EngineConfig(prefix_cache=tiers, max_queue_delay_s=1e9, preinfer=TriggerConfig(policy="all", burst_s=1e9))
    return Engine(make_adapter(servable), cfg, clock=ManualClock())


class RequestBursts:
    """Bursts of concurrent requests for prefixes; the device cache holds two or three of them."""

    def __init__(self, servable, seed):
        self.rng = np.random.default_rng(seed)
        self.random = random.Random(seed)
        self.engine = make_engine(servable, self.random.randrange(2 << 12, 5 << 12))
        self.histories = [draw_history(self.rng, self.random.randrange(4, 14)) for _ in range(NUM_USERS)]

    def run(self, num_bursts):
        for _ in range(num_bursts):
            with self.engine._condition:  # so that all are queued before the first is scheduled
                requests = [
                    self.submit_rank(user)
                    for user in self.random.sample(range(NUM_USERS), self.random.randrange(2, NUM_USERS))
                ]
            for request in requests:
                request.future.result(TIMEOUT_S)
            self.wait_for_copies()
        self.engine.close()
        self.engine.tiers.device.check()

    def submit_rank(self, user):
        num_events = self.random.choice([0, 0, 1, 2])
        history = self.histories[user] = extend_history(self.rng, self.histories[user], num_events)
        candidates = draw_candidates(self.rng, history)
        return self.engine.submit_rank(str(user), history, candidates, timeout_s=1e9, sender=RequestSource(str(user)))

    def wait_for_copies(self):
        end_s = time.perf_counter() + TIMEOUT_S
        while self.engine.tiers.host_cache._in_flight or self.engine._messages:
            assert time.perf_counter() < end_s
            time.sleep(1e-3)


def test_prefix_reload_makes_no_unneeded_copies(servable):
    """Regression test: reloaded prefixes used to be evicted for other requests before they were read."""
    num_reloaded = 0
    for seed in range(12):
        bursts = RequestBursts(servable, seed)
        bursts.run(20)
        counts = bursts.engine.counts
        assert counts.get("rank_host", 0) == counts.get("reloaded", 0)
        reserved = [entry for entry in bursts.engine.tiers.device.entries() if entry.reserved_until_s > 0]
        assert not reserved, "reservations of completed requests are released"
        num_reloaded += counts.get("reloaded", 0)
    assert num_reloaded > 100


@pytest.mark.parametrize("is_rank", [True, False])
def test_prefix_reload_of_cancelled_request_is_released(servable, is_rank, monkeypatch):
    rng = np.random.default_rng(1)
    engine = make_engine(servable, 1 << 14)
    history = draw_history(rng, 9)
    tiers = engine.tiers
    resume = engine._scheduler._resume
    engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=1e9).future.result(TIMEOUT_S)
    while tiers.host_cache._in_flight or engine._messages:
        time.sleep(1e-3)
    reserved_until_s = []

    def cancel_and_resume(request):
        reserved_until_s.append(tiers.device.entries()[0].reserved_until_s)
        request.future.cancel()
        resume(request)

    monkeypatch.setattr(engine._scheduler, "_resume", cancel_and_resume)
    monkeypatch.setattr(engine._scheduler._ranks, "_resume", cancel_and_resume)
    engine._post(lambda: tiers.device.evict(engine._key("a")))
    if is_rank:
        request = engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=1e9)
    else:
        _, request = engine.submit_preinfer("a", history, 0, 3, timeout_s=1e9)
    assert engine.wait_until_idle(TIMEOUT_S)
    assert reserved_until_s == [request.deadline_s]
    assert [entry.reserved_until_s for entry in tiers.device.entries()] == [float("-inf")]
    engine.close()
