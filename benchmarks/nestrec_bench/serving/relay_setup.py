"""What `nestrec bench relay` measures, and the model with its memory and graphs that all modes run on in turn."""

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
from nestrec.serving.kv_cache.kv_page_pool import PrefixDtype, pool_for
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import Copier, PrefixCacheConfig
from nestrec.serving.model.model_adapter import ModelAdapter, make_form
from nestrec_bench.harness.random_model import random_ranking
from nestrec_bench.load_test.engine_load import NUM_ITEMS, RelayLoad, RelayOutcome, run_in_turn, run_trial
from nestrec_bench.serving.relay_modes import MODES, Mode, RequestCosts, measure_costs
from nestrec_bench.serving.slow_copier import SlowCopier

_MOST_VISITS = 64
_WARM_S = 0.7
"""of a trial where nobody returns"""
LONGEST = 3
"""times the longest history: how far `longest` looks"""


@config
class RelayBench:
    """What is measured. The defaults suit two CPU cores."""

    encoder: HSTUConfig = HSTUConfig(dim=64, num_layers=2, num_heads=2, head_dim=32, time_bias=True)
    """the model; max_length follows the history"""
    model: str = ""
    """folder of an exported model, which is then measured over HTTP as `nestrec serve` serves it; empty: a model with
    random weights, inside this process, for the limits of the engine itself"""
    instances: int = 1
    """servers behind a gateway (over HTTP)"""
    front_processes: int | None = None
    """of each server (over HTTP); none: as it chooses"""
    asks_first: bool = True
    """users tell the number of their events, and send them where they are wanted (over HTTP); false: they are sent at
    once, and the server decides"""
    history: tuple[int, ...] = (512,)
    """events of a user; two tokens each"""
    lengths: tuple[int, ...] = ()
    """events of users by turns, mixed in one load; `history` is then the size that costs and the SLO are taken of"""
    candidates: tuple[int, ...] = (64,)
    """items of a ranking request"""
    returning: tuple[float, ...] = (0.0, 0.3, 0.6)
    """shares of requests of users who were here before"""
    recent_users: int = 64
    """a returning user is one of so many latest ones"""
    new_events: int = 4
    """of a user between two visits"""
    modes: tuple[str, ...] = tuple(MODES)
    """ways of serving; also reactive, relay_all, no_affinity and remote_fetch"""
    more_modes: tuple[str, ...] = ()
    """measured at the first size and the last share of returning users only, after everything else"""
    longest: bool = False
    """also find the longest history that meets the first size's SLO at half the largest rate of the first mode"""
    curve: tuple[float, ...] = ()
    """also latency and goodput at these multiples of each mode's largest rate, at the first size and share that
    returns"""
    slo_factor: float = 3.0
    """SLO over the unloaded P50 of full inference"""
    more_slo_factors: tuple[float, ...] = ()
    """further ones, each at every size and share of returning users"""
    slo_ms: tuple[float, ...] = ()
    """SLOs beside that one, at the first size and share of returning users"""
    deadline_factor: float = 0.0
    """deadline of ranking requests over the SLO, as of clients who would not wait for longer: what cannot be in time is
    refused (inside this process); 0: ten seconds"""
    body_bytes: int = 0
    """of a ranking request: where there is no room for so many it is refused unread, as by a front (inside this
    process)"""
    signal_ms: float = 150.0
    """from signal to ranking request"""
    warm_s: float = 2.0
    """of a trial before requests are counted, where users return: in its first half second nobody can"""
    duration_s: float = 8.0
    """of a trial after that"""
    fewest: int = 150
    """requests of a trial, however short"""
    factor: float = 1.3
    """between two rates that are tried, until one meets the SLO and the next does not"""
    starts: tuple[float, ...] = ()
    """where searches begin, over the largest rate of full inference, for each share of returning users (over HTTP);
    none: at 2.5 times and more"""
    at_least: float = 0.0
    """no search for other modes than the first: whether they carry its largest rate, and if not, this share of it; for
    sweeps over many sizes (inside this process). 0: a search"""
    search_s: float = 60.0
    """seconds after which a search for a largest rate ends with the best so far"""
    rounds: int = 2
    """halvings of the interval between these two"""
    cache_bytes: int = 256 << 20
    """device memory for prefixes"""
    dram_bytes: int = 1 << 30
    """host memory for prefixes"""
    max_batch_tokens: int = 4096
    """new tokens of requests in a batch; signals may add as many"""
    chunk_ms: float | None = None
    """device milliseconds of a batch up to which signals fill it; none: a quarter of the SLO, 0: the tokens alone bound
    them"""
    is_paired: bool = False
    """each history with the candidates at its place only, instead of with all"""
    device: str = "cpu"
    """cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of weights and products"""
    prefix_dtype: PrefixDtype = "model"
    """of prefixes"""
    costs_of: str = ""
    """file that `nestrec bench engine --json` has written on some device: the engine runs in simulated time, its
    batches take as long as they would there, and nothing is computed; for the sizes of its `encoder`, and modes
    without DRAM (`full`, `relay`)"""
    costs_of_model: str = "tables"
    """model of that file"""
    host_ms: NonNegative = 0.25
    """of each batch, from its plan until the device has it (in simulated time)"""
    way_ms: NonNegative = 0.0
    """from a client to the engine and back (in simulated time)"""
    seed: int = 0
    """of weights, arrivals and histories"""


class TrialBed(Protocol):
    """On which engines of all modes run one after the other."""

    bench: RelayBench

    def load(self, history: int, candidates: int, returning: float) -> RelayLoad: ...

    def costs(self, load: RelayLoad) -> RequestCosts: ...

    def unloaded_ms(self, load: RelayLoad) -> float:
        """Median of full inference with one request at a time."""
        ...

    def trial(self, mode: Mode, load: RelayLoad, rate: float, slo_ms: float) -> RelayOutcome:
        """By an engine of its own with empty caches."""
        ...


class RelayBed:
    """A model with its memory and graphs."""

    def __init__(self, bench: RelayBench):
        self.bench = bench
        self.form = form_of(bench)
        servable = self.form.servable
        pool = pool_for(
            servable, cache_bytes=bench.cache_bytes, page_tokens=PrefixCacheConfig().page_tokens,
            prefix_dtype=bench.prefix_dtype,
        )  # fmt: skip
        self.runner = make_runner(self.form, pool, EngineConfig(max_batch_tokens=bench.max_batch_tokens))

    def load(self, history: int, candidates: int, returning: float) -> RelayLoad:
        return load_of(self.bench, history, candidates, returning)

    def costs(self, load: RelayLoad) -> RequestCosts:
        return measure_costs(self.runner, load)

    def unloaded_ms(self, load: RelayLoad) -> float:
        full = MODES["full"]
        engine = Engine(self.form, engine_config(full, self.bench, 1e3), runner=self.runner)
        try:
            return float(np.median(run_in_turn(engine, load, self.bench.fewest)))
        finally:
            engine.close()

    def trial(self, mode: Mode, load: RelayLoad, rate: float, slo_ms: float) -> RelayOutcome:
        config = engine_config(mode, self.bench, slo_ms)
        engine = Engine(self.form, config, runner=self.runner, make_copier=copier_of(mode))
        gc.disable()  # the garbage is the generator's, and collecting it would stall the engine for milliseconds
        try:
            return run_trial(engine, load, rate, sends_signals=mode.sends_signals, strays=mode.strays)
        finally:
            engine.close()
            gc.enable()
            gc.collect()


def copier_of(mode: Mode) -> Callable[[torch.device], Copier]:
    """Returns what makes the copiers of a mode: those of this machine, or of an emulated slower link."""
    return partial(SlowCopier, gb_per_s=mode.fetch_gb_per_s) if mode.fetch_gb_per_s else Copier


def form_of(bench: RelayBench) -> ModelAdapter:
    """The model of a bench, with room for its longest histories."""
    events = max((*bench.history, *bench.lengths)) * (LONGEST if bench.longest else 1)
    events += _MOST_VISITS * bench.new_events
    encoder = replace(bench.encoder, max_length=2 * (events + 1))
    dtype = getattr(torch, bench.dtype)
    return make_form(random_ranking(encoder, num_items=NUM_ITEMS, seed=bench.seed, device=bench.device, dtype=dtype))


def load_of(bench: RelayBench, history: int, candidates: int, returning: float) -> RelayLoad:
    return RelayLoad(
        history=history, candidates=candidates, returning=returning, new_events=bench.new_events,
        recent_users=bench.recent_users, signal_s=bench.signal_ms / 1e3, duration_s=bench.duration_s,
        warm_s=bench.warm_s if returning else min(bench.warm_s, _WARM_S), fewest=bench.fewest, seed=bench.seed,
        longest_s=max(bench.duration_s, bench.search_s / 4), lengths=bench.lengths, body_bytes=bench.body_bytes,
    )  # fmt: skip


def engine_config(mode: Mode, bench: RelayBench, slo_ms: float) -> EngineConfig:
    """The engine of a mode."""
    tiers = PrefixCacheConfig(
        cache_bytes=bench.cache_bytes, dram_bytes=bench.dram_bytes if mode.uses_dram else 0,
        keeps_prefix=mode.keeps_prefix, keeps_on_device=mode.keeps_on_device,
        reload="always" if mode.fetches_always else "worth",
    )  # fmt: skip
    trigger = TriggerConfig(policy=mode.policy, budget_ms=slo_ms)
    return EngineConfig(
        tiers=tiers, trigger=trigger, max_queue_s=max(1.0, 4 * slo_ms / 1e3), chunk_ms=bench.chunk_ms,
        max_batch_tokens=bench.max_batch_tokens,
    )  # fmt: skip
