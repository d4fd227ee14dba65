"""Admission control: estimates of queue delay and completion time.

How long a request would wait, by whom it is from: what admission asks.

    wait  <=  signals + min(all requests, clients * min(the client's own, its users * the user's own)),
              with the request in each, and of signals what a batch may have of them

The device's time is shared equally among clients, and by each of them among its users (`fair_queue`). So nobody waits
longer than for all that is there, nor longer than its own work takes with an equal share. Requests go before signals,
of which there may be many: those are no reason to refuse a request.

What requests would take and wait for, by what an engine has learned of late: admission and signals go by it.
"""

import math
from dataclasses import dataclass, field

from nestrec.serving.core.cost_model import EngineCostModel
from nestrec.serving.core.request_limits import RequestSource
from nestrec.serving.engine.batch_pacer import BatchPacer


@dataclass(slots=True)
class _Client:
    seconds: float = 0.0
    users: dict[str, tuple[float, int]] = field(default_factory=dict)
    """seconds and number of works of each"""


class QueueEstimate:
    """Estimated device seconds of the work that waits or runs. Changed under a lock of the caller; any thread asks."""

    def __init__(self, most_signals_s: float = math.inf) -> None:
        """most_signals_s: what a batch may have of them."""
        self.num_works = 0
        self.signals_s = 0.0
        self._requests_s = 0.0
        self._most_signals_s = most_signals_s
        self._num_requests = 0
        self._clients: dict[str, _Client] = {}

    @property
    def seconds(self) -> float:
        """Of everything."""
        return self._requests_s + self.signals_s

    @property
    def before_request_s(self) -> float:
        """What a request that comes now may have to wait for."""
        return self._requests_s + self._signals_before_s

    @property
    def _signals_before_s(self) -> float:
        return min(self.signals_s, self._most_signals_s)

    def add(self, client: str, user: str, seconds: float) -> None:
        """A request."""
        own = self._clients.setdefault(client, _Client())
        before_s, number = own.users.get(user, (0.0, 0))
        own.users[user] = (before_s + seconds, number + 1)
        own.seconds += seconds
        self._requests_s += seconds
        self._num_requests += 1
        self.num_works += 1

    def remove(self, client: str, user: str, seconds: float) -> None:
        """What was added has been done, or given up."""
        own = self._clients[client]
        before_s, number = own.users.pop(user)
        if number > 1:
            own.users[user] = (max(0.0, before_s - seconds), number - 1)
        own.seconds = max(0.0, own.seconds - seconds)
        if not own.users:
            del self._clients[client]
        self.num_works -= 1
        self._num_requests -= 1
        self._requests_s = max(0.0, self._requests_s - seconds) if self._num_requests else 0.0

    def clear(self) -> None:
        """Forget all works."""
        self.num_works = self._num_requests = 0
        self.signals_s = self._requests_s = 0.0
        self._clients.clear()

    def add_signal(self, seconds: float) -> None:
        self.signals_s += seconds
        self.num_works += 1

    def remove_signal(self, seconds: float) -> None:
        self.num_works -= 1
        self.signals_s = max(0.0, self.signals_s - seconds) if self.num_works > self._num_requests else 0.0

    def expected_s(self, client: str, user: str | None, seconds: float) -> float:
        """Until work of so many seconds would be done. user: none where it is not known yet, and so a new one."""
        own = self._clients.get(client)
        signals_s = self._signals_before_s
        if own is None:
            return signals_s + min(self._requests_s, len(self._clients) * seconds) + seconds
        user_s, _ = own.users.get(user, (0.0, 0)) if user is not None else (0.0, 0)
        num_users = len(own.users) + (user_s == 0.0)
        of_client_s = min(own.seconds + seconds, num_users * (user_s + seconds))
        return signals_s + min(self._requests_s + seconds, len(self._clients) * of_client_s)


_SMOOTH_DOWN, _SMOOTH_UP = 0.05, 0.005
_BUSY = 0.5
"""share of its time that a device works where work waits for it rather than for the host"""


class AdmissionEstimator:
    """Any thread asks; one at a time tells."""

    def __init__(self, costs: EngineCostModel, pace: BatchPacer, backlog: QueueEstimate):
        self._costs = costs
        self._pace = pace
        self._backlog = backlog
        self._byte_s = 0.0  # device seconds of a byte of a request

    def full_rank_s(self, length: int, num_candidates: int) -> float:
        return self._costs.predict_s(*self._costs.work(0, length, num_candidates))

    def rank_s(self, length: int, cached: int, num_candidates: int) -> float:
        """Against a prefix of so many tokens."""
        return self._costs.predict_s(*self._costs.work(cached, length - cached, num_candidates))

    def ends_in_s(self, sender: RequestSource, user: str, seconds: float) -> float:
        """Until a request that came now and takes so long would be answered."""
        return self._pace.slowness * self._backlog.expected_s(sender.client, user, seconds)

    def unread_ends_in_s(self, sender: RequestSource) -> float:
        """The same of one that nobody has looked into, by its size."""
        seconds = self._byte_s * sender.num_bytes
        return self._pace.slowness * self._backlog.expected_s(sender.client, None, seconds)

    def told(self, sender: RequestSource, seconds: float) -> None:
        """A request of this size takes so long. What a byte takes goes quickly down and slowly up, towards requests
        that have a prefix here: unread, they would be refused for what others cost."""
        if not sender.num_bytes:
            return
        byte_s = seconds / sender.num_bytes
        known_s = self._byte_s or byte_s
        self._byte_s = known_s + (_SMOOTH_DOWN if byte_s < known_s else _SMOOTH_UP) * (byte_s - known_s)

    @property
    def is_device_busy(self) -> bool:
        """Worth a next batch beside the one that it computes. Where the host is what is slow, one batch after another
        holds more requests each, and the host has fewer batches to put together."""
        return self._pace.busy_share > _BUSY

    @property
    def device_wait_s(self) -> float:
        """What waits for the device: where the host is what is slow, nothing, since signals would only add to that."""
        return self._backlog.before_request_s if self.is_device_busy else 0.0
