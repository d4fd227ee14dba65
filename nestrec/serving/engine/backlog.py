"""How long a request would wait, by whom it is from: what admission asks.

    wait  <=  min(all that waits, clients * min(the client's own, its users * the user's own)), with the request in each

The device's time is shared equally among clients, and by each of them among its users (`fair_queue`). So nobody waits
longer than for all that is there, nor longer than its own work takes with an equal share.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Client:
    seconds: float = 0.0
    users: dict[str, tuple[float, int]] = field(default_factory=dict)
    """seconds and number of works of each"""


class Backlog:
    """Estimated device seconds of the work that waits or runs. Changed under a lock of the caller; any thread asks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_works = 0
        self._clients: dict[str, _Client] = {}

    def add(self, client: str, user: str, seconds: float) -> None:
        own = self._clients.setdefault(client, _Client())
        before_s, number = own.users.get(user, (0.0, 0))
        own.users[user] = (before_s + seconds, number + 1)
        own.seconds += seconds
        self.seconds += seconds
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
        self.seconds = max(0.0, self.seconds - seconds) if self.num_works else 0.0

    def expected_s(self, client: str, user: str | None, seconds: float) -> float:
        """Until work of so many seconds would be done. user: none where it is not known yet, and so a new one."""
        own = self._clients.get(client)
        if own is None:
            return min(self.seconds, len(self._clients) * seconds) + seconds
        user_s, _ = own.users.get(user, (0.0, 0)) if user is not None else (0.0, 0)
        num_users = len(own.users) + (user_s == 0.0)
        of_client_s = min(own.seconds + seconds, num_users * (user_s + seconds))
        return min(self.seconds + seconds, len(self._clients) * of_client_s)
