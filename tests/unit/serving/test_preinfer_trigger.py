"""Admission of pre-infer requests, and its cost model."""

import random

import numpy as np
import pytest

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError
from nestrec.serving.core.cost_model import EngineCostModel, work_of
from nestrec.serving.core.slot_router import KeyedHash
from nestrec.serving.inputs.engine_request import CacheKey
from nestrec.serving.kv_cache.preinfer_trigger import Trigger, TriggerConfig, waited_p99
from nestrec_bench.harness.clocks import ManualClock


def key_of(user):
    return CacheKey(str(user), "1", "c")


def decide(trigger, user, *, full_rank_s=0.1, rank_s=0.0, preinfer_s=0.05, num_bytes=10, wait_s=0.0, host_s=0.0):
    return trigger.decide(
        key_of(user), full_rank_s=full_rank_s, rank_s=rank_s, tail=1.2, wait_s=wait_s, preinfer_s=preinfer_s,
        num_bytes=num_bytes, host_s=host_s,
    )  # fmt: skip


def make(**changes):
    clock = ManualClock()
    return Trigger(TriggerConfig(**changes), clock, cache_bytes=100), clock


def test_trigger_admits_only_requests_at_risk():
    trigger, _ = make(latency_budget_ms=50.0)
    assert decide(trigger, 1, full_rank_s=0.04).reason == "safe"
    assert decide(trigger, 2, full_rank_s=0.042).is_admitted
    assert decide(trigger, 3, full_rank_s=0.01, wait_s=0.05).is_admitted, "waiting puts short requests at risk"


def test_trigger_counts_load_as_risk():
    """Full rankings of 10 ms each at a device load of 70% wait 65 ms at the 99th percentile."""
    admitted_fractions = {}
    for gap_s in (0.1, 0.010 / 0.7):
        trigger, clock = make(latency_budget_ms=50.0, max_compute_fraction=100.0, burst_s=100.0, max_cache_fraction=1e9)
        reasons = []
        for user in range(200):
            clock.sleep(gap_s)
            trigger.record_arrival(0.010)
            reasons.append(decide(trigger, user, full_rank_s=0.010).reason)
        admitted_fractions[gap_s] = reasons[50:].count("admitted") / 150
    assert list(admitted_fractions.values()) == [0.0, 1.0]


def test_trigger_load_of_few_requests_is_uncertain():
    """A load estimated from a few long requests is uncertain and may double at any moment."""
    reasons = {}
    for count in (8, 800):
        served_s = 0.08 / count
        trigger, clock = make(latency_budget_ms=2.8e3 * served_s, min_budget_fraction=0.0)
        for _ in range(count):
            clock.sleep(0.5 / count)
            trigger.record_arrival(served_s)
        reasons[count] = decide(trigger, 1, full_rank_s=served_s).reason
    assert reasons == {8: "admitted", 800: "safe"}


@pytest.mark.parametrize("load", [0.005, 0.05, 0.1, 0.2, 0.34, 0.5, 0.7])
def test_trigger_wait_estimate_equals_queue(load):
    """The estimate is also exact for small loads, for which requests are fast enough without pre-inference."""
    gaps = np.random.default_rng(1).exponential(1 / load, 400_000)
    backlog = np.cumsum(1 - gaps)  # each request waits for the remaining work of earlier ones
    waits = backlog - np.minimum.accumulate(np.minimum(backlog, 0))
    assert waited_p99(load) == pytest.approx(np.quantile(waits, 0.99), rel=0.05)


def test_trigger_wait_estimate_grows_with_load():
    waits = [waited_p99(load) for load in np.linspace(0, 3, 601)]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] < 250


def test_trigger_never_admits_short_requests():
    trigger, _ = make(latency_budget_ms=50.0, min_budget_fraction=0.05)
    for _ in range(1000):
        trigger.record_arrival(0.01)
    assert decide(trigger, 1, full_rank_s=0.002, wait_s=10.0).reason == "short"
    assert decide(trigger, 2, full_rank_s=0.0022, wait_s=10.0).is_admitted


def test_trigger_budget_includes_transit_time():
    """The budget includes the recent 90th percentile of the transit time: outliers and old values have no effect."""
    trigger, _ = make(latency_budget_ms=50.0, min_budget_fraction=0.05)
    transits = {"quick": [0.001] * 64 + [0.5] * 3, "slow": [0.001] * 100 + [0.025] * 156, "quick again": [0.001] * 256}
    reasons = {}
    for name, seconds in transits.items():
        for transit_s in seconds:
            trigger.record_transit(transit_s)
        reasons[name] = [decide(trigger, name, full_rank_s=full_rank_s).reason for full_rank_s in (0.002, 0.03)]
    assert reasons == {"quick": ["short", "safe"], "slow": ["short", "admitted"], "quick again": ["short", "safe"]}


@pytest.mark.parametrize(("rate", "reason"), [(116, "safe"), (200, "admitted")])
def test_trigger_counts_host_time_as_risk(rate, reason):
    """Requests take 2.1 ms of device, 1.2 ms of host and 1.5 ms of transit time.

    Measured latency was within 17.3 ms at 116 requests/s, and 23 ms at 200 requests/s, although the device was mostly
    idle at that rate.
    """
    trigger, clock = make(latency_budget_ms=17.3, max_compute_fraction=100.0, burst_s=100.0, max_cache_fraction=1e9)
    reasons = []
    for user in range(200):
        clock.sleep(1.0 / rate)
        trigger.record_transit(0.0015)
        trigger.record_arrival(0.0021 + 0.0012)
        reasons.append(decide(trigger, user, full_rank_s=0.0021, rank_s=0.0005, host_s=0.0012).reason)
    assert set(reasons[100:]) == {reason}


def test_trigger_host_bound_requests_gain_little():
    trigger, _ = make(latency_budget_ms=50.0, min_gain=0.2)
    assert decide(trigger, 1, full_rank_s=0.01, rank_s=0.006, wait_s=10.0, host_s=0.012).reason == "short"
    assert decide(trigger, 2, full_rank_s=0.01, rank_s=0.006, wait_s=10.0, host_s=0.008).is_admitted


def test_trigger_is_monotonic_in_load_and_length():
    rng = random.Random(3)
    for _ in range(300):
        budget_ms = rng.uniform(1, 100)
        host_s = rng.uniform(0, 0.1)
        transit_s = rng.uniform(0, 0.1)
        wait_s = rng.random()
        calm, _ = make(latency_budget_ms=budget_ms)
        loaded, _ = make(latency_budget_ms=budget_ms)
        for _ in range(16):
            loaded.record_transit(transit_s)
            loaded.record_arrival(rng.uniform(0, 0.1))
        full_s = rng.uniform(0, 0.2)
        request = {"full_rank_s": full_s, "rank_s": rng.uniform(0, 0.3) * full_s, "tail": 1.2}
        before = calm.would_admit(**request, wait_s=0.0, host_s=host_s).reason
        after = loaded.would_admit(**request, wait_s=wait_s, host_s=host_s).reason
        assert (before, after) in {
            ("short", "short"),
            ("safe", "safe"),
            ("safe", "history_required"),
            ("history_required", "history_required"),
        }
        if full_s * 1.2e3 <= 0.05 * budget_ms:
            assert after == "short"


def test_trigger_skips_requests_below_min_gain():
    """If a request has many candidates and a short history, pre-inference costs a batch and saves very little."""
    trigger, _ = make(latency_budget_ms=50.0, min_gain=0.2)
    assert decide(trigger, 1, full_rank_s=0.1, rank_s=0.085, wait_s=10.0).reason == "short"
    assert decide(trigger, 2, full_rank_s=0.1, rank_s=0.075, wait_s=10.0).is_admitted


def test_trigger_would_admit_equals_decision_without_charge():
    trigger, _ = make(latency_budget_ms=50.0)
    for full_rank_s in (0.001, 0.04, 0.042):
        estimate = trigger.would_admit(full_rank_s=full_rank_s, rank_s=0.0, tail=1.2, wait_s=0.0).reason
        assert estimate == {"admitted": "history_required"}.get(
            reason := decide(trigger, 1, full_rank_s=full_rank_s).reason, reason
        )
    live = trigger.live_bytes
    trigger.would_admit(full_rank_s=0.042, rank_s=0.0, tail=1.2, wait_s=0.0)
    assert trigger.live_bytes == live


def test_trigger_live_bytes_are_bounded():
    trigger, clock = make(max_cache_fraction=0.5, initial_lifetime_s=1.0, max_compute_fraction=100.0, burst_s=100.0)
    assert [decide(trigger, user).reason for user in range(6)] == ["admitted"] * 5 + ["live_cap"]
    trigger.release_budget(key_of(0))
    assert decide(trigger, 6).is_admitted
    clock.sleep(1.0)
    assert decide(trigger, 7).is_admitted
    assert trigger.live_bytes == 10


def test_trigger_preinfer_rate_is_bounded():
    trigger, clock = make(max_compute_fraction=0.5, burst_s=0.1, max_cache_fraction=1e9)
    admitted = 0
    for user in range(10_000):
        clock.sleep(0.001)
        admitted += decide(trigger, user, preinfer_s=0.05).is_admitted
    assert 0.95 * 100 <= admitted <= 100 + 2


def test_trigger_lifetime_follows_time_to_consumption():
    trigger, clock = make(lifetime_margin_s=0.2, burst_s=1e9, max_compute_fraction=1e9, max_cache_fraction=1e9)
    for user in range(32):
        decide(trigger, user)
        clock.sleep(0.15)
        trigger.release_budget(key_of(user))
    assert abs(trigger.lifetime_s - 0.35) < 1e-9


def test_engine_cost_model_tokens_within_time_match_cost():
    costs = EngineCostModel(step_s=1e-3, token_s=2e-6, pair_s=3e-10)
    for prefix in (0, 1_000, 30_000):
        for seconds in (1e-4, 2e-3, 0.1):
            tokens = costs.tokens_within(seconds, prefix)
            added_s = [costs.predict_s(*work_of(prefix, count, 0), steps=0.0) for count in (tokens, tokens + 1)]
            assert added_s[0] <= seconds * 1.001
            assert added_s[1] >= seconds * 0.999


def test_trigger_cost_of_windowed_attention():
    costs = EngineCostModel(step_s=1e-3, token_s=2e-6, pair_s=3e-10, max_keys_per_layer=[500, 1500])
    for prefix in (0, 1_000, 30_000, 10**7):
        tokens = costs.tokens_within(0.01, prefix)
        added_s = [costs.predict_s(*costs.work(prefix, count, 0), steps=0.0) for count in (tokens, tokens + 1)]
        assert added_s[0] <= 0.01 * 1.001
        assert added_s[1] >= 0.01 * (0.999 if prefix > 1500 else 0.8)


def test_trigger_random_schedules_keep_bounds():
    for seed in range(2_000):
        rng = random.Random(seed)
        trigger, clock = make(
            max_cache_fraction=rng.random(), max_compute_fraction=rng.random(), burst_s=0.2, initial_lifetime_s=2.0
        )
        spent = 0.0
        start = clock.now_s()
        for _ in range(30):
            user = rng.randrange(10)
            seconds = rng.random() * 0.2
            if rng.random() < 0.7:
                spent += seconds * decide(trigger, user, preinfer_s=seconds, num_bytes=rng.randint(1, 40)).is_admitted
            else:
                trigger.release_budget(key_of(user))
            clock.sleep(rng.random() * 0.3)
            assert 0 <= trigger.live_bytes <= trigger.cfg.max_cache_fraction * 100
            assert spent <= 0.2 + (clock.now_s() - start) * trigger.cfg.max_compute_fraction + 1e-9


def test_engine_cost_model_learns_mean_and_tail():
    rng = random.Random(1)
    costs = EngineCostModel()
    for _ in range(2_000):
        tokens, pairs = work_of(rng.randint(0, 4000), rng.randint(0, 500), rng.randint(1, 500))
        slow = 1.5 if rng.random() < 0.05 else 1.0
        costs.observe(tokens, pairs, (2e-3 + 1e-5 * tokens + 2e-9 * pairs) * slow)
    tokens, pairs = work_of(2000, 100, 256)
    expected = 2e-3 + 1e-5 * tokens + 2e-9 * pairs
    assert 0.9 * expected <= costs.predict_s(tokens, pairs) <= 1.2 * expected
    assert 1.2 <= costs.tail <= 1.7


@pytest.mark.parametrize("work", [work_of(0, 0, 256), work_of(0, 1024, 64), work_of(4000, 0, 1)])
def test_engine_cost_model_is_stable_for_equal_requests(work):
    """Tokens and pairs grow together, so their costs cannot be separated, but their sum must be correct."""
    rng = random.Random(2)
    costs = EngineCostModel()
    for number in range(20_000):
        size = rng.choice([1, 1, 1, 2, 3])
        seconds = (1e-4 + size * (2e-6 * work[0] + 1e-9 * work[1])) * rng.uniform(0.8, 1.2)
        costs.observe(size * work[0], size * work[1], seconds * (20.0 if rng.random() < 0.01 else 1.0), size)
        if number > 1000 and number % 50 == 0:
            expected = 1e-4 + 2e-6 * work[0] + 1e-9 * work[1]
            assert 0.8 * expected <= costs.predict_s(*work) <= 1.6 * expected
            assert costs.share_s(*work) <= 1.6 * expected


def test_engine_cost_model_counts_tokens_and_pairs():
    assert work_of(0, 3, 0) == (3, 6)
    limited = EngineCostModel(max_keys_per_layer=[2, 1000])
    assert limited.work(0, 3, 0) == (3, (1 + 2 + 2 + 6) // 2)
    assert limited.work(10, 0, 2) == (2, (2 * 2 + 22) // 2)
    assert limited.work(10, 3, 1) == (4, (4 * 2 + 11 + 12 + 13 + 14) // 2)
    assert work_of(10, 0, 2) == (2, 22)


def test_keyed_hash_separates_fields():
    keyed = KeyedHash(b"1")
    assert keyed.digest("p", "ab", "c") != keyed.digest("p", "a", "bc")
    assert keyed.digest("p", "1") != keyed.digest("p", 1)
    assert keyed.digest("p", "1") != keyed.digest("q", "1")
    assert keyed.digest("p", "1") != KeyedHash(b"2").digest("p", "1")


def test_trigger_rejects_unknown_policy():
    with pytest.raises(UserError, match="policy"):
        apply_overrides(TriggerConfig(), {"policy": "nevr"})
