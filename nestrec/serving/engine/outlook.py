"""What requests would take and wait for, by what an engine has learned of late: admission and signals go by it."""

from nestrec.serving.client import Sender
from nestrec.serving.engine.backlog import Backlog
from nestrec.serving.engine.cost_model import EngineCostModel
from nestrec.serving.engine.pace import EnginePace

_SMOOTH_DOWN, _SMOOTH_UP = 0.05, 0.005
_BUSY = 0.5
"""share of its time that a device works where work waits for it rather than for the host"""


class Outlook:
    """Any thread asks; one at a time tells."""

    def __init__(self, costs: EngineCostModel, pace: EnginePace, backlog: Backlog):
        self._costs, self._pace, self._backlog = costs, pace, backlog
        self._byte_s = 0.0  # device seconds of a byte of a request

    def full_rank_s(self, length: int, num_candidates: int) -> float:
        return self._costs.predict_s(*self._costs.work(0, length, num_candidates))

    def rank_s(self, length: int, cached: int, num_candidates: int) -> float:
        """Against a prefix of so many tokens."""
        return self._costs.predict_s(*self._costs.work(cached, length - cached, num_candidates))

    def ends_in_s(self, sender: Sender, user: str, seconds: float) -> float:
        """Until a request that came now and takes so long would be answered."""
        return self._pace.slowness * self._backlog.expected_s(sender.client, user, seconds)

    def unread_ends_in_s(self, sender: Sender) -> float:
        """The same of one that nobody has looked into, by its size."""
        seconds = self._byte_s * sender.num_bytes
        return self._pace.slowness * self._backlog.expected_s(sender.client, None, seconds)

    def told(self, sender: Sender, seconds: float) -> None:
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
