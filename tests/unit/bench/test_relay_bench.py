"""Relay benchmark on a tiny model."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.report.result_file import make_frame
from nestrec_bench.harness.random_model import random_ranking
from nestrec_bench.load_test.engine_load import RelayLoad, RelayOutcome, bank_of
from nestrec_bench.load_test.open_loop import Trial
from nestrec_bench.pages.relay_page import write_page
from nestrec_bench.serving.relay_bench import Sweep, measure_relay
from nestrec_bench.serving.relay_http import _Longest, measure_over_http
from nestrec_bench.serving.relay_modes import ABLATIONS, MODES, RequestCosts
from nestrec_bench.serving.relay_setup import RelayBed, RelayBenchConfig

BENCH = RelayBenchConfig(
    encoder=HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=64, time_bias=True),
    history=(24,),
    candidates=(4,),
    returning=(0.5,),
    signal_ms=5.0,
    duration_s=0.5,
    rounds=0,
    warm_s=0.1,
    fewest=5,
)
SOURCES = {
    "full": {"none"},
    "dram_fetch": {"none", "host"},
    "relay": {"none", "device"},
    "reactive": {"none", "device", "host"},
    "no_affinity": {"none", "device", "host"},
}


@pytest.fixture(scope="module")
def bed():
    return RelayBed(BENCH)


@pytest.mark.parametrize("name", SOURCES)
def test_relay_bench_modes_use_their_cache_tiers(bed, name):
    mode = {**MODES, **ABLATIONS}[name]
    outcome = bed.trial(mode, bed.load(24, 4, 0.8), 80.0, 0.01)
    counts = outcome.counts
    assert outcome.trial.num_rejected == 0
    assert outcome.parts["run_p50_ms"] >= 0
    assert 0 < outcome.parts["device_share"] < 1
    used = {source for source in ("none", "device", "host") if counts.get(f"rank_{source}")}
    assert used <= SOURCES[name]
    assert name != "relay" or "device" in used
    assert name != "no_affinity" or counts["rank_none"] > 5, "half of the requests reach the other instance"


def test_relay_bench_has_row_per_mode():
    rows = list(measure_relay(replace(BENCH, slo_factor=1e-6, factor=100.0)))
    assert [row["mode"] for row in rows] == list(MODES)
    assert all(row["max_qps"] == 0 for row in rows), "no request meets an SLO of a nanosecond"


def test_relay_load_returning_users_are_recent_with_new_events():
    load = RelayLoad(history=10, candidates=3, returning=0.5, new_events=2, recent_users=8, pause_s=0.1)
    at_s = np.arange(400) * 0.01
    visits = load.visits(at_s)
    assert visits == load.visits(at_s)
    latest = {}
    for number, (user, visit) in enumerate(visits):
        assert visit == 0 if user == number else visit > 0
        assert user == number or 10 <= number - latest[user] <= 18 + 10, "neither before the response nor much later"
        latest[user] = number
    assert 0.4 < sum(visit > 0 for _, visit in visits) / 400 < 0.6
    for user in (7, 140, 100_000):
        first, second = (bank_of(0).request(load, user, visit)[0] for visit in (0, 1))
        assert (len(first), len(second)) == (10, 12)
        assert (second.items[:10] == first.items).all()
        assert (second.times_ms[:10] == first.times_ms).all()


def test_relay_bench_rate_bounds_follow_from_costs():
    costs = RequestCosts(full_ms=10.0, prefix_ms=8.0, rank_ms=2.0, extend_ms=0.5, reload_ms=40.0, prefix_mb=1.0)
    assert costs.bound_qps(MODES["full"], 0.5) == 100.0
    assert costs.bound_qps(MODES["relay"], 0.0) == 100.0
    assert costs.bound_qps(MODES["relay"], 1.0) == 400.0
    assert costs.bound_qps(MODES["dram_fetch"], 0.5) == 50.0, "the link is the bottleneck"


def test_relay_bench_rejects_unknown_mode():
    with pytest.raises(UserError, match="rely"):
        list(measure_relay(replace(BENCH, modes=("rely",))))


def test_relay_bench_page_shows_p99_and_tables(tmp_path):
    size = {"mode": "relay", "history": 10, "candidates": 4, "returning": 0.0, "slo_ms": 9.0}
    points = [
        {**size, "load": load, "rate": load, "p50_ms": 1.0, "p99_ms": p99, "refused": 0}
        for load, p99 in ((0.5, 2.0), (1.0, 8.0), (1.2, None))
    ]
    best = {**size, "max_qps": 5.0, "speedup": 2.0, "bound_qps": 9.0, "p99_ms": 8.0, "hit_rate": 1.0, "admitted": None}
    tried = [{"rate": 1.0, "p99_ms": 3.0}, {"rate": 4.0, "p99_ms": None}]
    over_http = [{**best, "returning": share, "in_process": False, "biases": "position", "tried": tried}
                 for share in (0.0, 0.6)]  # fmt: skip
    rows = [*points, best, *over_http]
    write_page(tmp_path / "relay.html", make_frame(bench="relay", command="nestrec bench relay", rows=rows))
    page = (tmp_path / "relay.html").read_text()
    assert "P99, ms: 10 events, 4 candidates" in page
    assert "relay, 60% return" in page, "from the rates tried over HTTP"
    assert page.count("<svg") == 2
    assert page.count("<table") == 2


def test_relay_bench_mixed_history_lengths():
    load = RelayLoad(history=24, candidates=4, returning=0.0, lengths=(4, 9, 24))
    lengths = [len(bank_of(0).request(load, user, 0)[0]) for user in range(60)]
    assert set(lengths) == {4, 9, 24}
    assert lengths == [len(bank_of(0).request(load, user, 1)[0]) - load.new_events for user in range(60)]
    (row,) = measure_relay(replace(BENCH, modes=("full",), lengths=(4, 24), slo_factor=1e-6, factor=100.0))
    assert (row["in_process"], row["biases"], row["lengths"]) == (True, "position and time", [4, 24])


def test_relay_bench_measures_every_slo_and_size():
    rows = list(measure_relay(replace(BENCH, modes=("full",), slo_factor=1e-6, more_slo_factors=(2e-6,), factor=100.0,
                                      returning=(0.0, 0.5))))  # fmt: skip
    assert [row["returning"] for row in rows] == [0.0, 0.5] * 2
    assert len({row["slo_ms"] for row in rows}) <= 2


def test_relay_bench_long_search_ends_with_row():
    """No rate meets the SLO, and a trial at the next lower rate would take minutes."""
    cfg = replace(BENCH, modes=("full",), slo_factor=1e-6, fewest=10**6, search_s=0.4, factor=1.01)
    (row,) = measure_relay(cfg)
    assert row["max_qps"] == 0
    assert row["trials"] <= 2


@pytest.mark.parametrize(("carried", "tried", "found"), [(100.0, [100.0], 100.0), (96.0, [95.0, 100.0], 95.0),
                                                         (90.0, [95.0, 100.0], 0.0)])  # fmt: skip
def test_relay_bench_sweep_compares_with_first_mode(carried, tried, found):
    def trial(_mode, _load, rate, _budget_ms):
        latency_ms = np.full(200, 1.0 if rate <= carried else 9.0)
        return RelayOutcome(trial=Trial(rate, latency_ms, 0.0, 1.0), counts={}, parts={})

    bench = replace(BENCH, at_least=0.95)
    costs = RequestCosts(full_ms=1.0, prefix_ms=1.0, rank_ms=1.0, extend_ms=1.0, reload_ms=1.0, prefix_mb=1.0)
    load = RelayLoad(history=10, candidates=3, returning=0.5)
    row = Sweep(SimpleNamespace(bench=bench, trial=trial), "relay", load, costs, 5.0).row(5.0, None, 100.0)
    assert ([one["rate"] for one in row["tried"]], row["max_qps"]) == (tried, found)


def test_relay_bench_search_start_per_returning_fraction():
    with pytest.raises(UserError, match=r"starts=\(1\.0, 2\.0\): expected one value per fraction of returning users"):
        list(measure_over_http(replace(BENCH, model="none", modes=("full",), starts=(1.0, 2.0))))


def test_relay_bench_longest_history_search_rate(tmp_path):
    write_servable(random_ranking(replace(BENCH.encoder, max_length=1024), num_items=50), tmp_path / "model")
    bench = replace(BENCH, model=str(tmp_path / "model"), longest=True, rounds=1)
    rates = []

    def bed(mode, carried):
        def trial(lengths, _candidates, rate, _returning):
            rates.append(rate)
            return Trial(rate, np.full(200, 1.0 if lengths[0] <= carried else 9.0), 0.0, 1.0), {}

        return SimpleNamespace(mode=mode, trial=trial)

    longest = _Longest(bench, ((24,), 4))
    (full,), (relay,) = (
        list(longest.rows(bed(mode, carried), 5.0, 80.0)) for mode, carried in (("full", 100), ("relay", 300))
    )
    assert set(rates) == {40.0}
    assert 100 / 1.2 <= full["longest_history"] <= 100
    assert 300 / 1.2 <= relay["longest_history"] <= 300
    assert relay["of_first_mode"] == round(relay["longest_history"] / full["longest_history"], 3)
    assert not list(longest.rows(bed("full", 100), 5.0, 0.0)), "without a largest rate, there is no search"
    assert not list(_Longest(replace(bench, longest=False), ((24,), 4)).rows(bed("full", 100), 5.0, 80.0))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_relay_bench_measures_exported_model_over_http(tmp_path):
    encoder = replace(BENCH.encoder, max_length=128)
    write_servable(random_ranking(encoder, num_items=50), tmp_path / "model")
    bench = replace(BENCH, model=str(tmp_path / "model"), lengths=(4, 40), slo_factor=1e4, duration_s=1.5, fewest=5,
                    returning=(0.5,), search_s=20.0, factor=4.0, modes=("full", "relay"), starts=(0.5,),
                    longest=True)  # fmt: skip
    rows = list(measure_relay(bench))
    full, relay = (row for row in rows if "max_qps" in row)
    assert round(0.5 * full["max_qps"], 2) == pytest.approx(relay["tried"][0]["rate"], abs=0.02)
    assert [row["mode"] for row in rows if row.get("longest_history")] == ["full", "relay"]
    assert [row["in_process"] for row in (full, relay)] == [False, False]
    assert min(full["max_qps"], relay["max_qps"]) > 0, (full["tried"], relay["tried"])
    assert (full["history"], full["biases"], full["dtype"]) == ([4, 40], "position+buckets", "float32")
    assert set(full["alone_parts_ms"]) == {"in", "queue", "launch", "compute", "back", "device"}
    assert 0.0 < full["alone_parts_ms"]["device"] < full["full_p50_ms"]
    assert full["hit_rate"] == 0.0
    assert full["admitted"] is None
    assert relay["admitted"] is None, "no user is at risk, so no history was sent ahead"
    assert relay["hit_rate"] > 0.0, "returning users have a cached prefix"
