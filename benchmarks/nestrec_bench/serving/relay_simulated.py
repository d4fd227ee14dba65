"""Relay in simulated time: real engines on a simulated device, with costs that `nestrec bench engine` measured.

A cell of a sweep takes seconds on any machine and always has the same result. The simulation does not cover the host,
for which each batch takes a constant time, and copies to and from DRAM.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from nestrec.base.errors import UserError
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec_bench.harness.clocks import EventClock
from nestrec_bench.load_test.engine_load import RelayLoad, RelayOutcome, simulate_trial
from nestrec_bench.serving.relay_modes import BATCH, MODES, Mode, RequestCosts, mode_named
from nestrec_bench.serving.relay_setup import RelayBenchConfig, engine_config, load_of, make_bench_adapter
from nestrec_bench.serving.simulated_engine import Extent, SimulatedRunner, costs_of_rows

_UNLOADED_RATE = 2.0
_UNLOADED_S = 10.0


class SimulatedBed:
    """Test bed with a simulated device in simulated time."""

    def __init__(self, bench: RelayBenchConfig):
        self.bench = bench
        try:
            rows = json.loads(Path(bench.costs_of).read_text())["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = "the file does not contain device costs"
            remedy = "write one with: nestrec bench engine --json FILE"
            raise UserError(problem, option="costs_of", value=bench.costs_of, remedy=remedy) from error
        self._device, _ = costs_of_rows(rows, bench.costs_of_model)
        _check_modes(bench)
        self._adapter = make_bench_adapter(replace(bench, device="cpu"))

    def load(self, history: int, candidates: int, returning: float) -> RelayLoad:
        return load_of(self.bench, history, candidates, returning)

    def costs(self, load: RelayLoad) -> RequestCosts:
        history, new = (events * self._adapter.tokens_per_event for events in (load.history, load.new_events))
        runner = self._runner(EventClock())
        return RequestCosts(
            full_ms=self._milliseconds((0, history, load.candidates)),
            prefix_ms=self._milliseconds((0, history, 0)),
            rank_ms=self._milliseconds((history, 0, load.candidates), BATCH),
            extend_ms=self._milliseconds((history, new, 0), BATCH),
            reload_ms=0.0,
            prefix_mb=history * runner.pool.token_bytes / 1e6,
        )

    def unloaded_ms(self, load: RelayLoad) -> float:
        few = replace(load, returning=0.0, duration_s=_UNLOADED_S, warm_s=0.0, fewest=1)
        return float(np.median(self.trial(MODES["full"], few, _UNLOADED_RATE, 1e3).trial.latency_ms))

    def trial(self, mode: Mode, load: RelayLoad, rate: float, slo_ms: float) -> RelayOutcome:
        clock = EventClock()
        engine = Engine(
            self._adapter,
            engine_config(mode, self.bench, slo_ms),
            clock=clock,
            runner=self._runner(clock),
            has_thread=False,
        )
        try:
            way_s = self.bench.way_ms / 1e3
            return simulate_trial(engine, clock, load, rate, sends_signals=mode.sends_signals, way_s=way_s)
        finally:
            engine.close()

    def _milliseconds(self, extent: Extent, batch: int = 1) -> float:
        """Return the milliseconds per request in a batch of equal requests."""
        return round(self._device.milliseconds([extent] * batch) / batch, 4)

    def _runner(self, clock: EventClock) -> SimulatedRunner:
        bench = self.bench
        return SimulatedRunner(
            self._adapter, self._device, clock, cache_bytes=bench.cache_bytes,
            page_tokens=PrefixCacheConfig().page_tokens, host_ms=bench.host_ms,
        )  # fmt: skip


def _check_modes(bench: RelayBenchConfig) -> None:
    """Reject unsupported modes before any mode is measured."""
    for name in (*bench.modes, *bench.more_modes):
        mode = mode_named(name)
        if mode.uses_dram or mode.strays or mode.fetch_gb_per_s:
            problem = "the mode is not available in simulated time, which does not cover copies"
            raise UserError(problem, option="modes", value=name, remedy="set --modes full,relay")
