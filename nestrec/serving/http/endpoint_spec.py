"""Specs of endpoints (plugins), and the context that their handlers get.

What the endpoints of the hot routes need of a server: the service itself, or one in another process.

One route of the front: what it is asked, what it answers, and who answers.

A package of its own can add one without a change here: it names an `EndpointSpec` under the entry-point group
`nestrec.endpoints` (see `routes`). Requests are checked against the declared class before the handler sees them, and
the description in OpenAPI is made from the same class.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.core.rejections import OverloadedError
from nestrec.serving.core.request_limits import LimitsConfig, RequestSource
from nestrec.serving.history_store.history_store import HistoryStore
from nestrec.serving.http.server_metrics import Metrics
from nestrec.serving.inputs.engine_request import RankResult
from nestrec.serving.kv_cache.preinfer_trigger import Decision
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.security.auth import Audience
from nestrec.serving.service.inference_service import ModelDeployment, Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader

Ids = NDArray[np.int64]


class ScoringService(Protocol):
    """As `Service` has it; the sender of a request is the one of the task that asks."""

    @property
    def cfg(self) -> ServiceConfig: ...
    @property
    def fleets(self) -> Mapping[str, ModelDeployment]: ...
    @property
    def ranker(self) -> str: ...
    def announced_fleet(self, user: str) -> ModelDeployment: ...
    def ranking_fleet(self, user: str) -> ModelDeployment: ...
    def refusal(self, role: str, sender: RequestSource) -> OverloadedError | None: ...
    async def rank(
        self, fleet: ModelDeployment, user: str, history: History, candidates: Candidates, *, timeout_s: float
    ) -> RankResult: ...
    async def preinfer(
        self, fleet: ModelDeployment, user: str, history: History, now_ms: int, num_candidates: int, *, timeout_s: float
    ) -> Decision: ...
    async def foresee(self, user: str, num_events: int, num_candidates: int) -> tuple[ModelDeployment, Decision]: ...


class HotRouteContext(Protocol):
    """What handlers of hot routes work with."""

    @property
    def service(self) -> ScoringService: ...
    @property
    def limits(self) -> LimitsConfig: ...


JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """A handler with the classes of its request and answer."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    """such as /v1/rank; a part in braces is what the handler gets instead of a request"""
    summary: str
    """in a line, for people"""
    handle: Callable[["HandlerContext", Any], Awaitable[Any]]
    """gets the front and a request of the declared class; gives an answer of the declared one, or `HttpResponse`"""
    request: type | None = None
    """a dataclass; none: nothing is read from the body"""
    answer: Any = None
    """a typed dictionary or dataclass; none: an answer without a description"""
    status: int = 200
    """of an answer"""
    content_type: str = JSON_TYPE
    """of an answer"""
    takes_kept_history: bool = False
    """a request without `history` gets the events that the server keeps of its user"""
    takes_plain_lists: bool = False
    """its handler reads long lists of a request as `TypedList` too"""
    runs_in_fronts: bool = False
    """its handler needs no more than `HotRouteContext` has, so that a front in a process of its own answers it; others
    are answered by the process that computes"""
    computed_by: Literal["retrieval", "ranker"] | None = None
    """the model whose full queue has requests refused before they are read"""
    admin: bool = False
    """it changes what is served, for all users: for whoever runs the server, and not for its clients"""
    audience: Audience = "clients"
    """who may ask it where keys are asked for; anyone: it tells nothing of users, models or load"""
    example: Mapping[str, Any] = field(default_factory=dict)
    """a request, for the description"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerContext:
    """What handlers work with."""

    service: Service
    limits: LimitsConfig
    store: HistoryStore
    metrics: Metrics
    endpoints: Mapping[str, EndpointSpec]
    """by name"""
    reloader: Reloader | None = None
    """exchanges the models; none: they stay"""
