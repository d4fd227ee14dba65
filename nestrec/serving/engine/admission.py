"""Admission control (load shedding): estimates of the service time, queue delay and completion time of a request.

`QueueEstimate` bounds the time until a new request completes from the queued device seconds:

    completion  <=  preinfer + min(all requests, clients * min(those of the client, its users * those of the user)),
                    where each sum includes the new request, and preinfer is at most the pre-infer time of one batch

The device time is shared fairly among clients, and among the users of each client (`fair_queue`). Therefore a request
waits at most for everything that is queued, and at most as long as its own work takes at an equal share of the device.
Ranking requests precede pre-infer requests, so a long queue of the latter is not a reason to reject a ranking request.

`AdmissionEstimator` combines this bound with the learned cost model of the engine.
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
    """Queued device seconds and number of requests per user."""


class QueueEstimate:
    """Estimated device seconds of queued and running requests.

    Any thread may read; the caller holds a lock while it calls methods that change the estimate.
    """

    def __init__(self, max_preinfer_s: float = math.inf) -> None:
        """Create an empty estimate.

        Args:
            max_preinfer_s: Maximum device seconds of pre-infer requests in one batch.
        """
        self.num_requests = 0
        self.preinfer_s = 0.0
        self._requests_s = 0.0
        self._max_preinfer_s = max_preinfer_s
        self._num_rank_requests = 0
        self._clients: dict[str, _Client] = {}

    @property
    def seconds(self) -> float:
        """Device seconds of all queued and running requests."""
        return self._requests_s + self.preinfer_s

    @property
    def queue_delay_s(self) -> float:
        """Maximum queue delay of a ranking request that arrives now, in device seconds."""
        return self._requests_s + self._preinfer_before_s

    @property
    def _preinfer_before_s(self) -> float:
        return min(self.preinfer_s, self._max_preinfer_s)

    def add(self, client: str, user: str, seconds: float) -> None:
        """Add a ranking request."""
        own = self._clients.setdefault(client, _Client())
        before_s, number = own.users.get(user, (0.0, 0))
        own.users[user] = (before_s + seconds, number + 1)
        own.seconds += seconds
        self._requests_s += seconds
        self._num_rank_requests += 1
        self.num_requests += 1

    def remove(self, client: str, user: str, seconds: float) -> None:
        """Remove a ranking request that was completed or cancelled."""
        own = self._clients[client]
        before_s, number = own.users.pop(user)
        if number > 1:
            own.users[user] = (max(0.0, before_s - seconds), number - 1)
        own.seconds = max(0.0, own.seconds - seconds)
        if not own.users:
            del self._clients[client]
        self.num_requests -= 1
        self._num_rank_requests -= 1
        self._requests_s = max(0.0, self._requests_s - seconds) if self._num_rank_requests else 0.0

    def clear(self) -> None:
        """Remove all requests."""
        self.num_requests = self._num_rank_requests = 0
        self.preinfer_s = self._requests_s = 0.0
        self._clients.clear()

    def add_preinfer(self, seconds: float) -> None:
        self.preinfer_s += seconds
        self.num_requests += 1

    def remove_preinfer(self, seconds: float) -> None:
        self.num_requests -= 1
        self.preinfer_s = max(0.0, self.preinfer_s - seconds) if self.num_requests > self._num_rank_requests else 0.0

    def completion_s(self, client: str, user: str | None, seconds: float) -> float:
        """Return the device seconds until a new ranking request would be completed.

        Args:
            client: Client that sent the request.
            user: User of the request; None if it has not been parsed yet, which counts as a new user.
            seconds: Estimated device seconds of the request.
        """
        own = self._clients.get(client)
        preinfer_s = self._preinfer_before_s
        if own is None:
            return preinfer_s + min(self._requests_s, len(self._clients) * seconds) + seconds
        user_s, _ = own.users.get(user, (0.0, 0)) if user is not None else (0.0, 0)
        num_users = len(own.users) + (user_s == 0.0)
        of_client_s = min(own.seconds + seconds, num_users * (user_s + seconds))
        return preinfer_s + min(self._requests_s + seconds, len(self._clients) * of_client_s)


_SMOOTH_DOWN, _SMOOTH_UP = 0.05, 0.005
_BUSY = 0.5
"""Busy fraction above which the device, and not the host, is assumed to be the bottleneck."""


class AdmissionEstimator:
    """Predicted service and completion times. Thread-safe for readers; one thread at a time may call `observe`."""

    def __init__(self, costs: EngineCostModel, pacer: BatchPacer, queue: QueueEstimate):
        self._costs = costs
        self._pacer = pacer
        self._queue = queue
        self._byte_s = 0.0  # device seconds per byte of request body

    def full_rank_s(self, length: int, num_candidates: int) -> float:
        """Return the device seconds of a ranking request without a cached prefix."""
        return self._costs.predict_s(*self._costs.work(0, length, num_candidates))

    def rank_s(self, length: int, cached: int, num_candidates: int) -> float:
        """Return the device seconds of a ranking request with a prefix of `cached` tokens in the KV cache."""
        return self._costs.predict_s(*self._costs.work(cached, length - cached, num_candidates))

    def completion_s(self, sender: RequestSource, user: str, seconds: float) -> float:
        """Return the seconds until a request that arrives now and takes `seconds` on the device would be completed."""
        return self._pacer.slowness * self._queue.completion_s(sender.client, user, seconds)

    def unread_completion_s(self, sender: RequestSource) -> float:
        """Same as `completion_s` for an unparsed request, whose service time is estimated from its size."""
        seconds = self._byte_s * sender.num_bytes
        return self._pacer.slowness * self._queue.completion_s(sender.client, None, seconds)

    def observe(self, sender: RequestSource, seconds: float) -> None:
        """Learn the service time per byte from a request.

        The estimate falls quickly and rises slowly, toward requests with a cached prefix: otherwise these would be
        rejected unread because of the cost of requests without one.
        """
        if not sender.num_bytes:
            return
        byte_s = seconds / sender.num_bytes
        known_s = self._byte_s or byte_s
        self._byte_s = known_s + (_SMOOTH_DOWN if byte_s < known_s else _SMOOTH_UP) * (byte_s - known_s)

    @property
    def is_device_busy(self) -> bool:
        """Whether to launch the next batch while the device computes one.

        If the host is the bottleneck, sequential batches are better: each contains more requests, so the host has fewer
        batches to assemble.
        """
        return self._pacer.busy_fraction > _BUSY

    @property
    def device_wait_s(self) -> float:
        """Queue delay of the device in seconds; 0 if the host is the bottleneck."""
        return self._queue.queue_delay_s if self.is_device_busy else 0.0
