"""The order in which requests get the device: equal shares of its time for clients, and for the users of each.

    tag of a user's next request   start + max(its seconds, what it has had + its next piece)      the smallest is next
    start                          max(now, end of the user's last one), when it came
    now                            grows by seconds / (those who wait) with every piece that is computed

This is fair queueing in virtual time. Whoever has had less goes first; of those who have had the same, whoever asks for
less; and nobody waits for ever, since time goes on. A request that is computed in pieces keeps its tag: shorter ones go
before its rest, and equal ones behind it. If they took turns piece by piece all of them would end late, with much work
begun for those who then give up. Clients take turns by what they have had alone, without their next piece, which is
known of a user only. Requests of one user keep their order.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from nestrec.serving.inputs.engine_request import EngineRequest

_MOST_ENDS = 1024
"""remembered of those who do not wait, before the past ones are looked for"""


class _VirtualTime:
    """Virtual time among some names, and who of them is next."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._ends: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._joined: set[str] = set()
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._joined)

    def join(self, name: str, seconds: float, start_s: float | None = None) -> float | None:
        """It waits for so much; none where it waits already. Else when its time starts: now, unless that is told."""
        if name in self._joined:
            return None
        self._number += 1
        self._joined.add(name)
        start_s = max(self._now_s, self._ends.get(name, 0.0)) if start_s is None else start_s
        heapq.heappush(self._heap, (start_s + seconds, self._number, name))
        return start_s

    def leave(self) -> str:
        """The next one, who does not wait any more."""
        name = heapq.heappop(self._heap)[2]
        self._joined.discard(name)
        return name

    def charge(self, name: str, seconds: float, num_waiting: int) -> None:
        """It has been given so much, while so many had a right to it."""
        self._ends[name] = max(self._now_s, self._ends.get(name, 0.0)) + seconds
        self._now_s += seconds / max(1, num_waiting)
        if len(self._ends) > _MOST_ENDS + 2 * num_waiting:
            self._ends = {name: end_s for name, end_s in self._ends.items() if end_s > self._now_s}


class _Client:
    def __init__(self) -> None:
        self.turns = _VirtualTime()
        self.users: dict[str, deque[EngineRequest]] = {}
        self.starts_s: dict[str, float] = {}
        """of those who wait or are computed"""
        self.had_s: dict[str, float] = {}
        """of a request that is computed in pieces"""


class FairQueue:
    """Works that wait. What is popped is charged for, with 0 where it is given nothing, and later settled: until then
    its user is passed over."""

    def __init__(
        self, next_s: Callable[[EngineRequest], float], whole_s: Callable[[EngineRequest], float] | None = None
    ):
        """next_s: device seconds of a work's next piece. whole_s: of all of it."""
        self._next_s = next_s
        self._whole_s = whole_s or next_s
        self._turns = _VirtualTime()
        self._clients: dict[str, _Client] = {}
        self._num_works = 0

    def __bool__(self) -> bool:
        """Somebody can be popped."""
        return bool(self._turns)

    def __len__(self) -> int:
        return self._num_works

    def __iter__(self) -> Iterator[EngineRequest]:
        for client in self._clients.values():
            for works in client.users.values():
                yield from works

    def push(self, work: EngineRequest) -> None:
        self._works_of(work).append(work)
        self._join(work)

    def push_first(self, work: EngineRequest) -> None:
        """Before the others of its user."""
        self._works_of(work).appendleft(work)
        self._join(work)

    def pop(self) -> EngineRequest:
        client = self._clients[self._turns.leave()]
        self._num_works -= 1
        return client.users[client.turns.leave()].popleft()

    def charge(self, work: EngineRequest, seconds: float) -> None:
        """A work that was popped gets so many seconds of the device."""
        client = self._clients[work.client]
        client.turns.charge(work.key.user, seconds, len(client.users))
        client.had_s[work.key.user] = client.had_s.get(work.key.user, 0.0) + seconds
        self._turns.charge(work.client, seconds, len(self._clients))
        if client.turns:
            self._turns.join(work.client, 0.0)

    def settle(self, work: EngineRequest, *, is_left: bool) -> None:
        """What was popped waits again before the others of its user, or is gone."""
        client = self._clients[work.client]
        works = client.users[work.key.user]
        if is_left:
            self._num_works += 1
            works.appendleft(work)
        else:
            client.had_s.pop(work.key.user, None)
            client.starts_s.pop(work.key.user, None)
        if works:
            self._join(work)
            return
        del client.users[work.key.user]
        if not client.users:
            del self._clients[work.client]

    def _works_of(self, work: EngineRequest) -> deque[EngineRequest]:
        """One more is added to them."""
        self._num_works += 1
        client = self._clients.setdefault(work.client, _Client())
        return client.users.setdefault(work.key.user, deque())

    def _join(self, work: EngineRequest) -> None:
        client = self._clients[work.client]
        first = client.users[work.key.user][0]
        user = work.key.user
        seconds = max(self._whole_s(first), client.had_s.get(user, 0.0) + self._next_s(first))
        start_s = client.turns.join(user, seconds, client.starts_s.get(user) if user in client.had_s else None)
        if start_s is not None:
            client.starts_s[user] = start_s
        self._turns.join(work.client, 0.0)
