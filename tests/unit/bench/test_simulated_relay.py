"""Relay in simulated time: fit of device costs, determinism, and latency and goodput compared with full inference."""

import json
from dataclasses import replace

import pytest

from nestrec.base.errors import UserError
from nestrec.models.hstu import HSTUConfig
from nestrec_bench.serving import relay_simulated
from nestrec_bench.serving.relay_bench import measure_relay
from nestrec_bench.serving.relay_modes import MODES
from nestrec_bench.serving.relay_setup import RelayBenchConfig, engine_config
from nestrec_bench.serving.relay_simulated import SimulatedBed
from nestrec_bench.serving.simulated_engine import DeviceCosts, costs_of_rows

COSTS = DeviceCosts((0.35, 2e-3, 6e-7, 2e-4, 1.4e-6))
"""Costs with 4 ms for 1,024 tokens, and 0.8 ms for 256 candidates with them; about an H200 with HSTU-8x1024 and eight
times as many tokens."""
ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, position_bias=False)


def extents(tokens, candidates):
    return {"prefix": (0, tokens, 0), "rank": (tokens, 0, candidates), "full": (0, tokens, candidates)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return a result file in the format of `nestrec bench engine`."""
    rows = [
        {"model": "tables", "step": step, "tokens": tokens, "candidates": extent[2], "ms": COSTS.milliseconds([extent])}
        for tokens in (512, 1024, 2048)
        for candidates in (64, 256)
        for step, extent in extents(tokens, candidates).items()
    ]
    file = tmp_path_factory.mktemp("costs") / "engine.json"
    file.write_text(json.dumps({"rows": rows}))
    return file


def bench_of(measured, **changes):
    return RelayBenchConfig(
        encoder=ENCODER, costs_of=str(measured), history=(512,), candidates=(256,), returning=(0.0,), duration_s=1.5,
        fewest=400, dram_bytes=0, modes=("full", "relay"), **changes,
    )  # fmt: skip


def test_simulated_relay_costs_fit_measurements(measured):
    found, error = costs_of_rows(json.loads(measured.read_text())["rows"], "tables")
    assert error < 1e-3
    for extent in extents(1500, 100).values():
        assert found.milliseconds([extent] * 3) == pytest.approx(COSTS.milliseconds([extent] * 3), rel=1e-2)


def test_simulated_relay_costs_are_not_negative():
    odd = DeviceCosts.fit([((0, 512, 0), 3.0), ((0, 1024, 0), 2.0), ((512, 0, 64), 0.1)])
    assert min(odd.values) >= 0


@pytest.mark.parametrize(
    ("changes", "option"),
    [({"costs_of": "/nowhere.json"}, "costs_of"), ({"costs_of_model": "other"}, "costs_of_model")],
)
def test_simulated_relay_rejects_unsupported_options(measured, changes, option):
    with pytest.raises(UserError) as caught:
        list(measure_relay(RelayBenchConfig(**{"encoder": ENCODER, "costs_of": str(measured), **changes})))
    assert caught.value.option == option


@pytest.mark.parametrize("modes", [{}, {"modes": ("full",), "more_modes": ("relay_all",)}], ids=["usual", "more"])
def test_simulated_relay_rejects_modes_that_copy(measured, modes):
    with pytest.raises(UserError, match="simulated time") as caught:
        SimulatedBed(RelayBenchConfig(encoder=ENCODER, costs_of=str(measured), **modes))
    suggested = tuple(caught.value.remedy.rpartition(" ")[2].split(","))
    assert caught.value.value not in suggested
    SimulatedBed(RelayBenchConfig(encoder=ENCODER, costs_of=str(measured), modes=suggested))


def test_simulated_relay_single_request_latency(measured):
    bed = SimulatedBed(bench_of(measured, host_ms=0.5, way_ms=1.25))
    load = bed.load(512, 256, 0.0)
    assert bed.unloaded_ms(load) == pytest.approx(bed.costs(load).full_ms + 1.75, abs=0.06)


def test_simulated_relay_is_deterministic(measured):
    outcomes = []
    for _ in range(2):
        bed = SimulatedBed(bench_of(measured))
        outcome = bed.trial(MODES["relay"], bed.load(512, 256, 0.5), 150.0, 13.0)
        outcomes.append((outcome.trial.latency_ms.tolist(), outcome.counts, outcome.parts))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1]["rank_device"] > 0


@pytest.mark.parametrize(
    ("budget", "rates"), [(3.0, (65, 71, 77)), (6.0, (166, 178, 182))], ids=["short budget", "long budget"]
)
def test_simulated_relay_beats_full_inference_at_its_limit(measured, budget, rates):
    """The trigger once classified half of the users as safe at these rates, although their requests were late."""
    bed = SimulatedBed(bench_of(measured))
    load = bed.load(512, 256, 0.0)
    slo_ms = budget * bed.unloaded_ms(load)
    late = [rate for rate in rates if not bed.trial(MODES["relay"], load, float(rate), slo_ms).trial.meets(slo_ms)]
    assert late == []
    assert not bed.trial(MODES["full"], load, 2.0 * rates[-1], slo_ms).trial.meets(slo_ms)


@pytest.mark.parametrize("body_bytes", [0, 50_000], ids=["rejected after reading", "rejected unread"])
def test_simulated_relay_goodput_under_overload(measured, body_bytes, monkeypatch):
    """Ranking requests precede signals, because the signal of a rejected request is useless, and users with a cached
    prefix are not rejected for the cost of requests without one."""
    bed = SimulatedBed(bench_of(measured))
    load = bed.load(512, 256, 0.0)
    slo_ms = 3 * bed.unloaded_ms(load)
    load = replace(load, timeout_s=slo_ms / 1e3, body_bytes=body_bytes, warm_s=1.0)

    def config_with_slo(*arguments):
        return replace(engine_config(*arguments), max_queue_delay_s=slo_ms / 1e3)

    monkeypatch.setattr(relay_simulated, "engine_config", config_with_slo)
    trials = [bed.trial(MODES["relay"], load, rate, slo_ms).trial for rate in (300.0, 330.0, 440.0, 880.0)]
    goodput = [trial.goodput(slo_ms) for trial in trials]
    assert goodput[0] > 290
    assert min(goodput) > 0.9 * max(goodput)


def test_simulated_relay_rows_are_marked_as_emulated(measured):
    rows = list(measure_relay(bench_of(measured, at_least=0.95, search_s=5.0, rounds=0, factor=1.5)))
    assert [row["mode"] for row in rows] == ["full", "relay"]
    assert all(row["emulated"] and row["device"] == "simulated" and row["costs_of_model"] == "tables" for row in rows)
    assert rows[1]["max_qps"] >= 0.95 * rows[0]["max_qps"] > 0
