"""Responses of the endpoints, as typed dictionaries from which the OpenAPI description is made."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

Source = Literal["none", "device", "dram"]
Done = Literal["placed_last", "scored", "dropped"]


class UnknownIds(TypedDict):
    """Ids that the model does not know."""

    field: str
    """of the request; `items` is that of the answer"""
    ids: list[str | int]
    """each once"""
    done: Done
    """placed_last: below every known one; scored: read as an unknown one; dropped: as if they had not been named"""


class AppliedDefault(TypedDict):
    """Something that the model reads and the request did not tell."""

    field: str
    """of the request"""
    value: Any
    """what was taken instead"""


Prefix = TypedDict(  # `from` is no name of Python's
    "Prefix",
    {
        "from": Annotated[Source, "where keys and values of the history came from; none: all of it was computed"],
        "tokens": Annotated[int, "tokens that were not computed again"],
    },
)


ModelVersion = Annotated[str, "version of the model that computed all of them"]
Unknowns = Annotated[list[UnknownIds], "ids that the model does not know, and what was done with them"]
Defaults = Annotated[list[AppliedDefault], "what the model reads and the request did not tell"]
KnownPrefix = Annotated[
    Prefix, "what was known of the history before the request came; only with `--limits.tells_prefix true`"
]


class RankResponse(TypedDict):
    """Scores of candidates."""

    scores: Mapping[str, list[float]]
    """by output of the model, a number a candidate in the order of the request; larger is better. One in the last place
    has the least number of float32"""
    items: NotRequired[list[str | int]]
    """where unknown ones were to be left out: the candidates that the scores belong to"""
    model: ModelVersion
    prefix: NotRequired[KnownPrefix]
    unknown: Unknowns
    defaults: Defaults


class RecommendResponse(TypedDict):
    """The best items, best first."""

    items: list[str]
    """source ids"""
    scores: Mapping[str, list[float]]
    """by output of the model, a number an item; one in the last place has the least number of float32"""
    model: ModelVersion
    prefix: NotRequired[KnownPrefix]
    unknown: Unknowns
    defaults: Defaults


class PreinferResponse(TypedDict):
    """Whether the history is computed ahead."""

    admitted: bool
    """it is"""
    reason: str
    """why, or why not; short or safe: ranking will be in time without; wanted: send it again with the history"""
    model: str
    """version of the model; the ranking request of this user that follows soon is answered by the same. Empty where the
    front of a fleet saw by itself that a signal is of no use"""
    unknown: Unknowns
    defaults: Defaults


class EventsResponse(TypedDict):
    """What is kept now."""

    events: NotRequired[int]
    """of this user; not told by a store that does not count them"""


class ModelInfo(TypedDict):
    """What a model reads and gives."""

    version: str
    """of the weights"""
    name: str
    """recipe that was trained"""
    outputs: list[str]
    """names of a candidate's scores, the one that orders recommendations first"""
    items: int
    """that it knows"""
    max_events: int
    """of a history; older ones are not read"""
    reads: list[str]
    """fields of a request that must be there, unless `defaults` has them"""
    actions: Mapping[str, int]
    """name to bit"""
    features: list[str]
    """categories of events and candidates"""
    user_features: list[str]
    """categories of users"""
    defaults: Mapping[str, Any]
    """what its export takes for a field that is left out"""
    precision: NotRequired[Mapping[str, Any]]
    """of a model that was exported in fewer bits than it was trained in: which, and what that cost on events that
    validate"""
    search: NotRequired[Mapping[str, Any]]
    """of a retrieval model: how its index is searched, and where not every row is looked at the recall that its export
    measured"""


class ModelsResponse(TypedDict):
    """The models that are served."""

    models: Mapping[str, ModelInfo]
    """by role: retrieval, ranking"""


class StatusResponse(TypedDict):
    """What the live page shows."""

    reloads: Mapping[str, Any]
    """how often models were asked to be loaded anew, how often that was done, and whether the last one was refused"""
    latency: Mapping[str, float]
    """of recent answers, in milliseconds, and their number"""
    models: Mapping[str, Any]
    """by role: version, counts, fill of the caches"""
    follow: Mapping[str, Any]
    """by role, of models that come from an address: version, how far behind and why, and how fresh it is"""
    router: Mapping[str, Any]
    """loads of the instances, and requests that went elsewhere"""


class LivePageResponse(TypedDict):
    """What the live page draws."""

    status: StatusResponse
    """now"""
    timeline: Mapping[str, list[Any]]
    """by name, a value a second of the last ten minutes, oldest first"""
    relay: Mapping[str, list[Mapping[str, Any]]]
    """by role, the last requests: when they came and ended, in seconds before now, and where their prefix was"""


class TitlesResponse(TypedDict):
    """What people call items."""

    titles: Mapping[str, str]
    """by source id"""


class ItemsResponse(TypedDict):
    """New items are served."""

    added: int
    """that were not known yet"""
    items: Mapping[str, int]
    """by role: how many the model knows now"""
    models: Mapping[str, str]
    """by role: its version, which new items change"""


class ItemsSampleAnswer(TypedDict):
    """Some of the items that the model knows."""

    items: list[str]
    """at most 1,000 ids, at equal distances over the catalog"""
    known: int
    """Number of items in the catalog."""


class HealthResponse(TypedDict):
    """Alive, or ready."""

    status: str
    """live, dead or ready"""
    models: NotRequired[Mapping[str, str]]
    """of one that is ready: version by role"""
    signals_from: NotRequired[int]
    """of one that is ready: events of the shortest history that is worth computing ahead now"""


class LoadedModelInfo(TypedDict):
    """A model and where it lies."""

    version: str
    """of the weights"""
    folder: str
    """on the machine of the server, with no link in it"""


class DeploymentResponse(TypedDict):
    """What an instance serves."""

    models: Mapping[str, LoadedModelInfo]
    """in service, by role"""
    previous: Mapping[str, LoadedModelInfo]
    """what the last swap has replaced, and a rollback brings back, by role"""
    draining: bool
    """it says that it is not ready, so that whoever routes requests sends them elsewhere"""


class ErrorDetail(TypedDict):
    """What is wrong."""

    message: str
    """for people"""
    field: NotRequired[str]
    """of the request, where one of them is wrong"""
    remedy: NotRequired[str]
    """Proposed way to solve the problem."""


class ErrorResponse(TypedDict):
    """The answer to a request that was not served."""

    error: ErrorDetail
    """what is wrong"""
