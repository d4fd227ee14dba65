"""Serving modes that `nestrec bench relay` compares: same kernels, batches and engine, different rules for prefixes.

The costs of a request on the device and the link are measured alone; they imply upper bounds of the request rate:

full    1 / t_full
signals 1 / (t_rank + (1 - r) t_prefix + r t_extend)              r: fraction of returning users
none    min(1 / ((1 - r) t_full + r t_rank), link / (r S_kv))    prefixes of earlier visits only, S_kv bytes each
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from nestrec.base.errors import UserError, did_you_mean
from nestrec.serving.engine.reference_runner import BatchItem, BatchRunner
from nestrec.serving.kv_cache.host_prefix_cache import HostPages
from nestrec_bench.load_test.engine_load import RelayLoad, bank_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A serving mode: cache tiers of prefixes, time of their prefill, and the change that an ablation makes."""

    policy: Literal["never", "at_risk", "all"] = "never"
    """Policy of the trigger; `never` sends no signals."""
    keeps_prefix: bool = True
    keeps_on_device: bool = True
    uses_dram: bool = False
    fetches_always: bool = False
    """Whether prefixes in DRAM are fetched even if prefilling them is faster."""
    strays: float = 0.0
    """Fraction of ranking requests that reach a different instance than their signal."""
    fetch_gb_per_s: float = 0.0
    """Bandwidth of an emulated network between an instance and its second tier; 0 for memory of the same machine."""

    @property
    def sends_signals(self) -> bool:
        return self.policy != "never"


MODES = {
    "full": Mode(keeps_prefix=False),
    "dram_fetch": Mode(keeps_on_device=False, uses_dram=True, fetches_always=True),
    "relay": Mode(policy="at_risk"),
    "relay_dram": Mode(policy="at_risk", uses_dram=True),
}
ABLATIONS = {
    "reactive": Mode(uses_dram=True),
    "relay_all": Mode(policy="all", uses_dram=True),
    "no_affinity": Mode(policy="at_risk", uses_dram=True, strays=0.5),
    "remote_fetch": Mode(
        policy="at_risk", keeps_on_device=False, uses_dram=True, fetches_always=True, fetch_gb_per_s=12.5
    ),
}
"""Ablations. no_affinity: one of two instances to which requests are assigned at random. remote_fetch: after ranking,
prefixes are cached by another machine over a link of 100 Gbit/s, from which every return of a user fetches them."""


def mode_named(name: str) -> Mode:
    known = {**MODES, **ABLATIONS}
    if name not in known:
        raise UserError("unknown serving mode", option="modes", value=name, remedy=did_you_mean(name, known))
    return known[name]


_REPEATS = 9
_WARM_S = 0.3
BATCH = 8
"""Number of requests in a batch that ranks, or extends prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCosts:
    """Costs of one request without load."""

    full_ms: float
    """Milliseconds of history and candidates."""
    prefix_ms: float
    """Milliseconds of the history."""
    rank_ms: float
    """Milliseconds of the candidates with a cached history, in a batch of such requests."""
    extend_ms: float
    """Milliseconds of the events since the last visit, in a batch of such signals."""
    reload_ms: float
    """Milliseconds of the copy of a prefix from host memory."""
    prefix_mb: float

    def bound_qps(self, mode: Mode, returning: float) -> float:
        """Return the upper bound of requests/s that device and link allow."""
        if not mode.keeps_prefix:
            return 1e3 / self.full_ms
        if mode.sends_signals:
            return 1e3 / (self.rank_ms + (1 - returning) * self.prefix_ms + returning * self.extend_ms)
        device_ms = (1 - returning) * self.full_ms + returning * (self.rank_ms + self.extend_ms)
        return 1e3 / max(device_ms, 0.0 if mode.keeps_on_device else returning * self.reload_ms)


def measure_costs(runner: BatchRunner, load: RelayLoad) -> RequestCosts:
    """Measure the costs of a request with the history and the candidates of a load."""
    adapter = runner.adapter
    pool = runner.pool
    history, candidates = bank_of(load.seed).request(load, 0, 1)
    tokens = adapter.tokens(history, candidates.now_ms)
    last = load.history * adapter.tokens_per_event
    pages = list(range(-(-tokens.length // pool.page_tokens)))

    def milliseconds(first: int, end: int, *, ranks: bool, batch: int = 1) -> float:
        part = BatchItem(
            tokens=tokens,
            first=first,
            end=end,
            pages=pages,
            store_until=min(end, tokens.num_cacheable),
            candidates=candidates if ranks else None,
        )
        return round(_median_ms(lambda: runner.launch([part] * batch).wait()[1]) / batch, 4)

    host = HostPages(pool, max_bytes=len(pages) * pool.page_bytes)
    host_pages = host.allocate(host.bytes_of(last))
    host.copy_out(pages, host_pages)
    return RequestCosts(
        full_ms=milliseconds(0, last, ranks=True),
        prefix_ms=milliseconds(0, last, ranks=False),
        rank_ms=milliseconds(last, last, ranks=True, batch=BATCH),
        extend_ms=milliseconds(last, tokens.length, ranks=False, batch=BATCH),
        reload_ms=_median_ms(lambda: _seconds_of(lambda: host.copy_in(pages, host_pages))),
        prefix_mb=host.bytes_of(last) / 1e6,
    )


def _seconds_of(action: Callable[[], None]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def _median_ms(seconds: Callable[[], float]) -> float:
    end_s = time.perf_counter() + _WARM_S
    seconds()  # compiles and allocates
    while time.perf_counter() < end_s:  # until the device has reached its clock rate under load
        seconds()
    return round(float(np.median([seconds() for _ in range(_REPEATS)])) * 1e3, 4)
