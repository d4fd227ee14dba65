"""What the endpoints of the hot routes need of a server: the service itself, or one in another process."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.client import Sender
from nestrec.serving.engine.work import Answer, OverloadedError
from nestrec.serving.model.inputs import Candidates, History
from nestrec.serving.prefix.trigger import Decision
from nestrec.serving.service import Fleet, ServiceConfig

Ids = NDArray[np.int64]


class Answering(Protocol):
    """As `Service` has it; the sender of a request is the one of the task that asks."""

    @property
    def cfg(self) -> ServiceConfig: ...
    @property
    def fleets(self) -> Mapping[str, Fleet]: ...
    @property
    def ranker(self) -> str: ...
    def announced_fleet(self, user: str) -> Fleet: ...
    def ranking_fleet(self, user: str) -> Fleet: ...
    def refusal(self, role: str, sender: Sender) -> OverloadedError | None: ...
    async def rank(
        self, fleet: Fleet, user: str, history: History, candidates: Candidates, *, timeout_s: float
    ) -> Answer: ...
    async def preinfer(
        self, fleet: Fleet, user: str, history: History, now_ms: int, num_candidates: int, *, timeout_s: float
    ) -> Decision: ...
    async def foresee(self, user: str, num_events: int, num_candidates: int) -> tuple[Fleet, Decision]: ...


class HotFront(Protocol):
    """What handlers of hot routes work with."""

    @property
    def service(self) -> Answering: ...
    @property
    def limits(self) -> LimitsConfig: ...
