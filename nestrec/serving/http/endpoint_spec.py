"""Specs of HTTP endpoints (plugins), and the context that is passed to their handlers.

An `EndpointSpec` declares one route: method, path, handler, and the schemas of its request and response. Other packages
add endpoints as entry points of the group `nestrec.endpoints` (see `routes`). A request is validated against its schema
before the handler is called, and the OpenAPI description is generated from the same schema.

Handlers of hot routes (rank, recommend, pre-infer) use only `HotRouteContext`. Its `ScoringService` is the service of
this process, or a remote one if the handler runs in a frontend worker.
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
    """Methods of `Service` that hot routes call; the source of a request is taken from the current task."""

    @property
    def cfg(self) -> ServiceConfig: ...
    @property
    def deployments(self) -> Mapping[str, ModelDeployment]: ...
    @property
    def ranker(self) -> str: ...
    def session_deployment(self, user: str) -> ModelDeployment: ...
    def ranking_deployment(self, user: str) -> ModelDeployment: ...
    def overload_error(self, role: str, sender: RequestSource) -> OverloadedError | None: ...
    async def rank(
        self, deployment: ModelDeployment, user: str, history: History, candidates: Candidates, *, timeout_s: float
    ) -> RankResult: ...
    async def preinfer(
        self,
        deployment: ModelDeployment,
        user: str,
        history: History,
        now_ms: int,
        num_candidates: int,
        *,
        timeout_s: float,
    ) -> Decision: ...
    async def would_admit_preinfer(
        self, user: str, num_events: int, num_candidates: int
    ) -> tuple[ModelDeployment, Decision]: ...


class HotRouteContext(Protocol):
    """Context of handlers of hot routes."""

    @property
    def service(self) -> ScoringService: ...
    @property
    def limits(self) -> LimitsConfig: ...


JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """Spec of one endpoint: a route, its handler, and the schemas of its request and response."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    """Path, for example /v1/rank; a segment in braces is a path parameter, which the handler gets instead of a
    request."""
    summary: str
    """Summary of one line without a period, for the documentation."""
    handle: Callable[["HandlerContext", Any], Awaitable[Any]]
    """Handler: an async function of the context and the request, which returns the declared response or an
    `HttpResponse`."""
    request: type | None = None
    """Dataclass of the request body; None ignores the body."""
    response: Any = None
    """Typed dictionary or dataclass of the response body; None leaves it undocumented."""
    status: int = 200
    """HTTP status of a successful response."""
    content_type: str = JSON_TYPE
    """Content type of a successful response."""
    uses_stored_history: bool = False
    """Whether the stored events of the user are added to a request without `history`."""
    accepts_typed_lists: bool = False
    """Whether the handler accepts a `TypedList` for a long list of the request."""
    runs_in_frontend_workers: bool = False
    """Whether frontend workers run the handler, which then must use only `HotRouteContext`; other requests are
    forwarded to the engine process."""
    computed_by: Literal["retrieval", "ranker"] | None = None
    """Model that computes the response: while its queue is full, requests are rejected before they are parsed
    (admission control). None disables this."""
    admin: bool = False
    """Whether the endpoint changes what the server serves to all users; it then requires the role admin."""
    audience: Audience = "clients"
    """Callers that are authorized if the server requires API keys; `anyone` is for responses that reveal nothing about
    users, models or load."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Example request for the documentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerContext:
    """Context of handlers that run in the engine process."""

    service: Service
    limits: LimitsConfig
    store: HistoryStore
    metrics: Metrics
    endpoints: Mapping[str, EndpointSpec]
    """Endpoints of the server by name."""
    reloader: Reloader | None = None
    """Reloads and swaps the models; None if the server cannot change them."""
