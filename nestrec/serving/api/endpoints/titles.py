"""POST /v1/titles: what people call items, for whoever tries requests by hand."""

import itertools

from nestrec.serving.api.answers import TitlesAnswer
from nestrec.serving.api.endpoint import Endpoint, Front
from nestrec.serving.api.requests import TitlesRequest
from nestrec.serving.model.servable import Servable

_MOST_FOUND = 20


async def titles(front: Front, request: TitlesRequest) -> TitlesAnswer:
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


TITLES = Endpoint(
    method="POST",
    path="/v1/titles",
    summary="What people call items, where the model knows it",
    handle=titles,
    request=TitlesRequest,
    answer=TitlesAnswer,
    example={"items": ["12", "7"], "search": "star"},
)
