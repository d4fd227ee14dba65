"""Fair queuing with virtual time: equal shares of the device for all clients, and for the users of each client.

    tag of a user's next request   start + max(its seconds, seconds received + next chunk)      the smallest tag is next
    start                          max(now, end of the user's previous request) at its arrival
    now                            grows by seconds / (number of waiting users) with every computed chunk

Users with less received device time go first; among equals, those with the shorter request. No request starves, because
virtual time advances. A request that is computed in chunks keeps its tag: shorter requests go before its remaining
chunks, and equal ones after them. Round-robin by chunks would finish all of them late, with much work done for requests
that then exceed their deadline. Clients are ordered by received time only, without the next chunk, which is known per
user only. Requests of one user stay in order.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from nestrec.serving.inputs.engine_request import EngineRequest

_MAX_ENDS = 1024
"""Number of end times of names that do not wait above which past ones are dropped."""


class _VirtualTime:
    """Virtual time of a set of names, and the queue of the waiting ones."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._ends: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._joined: set[str] = set()
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._joined)

    def add(self, name: str, seconds: float, start_s: float | None = None) -> float | None:
        """Add a name that waits for `seconds`.

        Returns:
            Its start in virtual time (`start_s` if passed), or None if it already waits.
        """
        if name in self._joined:
            return None
        self._number += 1
        self._joined.add(name)
        start_s = max(self._now_s, self._ends.get(name, 0.0)) if start_s is None else start_s
        heapq.heappush(self._heap, (start_s + seconds, self._number, name))
        return start_s

    def pop(self) -> str:
        """Remove and return the next name."""
        name = heapq.heappop(self._heap)[2]
        self._joined.discard(name)
        return name

    def charge(self, name: str, seconds: float, num_waiting: int) -> None:
        """Charge a name for device time that it received while `num_waiting` names waited."""
        self._ends[name] = max(self._now_s, self._ends.get(name, 0.0)) + seconds
        self._now_s += seconds / max(1, num_waiting)
        if len(self._ends) > _MAX_ENDS + 2 * num_waiting:
            self._ends = {name: end_s for name, end_s in self._ends.items() if end_s > self._now_s}


class _Client:
    def __init__(self) -> None:
        self.user_time = _VirtualTime()
        self.users: dict[str, deque[EngineRequest]] = {}
        self.starts_s: dict[str, float] = {}
        """Virtual start times of users with waiting or running requests."""
        self.received_s: dict[str, float] = {}
        """Device seconds received by the current request per user, if it is computed in chunks."""


class FairQueue:
    """Queue of waiting ranking requests in fair order.

    The caller must charge each popped request (with 0 if it gets no device time) and later requeue it with `requeue`;
    until then other requests of its user are skipped.
    """

    def __init__(
        self, next_s: Callable[[EngineRequest], float], total_s: Callable[[EngineRequest], float] | None = None
    ):
        """Create an empty queue.

        Args:
            next_s: Returns the device seconds of the next chunk of a request.
            total_s: Returns the device seconds of the complete request; `next_s` by default.
        """
        self._next_s = next_s
        self._total_s = total_s or next_s
        self._client_time = _VirtualTime()
        self._clients: dict[str, _Client] = {}
        self._num_requests = 0

    def __bool__(self) -> bool:
        """Return whether a request can be popped."""
        return bool(self._client_time)

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[EngineRequest]:
        for client in self._clients.values():
            for requests in client.users.values():
                yield from requests

    def push(self, request: EngineRequest) -> None:
        self._requests_of(request).append(request)
        self._join(request)

    def push_first(self, request: EngineRequest) -> None:
        """Add a request before the others of its user."""
        self._requests_of(request).appendleft(request)
        self._join(request)

    def pop(self) -> EngineRequest:
        client = self._clients[self._client_time.pop()]
        self._num_requests -= 1
        return client.users[client.user_time.pop()].popleft()

    def charge(self, request: EngineRequest, seconds: float) -> None:
        """Charge the client and the user of a popped request for `seconds` of device time."""
        client = self._clients[request.client]
        client.user_time.charge(request.key.user, seconds, len(client.users))
        client.received_s[request.key.user] = client.received_s.get(request.key.user, 0.0) + seconds
        self._client_time.charge(request.client, seconds, len(self._clients))
        if client.user_time:
            self._client_time.add(request.client, 0.0)

    def requeue(self, request: EngineRequest, *, is_unfinished: bool) -> None:
        """Put a popped request back before the others of its user if chunks of it remain, and admit its user again."""
        client = self._clients[request.client]
        requests = client.users[request.key.user]
        if is_unfinished:
            self._num_requests += 1
            requests.appendleft(request)
        else:
            client.received_s.pop(request.key.user, None)
            client.starts_s.pop(request.key.user, None)
        if requests:
            self._join(request)
            return
        del client.users[request.key.user]
        if not client.users:
            del self._clients[request.client]

    def _requests_of(self, request: EngineRequest) -> deque[EngineRequest]:
        """Return the queue of the request's user, to which the caller adds one request."""
        self._num_requests += 1
        client = self._clients.setdefault(request.client, _Client())
        return client.users.setdefault(request.key.user, deque())

    def _join(self, request: EngineRequest) -> None:
        client = self._clients[request.client]
        first = client.users[request.key.user][0]
        user = request.key.user
        seconds = max(self._total_s(first), client.received_s.get(user, 0.0) + self._next_s(first))
        start_s = client.user_time.add(user, seconds, client.starts_s.get(user) if user in client.received_s else None)
        if start_s is not None:
            client.starts_s[user] = start_s
        self._client_time.add(request.client, 0.0)
