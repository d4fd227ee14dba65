"""Open-loop load for an engine in this process: requests of users, some of whom return with a few new events."""

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
_SPIN_S = 3e-4
_MIN_IN_TURN = 5
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLoad:
    """Parameters of a load. The history of a user is a function of the user and the number of the visit."""

    history: int
    """Number of events at the first visit."""
    candidates: int
    returning: float
    """Fraction of requests of returning users."""
    new_events: int = 4
    """Number of new events between two visits."""
    recent_users: int = 64
    """Number of latest users from which a returning user is drawn."""
    pause_s: float = 0.5
    """Minimum time between two visits of a user, so that users do not return before they have a response."""
    signal_s: float = 0.15
    """Time from a pre-infer signal to the ranking request."""
    warm_s: float = 0.5
    """Warm-up time before requests are counted, in which caches, queues and the trigger reach a steady state."""
    duration_s: float = 8.0
    fewest: int = 150
    """Minimum number of requests in a trial, which can make it longer than `duration_s`."""
    longest_s: float = math.inf
    """Maximum duration of a trial, which takes precedence over `fewest`."""
    lengths: tuple[int, ...] = ()
    """Numbers of events at the first visit, assigned to users in turn, instead of `history`."""
    timeout_s: float = 10.0
    """Timeout of ranking requests; requests that would exceed it are rejected."""
    body_bytes: int = 0
    """Size of request bodies. A request is rejected before its body is parsed if its size is too large for the current
    load, as by a frontend."""
    seed: int = 0

    def visits(self, at_s: Floats) -> list[tuple[int, int]]:
        """Return the user and the number of the visit for each request."""
        rng = np.random.default_rng(self.seed)
        away: deque[tuple[float, int, int]] = deque()  # (time, user, number of visits) of users who cannot return yet
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
    """Return the cached request bank of a seed."""
    return Requests(seed)


class Requests:
    """Histories and candidates that are slices of one bank of random events, so that their creation takes no time."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self._items = rng.integers(1, NUM_ITEMS, _BANK)
        self._tabs = rng.integers(0, 3, _BANK)
        self._actions = rng.integers(0, 4, _BANK)
        self._times = np.sort(rng.integers(0, _NOW_MS // 2, _BANK))

    def request(self, load: RelayLoad, user: int, visit: int) -> tuple[History, Candidates]:
        """Return the history and the candidates of a visit."""
        length = load.history if not load.lengths else load.lengths[user * 7919 % len(load.lengths)]
        length += visit * load.new_events
        first = user * 7919 % (_BANK // 2)  # independent of the length: a returning user has the same events and more
        events = slice(first, first + length)
        history = History(
            items=self._items[events],
            times_ms=self._times[events],
            actions=self._actions[events],
            features={"event_tab": self._tabs[events]},
        )
        chosen = slice(first // 2, first // 2 + load.candidates)
        candidates = Candidates(items=self._items[chosen], now_ms=_NOW_MS, features={"event_tab": self._tabs[chosen]})
        return history, candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOutcome:
    """Result of a trial, with counters and a breakdown of the latency."""

    trial: Trial
    counts: dict[str, int]
    """Counters of the engine."""
    parts: dict[str, float]
    """Parts of the latency of successful requests, and the utilization of the device."""


def run_in_turn(engine: Engine, load: RelayLoad, count: int) -> list[float]:
    """Send requests one after another (closed loop), and return their latencies in milliseconds."""
    bank = bank_of(load.seed)
    latency_ms = list[float]()
    ended: queue.SimpleQueue[float] = queue.SimpleQueue()
    end_s = time.perf_counter() + load.longest_s
    for user in range(count):
        if user >= _MIN_IN_TURN and time.perf_counter() > end_s:
            break
        history, candidates = bank.request(load, user, 0)
        start_s = time.perf_counter()
        request = engine.submit_rank(f"{user}", history, candidates, timeout_s=_TIMEOUT_S)
        request.future.add_done_callback(lambda _: ended.put(time.perf_counter()))
        latency_ms.append((ended.get() - start_s) * 1e3)
    return latency_ms


def run_trial(
    engine: Engine, load: RelayLoad, rate: float, *, sends_signals: bool, strays: float = 0.0
) -> RelayOutcome:
    """Measure one rate with an open loop: signals and requests are sent at fixed times, independent of the engine.

    The sender is a thread of the engine's process, like a frontend, because timers of an event loop have a resolution
    of milliseconds.

    Args:
        engine: Engine that is measured.
        load: Parameters of the load.
        rate: Requests per second.
        sends_signals: Whether pre-infer signals are sent.
        strays: Fraction of ranking requests that reach a different instance than their signal.
    """
    requests = _TrialRequests(engine, load, rate, strays=strays)
    wait_until = _PreciseTimer(Spin() if engine.pacer.spins else None).wait_until
    requests.start_s = time.perf_counter() + 0.01
    for send_s, send in requests.schedule(sends_signals=sends_signals):
        wait_until(requests.start_s + send_s)
        send()
    engine.wait_until_idle(_TIMEOUT_S)
    return requests.outcome()


def simulate_trial(
    engine: Engine, clock: EventClock, load: RelayLoad, rate: float, *, sends_signals: bool, way_s: float = 0.0
) -> RelayOutcome:
    """Measure one rate in simulated time, with an engine without a thread.

    Args:
        engine: Engine that is measured.
        clock: Simulated clock of the engine.
        load: Parameters of the load.
        rate: Requests per second.
        sends_signals: Whether pre-infer signals are sent.
        way_s: Round-trip time between the sender and the engine.
    """
    requests = _TrialRequests(engine, load, rate, way_s=way_s)
    requests.start_s = clock.now_s()
    for send_s, send in requests.schedule(sends_signals=sends_signals):
        clock.at(requests.start_s + send_s, send)
    run_until_idle(engine, clock)
    return requests.outcome()


def run_until_idle(engine: Engine, clock: EventClock) -> None:
    """Run engine steps and scheduled events until none are left."""
    while engine.has_work or clock.next_s < math.inf:
        if engine.has_work:
            engine.step()
        else:
            clock.sleep(max(0.0, clock.next_s - clock.now_s()))


class _TrialRequests:
    """Signals and requests of one trial, and their results. Times are those of the engine's clock."""

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
        # Only requests in flight: if they were stored longer, their memory could not be reused.
        self._in_flight: dict[int, EngineRequest] = {}

    def schedule(self, *, sends_signals: bool) -> list[tuple[float, Callable[[], None]]]:
        """Return send times after the start and functions that send, in order of time."""
        numbers = range(len(self._at_s))
        ranks = [(self._at_s[i] + self._load.signal_s, functools.partial(self._rank, i)) for i in numbers]
        signals = [(self._at_s[i], functools.partial(self._signal, i)) for i in numbers if sends_signals]
        return sorted([*signals, *ranks], key=lambda one: one[0])

    def outcome(self) -> RelayOutcome:
        """Return the result, after all requests have ended."""
        load = self._load
        at_s = self._at_s
        utilization = self._engine.device_s / (self._engine.clock.now_s() - self.start_s)
        due_s = self.start_s + load.signal_s + at_s
        counted = at_s >= load.warm_s
        latency_ms = (self._ended_s + self._way_s - due_s) * 1e3
        span_s = float(at_s[-1]) - load.warm_s
        late_ms = float(np.quantile(self._lateness_ms[counted], 0.99))
        trial = Trial(self._rate, latency_ms[counted], late_ms, span_s)
        chosen = counted & np.isfinite(latency_ms)
        times = (due_s, self._planned_s, self._launched_s, self._ended_s)
        parts = _latency_parts(*(times_s[chosen] for times_s in times))
        parts["device_share"] = round(utilization, 3)
        return RelayOutcome(trial=trial, counts=self._engine.counts, parts=parts)

    def _signal(self, number: int) -> None:
        history, candidates = self._requests[number]
        with contextlib.suppress(RequestRejectedError):
            self._engine.submit_preinfer(
                self._user(number), history, candidates.now_ms, len(candidates), timeout_s=_TIMEOUT_S
            )

    def _rank(self, number: int) -> None:
        history, candidates = self._requests[number]
        now_s = self._engine.clock.now_s()
        self._lateness_ms[number] = (now_s - self.start_s - self._at_s[number] - self._load.signal_s) * 1e3
        name = self._user(number)
        if self._is_stray[number]:  # another user name, so that no prefix is cached
            name = f"{name}.{number}"
        sender = RequestSource(num_bytes=self._load.body_bytes, received_s=now_s - self._way_s if self._way_s else 0.0)
        if self._load.body_bytes and self._engine.is_overloaded_for(sender):
            self._engine.reject()
            return
        with contextlib.suppress(RequestRejectedError):
            request = self._engine.submit_rank(name, history, candidates, timeout_s=self._load.timeout_s, sender=sender)
            self._in_flight[number] = request
            request.future.add_done_callback(functools.partial(self._complete, number))

    def _user(self, number: int) -> str:
        return f"{self._visits[number][0]}"

    def _complete(self, number: int, future: "Future[RankResult]") -> None:
        request = self._in_flight.pop(number)
        if future.exception() is None:
            self._ended_s[number] = self._engine.clock.now_s()
            self._planned_s[number] = request.planned_s
            self._launched_s[number] = request.launched_s


class _PreciseTimer:
    """Timer that sleeps and, if the engine spins, spins at the end of a wait, because a sleeping core wakes up late."""

    def __init__(self, spin: Spin | None):
        self._spin = spin

    def wait_until(self, moment_s: float) -> None:
        left_s = moment_s - time.perf_counter()
        if self._spin is None:
            time.sleep(max(0.0, left_s))
            return
        if left_s > 2 * _SPIN_S:
            time.sleep(left_s - _SPIN_S)
        while (left_s := moment_s - time.perf_counter()) > 0:
            self._spin.wait(left_s)


def arrivals(rate: float, load: RelayLoad) -> Floats:
    """Return random send times with exactly the expected number of requests, so that short trials have the exact rate.

    While users cannot return yet, requests of returning users are omitted; otherwise, they would all be requests of
    new users.
    """
    rng = np.random.default_rng(load.seed)
    duration_s = load.warm_s + max(load.duration_s, min(load.fewest / rate, load.longest_s))
    at_s = np.sort(rng.uniform(0, duration_s, round(rate * duration_s)))
    is_sent = (at_s >= min(load.pause_s, load.warm_s)) | (rng.random(len(at_s)) >= load.returning)
    sent: Floats = at_s[is_sent]
    return sent


def _latency_parts(due_s: Floats, planned_s: Floats, launched_s: Floats, ended_s: Floats) -> dict[str, float]:
    """Return the median times of a request before, during and after the formation of its batch, in milliseconds."""
    if not len(due_s):
        return {}
    parts = {"wait": planned_s - due_s, "launch": launched_s - planned_s, "run": ended_s - launched_s}
    return {f"{name}_p50_ms": round(float(np.median(values)) * 1e3, 3) for name, values in parts.items()}
