"""Which requests are worth computing ahead: those whose full ranking would miss its budget, within two bounds.

    short      tail * t_full(n, m) <= short_share * budget        never computed ahead, whatever the load
               or t_full(n, m) - t_rank(n, m) < least_gain * s
    at risk    wait + tail * t_full(n, m) + t_host + t_way + w99 > budget
               s = t_full(n, m) + t_host,   w99 = s * waited_p99(load)
    live cap   bytes of admitted prefixes that ranking has not consumed yet   <= rho * bytes of the device cache
    rate cap   device seconds of pre-inference, as a token bucket filled with u_pre a second

A prefix counts as live until it is consumed or until T_life = P99(ready to consumed) + margin has passed. By Little's
law the live cap is the bound on admissions a second of the formulas that this follows. The budget is what a user sees,
so the device is not all of it: t_host is the host's part of a batch, for which the device waits, and t_way the time
from a request's arrival to its engine and of the answer back, at the 90th percentile of late. `load` is the share of
time that ranking all requests of late in full, each by itself, would take, and w99 what one then waits at the 99th
percentile: with less, those are signalled who would be late; with more, also those who would not, whose signals are
then what others wait for. Few requests of late say little about those to come, so two standard deviations are added
(of a sum of as many terms as come at random): where half of the users are taken to be safe by chance, and are not,
ranking is late for more than one in a hundred.

    load = (sum of s + 2 sqrt(sum of s^2)) / span                  over the requests of the last half second

`foresee` is the first half alone, from numbers that whoever routes a request knows without its history. Computing ahead
moves work and does not save any, so it is for those who would be late: who is short, or not at risk, sends no signal.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nestrec.base.clock import Clock
from nestrec.base.config import config
from nestrec.base.config_values import NonNegative, Share
from nestrec.serving.inputs.engine_request import CacheKey

USUAL_CANDIDATES = 256
"""of a ranking request to come, where a signal does not say"""
_LOAD_WINDOW_S, _SHORTEST_SPAN_S, _DEVIATIONS = 0.5, 0.1, 2.0
_FEWEST_LIVES, _REFRESH_EVERY = 16, 8
_P99 = 0.99
_HIGHEST_LOAD = 0.99
_NEWTON_STEPS = 8
_WAYS = 256
_WAYS_EVERY = 16
_WAY_QUANTILE = 0.9
_LONGEST_WAY_S = 10.0
"""requests whose way is known, after how many it is looked at again, and what counts of them"""


@config
class TriggerConfig:
    policy: Literal["at_risk", "all", "never"] = "at_risk"
    """whose prefix is computed ahead: at_risk, who would miss the budget otherwise; all, within the bounds; never"""
    budget_ms: NonNegative = 50.0
    """time that ranking may take at the 99th percentile, from its request on"""
    cache_share: NonNegative = 0.8
    """share of the device cache that prefixes may hold whose ranking has not come yet (rho)"""
    compute_share: NonNegative = 0.9
    """share of the device's time that may go into computing ahead (u_pre)"""
    short_share: Share = 0.05
    """of the budget: who takes no more of it is never computed ahead (at_risk)"""
    least_gain: Share = 0.2
    """of the time of ranking in full, the host's part included, that a prefix must save: who gains less is never
    computed ahead (at_risk)"""
    burst_s: NonNegative = 1.0
    """device seconds of pre-inference that may be saved up"""
    first_life_s: NonNegative = 1.0
    """how long a prefix is taken to wait for its ranking, before that has been measured (T_life)"""
    life_margin_s: NonNegative = 0.2
    """added to the measured time from ready to consumed"""


@dataclass(frozen=True, slots=True)
class Decision:
    is_admitted: bool
    reason: str
    """`admitted`, `short`, `safe`, `never`, `live_cap` or `rate_cap`; `wanted`: it may be, and needs the history"""


def waited_p99(load: float) -> float:
    """What one in a hundred waits for at least, in times of service, where requests come at random and take equally
    long; `load` is the share of time that they take. Nobody waits for ever: a load is at most 0.99.

    P(W > t) = 1 - (1 - load) e^(load t) within one time of service, and C e^(-r t) beyond it, with r from
    load (e^r - 1) = r and C = (1 - load) / (load e^r - 1).
    """
    load = min(load, _HIGHEST_LOAD)
    if load <= 1 - _P99:
        return 0.0
    within_one = math.log(_P99 / (1 - load)) / load
    if within_one <= 1:
        return within_one
    rate = -2 * math.log(load)  # never below r, from where Newton's steps only come down
    for _ in range(_NEWTON_STEPS):
        rate -= (math.log1p(rate / load) - rate) / (1 / (load + rate) - 1)
    return math.log((1 - load) / (load * math.exp(rate) - 1) / (1 - _P99)) / rate


class Trigger:
    """Decisions of one instance. One thread, or one lock of the caller, uses it."""

    def __init__(self, cfg: TriggerConfig, clock: Clock, *, cache_bytes: int):
        self.cfg = cfg
        self._clock = clock
        self._cache_bytes = cache_bytes
        self._live: OrderedDict[CacheKey, tuple[int, float]] = OrderedDict()  # bytes, admitted at
        self._live_bytes = 0
        self._saved_s = cfg.burst_s
        self._filled_at_s = clock.now_s()
        self._lives: deque[float] = deque(maxlen=256)
        self._num_lives = 0
        self._life_s = cfg.first_life_s
        self._offered: deque[tuple[float, float]] = deque()  # when, seconds in full
        self._offered_s = self._offered_squares = 0.0
        self._ways: deque[float] = deque(maxlen=_WAYS)
        self._num_ways = 0
        self.way_s = 0.0
        """t_way"""

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
        """Whether to compute ahead; an admission is charged at once. rank_s: of ranking against a prefix. host_s: of a
        batch, beside the device's."""
        self._advance()
        foreseen = self.foresee(full_rank_s=full_rank_s, rank_s=rank_s, tail=tail, wait_s=wait_s, host_s=host_s)
        if foreseen.reason != "wanted":
            return foreseen
        if self._live_bytes + num_bytes > self.cfg.cache_share * self._cache_bytes:
            return Decision(False, "live_cap")
        if preinfer_s > self._saved_s:
            return Decision(False, "rate_cap")
        self._saved_s -= preinfer_s
        self._end(key)
        self._live[key] = (num_bytes, self._clock.now_s())
        self._live_bytes += num_bytes
        return Decision(True, "admitted")

    def foresee(
        self, *, full_rank_s: float, rank_s: float, tail: float, wait_s: float, host_s: float = 0.0
    ) -> Decision:
        """Whether a signal would be of use, from what is known without a history; nothing is charged."""
        if self.cfg.policy == "never":
            return Decision(False, "never")
        if self.cfg.policy == "at_risk":
            is_quick = full_rank_s * tail * 1e3 <= self.cfg.short_share * self.cfg.budget_ms
            served_s = full_rank_s + host_s
            if is_quick or full_rank_s - rank_s < self.cfg.least_gain * served_s:
                return Decision(False, "short")
            late_s = wait_s + full_rank_s * tail + host_s + self.way_s + self._queue_tail_s(served_s)
            if late_s * 1e3 <= self.cfg.budget_ms:
                return Decision(False, "safe")
        return Decision(False, "wanted")

    def offered(self, served_s: float) -> None:
        """A ranking request has come that would take so long in full, with the host's part."""
        self._offered.append((self._clock.now_s(), served_s))
        self._offered_s += served_s
        self._offered_squares += served_s**2
        self._forget_offered()

    def came(self, way_s: float) -> None:
        """A ranking request took so long to its engine, and an answer back."""
        self._ways.append(min(max(0.0, way_s), _LONGEST_WAY_S))
        self._num_ways += 1
        if self._num_ways % _WAYS_EVERY == 0:
            self.way_s = sorted(self._ways)[int(_WAY_QUANTILE * len(self._ways))]

    def _forget_offered(self) -> None:
        now_s = self._clock.now_s()
        while self._offered and self._offered[0][0] < now_s - _LOAD_WINDOW_S:
            _, served_s = self._offered.popleft()
            self._offered_s -= served_s
            self._offered_squares -= served_s**2
        if not self._offered:  # rounding does not pile up
            self._offered_s = self._offered_squares = 0.0

    def _queue_tail_s(self, served_s: float) -> float:
        """w99"""
        now_s = self._clock.now_s()
        self._forget_offered()
        span_s = max(now_s - self._offered[0][0], _SHORTEST_SPAN_S) if self._offered else _LOAD_WINDOW_S
        most_s = self._offered_s + _DEVIATIONS * math.sqrt(max(0.0, self._offered_squares))
        return served_s * waited_p99(most_s / span_s)

    def consumed(self, key: CacheKey) -> None:
        """Ranking has read the prefix, or it is gone: it no longer counts as live."""
        known = self._live.get(key)
        if known is not None:
            self._lives.append(self._clock.now_s() - known[1])
            self._num_lives += 1
            if self._num_lives >= _FEWEST_LIVES and self._num_lives % _REFRESH_EVERY == 0:
                self._life_s = float(np.quantile(self._lives, 0.99)) + self.cfg.life_margin_s
            self._end(key)

    @property
    def life_s(self) -> float:
        """T_life"""
        return self._life_s

    @property
    def live_bytes(self) -> int:
        return self._live_bytes

    def _end(self, key: CacheKey) -> None:
        known = self._live.pop(key, None)
        if known is not None:
            self._live_bytes -= known[0]

    def _advance(self) -> None:
        now_s = self._clock.now_s()
        self._saved_s = min(self.cfg.burst_s, self._saved_s + (now_s - self._filled_at_s) * self.cfg.compute_share)
        self._filled_at_s = now_s
        life_s = self.life_s
        while self._live:
            key, (_, since_s) = next(iter(self._live.items()))
            if now_s - since_s < life_s:
                return
            self._end(key)
