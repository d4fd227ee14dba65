"""What may be asked: each field is checked as it is declared here, and OpenAPI says the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from nestrec.base.bounds import Bound
from nestrec.serving.api.shapes import Least, Most, NoControls

LATEST_MS = 7_258_118_400_000
"""the year 2200"""
ItemId = Annotated[str, Most("max_id_characters")] | int
Category = Annotated[str, Most("max_text_characters")] | int | float | bool | None
"""a category by its name or number, true and false where the log has those, or the value of a number"""
Value = Category | list[Category]
"""the same, a text, a list of categories, or the numbers of a vector: what the log has of the feature"""
Moment = Annotated[int, Bound(0, LATEST_MS)]
Action = int | str | list[str] | None
UserId = Annotated[str, Least(1), Most("max_user_characters")] | int
Timeout = Annotated[int, Least(1), Most("max_timeout_ms")]
ModelAddress = Annotated[str, Bound(1, 4096), NoControls()]
"""a folder or an address; Linux takes paths of 4,096 bytes"""
Unknown = Literal["last", "score", "drop", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFields:
    """Events of a user, oldest first."""

    items: Annotated[list[ItemId], Most("max_history")] | None = None
    """source ids"""
    times_ms: list[Moment] | None = None
    """Unix milliseconds of each event"""
    actions: list[Action] | None = None
    """what the user did at each event: the name of an action, a list of names, or the sum of their bits (GET /v1/models
    lists both); null where nobody knows"""
    features: Mapping[str, list[Value] | None] | None = None
    """by name of a feature, a value an event; null is a value that nobody knows"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreinferRequest:
    """A ranking request of this user is on its way."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    history: HistoryFields | None = None
    """where it is left out, the events that the server keeps"""
    prefer_kept: bool | None = None
    """the events that the server keeps are read even so; `history` stands in where it has none or cannot reach them"""
    user_features: Mapping[str, Value] | None = None
    """by name of a feature of the user"""
    now_ms: Moment | None = None
    """when it is asked, in Unix milliseconds; the time of the server where it is left out"""
    timeout_ms: Timeout | None = None
    """an answer is of no use later"""
    unknown: Unknown | None = None
    """what to do with ids that the model does not know: candidates get the last place (last, the default), a score all
    the same (score), are left out (drop), or the request is refused (refuse); events are left out unless it says
    score or refuse"""
    num_candidates: Annotated[int, Least(1), Most("max_candidates")] | None = None
    """that will be ranked"""
    events: Annotated[int, Least(0)] | None = None
    """how many events the history has, instead of the history: the answer says whether it is wanted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Scores of candidates are wanted."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    candidates: Annotated[list[ItemId], Least(1), Most("max_candidates")]
    """source ids of the items to be scored"""
    history: HistoryFields | None = None
    """where it is left out, the events that the server keeps"""
    prefer_kept: bool | None = None
    """the events that the server keeps are read even so; `history` stands in where it has none or cannot reach them"""
    user_features: Mapping[str, Value] | None = None
    """by name of a feature of the user"""
    context: Mapping[str, Value] | None = None
    """by name of a feature of an event: its value for every candidate, such as the device of this request"""
    candidate_features: Mapping[str, list[Value] | Category] | None = None
    """by name of a feature of an event: a value a candidate, or one for all of them; a list for all is `context`"""
    now_ms: Moment | None = None
    """when it is asked, in Unix milliseconds; the time of the server where it is left out"""
    timeout_ms: Timeout | None = None
    """an answer is of no use later"""
    unknown: Unknown | None = None
    """what to do with ids that the model does not know: candidates get the last place (last, the default), a score all
    the same (score), are left out (drop), or the request is refused (refuse); events are left out unless it says
    score or refuse"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendRequest:
    """The best items of the catalogue are wanted."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    history: HistoryFields | None = None
    """where it is left out, the events that the server keeps"""
    prefer_kept: bool | None = None
    """the events that the server keeps are read even so; `history` stands in where it has none or cannot reach them"""
    k: Annotated[int, Least(1), Most("max_k")] | None = None
    """how many items; 10 where it is left out"""
    exclude_seen: bool | None = None
    """items of the history are not recommended, which is the default"""
    exclude: Annotated[list[ItemId], Most("max_listed")] | None = None
    """items that are not recommended"""
    allow: Annotated[list[ItemId], Most("max_listed")] | None = None
    """only these are recommended"""
    user_features: Mapping[str, Value] | None = None
    """by name of a feature of the user"""
    context: Mapping[str, Value] | None = None
    """by name of a feature of an event: its value for every candidate, such as the device of this request"""
    candidate_features: Mapping[str, Value] | None = None
    """the same as `context`: a request cannot know its candidates"""
    now_ms: Moment | None = None
    """when it is asked, in Unix milliseconds; the time of the server where it is left out"""
    timeout_ms: Timeout | None = None
    """an answer is of no use later"""
    unknown: Unknown | None = None
    """what to do with ids that the model does not know: items that only retrieval knows get the last place (last, the
    default), a score all the same (score) or are left out (drop); a request with unknown ids is refused (refuse);
    events are left out unless it says score or refuse"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRequest:
    """Other models are to be served."""

    models: Annotated[list[ModelAddress], Least(1)]
    """folders of exported models, on the machine of the server, or addresses of versions (ADDRESS, ADDRESS@VERSION);
    one of each role that is to change"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest:
    """What was served before the last swap is to be served again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """Users are to go elsewhere, or may come back."""

    drain: bool | None = None
    """false ends it; true where it is left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewItemFields:
    """An item that the models are to know."""

    id: Annotated[str, Least(1), Most("max_id_characters")] | int
    """as requests will name it"""
    features: Mapping[str, Value] | None = None
    """by name of a feature of items: a category, a list of them, a number, a text, or the numbers of a vector; what is
    left out nobody knows"""
    title: Annotated[str, Most("max_text_characters")] | None = None
    """what people call it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsRequest:
    """Items are to be served that no training has met."""

    items: Annotated[list[NewItemFields], Least(1), Most("max_listed")]
    """those that are known already stay as they are"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TitlesRequest:
    """What people call items, where the model knows it."""

    items: Annotated[list[ItemId], Most("max_listed")]
    """source ids; may be empty"""
    search: Annotated[str, Least(1), Most("max_id_characters")] | None = None
    """words of a title, in any case: the first items whose title has it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsRequest:
    """Events to be kept for requests without a history."""

    user: UserId
    """whose events they are; 7 and "7" are one user"""
    history: HistoryFields
    """events in the order of their times; those that are older than some that are kept take their place among them"""
