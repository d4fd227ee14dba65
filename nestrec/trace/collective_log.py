"""Which collectives a rank has issued, in order, and how long the host spent in them."""

from collections import deque

_LOG_LENGTH = 4096


class CollectiveLog:
    """The last collectives that this rank issued, in order, over all communicators."""

    def __init__(self) -> None:
        self._entries: deque[str] = deque(maxlen=_LOG_LENGTH)
        self._durations_ns: dict[str, deque[int]] = {}
        self.count = 0

    def record(self, communicator: str, operation: str) -> None:
        self._entries.append(f"{communicator}.{operation}")
        self.count += 1

    def entries(self) -> list[str]:
        return list(self._entries)

    def record_duration(self, communicator: str, duration_ns: int) -> None:
        self._durations_ns.setdefault(communicator, deque(maxlen=_LOG_LENGTH)).append(duration_ns)

    def take_durations_ns(self, communicator: str) -> list[int]:
        """What the host spent in each collective of a communicator since the last call, in the order of issue."""
        durations, taken = self._durations_ns.get(communicator, deque()), []
        while durations:
            taken.append(durations.popleft())
        return taken
