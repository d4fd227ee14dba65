"""Trigger of pre-infer requests (RelayGR): decides which histories to prefill ahead of the ranking request.

Pre-inference moves work to an earlier time and does not save any. It is therefore used only for requests whose full
(uncached) ranking would exceed the latency budget, within two limits:

    short      tail * t_full(n, m) <= min_budget_fraction * budget        never prefilled ahead, whatever the load
               or t_full(n, m) - t_rank(n, m) < min_gain * s
    at risk    wait + tail * t_full(n, m) + t_host + t_transit + w99 > budget
               s = t_full(n, m) + t_host,   w99 = s * waited_p99(load)
    live cap   bytes of admitted prefixes that ranking has not consumed yet   <= rho * bytes of the device cache
    rate cap   device seconds of pre-inference, as a token bucket filled with u_pre per second

A prefix is live until it is consumed or until T_life = P99(ready to consumed) + margin has passed. By Little's law, the
live cap corresponds to the limit on admissions per second in the paper's formulas. The budget is the latency that a
user observes, so it includes more than device time: t_host is the host time of a batch, and t_transit the recent 90th
percentile of the time from the arrival of a request to its engine plus that of the response back.

`load` is the fraction of time that ranking all recent requests in full, one by one, would take, and w99 the 99th
percentile of the resulting queue delay. A smaller estimate would trigger pre-inference only for requests that are
already late; a larger one also for requests that would be in time, and their pre-inference would delay others. Few
recent requests are a poor estimate of the next ones, so two standard deviations are added (of a sum with a Poisson
number of terms): if half of the users were classified as safe by chance, more than one in a hundred rankings would be
late.

    load = (sum of s + 2 sqrt(sum of s^2)) / span                  over the requests of the last half second

`would_admit` evaluates the first two conditions only, from numbers that a router knows without the history.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nestrec.base.clock import Clock
from nestrec.base.config import config
from nestrec.base.config_values import Fraction, NonNegative
from nestrec.serving.inputs.engine_request import CacheKey

DEFAULT_CANDIDATES = 256
"""Number of candidates assumed for the ranking request if the pre-infer request does not specify it."""
_LOAD_WINDOW_S, _SHORTEST_SPAN_S, _DEVIATIONS = 0.5, 0.1, 2.0
_MIN_LIFETIMES, _REFRESH_EVERY = 16, 8
_P99 = 0.99
_MAX_LOAD = 0.99
_NEWTON_STEPS = 8
_NUM_TRANSITS = 256
_TRANSIT_REFRESH_EVERY = 16
_TRANSIT_QUANTILE = 0.9
_MAX_TRANSIT_S = 10.0
"""Transit times: number of recent ones, number of new ones between updates of the quantile, the quantile, and the limit
to which they are clipped."""


@config
class TriggerConfig:
    policy: Literal["at_risk", "all", "never"] = "at_risk"
    """Which pre-infer requests are admitted: at_risk, those whose ranking would otherwise exceed the latency budget;
    all, every one within the limits; never, none."""
    latency_budget_ms: NonNegative = 50.0
    """Latency budget of ranking requests in milliseconds, at the 99th percentile."""
    max_cache_fraction: NonNegative = 0.8
    """Maximum fraction of the device cache for prefixes whose ranking request has not arrived yet (rho)."""
    max_compute_fraction: NonNegative = 0.9
    """Maximum fraction of device time for pre-inference (u_pre)."""
    min_budget_fraction: Fraction = 0.05
    """Fraction of the latency budget; requests that take no more than this are never prefilled ahead (at_risk only)."""
    min_gain: Fraction = 0.2
    """Minimum fraction of the full ranking time, including host time, that a prefix must save; requests that save less
    are never prefilled ahead (at_risk only)."""
    burst_s: NonNegative = 1.0
    """Size of the token bucket of pre-inference in device seconds."""
    initial_lifetime_s: NonNegative = 1.0
    """Initial estimate of the seconds between pre-inference and ranking, until it has been measured (T_life)."""
    lifetime_margin_s: NonNegative = 0.2
    """Seconds added to the measured time between pre-inference and ranking."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision on a pre-infer request."""

    is_admitted: bool
    reason: str
    """`admitted`, `short`, `safe`, `never`, `live_cap` or `rate_cap`; `history_required` if it pays off and the caps
    have not been checked yet."""


def waited_p99(load: float) -> float:
    """Return the 99th percentile of the queue delay in an M/D/1 queue, in units of the service time.

    P(W > t) = 1 - (1 - load) e^(load t) within one service time, and C e^(-r t) beyond it, with r from
    load (e^r - 1) = r and C = (1 - load) / (load e^r - 1).

    Args:
        load: Utilization of the server; clipped to 0.99, so that the result is finite.
    """
    load = min(load, _MAX_LOAD)
    if load <= 1 - _P99:
        return 0.0
    short_delay = math.log(_P99 / (1 - load)) / load
    if short_delay <= 1:
        return short_delay
    rate = -2 * math.log(load)  # never below r, so Newton's method decreases monotonically
    for _ in range(_NEWTON_STEPS):
        rate -= (math.log1p(rate / load) - rate) / (1 / (load + rate) - 1)
    return math.log((1 - load) / (load * math.exp(rate) - 1) / (1 - _P99)) / rate


class Trigger:
    """Admits pre-infer requests of one engine. Not thread-safe: the caller holds a lock or uses one thread."""

    def __init__(self, cfg: TriggerConfig, clock: Clock, *, cache_bytes: int):
        self.cfg = cfg
        self._clock = clock
        self._cache_bytes = cache_bytes
        self._live: OrderedDict[CacheKey, tuple[int, float]] = OrderedDict()  # (bytes, time of admission)
        self._live_bytes = 0
        self._bucket_s = cfg.burst_s
        self._filled_at_s = clock.now_s()
        self._lifetimes: deque[float] = deque(maxlen=256)
        self._num_lifetimes = 0
        self._lifetime_s = cfg.initial_lifetime_s
        self._arrivals: deque[tuple[float, float]] = deque()  # (time, seconds without a prefix)
        self._arrivals_s = self._arrivals_squares = 0.0
        self._transits: deque[float] = deque(maxlen=_NUM_TRANSITS)
        self._num_transits = 0
        self.transit_s = 0.0
        """Recent transit time of requests and responses in seconds (t_transit)."""

    def decide(
        self,
        key: CacheKey,
        *,
        full_rank_s: float,
        rank_s: float,
        tail: float,
        wait_s: float,
        preinfer_s: float,
        num_bytes: int,
        host_s: float = 0.0,
    ) -> Decision:
        """Decide on a pre-infer request; an admission is charged at once.

        Args:
            key: User and model version.
            full_rank_s: Predicted device seconds of the ranking request without a cached prefix.
            rank_s: Predicted device seconds of the ranking request with a cached prefix.
            tail: Factor from a predicted time to its 99th percentile.
            wait_s: Queue delay of a request that arrives now.
            preinfer_s: Predicted device seconds of the pre-infer request.
            num_bytes: Bytes of the prefix in the KV cache.
            host_s: Host seconds per batch, in addition to the device time.
        """
        self._advance()
        decision = self.would_admit(full_rank_s=full_rank_s, rank_s=rank_s, tail=tail, wait_s=wait_s, host_s=host_s)
        if decision.reason != "history_required":
            return decision
        if self._live_bytes + num_bytes > self.cfg.max_cache_fraction * self._cache_bytes:
            return Decision(False, "live_cap")
        if preinfer_s > self._bucket_s:
            return Decision(False, "rate_cap")
        self._bucket_s -= preinfer_s
        self._end(key)
        self._live[key] = (num_bytes, self._clock.now_s())
        self._live_bytes += num_bytes
        return Decision(True, "admitted")

    def would_admit(
        self, *, full_rank_s: float, rank_s: float, tail: float, wait_s: float, host_s: float = 0.0
    ) -> Decision:
        """Decide whether a pre-infer request would pay off, without the history; charges nothing.

        The arguments are those of `decide`.
        """
        if self.cfg.policy == "never":
            return Decision(False, "never")
        if self.cfg.policy == "at_risk":
            is_quick = full_rank_s * tail * 1e3 <= self.cfg.min_budget_fraction * self.cfg.latency_budget_ms
            served_s = full_rank_s + host_s
            if is_quick or full_rank_s - rank_s < self.cfg.min_gain * served_s:
                return Decision(False, "short")
            late_s = wait_s + full_rank_s * tail + host_s + self.transit_s + self._queue_tail_s(served_s)
            if late_s * 1e3 <= self.cfg.latency_budget_ms:
                return Decision(False, "safe")
        return Decision(False, "history_required")

    def record_arrival(self, served_s: float) -> None:
        """Record the arrival of a ranking request and its full (uncached) service time, including host time."""
        self._arrivals.append((self._clock.now_s(), served_s))
        self._arrivals_s += served_s
        self._arrivals_squares += served_s**2
        self._drop_old_arrivals()

    def record_transit(self, transit_s: float) -> None:
        """Record the transit time of a ranking request to its engine plus that of a response back, in seconds."""
        self._transits.append(min(max(0.0, transit_s), _MAX_TRANSIT_S))
        self._num_transits += 1
        if self._num_transits % _TRANSIT_REFRESH_EVERY == 0:
            self.transit_s = sorted(self._transits)[int(_TRANSIT_QUANTILE * len(self._transits))]

    def _drop_old_arrivals(self) -> None:
        now_s = self._clock.now_s()
        while self._arrivals and self._arrivals[0][0] < now_s - _LOAD_WINDOW_S:
            _, served_s = self._arrivals.popleft()
            self._arrivals_s -= served_s
            self._arrivals_squares -= served_s**2
        if not self._arrivals:  # prevents rounding errors from accumulating
            self._arrivals_s = self._arrivals_squares = 0.0

    def _queue_tail_s(self, served_s: float) -> float:
        """Return the 99th percentile of the queue delay in seconds (w99)."""
        now_s = self._clock.now_s()
        self._drop_old_arrivals()
        span_s = max(now_s - self._arrivals[0][0], _SHORTEST_SPAN_S) if self._arrivals else _LOAD_WINDOW_S
        upper_bound_s = self._arrivals_s + _DEVIATIONS * math.sqrt(max(0.0, self._arrivals_squares))
        return served_s * waited_p99(upper_bound_s / span_s)

    def release_budget(self, key: CacheKey) -> None:
        """Release the live bytes of a prefix that was consumed by its ranking request or no longer exists."""
        known = self._live.get(key)
        if known is not None:
            self._lifetimes.append(self._clock.now_s() - known[1])
            self._num_lifetimes += 1
            if self._num_lifetimes >= _MIN_LIFETIMES and self._num_lifetimes % _REFRESH_EVERY == 0:
                self._lifetime_s = float(np.quantile(self._lifetimes, 0.99)) + self.cfg.lifetime_margin_s
            self._end(key)

    @property
    def lifetime_s(self) -> float:
        """Expected maximum time between pre-inference and ranking in seconds (T_life)."""
        return self._lifetime_s

    @property
    def live_bytes(self) -> int:
        return self._live_bytes

    def _end(self, key: CacheKey) -> None:
        known = self._live.pop(key, None)
        if known is not None:
            self._live_bytes -= known[0]

    def _advance(self) -> None:
        now_s = self._clock.now_s()
        self._bucket_s = min(
            self.cfg.burst_s, self._bucket_s + (now_s - self._filled_at_s) * self.cfg.max_compute_fraction
        )
        self._filled_at_s = now_s
        life_s = self.lifetime_s
        while self._live:
            key, (_, since_s) = next(iter(self._live.items()))
            if now_s - since_s < life_s:
                return
            self._end(key)
