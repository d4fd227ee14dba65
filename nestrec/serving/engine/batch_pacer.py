"""Timing of batches: when to schedule the next batch, and how the engine's thread waits until then.

A batch is scheduled as late as possible without making the device idle, so that it includes the latest requests
(dynamic batching). For this, the pacer learns the host time from scheduling to launch and predicts the end of the
batch in flight; it polls for batches that end early.

An engine on a GPU waits by spinning, without the GIL: waits are shorter than the wake-up latency of an idle core, and a
core that slept between two batches is several times slower right after (measured on the host of an H200: 0.7 ms to
assemble a batch instead of 0.2 ms). The thread spins only while a batch is in flight or was until recently.
"""

import time
from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.clock import Clock, RealClock

_MAX_SPIN_S = 2e-3
_SPIN_SMOOTHING = 0.2
_NUM_COUNTERS = 64
_POLL_COST = 2.0
"""Approximate cost of an iteration that also polls for wake-ups, relative to a plain iteration."""


@njit(cache=True, nogil=True)
def _spin(count: int) -> int:
    state = count
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


@njit(cache=True, nogil=True)
def _spin_until(count: int, counters: NDArray[np.int64], seen: int) -> None:
    """Poll a different counter each time: the compiler would hoist the load of a single one out of the loop."""
    state = count
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        if counters[(state >> 16) & (_NUM_COUNTERS - 1)] != seen:
            return


class WakeCounter:
    """Wake-up counter that a spinning thread polls without the GIL, so that polling does not slow other threads."""

    def __init__(self) -> None:
        self.counters = np.zeros(_NUM_COUNTERS, np.int64)

    @property
    def count(self) -> int:
        return int(self.counters[0])

    def notify(self) -> None:
        """Wake the spinning thread. Not thread-safe: one caller at a time."""
        self.counters += 1


class Spin:
    """Busy-waiting of one thread, calibrated to seconds."""

    _first_rate = 1e9

    def __init__(self) -> None:
        self.spin(1)  # compiles, or loads the compiled code from the cache
        _spin_until(1, np.zeros(_NUM_COUNTERS, np.int64), 0)
        self._iterations_per_s = self._first_rate
        for _ in range(8):
            self.wait(1e-4)

    def wait(self, seconds: float) -> None:
        """Spin for about `seconds`, but at most two milliseconds."""
        count = int(min(seconds, _MAX_SPIN_S) * self._iterations_per_s)
        if count <= 0:
            return
        start_s = time.perf_counter()
        if self.spin(count) == count:
            measured = count / max(time.perf_counter() - start_s, 1e-7)
            self._iterations_per_s += _SPIN_SMOOTHING * (measured - self._iterations_per_s)

    def spin(self, limit: int) -> int:
        """Spin for at most `limit` iterations and return the number of iterations made."""
        _spin(limit)
        return limit

    def wait_for_notify(self, seconds: float, calls: WakeCounter, seen: int) -> None:
        """Spin until the count of wake-ups differs from `seen`, or for about `seconds`."""
        _spin_until(int(min(seconds, _MAX_SPIN_S) * self._iterations_per_s / _POLL_COST), calls.counters, seen)


_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 5e-5, 1e-3
_SHORTEST_SPIN_S, _POLL_FRACTION = 3e-5, 0.75
"""Shortest time between two polls for the end of a batch, and the fraction of its remaining time to wait before the
next poll. Each poll takes the GIL from threads that read requests."""
_AWAKE_S = 1e-2
"""Seconds that a spinning thread waits for the next request before it sleeps: waking it would cost the thread that
submits a request time, while that thread holds the GIL."""
_PACE_SMOOTHING = 0.05
_WINDOW_S = 0.1
_MAX_OUTLIER, _OUTLIER_MARGIN_S = 4.0, 1e-3
"""Clipping of host times relative to their mean: an outlier is caused by the machine, not by the batch."""
_SLOWNESS_WINDOW_S, _SLOWNESS_SMOOTH, _MAX_SLOWNESS = 0.2, 0.3, 10.0


class BatchPacer:
    """Timing of the batches of an engine; used on the engine's thread only."""

    def __init__(self, *, spins: bool, clock: Clock | None = None):
        """Create a pacer.

        Args:
            spins: Whether the thread busy-waits, and so keeps its core, while there is work.
            clock: Source of time; the system clock by default.
        """
        self.spins = spins
        self._clock = clock or RealClock()
        self._spin = Spin() if spins else None
        self._wake_counter = WakeCounter()
        self._busy_until_s = 0.0
        self._lead_s, self._spread_s = 1e-3, 2e-4  # recent mean and deviation of the time from scheduling to launch
        self.busy_fraction = 1.0
        """Fraction of recent time during which the device was busy."""
        self._window_began_s = self._clock.now_s()
        self._window_worked_s = 0.0
        self.host_s = 0.0
        """Recent host time of a batch in seconds: from scheduling to its last response, without the device time."""
        self.slowness = 1.0
        """Elapsed seconds per estimated device second while requests are queued; above 1 if the host is the bottleneck
        or estimates are too low."""
        self._waited_since_s: float | None = None
        self._waited_s = self._done_s = 0.0

    def observe_launch(self, planned_s: float, launched_s: float, predicted_s: float) -> None:
        """Record a launched batch.

        Args:
            planned_s: Time at which it was scheduled.
            launched_s: Time at which it was launched.
            predicted_s: Predicted device seconds.
        """
        lead_s = launched_s - planned_s
        self._spread_s += _PACE_SMOOTHING * (abs(lead_s - self._lead_s) - self._spread_s)
        self._lead_s += _PACE_SMOOTHING * (lead_s - self._lead_s)
        self._busy_until_s = max(self._busy_until_s, launched_s) + predicted_s

    def observe_device_time(self, ended_s: float, seconds: float) -> None:
        """Record the measured device seconds of a batch that ended."""
        self._window_worked_s += seconds
        if (span_s := ended_s - self._window_began_s) >= _WINDOW_S:
            self.busy_fraction = min(1.0, self._window_worked_s / span_s)
            self._window_began_s = ended_s
            self._window_worked_s = 0.0

    def observe_host_time(self, host_s: float) -> None:
        """Record the host time of a batch during which no other batch was in flight."""
        host_s = min(host_s, _MAX_OUTLIER * self.host_s + _OUTLIER_MARGIN_S)
        self.host_s += _PACE_SMOOTHING * (host_s - self.host_s)

    def observe_completed(self, ended_s: float, estimate_s: float, *, has_more: bool) -> None:
        """Record completed requests.

        Args:
            ended_s: Time at which their batch ended.
            estimate_s: Sum of their estimated device seconds.
            has_more: Whether other requests are queued.
        """
        if self._waited_since_s is not None:
            self._waited_s += ended_s - self._waited_since_s
            self._done_s += estimate_s
        self._waited_since_s = ended_s if has_more else None
        if self._done_s and self._waited_s >= _SLOWNESS_WINDOW_S:
            measured = min(_MAX_SLOWNESS, max(1.0, self._waited_s / self._done_s))
            self.slowness += _SLOWNESS_SMOOTH * (measured - self.slowness)
            self._waited_s = self._done_s = 0.0

    def observe_end(self, ended_s: float, predicted_s: float) -> None:
        """Record the end of a batch and the predicted device seconds of the batches still in flight."""
        self._busy_until_s = ended_s + predicted_s

    @property
    def next_batch_in_s(self) -> float:
        """Seconds until the next batch should be scheduled, while one is in flight."""
        return self._busy_until_s - (self._lead_s + 2 * self._spread_s) - self._clock.now_s()

    def wait(self, *, has_work: bool) -> None:
        """Wait for part of the time until the next batch should be scheduled or the batch in flight ends.

        Requests that arrive in the meantime are handled in the next step.
        """
        left_s = self._busy_until_s - self._clock.now_s()
        step_in_s = self.next_batch_in_s
        has_step = has_work or step_in_s > 0
        if self._spin is not None:
            self._spin.wait(max(_SHORTEST_SPIN_S, min(_POLL_FRACTION * left_s, step_in_s if has_step else left_s)))
            return
        wait_s = min(max(_SHORTEST_SLEEP_S, left_s / 2), _LONGEST_SLEEP_S)
        wait_s = min(wait_s, step_in_s) if has_step else wait_s
        if wait_s > 0:
            self._clock.sleep(wait_s)

    def notify(self) -> None:
        """Wake the engine's thread. Callable from any thread, one at a time."""
        self._wake_counter.notify()

    def stay_awake(self, has_something_to_do: Callable[[], bool]) -> None:
        """Spin for a moment before sleeping: requests arrive in bursts, and a core that slept is slow at first."""
        if self._spin is None:
            return
        seen = self._wake_counter.count
        end_s = self._clock.now_s() + _AWAKE_S
        if not has_something_to_do():
            while self._wake_counter.count == seen and (left_s := end_s - self._clock.now_s()) > 0:
                self._spin.wait_for_notify(left_s, self._wake_counter, seen)
