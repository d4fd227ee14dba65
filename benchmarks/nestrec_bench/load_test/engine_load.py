"""Load on an engine of this process: users who come, some of whom come back with a few more events."""

import contextlib
import functools
import math
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.core.rejections import RequestRejectedError
from nestrec.serving.core.request_limits import RequestSource
from nestrec.serving.engine.batch_pacer import Spin
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.inputs.engine_request import EngineRequest, RankResult
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec_bench.harness.clocks import EventClock
from nestrec_bench.load_test.open_loop import Trial

NUM_ITEMS = 10_000
_BANK = 1 << 20
_NOW_MS = 2 * 10**10
_TIMEOUT_S = 10.0
_SPUN_S = 3e-4
_FEWEST_IN_TURN = 5
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLoad:
    """A user's history is a function of the user and the visit."""

    history: int
    """events at the first visit"""
    candidates: int
    returning: float
    """share of requests of users who were here before"""
    new_events: int = 4
    """between two visits"""
    recent_users: int = 64
    """a returning user is one of so many latest ones"""
    pause_s: float = 0.5
    """between two visits of a user at least: nobody comes back before the answer"""
    signal_s: float = 0.15
    """from signal to ranking request"""
    warm_s: float = 0.5
    """before requests are counted: caches, queues and the trigger settle"""
    duration_s: float = 8.0
    fewest: int = 150
    """requests of a trial, however short"""
    longest_s: float = math.inf
    """of a trial, however few requests come"""
    lengths: tuple[int, ...] = ()
    """events at the first visit, by turns of users, instead of `history`"""
    timeout_s: float = 10.0
    """for which requests may wait: those that could not be in time are refused"""
    body_bytes: int = 0
    """size of their bodies: where one of that size would be refused whatever is in it, it is, as by a front"""
    seed: int = 0

    def visits(self, at_s: Floats) -> list[tuple[int, int]]:
        """(user, visit) of each request."""
        rng = np.random.default_rng(self.seed)
        away: deque[tuple[float, int, int]] = deque()  # (moment, user, visits so far) of those who cannot be back yet
        recent: list[tuple[int, int]] = []
        visits: list[tuple[int, int]] = []
        for number, moment_s in enumerate(at_s):
            while away and away[0][0] <= moment_s - self.pause_s:
                recent.append(away.popleft()[1:])
            del recent[: -self.recent_users]
            visit = (number, 0)
            if recent and rng.random() < self.returning:
                visit = recent.pop(int(rng.integers(len(recent))))
            visits.append(visit)
            away.append((float(moment_s), visit[0], visit[1] + 1))
        return visits


@functools.cache
def bank_of(seed: int) -> "Requests":
    return Requests(seed)


class Requests:
    """Histories and candidates cut out of one bank of random events, so that making them costs no time."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self._items, self._tabs = rng.integers(1, NUM_ITEMS, _BANK), rng.integers(0, 3, _BANK)
        self._actions = rng.integers(0, 4, _BANK)
        self._times = np.sort(rng.integers(0, _NOW_MS // 2, _BANK))

    def request(self, load: RelayLoad, user: int, visit: int) -> tuple[History, Candidates]:
        length = load.history if not load.lengths else load.lengths[user * 7919 % len(load.lengths)]
        length += visit * load.new_events
        first = user * 7919 % (_BANK // 2)  # whatever the length: a user who returns has the same events and more
        events = slice(first, first + length)
        history = History(
            items=self._items[events],
            times_ms=self._times[events],
            actions=self._actions[events],
            features={"event_tab": self._tabs[events]},
        )
        asked = slice(first // 2, first // 2 + load.candidates)
        candidates = Candidates(items=self._items[asked], now_ms=_NOW_MS, features={"event_tab": self._tabs[asked]})
        return history, candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOutcome:
    """A trial, and what it consisted of."""

    trial: Trial
    counts: dict[str, int]
    """of the engine"""
    parts: dict[str, float]
    """where the time of answered requests went, and how busy the device was"""


def run_in_turn(engine: Engine, load: RelayLoad, count: int) -> list[float]:
    """Milliseconds of requests of which each leaves when the one before has been answered."""
    bank = bank_of(load.seed)
    latency_ms = list[float]()
    ended: queue.SimpleQueue[float] = queue.SimpleQueue()
    end_s = time.perf_counter() + load.longest_s
    for user in range(count):
        if user >= _FEWEST_IN_TURN and time.perf_counter() > end_s:
            break
        history, candidates = bank.request(load, user, 0)
        start_s = time.perf_counter()
        work = engine.rank(f"{user}", history, candidates, timeout_s=_TIMEOUT_S)
        work.future.add_done_callback(lambda _: ended.put(time.perf_counter()))
        latency_ms.append((ended.get() - start_s) * 1e3)
    return latency_ms


def run_trial(
    engine: Engine, load: RelayLoad, rate: float, *, sends_signals: bool, strays: float = 0.0
) -> RelayOutcome:
    """One rate, open loop: signals and requests leave at their moments, whatever the engine does.

    strays: share of ranking requests that reach another instance than their signal did.

    The sender is a plain thread of the engine's process, as a front would be, since the event loop's clock ticks in
    milliseconds.
    """
    sent = _Sent(engine, load, rate, strays=strays)
    wait_until = _Clock(Spin() if engine.pace.spins else None).wait_until
    sent.start_s = time.perf_counter() + 0.01
    for moment_s, send in sent.agenda(sends_signals=sends_signals):
        wait_until(sent.start_s + moment_s)
        send()
    engine.wait_until_idle(_TIMEOUT_S)
    return sent.outcome()


def simulate_trial(
    engine: Engine, clock: EventClock, load: RelayLoad, rate: float, *, sends_signals: bool, way_s: float = 0.0
) -> RelayOutcome:
    """The same in simulated time, by an engine without a thread. way_s: from the sender to the engine and back."""
    sent = _Sent(engine, load, rate, way_s=way_s)
    sent.start_s = clock.now_s()
    for moment_s, send in sent.agenda(sends_signals=sends_signals):
        clock.at(sent.start_s + moment_s, send)
    take_turns(engine, clock)
    return sent.outcome()


def take_turns(engine: Engine, clock: EventClock) -> None:
    """Until nothing is left to do, now or later."""
    while engine.has_something_to_do or clock.next_s < math.inf:
        if engine.has_something_to_do:
            engine.turn()
        else:
            clock.sleep(max(0.0, clock.next_s - clock.now_s()))


class _Sent:
    """Signals and requests of one trial, and what became of them. Moments are of the engine's clock."""

    def __init__(self, engine: Engine, load: RelayLoad, rate: float, *, strays: float = 0.0, way_s: float = 0.0):
        self._engine = engine
        self._load = load
        self._rate = rate
        self._way_s = way_s
        self.start_s = 0.0
        self._at_s = arrivals(rate, load)
        self._visits = load.visits(self._at_s)
        bank = bank_of(load.seed)
        self._requests = [bank.request(load, *visit) for visit in self._visits]
        self._is_stray = np.random.default_rng(load.seed).random(len(self._at_s)) < strays
        self._ended_s, self._planned_s, self._launched_s, self._lateness_ms = (
            np.full(len(self._at_s), np.inf) for _ in range(4)
        )
        # Works on their way: kept longer, their memory would have to be new each time.
        self._works: dict[int, EngineRequest] = {}

    def agenda(self, *, sends_signals: bool) -> list[tuple[float, Callable[[], None]]]:
        """What is to be sent, and when after the start, in order."""
        numbers = range(len(self._at_s))
        ranks = [(self._at_s[i] + self._load.signal_s, functools.partial(self._rank, i)) for i in numbers]
        signals = [(self._at_s[i], functools.partial(self._signal, i)) for i in numbers if sends_signals]
        return sorted([*signals, *ranks], key=lambda one: one[0])

    def outcome(self) -> RelayOutcome:
        """When all have been answered or given up."""
        load = self._load
        at_s = self._at_s
        device_share = self._engine.device_s / (self._engine.clock.now_s() - self.start_s)
        asked_s = self.start_s + load.signal_s + at_s
        counted = at_s >= load.warm_s
        latency_ms = (self._ended_s + self._way_s - asked_s) * 1e3
        span_s = float(at_s[-1]) - load.warm_s
        late_ms = float(np.quantile(self._lateness_ms[counted], 0.99))
        trial = Trial(self._rate, latency_ms[counted], late_ms, span_s)
        chosen = counted & np.isfinite(latency_ms)
        times = (asked_s, self._planned_s, self._launched_s, self._ended_s)
        parts = _parts(*(times_s[chosen] for times_s in times))
        share = {"device_share": round(device_share, 3)}
        return RelayOutcome(trial=trial, counts=self._engine.counts, parts={**parts, **share})

    def _signal(self, number: int) -> None:
        history, candidates = self._requests[number]
        with contextlib.suppress(RequestRejectedError):
            self._engine.preinfer(self._user(number), history, candidates.now_ms, len(candidates), timeout_s=_TIMEOUT_S)

    def _rank(self, number: int) -> None:
        (history, candidates) = self._requests[number]
        now_s = self._engine.clock.now_s()
        self._lateness_ms[number] = (now_s - self.start_s - self._at_s[number] - self._load.signal_s) * 1e3
        name = self._user(number)
        if self._is_stray[number]:  # whoever comes by chance finds nothing of theirs
            name = f"{name}.{number}"
        sender = RequestSource(num_bytes=self._load.body_bytes, began_s=now_s - self._way_s if self._way_s else 0.0)
        if self._load.body_bytes and self._engine.is_full_for(sender):
            self._engine.refuse()
            return
        with contextlib.suppress(RequestRejectedError):
            work = self._engine.rank(name, history, candidates, timeout_s=self._load.timeout_s, sender=sender)
            self._works[number] = work
            work.future.add_done_callback(functools.partial(self._answered, number))

    def _user(self, number: int) -> str:
        return f"{self._visits[number][0]}"

    def _answered(self, number: int, future: "Future[RankResult]") -> None:
        work = self._works.pop(number)
        if future.exception() is None:
            self._ended_s[number] = self._engine.clock.now_s()
            self._planned_s[number] = work.planned_s
            self._launched_s[number] = work.launched_s


class _Clock:
    """Waits for moments: sleeping, and spinning for the last of it where the engine does, since a core that sleeps is
    late by what it takes to wake."""

    def __init__(self, spin: Spin | None):
        self._spin = spin

    def wait_until(self, moment_s: float) -> None:
        left_s = moment_s - time.perf_counter()
        if self._spin is None:
            time.sleep(max(0.0, left_s))
            return
        if left_s > 2 * _SPUN_S:
            time.sleep(left_s - _SPUN_S)
        while (left_s := moment_s - time.perf_counter()) > 0:
            self._spin.wait(left_s)


def arrivals(rate: float, load: RelayLoad) -> Floats:
    """Poisson arrivals of which exactly the expected number came: so the rate of a short trial is the rate it says.

    As long as nobody can be back yet, those who would be do not come: more users than usual would all be new.
    """
    rng = np.random.default_rng(load.seed)
    duration_s = load.warm_s + max(load.duration_s, min(load.fewest / rate, load.longest_s))
    at_s = np.sort(rng.uniform(0, duration_s, round(rate * duration_s)))
    comes: Floats = at_s[(at_s >= min(load.pause_s, load.warm_s)) | (rng.random(len(at_s)) >= load.returning)]
    return comes


def _parts(asked_s: Floats, planned_s: Floats, launched_s: Floats, ended_s: Floats) -> dict[str, float]:
    """Median milliseconds of a request before, in and after the making of its batch."""
    if not len(asked_s):
        return {}
    named = {"wait": planned_s - asked_s, "launch": launched_s - planned_s, "run": ended_s - launched_s}
    return {f"{name}_p50_ms": round(float(np.median(values)) * 1e3, 3) for name, values in named.items()}
