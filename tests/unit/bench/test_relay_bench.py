"""The bench of the relay measures what it says, on a tiny model."""

from dataclasses import replace

import pytest

from nestrec.base.errors import UserError
from nestrec.bench.relay import MODES, Load, RelayBench, engine_config, measure_relay, run_trial
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine import Engine
from nestrec.serving.forms import make_form
from nestrec.serving.random_model import random_ranking

BENCH = RelayBench(
    encoder=HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=64, time_bias=True),
    history=(24,), candidates=(4,), returning=(0.5,), signal_ms=5.0, duration_s=0.5, rounds=0,
)  # fmt: skip
SOURCES = {
    "full": {"none"},
    "dram_fetch": {"none", "dram"},
    "relay": {"none", "device"},
    "reactive": {"none", "device", "dram"},
}


@pytest.mark.parametrize("mode", SOURCES)
def test_each_mode_takes_prefixes_from_its_tiers_only(mode):
    engine = Engine(make_form(random_ranking(BENCH.encoder, num_items=10_000)), engine_config(mode, BENCH, slo_ms=0.01))
    trial = run_trial(engine, Load(BENCH, 24, 4, returning=0.8), 80.0, sends_signals=mode == "relay")
    assert trial.num_refused == 0
    used = {source for source in ("none", "device", "dram") if engine.counts.get(f"rank_{source}")}
    assert used <= SOURCES[mode]
    assert mode != "relay" or "device" in used


def test_every_mode_gives_a_row():
    rows = list(measure_relay(replace(BENCH, slo_ms=1e-3)))
    assert [row["mode"] for row in rows] == list(MODES)
    assert all(row["max_qps"] == 0 for row in rows), "nothing is served within a microsecond"


def test_an_unknown_mode_is_named():
    with pytest.raises(UserError, match="rely"):
        engine_config("rely", BENCH, 1.0)
