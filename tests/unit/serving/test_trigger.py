"""Admission of pre-inference, and the cost model behind it."""

import random

import numpy as np
import pytest

from nestrec.base.config_overrides import with_overrides
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


def test_only_requests_at_risk_are_admitted():
    trigger, _ = make(budget_ms=50.0)
    assert decide(trigger, 1, full_rank_s=0.04).reason == "safe"
    assert decide(trigger, 2, full_rank_s=0.042).is_admitted
    assert decide(trigger, 3, full_rank_s=0.01, wait_s=0.05).is_admitted, "a queue puts short requests at risk"


def test_load_puts_requests_at_risk_that_alone_would_be_safe():
    """Full ranking of 10 ms at 70% of the device waits 65 ms at the 99th percentile."""
    shares = {}
    for gap_s in (0.1, 0.010 / 0.7):
        trigger, clock = make(budget_ms=50.0, compute_share=100.0, burst_s=100.0, cache_share=1e9)
        reasons = []
        for user in range(200):
            clock.sleep(gap_s)
            trigger.offered(0.010)
            reasons.append(decide(trigger, user, full_rank_s=0.010).reason)
        shares[gap_s] = reasons[50:].count("admitted") / 150
    assert list(shares.values()) == [0.0, 1.0]


def test_few_requests_of_late_say_little_about_those_to_come():
    """The same load of a few long requests may be twice as high in a moment."""
    reasons = {}
    for count in (8, 800):
        served_s = 0.08 / count
        trigger, clock = make(budget_ms=2.8e3 * served_s, short_share=0.0)
        for _ in range(count):
            clock.sleep(0.5 / count)
            trigger.offered(served_s)
        reasons[count] = decide(trigger, 1, full_rank_s=served_s).reason
    assert reasons == {8: "admitted", 800: "safe"}


@pytest.mark.parametrize("load", [0.005, 0.05, 0.1, 0.2, 0.34, 0.5, 0.7])
def test_what_one_waits_is_what_one_waits_in_a_queue(load):
    """Where the load is small, too: requests that would be in time anyhow are not signalled."""
    gaps = np.random.default_rng(1).exponential(1 / load, 400_000)
    behind = np.cumsum(1 - gaps)  # each waits for what those before it have left over
    waits = behind - np.minimum.accumulate(np.minimum(behind, 0))
    assert waited_p99(load) == pytest.approx(np.quantile(waits, 0.99), rel=0.05)


def test_one_waits_longer_the_higher_the_load_is_and_never_for_ever():
    waits = [waited_p99(load) for load in np.linspace(0, 3, 601)]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] < 250


def test_short_requests_are_never_computed_ahead_whatever_waits():
    trigger, _ = make(budget_ms=50.0, short_share=0.05)
    for _ in range(1000):
        trigger.offered(0.01)
    assert decide(trigger, 1, full_rank_s=0.002, wait_s=10.0).reason == "short"
    assert decide(trigger, 2, full_rank_s=0.0022, wait_s=10.0).is_admitted


def test_the_way_to_the_engine_and_back_is_a_part_of_the_budget():
    """At its 90th percentile of late: one slow request changes nothing, and what was slow once is forgotten."""
    trigger, _ = make(budget_ms=50.0, short_share=0.05)
    ways = {"quick": [0.001] * 64 + [0.5] * 3, "slow": [0.001] * 100 + [0.025] * 156, "quick again": [0.001] * 256}
    reasons = {}
    for name, seconds in ways.items():
        for way_s in seconds:
            trigger.came(way_s)
        reasons[name] = [decide(trigger, name, full_rank_s=full_rank_s).reason for full_rank_s in (0.002, 0.03)]
    assert reasons == {"quick": ["short", "safe"], "slow": ["short", "admitted"], "quick again": ["short", "safe"]}


@pytest.mark.parametrize(("rate", "reason"), [(116, "safe"), (200, "admitted")])
def test_who_would_wait_for_the_host_is_at_risk(rate, reason):
    """2.1 ms of the device, 1.2 of the host and 1.5 of the way: measured so, 116 a second met 17.3 ms, and 200, for
    which the device alone was idle for most of its time, took 23."""
    trigger, clock = make(budget_ms=17.3, compute_share=100.0, burst_s=100.0, cache_share=1e9)
    reasons = []
    for user in range(200):
        clock.sleep(1.0 / rate)
        trigger.came(0.0015)
        trigger.offered(0.0021 + 0.0012)
        reasons.append(decide(trigger, user, full_rank_s=0.0021, rank_s=0.0005, host_s=0.0012).reason)
    assert set(reasons[100:]) == {reason}


def test_who_is_served_by_the_host_more_than_by_the_device_gains_little_by_a_prefix():
    trigger, _ = make(budget_ms=50.0, least_gain=0.2)
    assert decide(trigger, 1, full_rank_s=0.01, rank_s=0.006, wait_s=10.0, host_s=0.012).reason == "short"
    assert decide(trigger, 2, full_rank_s=0.01, rank_s=0.006, wait_s=10.0, host_s=0.008).is_admitted


def test_whatever_load_host_and_way_are_nobody_short_is_signalled_and_more_of_them_never_makes_anybody_safe():
    rng = random.Random(3)
    for _ in range(300):
        budget_ms = rng.uniform(1, 100)
        host_s = rng.uniform(0, 0.1)
        way_s = rng.uniform(0, 0.1)
        wait_s = rng.random()
        calm, _ = make(budget_ms=budget_ms)
        loaded, _ = make(budget_ms=budget_ms)
        for _ in range(16):
            loaded.came(way_s)
            loaded.offered(rng.uniform(0, 0.1))
        full_s = rng.uniform(0, 0.2)
        asked = {"full_rank_s": full_s, "rank_s": rng.uniform(0, 0.3) * full_s, "tail": 1.2}
        before = calm.foresee(**asked, wait_s=0.0, host_s=host_s).reason
        after = loaded.foresee(**asked, wait_s=wait_s, host_s=host_s).reason
        assert (before, after) in {("short", "short"), ("safe", "safe"), ("safe", "wanted"), ("wanted", "wanted")}
        if full_s * 1.2e3 <= 0.05 * budget_ms:
            assert after == "short"


def test_who_gains_little_by_a_prefix_is_never_computed_ahead_whatever_waits():
    """Many candidates after a short history: to compute that ahead costs a batch more and saves next to nothing."""
    trigger, _ = make(budget_ms=50.0, least_gain=0.2)
    assert decide(trigger, 1, full_rank_s=0.1, rank_s=0.085, wait_s=10.0).reason == "short"
    assert decide(trigger, 2, full_rank_s=0.1, rank_s=0.075, wait_s=10.0).is_admitted


def test_what_is_foreseen_is_what_is_decided_and_charges_nothing():
    trigger, _ = make(budget_ms=50.0)
    for full_rank_s in (0.001, 0.04, 0.042):
        told = trigger.foresee(full_rank_s=full_rank_s, rank_s=0.0, tail=1.2, wait_s=0.0).reason
        assert told == {"admitted": "wanted"}.get(reason := decide(trigger, 1, full_rank_s=full_rank_s).reason, reason)
    live = trigger.live_bytes
    trigger.foresee(full_rank_s=0.042, rank_s=0.0, tail=1.2, wait_s=0.0)
    assert trigger.live_bytes == live


def test_live_bytes_are_bounded_until_consumed_or_dead():
    trigger, clock = make(cache_share=0.5, first_life_s=1.0, compute_share=100.0, burst_s=100.0)
    assert [decide(trigger, user).reason for user in range(6)] == ["admitted"] * 5 + ["live_cap"]
    trigger.consumed(key_of(0))
    assert decide(trigger, 6).is_admitted
    clock.sleep(1.0)
    assert decide(trigger, 7).is_admitted
    assert trigger.live_bytes == 10


def test_the_rate_of_pre_inference_is_bounded():
    trigger, clock = make(compute_share=0.5, burst_s=0.1, cache_share=1e9)
    admitted = 0
    for user in range(10_000):
        clock.sleep(0.001)
        admitted += decide(trigger, user, preinfer_s=0.05).is_admitted
    assert 0.95 * 100 <= admitted <= 100 + 2


def test_life_follows_the_time_from_ready_to_consumed():
    trigger, clock = make(life_margin_s=0.2, burst_s=1e9, compute_share=1e9, cache_share=1e9)
    for user in range(32):
        decide(trigger, user)
        clock.sleep(0.15)
        trigger.consumed(key_of(user))
    assert abs(trigger.life_s - 0.35) < 1e-9


def test_tokens_that_fit_into_a_time_take_that_time():
    costs = EngineCostModel(step_s=1e-3, token_s=2e-6, pair_s=3e-10)
    for prefix in (0, 1_000, 30_000):
        for seconds in (1e-4, 2e-3, 0.1):
            tokens = costs.tokens_within(seconds, prefix)
            added_s = [costs.predict_s(*work_of(prefix, count, 0), steps=0.0) for count in (tokens, tokens + 1)]
            assert added_s[0] <= seconds * 1.001
            assert added_s[1] >= seconds * 0.999


def test_tokens_that_see_few_others_fit_into_a_time_however_long_the_prefix_is():
    costs = EngineCostModel(step_s=1e-3, token_s=2e-6, pair_s=3e-10, most_seen=[500, 1500])
    for prefix in (0, 1_000, 30_000, 10**7):
        tokens = costs.tokens_within(0.01, prefix)
        added_s = [costs.predict_s(*costs.work(prefix, count, 0), steps=0.0) for count in (tokens, tokens + 1)]
        assert added_s[0] <= 0.01 * 1.001
        assert added_s[1] >= 0.01 * (0.999 if prefix > 1500 else 0.8)


def test_random_schedules_keep_both_bounds():
    for seed in range(2_000):
        rng = random.Random(seed)
        trigger, clock = make(cache_share=rng.random(), compute_share=rng.random(), burst_s=0.2, first_life_s=2.0)
        spent = 0.0
        start = clock.now_s()
        for _ in range(30):
            user = rng.randrange(10)
            seconds = rng.random() * 0.2
            if rng.random() < 0.7:
                spent += seconds * decide(trigger, user, preinfer_s=seconds, num_bytes=rng.randint(1, 40)).is_admitted
            else:
                trigger.consumed(key_of(user))
            clock.sleep(rng.random() * 0.3)
            assert 0 <= trigger.live_bytes <= trigger.cfg.cache_share * 100
            assert spent <= 0.2 + (clock.now_s() - start) * trigger.cfg.compute_share + 1e-9


def test_the_cost_model_learns_costs_and_tail():
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
def test_the_cost_of_requests_that_are_all_alike_never_drifts(work):
    """Their tokens and pairs grow together, so nothing tells what either costs; their sum must stay right."""
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


def test_work_counts_what_attention_multiplies():
    assert work_of(0, 3, 0) == (3, 6)
    limited = EngineCostModel(most_seen=[2, 1000])
    assert limited.work(0, 3, 0) == (3, (1 + 2 + 2 + 6) // 2)
    assert limited.work(10, 0, 2) == (2, (2 * 2 + 22) // 2)
    assert limited.work(10, 3, 1) == (4, (4 * 2 + 11 + 12 + 13 + 14) // 2)
    assert work_of(10, 0, 2) == (2, 22)


def test_fields_of_a_keyed_hash_cannot_be_shifted():
    keyed = KeyedHash(b"1")
    assert keyed.digest("p", "ab", "c") != keyed.digest("p", "a", "bc")
    assert keyed.digest("p", "1") != keyed.digest("p", 1)
    assert keyed.digest("p", "1") != keyed.digest("q", "1")
    assert keyed.digest("p", "1") != KeyedHash(b"2").digest("p", "1")


def test_a_policy_that_nobody_knows_is_refused():
    with pytest.raises(UserError, match="policy"):
        with_overrides(TriggerConfig(), {"policy": "nevr"})
