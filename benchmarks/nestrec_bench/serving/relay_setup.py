"""Options of `nestrec bench relay`, and the test bed on which its modes take turns: model, KV cache and CUDA graphs."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch

from nestrec.base.config import config
from nestrec.base.config_values import NonNegative
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.serving_engine import Engine, make_runner
from nestrec.serving.kv_cache.kv_page_pool import KVCacheDtype, pool_for
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import Copier, PrefixCacheConfig
from nestrec.serving.model.model_adapter import ModelAdapter, make_adapter
from nestrec_bench.harness.random_model import random_ranking
from nestrec_bench.load_test.engine_load import NUM_ITEMS, RelayLoad, RelayOutcome, run_in_turn, run_trial
from nestrec_bench.serving.relay_modes import MODES, Mode, RequestCosts, measure_costs
from nestrec_bench.serving.slow_copier import SlowCopier

_MAX_VISITS = 64
_WARM_S = 0.7
"""Warm-up seconds of a trial without returning users."""
LONGEST = 3
"""Limit of the search for the longest history, as a multiple of the longest one of the options."""


@config
class RelayBenchConfig:
    """Options of the relay benchmark. The defaults suit two CPU cores."""

    encoder: HSTUConfig = HSTUConfig(dim=64, num_layers=2, num_heads=2, head_dim=32, time_bias=True)
    """Encoder of the model; max_length is set according to the history."""
    model: str = ""
    """Folder of an exported model to measure over HTTP with `nestrec serve`. Empty: a model with random weights runs in
    this process, to measure the engine alone."""
    instances: int = 1
    """Number of servers behind a gateway (over HTTP)."""
    frontend_workers: int | None = None
    """Number of frontend workers of each server (over HTTP). None: the default of the server."""
    asks_first: bool = True
    """Whether clients first send the number of events, and the events only if the server requests them (over HTTP). If
    false, they send the events immediately, and the server decides whether to use them."""
    history: tuple[int, ...] = (512,)
    """Numbers of events per user; an event has two tokens."""
    lengths: tuple[int, ...] = ()
    """Numbers of events of users, mixed in one load; `history` is then used to determine costs and SLO."""
    candidates: tuple[int, ...] = (64,)
    """Numbers of candidates per ranking request."""
    returning: tuple[float, ...] = (0.0, 0.3, 0.6)
    """Fractions of requests that come from returning users."""
    recent_users: int = 64
    """Number of most recent users among which a returning user is drawn."""
    new_events: int = 4
    """Number of events of a user between two visits."""
    modes: tuple[str, ...] = tuple(MODES)
    """Serving modes; also available are reactive, relay_all, no_affinity and remote_fetch."""
    more_modes: tuple[str, ...] = ()
    """Serving modes that are measured last, at the first size and the last fraction of returning users only."""
    longest: bool = False
    """Whether to search for the longest history that meets the SLO of the first size at half the largest rate of the
    first mode."""
    curve: tuple[float, ...] = ()
    """Multiples of each mode's largest rate at which latency and goodput are measured, at the first size and fraction
    of returning users."""
    slo_factor: float = 3.0
    """SLO as a multiple of the unloaded P50 of full inference."""
    more_slo_factors: tuple[float, ...] = ()
    """Further SLO factors, measured at every size and fraction of returning users."""
    slo_ms: tuple[float, ...] = ()
    """Further SLOs in milliseconds, measured at the first size and fraction of returning users."""
    deadline_factor: float = 0.0
    """Deadline of ranking requests as a multiple of the SLO; the engine rejects requests that cannot meet it (in this
    process). 0: the deadline is ten seconds."""
    body_bytes: int = 0
    """Body size of a ranking request; the request is rejected unread if the queue does not have capacity for it, as in
    a frontend (in this process)."""
    signal_ms: float = 150.0
    """Milliseconds between a signal and its ranking request."""
    warm_s: float = 2.0
    """Seconds of a trial before requests are counted, with returning users: none can return in the first half
    second."""
    duration_s: float = 8.0
    """Seconds of a trial after its warm-up."""
    fewest: int = 150
    """Minimum number of requests of a trial."""
    factor: float = 1.3
    """Factor between two measured rates, until one meets the SLO and the next one does not."""
    starts: tuple[float, ...] = ()
    """Rates at which searches start, as multiples of the largest rate of full inference, one per fraction of returning
    users (over HTTP). Empty: 2.5 and more."""
    at_least: float = 0.0
    """Fraction of the first mode's largest rate. If it is not 0, other modes are not searched: they are measured at
    that largest rate, and, if they do not meet the SLO, at this fraction of it; for sweeps over many sizes (in this
    process)."""
    search_s: float = 60.0
    """Seconds after which a search for a largest rate ends with the best rate that was found."""
    rounds: int = 2
    """Number of bisections of the interval between the last two rates."""
    cache_bytes: int = 256 << 20
    """Device memory for prefixes."""
    dram_bytes: int = 1 << 30
    """Host memory for prefixes."""
    max_batch_tokens: int = 4096
    """Maximum number of new tokens of ranking requests in a batch; signals may add as many again."""
    chunk_ms: float | None = None
    """Device milliseconds up to which signals fill a batch. None: a quarter of the SLO; 0: only the number of tokens
    limits them."""
    is_paired: bool = False
    """Whether to pair each history with the number of candidates at the same index instead of with all numbers."""
    device: str = "cpu"
    """Device of the model, cpu or cuda."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and matrix products."""
    prefix_dtype: KVCacheDtype = "model"
    """Data type of the KV cache."""
    costs_of: str = ""
    """Result file of `nestrec bench engine` on some device. The engine then runs in simulated time with the batch times
    of that device, without computing; for the sizes of its `encoder`, and for modes without DRAM (`full`, `relay`)."""
    costs_of_model: str = "tables"
    """Model in the file of `costs_of`."""
    host_ms: NonNegative = 0.25
    """Milliseconds of each batch between its scheduling and its start on the device (in simulated time)."""
    way_ms: NonNegative = 0.0
    """Milliseconds of the network between client and engine, both ways together (in simulated time)."""
    seed: int = 0
    """Seed of weights, arrivals and histories."""


class TrialBed(Protocol):
    """A test bed on which the engines of all modes run one after another."""

    bench: RelayBenchConfig

    def load(self, history: int, candidates: int, returning: float) -> RelayLoad: ...

    def costs(self, load: RelayLoad) -> RequestCosts: ...

    def unloaded_ms(self, load: RelayLoad) -> float:
        """Return the median latency of full inference with one request at a time."""
        ...

    def trial(self, mode: Mode, load: RelayLoad, rate: float, slo_ms: float) -> RelayOutcome:
        """Run a load on a new engine with empty caches."""
        ...


class RelayBed:
    """Test bed in this process: a model with its KV cache and CUDA graphs."""

    def __init__(self, bench: RelayBenchConfig):
        self.bench = bench
        self.adapter = make_bench_adapter(bench)
        servable = self.adapter.servable
        pool = pool_for(
            servable, cache_bytes=bench.cache_bytes, page_tokens=PrefixCacheConfig().page_tokens,
            kv_cache_dtype=bench.prefix_dtype,
        )  # fmt: skip
        self.runner = make_runner(self.adapter, pool, EngineConfig(max_batch_tokens=bench.max_batch_tokens))

    def load(self, history: int, candidates: int, returning: float) -> RelayLoad:
        return load_of(self.bench, history, candidates, returning)

    def costs(self, load: RelayLoad) -> RequestCosts:
        return measure_costs(self.runner, load)

    def unloaded_ms(self, load: RelayLoad) -> float:
        full = MODES["full"]
        engine = Engine(self.adapter, engine_config(full, self.bench, 1e3), runner=self.runner)
        try:
            return float(np.median(run_in_turn(engine, load, self.bench.fewest)))
        finally:
            engine.close()

    def trial(self, mode: Mode, load: RelayLoad, rate: float, slo_ms: float) -> RelayOutcome:
        config = engine_config(mode, self.bench, slo_ms)
        engine = Engine(self.adapter, config, runner=self.runner, make_copier=copier_of(mode))
        gc.disable()  # collecting the garbage of the load generator would delay the engine by milliseconds
        try:
            return run_trial(engine, load, rate, sends_signals=mode.sends_signals, strays=mode.strays)
        finally:
            engine.close()
            gc.enable()
            gc.collect()


def copier_of(mode: Mode) -> Callable[[torch.device], Copier]:
    """Return the copier class of a mode: that of this machine, or one with an emulated slower link."""
    return partial(SlowCopier, gb_per_s=mode.fetch_gb_per_s) if mode.fetch_gb_per_s else Copier


def make_bench_adapter(bench: RelayBenchConfig) -> ModelAdapter:
    """Create a model with random weights whose maximum length suffices for the longest histories."""
    events = max((*bench.history, *bench.lengths)) * (LONGEST if bench.longest else 1)
    events += _MAX_VISITS * bench.new_events
    encoder = replace(bench.encoder, max_length=2 * (events + 1))
    dtype = getattr(torch, bench.dtype)
    return make_adapter(random_ranking(encoder, num_items=NUM_ITEMS, seed=bench.seed, device=bench.device, dtype=dtype))


def load_of(bench: RelayBenchConfig, history: int, candidates: int, returning: float) -> RelayLoad:
    return RelayLoad(
        history=history, candidates=candidates, returning=returning, new_events=bench.new_events,
        recent_users=bench.recent_users, signal_s=bench.signal_ms / 1e3, duration_s=bench.duration_s,
        warm_s=bench.warm_s if returning else min(bench.warm_s, _WARM_S), fewest=bench.fewest, seed=bench.seed,
        longest_s=max(bench.duration_s, bench.search_s / 4), lengths=bench.lengths, body_bytes=bench.body_bytes,
    )  # fmt: skip


def engine_config(mode: Mode, bench: RelayBenchConfig, slo_ms: float) -> EngineConfig:
    """Return the engine config of a mode."""
    tiers = PrefixCacheConfig(
        device_bytes=bench.cache_bytes, host_bytes=bench.dram_bytes if mode.uses_dram else 0,
        enabled=mode.keeps_prefix, keep_on_device=mode.keeps_on_device,
        reload_policy="always" if mode.fetches_always else "when_faster",
    )  # fmt: skip
    trigger = TriggerConfig(policy=mode.policy, latency_budget_ms=slo_ms)
    return EngineConfig(
        prefix_cache=tiers, preinfer=trigger, max_queue_delay_s=max(1.0, 4 * slo_ms / 1e3),
        preinfer_chunk_ms=bench.chunk_ms, max_batch_tokens=bench.max_batch_tokens,
    )  # fmt: skip
