"""When the next batch is to be planned, and how the engine's thread waits until then.

Planned as late as keeps the device busy, a batch also holds what came a moment ago: so the host's seconds from plan to
launch are learned, and the end of the batch before is predicted. One that ends early is seen by looking.

Waiting for less than it takes an idle core to wake: the thread keeps its core and leaves the interpreter to others.

A core that slept between two batches is several times slower just after it (measured on an H200's host: 0.7 ms to put a
batch together instead of 0.2). Only engines on a GPU wait so, and only while a batch is on its way or was a moment
ago.
"""

import time
from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.clock import Clock, RealClock

_MOST_S = 2e-3
_SPIN_SMOOTHING = 0.2
_PLACES = 64
_LOOK_COST = 2.0
"""turns for which one takes that looks at calls as well, about"""


@njit(cache=True, nogil=True)
def _turns(count: int) -> int:
    state = count
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


@njit(cache=True, nogil=True)
def _turns_until(count: int, calls: NDArray[np.int64], seen: int) -> None:
    """Looks at another place each time: a compiler would read one place once."""
    state = count
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        if calls[(state >> 16) & (_PLACES - 1)] != seen:
            return


class Calls:
    """By which a thread that spins is called without the interpreter: to look it would have to ask for that each time,
    and take from whoever has it."""

    def __init__(self) -> None:
        self.places = np.zeros(_PLACES, np.int64)

    @property
    def count(self) -> int:
        return int(self.places[0])

    def call(self) -> None:
        """One thread at a time."""
        self.places += 1


class Spin:
    """Waits of one thread."""

    _first_rate = 1e9

    def __init__(self) -> None:
        self.turn(1)  # compiled, or read from the cache
        _turns_until(1, np.zeros(_PLACES, np.int64), 0)
        self._turns_a_second = self._first_rate
        for _ in range(8):
            self.wait(1e-4)

    def wait(self, seconds: float) -> None:
        """About so long, but at most two milliseconds."""
        count = int(min(seconds, _MOST_S) * self._turns_a_second)
        if count <= 0:
            return
        start_s = time.perf_counter()
        if self.turn(count) == count:
            found = count / max(time.perf_counter() - start_s, 1e-7)
            self._turns_a_second += _SPIN_SMOOTHING * (found - self._turns_a_second)

    def turn(self, most: int) -> int:
        """Spin for at most `most` turns and return the number of turns made."""
        _turns(most)
        return most

    def wait_for_call(self, seconds: float, calls: Calls, seen: int) -> None:
        """Until there are other calls than those that were seen, or about so long."""
        _turns_until(int(min(seconds, _MOST_S) * self._turns_a_second / _LOOK_COST), calls.places, seen)


_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 5e-5, 1e-3
_SHORTEST_SPIN_S, _LOOKED_FOR = 3e-5, 0.75
"""how a thread that spins looks for the end of a batch: after so much of the time that is left. Each look takes the
interpreter from whoever reads requests"""
_AWAKE_S = 1e-2
"""for which a thread that spins waits for the next request before it sleeps: whoever wakes it pays for that, with the
interpreter in its hands"""
_PACE_SMOOTHING = 0.05
_WINDOW_S = 0.1
_MOST_SURPRISE, _LEAST_SURPRISE_S = 4.0, 1e-3
"""what one batch adds to what is taken for the host's part: a hiccup of the machine is no cost of batches"""
_SLOWNESS_WINDOW_S, _SLOWNESS_SMOOTH, _MOST_SLOWNESS = 0.2, 0.3, 10.0


class BatchPacer:
    """Used on the engine's thread."""

    def __init__(self, *, spins: bool, clock: Clock | None = None):
        """spins: the thread keeps its core busy while there is work."""
        self.spins = spins
        self._clock = clock or RealClock()
        self._spin = Spin() if spins else None
        self._calls = Calls()
        self._busy_until_s = 0.0
        self._lead_s, self._spread_s = 1e-3, 2e-4  # of late, from plan to launch
        self.busy_share = 1.0
        """of its time of late for which the device has worked"""
        self._window_began_s = self._clock.now_s()
        self._window_worked_s = 0.0
        self.host_s = 0.0
        """of a batch by itself, beside the device's: from its plan to its last answer, of late"""
        self.slowness = 1.0
        """seconds that go by for one of work, as it was estimated, while work waits: more than one where the host is
        what is slow, or estimates are too low"""
        self._waited_since_s: float | None = None
        self._waited_s = self._done_s = 0.0

    def launched(self, planned_s: float, launched_s: float, predicted_s: float) -> None:
        """A batch is on its way that is expected to take so long on the device."""
        lead_s = launched_s - planned_s
        self._spread_s += _PACE_SMOOTHING * (abs(lead_s - self._lead_s) - self._spread_s)
        self._lead_s += _PACE_SMOOTHING * (lead_s - self._lead_s)
        self._busy_until_s = max(self._busy_until_s, launched_s) + predicted_s

    def worked(self, ended_s: float, seconds: float) -> None:
        """A batch has ended for which the device worked so long."""
        self._window_worked_s += seconds
        if (span_s := ended_s - self._window_began_s) >= _WINDOW_S:
            self.busy_share = min(1.0, self._window_worked_s / span_s)
            self._window_began_s = ended_s
            self._window_worked_s = 0.0

    def answered_alone(self, host_s: float) -> None:
        """A batch beside which there was no other took the host so long."""
        host_s = min(host_s, _MOST_SURPRISE * self.host_s + _LEAST_SURPRISE_S)
        self.host_s += _PACE_SMOOTHING * (host_s - self.host_s)

    def done(self, ended_s: float, estimate_s: float, *, has_more: bool) -> None:
        """Works have been answered that were taken for so many seconds together. has_more: others wait."""
        if self._waited_since_s is not None:
            self._waited_s += ended_s - self._waited_since_s
            self._done_s += estimate_s
        self._waited_since_s = ended_s if has_more else None
        if self._done_s and self._waited_s >= _SLOWNESS_WINDOW_S:
            found = min(_MOST_SLOWNESS, max(1.0, self._waited_s / self._done_s))
            self.slowness += _SLOWNESS_SMOOTH * (found - self.slowness)
            self._waited_s = self._done_s = 0.0

    def ended(self, ended_s: float, predicted_s: float) -> None:
        """A batch has ended; those after it are expected to take so long."""
        self._busy_until_s = ended_s + predicted_s

    @property
    def turn_in_s(self) -> float:
        """Until the next batch is to be planned, while one is on its way."""
        return self._busy_until_s - (self._lead_s + 2 * self._spread_s) - self._clock.now_s()

    def wait(self, *, has_work: bool) -> None:
        """A part of the time until the next batch is to be planned, or until one on its way ends: what arrives
        meanwhile can wait for the next turn."""
        left_s = self._busy_until_s - self._clock.now_s()
        turn_in_s = self.turn_in_s
        has_turn = has_work or turn_in_s > 0
        if self._spin is not None:
            self._spin.wait(max(_SHORTEST_SPIN_S, min(_LOOKED_FOR * left_s, turn_in_s if has_turn else left_s)))
            return
        wait_s = min(max(_SHORTEST_SLEEP_S, left_s / 2), _LONGEST_SLEEP_S)
        wait_s = min(wait_s, turn_in_s) if has_turn else wait_s
        if wait_s > 0:
            self._clock.sleep(wait_s)

    def call(self) -> None:
        """There is something to do; by any thread, one at a time."""
        self._calls.call()

    def stay_awake(self, has_something_to_do: Callable[[], bool]) -> None:
        """A moment before sleeping: requests come in bursts, and a core that slept is slow for the first of them."""
        if self._spin is None:
            return
        seen = self._calls.count
        end_s = self._clock.now_s() + _AWAKE_S
        if not has_something_to_do():
            while self._calls.count == seen and (left_s := end_s - self._clock.now_s()) > 0:
                self._spin.wait_for_call(left_s, self._calls, seen)
