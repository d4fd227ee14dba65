"""POST /v1/items: new items by their features, served from now on."""

import asyncio

from nestrec.base.errors import UserError
from nestrec.serving.api.answers import ItemsAnswer
from nestrec.serving.api.endpoint import Endpoint, Front
from nestrec.serving.api.requests import ItemsRequest
from nestrec.serving.api.schema import BadRequestError
from nestrec.serving.new_items import NewItem, add_items

_CONFLICT = 409


async def items(front: Front, request: ItemsRequest) -> ItemsAnswer:
    """Answered when they are served; where one will not do, none is added."""
    told = [
        NewItem(key=str(item.id), features=dict(item.features or {}), title=item.title or "") for item in request.items
    ]
    try:
        added = await asyncio.to_thread(add_items, front.service, told)
    except UserError as error:
        raise BadRequestError(str(error), status=_CONFLICT) from error
    fleets = front.service.fleets
    return {
        "added": added,
        "items": {role: fleet.servable.spec.num_items for role, fleet in fleets.items()},
        "models": {role: fleet.servable.version[:12] for role, fleet in fleets.items()},
    }


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
