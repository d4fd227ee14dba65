"""Items: POST /v1/items adds new ones by their features, GET /v1/items/sample returns ids that the models know."""

from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.api.answers import ItemsAnswer, ItemsSampleAnswer
from nestrec.serving.api.endpoint import Endpoint, Front
from nestrec.serving.api.process.serially import on_daemon_thread
from nestrec.serving.api.requests import ItemsRequest
from nestrec.serving.api.schema import BadRequestError
from nestrec.serving.model.spec import shown_version
from nestrec.serving.new_items import NewItem, add_items

_CONFLICT = 409
_MOST_SAMPLED = 1000
"""Maximum number of ids in a sample; more would make the response large and a load no more realistic."""


async def items(front: Front, request: ItemsRequest) -> ItemsAnswer:
    """Answered when they are served; where one will not do, none is added."""
    told = [
        NewItem(key=str(item.id), features=dict(item.features or {}), title=item.title or "") for item in request.items
    ]
    try:
        added = await on_daemon_thread(lambda: add_items(front.service, told))
    except UserError as error:
        field = error.field or "items"
        raise BadRequestError(error.problem, field, _CONFLICT, remedy=error.remedy or "") from error
    fleets = front.service.fleets
    return {
        "added": added,
        "items": {role: fleet.servable.spec.num_items for role, fleet in fleets.items()},
        "models": {role: shown_version(fleet.servable.version) for role, fleet in fleets.items()},
    }


async def items_sample(front: Front, _: Any) -> ItemsSampleAnswer:
    """Returns ids at equal distances over the catalog of the model that ranks."""
    keys = front.service.fleet(front.service.ranker).servable.item_keys
    return {"items": list(keys[:: max(1, -(-len(keys) // _MOST_SAMPLED))]), "known": len(keys)}


ITEMS = Endpoint(
    method="POST",
    path="/v1/items",
    summary="Add items by their features; the models know them at once",
    handle=items,
    request=ItemsRequest,
    answer=ItemsAnswer,
    admin=True,
    example={"items": [{"id": "9001", "features": {"brand": "acme", "tags": ["red", "new"], "price": 9.5}}]},
)
ITEMS_SAMPLE = Endpoint(
    method="GET",
    path="/v1/items/sample",
    summary="Ids of items that the models know, for made-up requests",
    handle=items_sample,
    answer=ItemsSampleAnswer,
)
