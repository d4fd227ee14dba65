"""Requests of an engine: ranking requests, and pre-infer requests, which prefill a history ahead of time."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.core.request_limits import UNKNOWN_SOURCE, RequestSource
from nestrec.serving.core.tracing import EngineTimes
from nestrec.serving.model.model_adapter import HistoryTokens
from nestrec.serving.model.request_inputs import Candidates


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Key of the prefix cache: the user and the model that computed the prefix."""

    user: str
    version: str
    """Version of the model."""
    config: str
    """Other settings on which the cached keys and values depend, such as the stride of a full history."""


Source = Literal["none", "device", "host"]


@dataclass(frozen=True, slots=True)
class RankResult:
    """Scores of a ranking request."""

    items: NDArray[np.int64]
    """Scored items."""
    scores: NDArray[np.float32]
    """Scores of shape (items, outputs)."""
    version: str
    """Version of the model that computed all scores."""
    source: Source
    """Tier of the prefix cache from which the prefix was read."""
    num_cached: int
    """Number of history tokens read from the KV cache."""


@dataclass(eq=False, slots=True, kw_only=True)
class EngineRequest:
    """Request inside an engine; without candidates it is a pre-infer request."""

    key: CacheKey
    tokens: HistoryTokens
    candidates: Candidates | None
    arrived_s: float
    """Arrival time in seconds by the engine's clock, like all times here: `perf_counter`, except in simulations."""
    deadline_s: float
    estimate_s: float
    """Device time in seconds that admission control estimated."""
    sender: RequestSource = UNKNOWN_SOURCE
    """Client that sent the request."""
    future: "Future[RankResult]" = field(default_factory=Future)
    source: Source = "none"
    num_cached: int = 0
    """Number of history tokens that were in the KV cache when the request started."""
    is_started: bool = False
    """Whether a part of the request was computed or is in a launched batch."""
    num_planned: int = 0
    """Number of candidates that were scored or are in a launched batch."""
    scored: list[NDArray[np.float32]] = field(default_factory=list)
    """Scores of the candidates so far, one array per batch."""
    is_finished: bool = False
    """Whether the request was completed, rejected or cancelled."""
    computed_s: float = 0.0
    """Total device time in seconds of the batches that contained parts of the request."""
    planned_s: float = 0.0
    """Time at which the scheduler started to form the last batch of the request."""
    launched_s: float = 0.0
    """Time at which that batch was launched on the device."""
    ended_s: float = 0.0
    """Time at which the request was completed."""
    _content: tuple[int, bytes] = (0, b"")
    """Number of tokens and their serialized content; cached, because every chunk of a pre-infer request reads it."""

    def times(self) -> EngineTimes:
        """Return the times and costs of a finished request for tracing."""
        return EngineTimes(
            arrived_s=self.arrived_s,
            planned_s=self.planned_s,
            computed_s=self.computed_s,
            ended_s=self.ended_s,
            num_tokens=self.tokens.length,
        )

    def restart(self, version: str) -> None:
        """Reset the request to run from the start with another version of the model."""
        self.key = replace(self.key, version=version)
        self.source = "none"
        self.num_cached = 0
        self.is_started = False
        self.num_planned = 0
        self.scored.clear()

    @property
    def client(self) -> str:
        """Name of the client that sent the request."""
        return self.sender.client

    @property
    def is_rank(self) -> bool:
        """Whether this is a ranking request; otherwise it is a pre-infer request."""
        return self.candidates is not None

    @property
    def remaining_candidates(self) -> Candidates | None:
        """Candidates that are not in a batch yet."""
        if self.candidates is None or self.num_planned == 0:
            return self.candidates
        return self.candidates.part(self.num_planned, len(self.candidates))

    def content_of(self, num_tokens: int) -> bytes | None:
        """Return the serialized content of the first tokens, to compare with a cache entry.

        The result is None for more tokens than are cacheable, because such an entry belongs to another history.
        """
        if num_tokens > self.tokens.num_cacheable:
            return None
        if num_tokens != self._content[0]:
            self._content = (num_tokens, self.tokens.content(num_tokens))
        return self._content[1]
