"""Items: POST /v1/items adds new ones by their features, GET /v1/items/sample returns ids that the models know.

POST /v1/titles: what people call items, for whoever tries requests by hand.
"""

import itertools
from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.inputs.request_schema import ItemsRequest, TitlesRequest
from nestrec.serving.inputs.responses import ItemsResponse, ItemsSampleAnswer, TitlesResponse
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.service.cold_start_items import NewItem, add_items
from nestrec.serving.service.model_reloader import on_daemon_thread

_CONFLICT = 409
_MOST_SAMPLED = 1000
"""Maximum number of ids in a sample; more would make the response large and a load no more realistic."""


async def items(front: HandlerContext, request: ItemsRequest) -> ItemsResponse:
    """Answered when they are served; where one will not do, none is added."""
    told = [
        NewItem(key=str(item.id), features=dict(item.features or {}), title=item.title or "") for item in request.items
    ]
    try:
        added = await on_daemon_thread(lambda: add_items(front.service, told))
    except UserError as error:
        field = error.option or "items"
        raise BadRequestError(error.problem, field, _CONFLICT, remedy=error.remedy or "") from error
    fleets = front.service.fleets
    return {
        "added": added,
        "items": {role: fleet.servable.spec.num_items for role, fleet in fleets.items()},
        "models": {role: shown_version(fleet.servable.version) for role, fleet in fleets.items()},
    }


async def items_sample(front: HandlerContext, _: Any) -> ItemsSampleAnswer:
    """Returns ids at equal distances over the catalog of the model that ranks."""
    keys = front.service.fleet(front.service.ranker).servable.item_keys
    return {"items": list(keys[:: max(1, -(-len(keys) // _MOST_SAMPLED))]), "known": len(keys)}


ITEMS = EndpointSpec(
    method="POST",
    path="/v1/items",
    summary="Add items by their features; the models know them at once",
    handle=items,
    request=ItemsRequest,
    answer=ItemsResponse,
    admin=True,
    example={"items": [{"id": "9001", "features": {"brand": "acme", "tags": ["red", "new"], "price": 9.5}}]},
)
ITEMS_SAMPLE = EndpointSpec(
    method="GET",
    path="/v1/items/sample",
    summary="Ids of items that the models know, for made-up requests",
    handle=items_sample,
    answer=ItemsSampleAnswer,
)


_MOST_FOUND = 20


async def titles(front: HandlerContext, request: TitlesRequest) -> TitlesResponse:
    """Items without a title are left out."""
    found: dict[str, str] = {}
    for fleet in front.service.fleets.values():
        servable = fleet.servable
        if not servable.item_titles:
            continue
        for item, place in zip(request.items, servable.ids_of(request.items).tolist(), strict=True):
            if place:
                found.setdefault(str(item), servable.item_titles[place - 1])
        if request.search is not None:
            found |= _search(servable, request.search.casefold())
    return {"titles": {item: title for item, title in found.items() if title}}


def _search(servable: Servable, wanted: str) -> dict[str, str]:
    named = zip(servable.item_keys, servable.item_titles, strict=True)
    return dict(itertools.islice(((key, title) for key, title in named if wanted in title.casefold()), _MOST_FOUND))


TITLES = EndpointSpec(
    method="POST",
    path="/v1/titles",
    summary="What people call items, where the model knows it",
    handle=titles,
    request=TitlesRequest,
    answer=TitlesResponse,
    example={"items": ["12", "7"], "search": "star"},
)
