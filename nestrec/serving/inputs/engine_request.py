"""What waits for an engine: requests to rank and signals to compute a prefix ahead."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.core.request_limits import NOBODY, RequestSource
from nestrec.serving.core.tracing import EngineTimes
from nestrec.serving.model.model_adapter import HistoryTokens
from nestrec.serving.model.request_inputs import Candidates


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Whose prefix under which model."""

    user: str
    version: str
    """of the model"""
    config: str
    """whatever else the prefix depends on, such as how a full history slides"""


Source = Literal["none", "device", "dram"]


@dataclass(frozen=True, slots=True)
class RankResult:
    """Scores of a ranking request."""

    items: NDArray[np.int64]
    """what was scored"""
    scores: NDArray[np.float32]
    """(items, outputs)"""
    version: str
    """of the model that computed all of them"""
    source: Source
    """where the prefix came from"""
    num_cached: int
    """tokens that were not computed again"""


@dataclass(eq=False, slots=True, kw_only=True)
class EngineRequest:
    """One request inside an engine; without candidates it is a pre-infer signal."""

    key: CacheKey
    tokens: HistoryTokens
    candidates: Candidates | None
    arrived_s: float
    """by the engine's clock, as all moments here: `perf_counter` but in simulations"""
    deadline_s: float
    estimate_s: float
    """device seconds that it was admitted with"""
    sender: RequestSource = NOBODY
    """whom it is from"""
    future: "Future[RankResult]" = field(default_factory=Future)
    source: Source = "none"
    num_cached: int = 0
    """tokens that were there when it began"""
    is_begun: bool = False
    """a part of it is computed, or on its way"""
    num_planned: int = 0
    """candidates that are scored, or on their way"""
    scored: list[NDArray[np.float32]] = field(default_factory=list)
    """of the candidates so far"""
    is_finished: bool = False
    """answered, refused or cancelled"""
    computed_s: float = 0.0
    """device seconds of the batches that it had a part in"""
    planned_s: float = 0.0
    """when its last batch began to be put together"""
    launched_s: float = 0.0
    """when that batch had been given to the device"""
    ended_s: float = 0.0
    """when it was answered"""
    _content: tuple[int, bytes] = (0, b"")
    """of how many tokens, and what it is: asked for at every chunk of a signal"""

    def times(self) -> EngineTimes:
        """Returns the moments and costs that tracing reports of an ended request."""
        return EngineTimes(
            arrived_s=self.arrived_s,
            planned_s=self.planned_s,
            computed_s=self.computed_s,
            ended_s=self.ended_s,
            num_tokens=self.tokens.length,
        )

    def begin_again(self, version: str) -> None:
        """With another version of the model: nothing of what was computed is of use."""
        self.key = replace(self.key, version=version)
        self.source = "none"
        self.num_cached = 0
        self.is_begun = False
        self.num_planned = 0
        self.scored.clear()

    @property
    def client(self) -> str:
        return self.sender.client

    @property
    def is_rank(self) -> bool:
        return self.candidates is not None

    @property
    def candidates_left(self) -> Candidates | None:
        """Those that no batch has taken yet."""
        if self.candidates is None or self.num_planned == 0:
            return self.candidates
        return self.candidates.part(self.num_planned, len(self.candidates))

    def content_of(self, num_tokens: int) -> bytes | None:
        """None beyond what can be cached: an entry of more tokens belongs to another history."""
        if num_tokens > self.tokens.num_cacheable:
            return None
        if num_tokens != self._content[0]:
            self._content = (num_tokens, self.tokens.content(num_tokens))
        return self._content[1]
