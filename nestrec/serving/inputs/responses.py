"""Response schemas: typed dictionaries of all endpoints, from which the OpenAPI description is generated."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

Source = Literal["none", "device", "host"]
Done = Literal["placed_last", "scored", "dropped"]


class UnknownIds(TypedDict):
    """Ids that the model does not know."""

    field: str
    """Field of the request that contains the ids; `items` refers to the field of the response."""
    ids: list[str | int]
    """Unknown ids without duplicates."""
    action: Done
    """Handling of the ids: placed_last (ranked below all known items), scored (scored as the unknown item), or dropped
    (ignored)."""


class AppliedDefault(TypedDict):
    """Input of the model that the request omitted."""

    field: str
    """Omitted field of the request."""
    value: Any
    """Default value that was used instead."""


Prefix = TypedDict(  # functional syntax, because `from` is a Python keyword
    "Prefix",
    {
        "from": Annotated[
            Source, "Tier of the prefix cache from which the cached keys and values were read; none: no cache hit"
        ],
        "tokens": Annotated[int, "Number of history tokens read from the KV cache."],
    },
)


ModelVersion = Annotated[str, "Version of the model that computed all scores."]
Unknowns = Annotated[list[UnknownIds], "Ids that the model does not know, and how they were handled."]
Defaults = Annotated[list[AppliedDefault], "Default values of inputs that the request omitted."]
KnownPrefix = Annotated[
    Prefix, "Part of the history that was in the prefix cache; only with `--limits.expose_cache_source true`"
]


class RankResponse(TypedDict):
    """Scores of candidates."""

    scores: Mapping[str, list[float]]
    """Scores by output of the model, one per candidate in the order of the request; larger is better. Candidates that
    are ranked last have the smallest float32 number."""
    items: NotRequired[list[str | int]]
    """Candidates to which the scores belong; present only if the request asks to drop unknown candidates."""
    model: ModelVersion
    cache_source: NotRequired[KnownPrefix]
    unknown_ids: Unknowns
    defaults_used: Defaults


class RecommendResponse(TypedDict):
    """Recommended items, best first."""

    items: list[str]
    """Source ids of the items."""
    scores: Mapping[str, list[float]]
    """Scores by output of the model, one per item; items that are ranked last have the smallest float32 number."""
    model: ModelVersion
    cache_source: NotRequired[KnownPrefix]
    unknown_ids: Unknowns
    defaults_used: Defaults


class PreinferResponse(TypedDict):
    """Decision about a pre-infer request: whether the history is prefilled ahead of the ranking request."""

    admitted: bool
    """Whether the history is prefilled."""
    reason: str
    """Reason of the decision. short, safe: the ranking request will meet its latency budget without prefill;
    history_required: send the pre-infer request again with the history."""
    model: str
    """Version of the model, which will also serve the following ranking request of this user. Empty if the gateway of a
    fleet rejected the pre-infer request itself, because prefill does not pay off."""
    unknown_ids: Unknowns
    defaults_used: Defaults


class EventsResponse(TypedDict):
    """State of the history store after an append."""

    events: NotRequired[int]
    """Number of stored events of the user; absent if the store does not count them."""


class ModelInfo(TypedDict):
    """Inputs and outputs of a served model."""

    version: str
    """Version of the model."""
    name: str
    """Name of the trained recipe."""
    outputs: list[str]
    """Names of the scores of a candidate; recommendations are sorted by the first one."""
    items: int
    """Number of items in the catalog."""
    max_events: int
    """Maximum number of history events that the model reads; older ones are ignored."""
    required_fields: list[str]
    """Request fields that the model needs, unless they have a default."""
    actions: Mapping[str, int]
    """Bit of each action, by name."""
    features: list[str]
    """Names of the features of events and candidates."""
    user_features: list[str]
    """Names of the features of users."""
    defaults: Mapping[str, Any]
    """Default values of the export for omitted request fields."""
    precision: NotRequired[Mapping[str, Any]]
    """Precision of a quantized export and its quality loss on validation events; absent if it was not quantized."""
    search: NotRequired[Mapping[str, Any]]
    """Search method of the index of a retrieval model and, for ANN search, the recall measured by the export."""


class ModelsResponse(TypedDict):
    """Served models."""

    models: Mapping[str, ModelInfo]
    """Models by role: retrieval, ranking."""


class StatusResponse(TypedDict):
    """Server status on the live page."""

    reloads: Mapping[str, Any]
    """Number of requested and of completed model reloads, and whether the last one was rejected."""
    latency: Mapping[str, float]
    """Latency of recent responses in milliseconds, and their number."""
    models: Mapping[str, Any]
    """Version, counters and cache fill of each model, by role."""
    follow: Mapping[str, Any]
    """Version, lag with its reason, and freshness of models that follow an address, by role."""
    router: Mapping[str, Any]
    """Load of the instances, and number of requests routed to a different instance than the preferred one."""


class LivePageResponse(TypedDict):
    """Data of the live page."""

    status: StatusResponse
    """Current status of the server."""
    timeline: Mapping[str, list[Any]]
    """Time series by name, one value per second of the last ten minutes, oldest first."""
    relay: Mapping[str, list[Mapping[str, Any]]]
    """Latest requests by role: arrival and end in seconds before now, and the cache tier of their prefix."""


class TitlesResponse(TypedDict):
    """Titles of items."""

    titles: Mapping[str, str]
    """Titles by source id."""


class ItemsResponse(TypedDict):
    """Result of adding cold-start items."""

    added: int
    """Number of items that were not in the catalog before."""
    items: Mapping[str, int]
    """Number of items in the catalog of each model, by role."""
    models: Mapping[str, str]
    """Version of each model, by role; adding items changes it."""


class ItemsSampleResponse(TypedDict):
    """Sample of the items in the catalog."""

    items: list[str]
    """At most 1,000 source ids, evenly spaced over the catalog."""
    known: int
    """Number of items in the catalog."""


class HealthResponse(TypedDict):
    """Result of a liveness or readiness probe."""

    status: str
    """Status: live, dead or ready."""
    models: NotRequired[Mapping[str, str]]
    """Version of each model by role, if the server is ready."""
    min_preinfer_events: NotRequired[int]
    """Minimum number of history events for which prefill ahead of time currently pays off, if the server is ready."""


class LoadedModelInfo(TypedDict):
    """Version and folder of a loaded model."""

    version: str
    """Version of the model."""
    folder: str
    """Folder on the machine of the server, with symbolic links resolved."""


class DeploymentResponse(TypedDict):
    """Models that an instance serves."""

    models: Mapping[str, LoadedModelInfo]
    """Served models by role."""
    previous: Mapping[str, LoadedModelInfo]
    """Models before the last swap by role, which a rollback restores."""
    draining: bool
    """Whether the instance is draining: its readiness probe fails, so that load balancers send requests elsewhere."""


class ErrorDetail(TypedDict):
    """Description of an error."""

    message: str
    """Human-readable description."""
    field: NotRequired[str]
    """Field of the request that is invalid, if the error refers to one."""
    remedy: NotRequired[str]
    """Proposed way to solve the problem."""


class ErrorResponse(TypedDict):
    """Response to a request that failed."""

    error: ErrorDetail
    """Description of the error."""
