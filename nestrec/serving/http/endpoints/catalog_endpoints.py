"""Catalog endpoints: add cold-start items (POST /v1/items), sample item ids (GET /v1/items/sample), and look up titles
(POST /v1/titles), for example to try requests on the live page.
"""

import itertools
from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.inputs.request_schema import ItemsRequest, TitlesRequest
from nestrec.serving.inputs.responses import ItemsResponse, ItemsSampleResponse, TitlesResponse
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.service.cold_start_items import NewItem, add_items
from nestrec.serving.service.model_reloader import on_daemon_thread

_CONFLICT = 409
_MOST_SAMPLED = 1000
"""Maximum number of ids in a sample; more would make the response large and a load no more realistic."""


async def items(context: HandlerContext, request: ItemsRequest) -> ItemsResponse:
    """Add cold-start items to the catalog; responds when they are served. If one of them is invalid, none is added."""
    new_items = [
        NewItem(key=str(item.id), features=dict(item.features or {}), title=item.title or "") for item in request.items
    ]
    try:
        added = await on_daemon_thread(lambda: add_items(context.service, new_items))
    except UserError as error:
        field = error.option or "items"
        raise BadRequestError(error.problem, field, _CONFLICT, remedy=error.remedy or "") from error
    deployments = context.service.deployments
    return {
        "added": added,
        "items": {role: deployment.servable.spec.num_items for role, deployment in deployments.items()},
        "models": {role: short_version(deployment.servable.version) for role, deployment in deployments.items()},
    }


async def items_sample(context: HandlerContext, _: Any) -> ItemsSampleResponse:
    """Return item ids that are evenly spaced over the catalog of the ranking model."""
    keys = context.service.deployment(context.service.ranker).servable.item_keys
    return {"items": list(keys[:: max(1, -(-len(keys) // _MOST_SAMPLED))]), "known": len(keys)}


ITEMS = EndpointSpec(
    method="POST",
    path="/v1/items",
    summary="Add items to the catalog by their features; the models know them immediately",
    handle=items,
    request=ItemsRequest,
    response=ItemsResponse,
    admin=True,
    example={"items": [{"id": "9001", "features": {"brand": "acme", "tags": ["red", "new"], "price": 9.5}}]},
)
ITEMS_SAMPLE = EndpointSpec(
    method="GET",
    path="/v1/items/sample",
    summary="Get a sample of the item ids in the catalog, for synthetic requests",
    handle=items_sample,
    response=ItemsSampleResponse,
)


_MAX_MATCHES = 20
"""Maximum number of items in the result of a search."""


async def titles(context: HandlerContext, request: TitlesRequest) -> TitlesResponse:
    """Return the titles of items, and of items whose title contains the search text; items without one are omitted."""
    titles_by_item: dict[str, str] = {}
    for deployment in context.service.deployments.values():
        servable = deployment.servable
        if not servable.item_titles:
            continue
        for item, item_id in zip(request.items, servable.ids_of(request.items).tolist(), strict=True):
            if item_id:
                titles_by_item.setdefault(str(item), servable.item_titles[item_id - 1])
        if request.search is not None:
            titles_by_item |= _search(servable, request.search.casefold())
    return {"titles": {item: title for item, title in titles_by_item.items() if title}}


def _search(servable: Servable, text: str) -> dict[str, str]:
    pairs = zip(servable.item_keys, servable.item_titles, strict=True)
    return dict(itertools.islice(((key, title) for key, title in pairs if text in title.casefold()), _MAX_MATCHES))


TITLES = EndpointSpec(
    method="POST",
    path="/v1/titles",
    summary="Get the titles of items, or search for items by title",
    handle=titles,
    request=TitlesRequest,
    response=TitlesResponse,
    example={"items": ["12", "7"], "search": "star"},
)
