"""The relay in simulated time: engines as they are, on a device that is told by what `nestrec bench engine` measured.

A cell of a sweep takes seconds on any machine, and gives the same numbers every time. What it cannot tell: anything
about the host, of which each batch takes a constant time, and copies to and from DRAM.
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
from nestrec_bench.serving.relay_setup import RelayBench, engine_config, form_of, load_of
from nestrec_bench.serving.simulated_engine import Extent, SimulatedRunner, costs_of_rows

_ALONE_RATE, _ALONE_S = 2.0, 10.0


class SimulatedBed:
    """A device that computes nothing, in a time of its own."""

    def __init__(self, bench: RelayBench):
        self.bench = bench
        try:
            rows = json.loads(Path(bench.costs_of).read_text())["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError("is no file of device costs", option="costs_of", value=bench.costs_of,
                            remedy="write one with: nestrec bench engine --json FILE") from error  # fmt: skip
        self._device, _ = costs_of_rows(rows, bench.costs_of_model)
        _check_modes(bench)
        self._form = form_of(replace(bench, device="cpu"))

    def load(self, history: int, candidates: int, returning: float) -> RelayLoad:
        return load_of(self.bench, history, candidates, returning)

    def costs(self, load: RelayLoad) -> RequestCosts:
        history, new = (events * self._form.tokens_an_event for events in (load.history, load.new_events))
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
        few = replace(load, returning=0.0, duration_s=_ALONE_S, warm_s=0.0, fewest=1)
        return float(np.median(self.trial(MODES["full"], few, _ALONE_RATE, 1e3).trial.latency_ms))

    def trial(self, mode: Mode, load: RelayLoad, rate: float, slo_ms: float) -> RelayOutcome:
        clock = EventClock()
        engine = Engine(
            self._form,
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
        """Of one, in a batch of so many."""
        return round(self._device.milliseconds([extent] * batch) / batch, 4)

    def _runner(self, clock: EventClock) -> SimulatedRunner:
        bench = self.bench
        return SimulatedRunner(
            self._form, self._device, clock, cache_bytes=bench.cache_bytes, page_tokens=PrefixCacheConfig().page_tokens,
            host_ms=bench.host_ms,
        )  # fmt: skip


def _check_modes(bench: RelayBench) -> None:
    """Before any is measured: a sweep of the modes before it would be for nothing."""
    for name in (*bench.modes, *bench.more_modes):
        mode = mode_named(name)
        if mode.uses_dram or mode.strays or mode.fetch_gb_per_s:
            raise UserError("is not there in simulated time, which has no copies", option="modes", value=name,
                            remedy="choose of full and relay: --modes full,relay")  # fmt: skip
