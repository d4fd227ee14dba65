"""The endpoints of the front: ours, and those that other packages add by the entry-point group `nestrec.endpoints`."""

from nestrec.base.errors import UserError
from nestrec.base.seam import Seam
from nestrec.serving.api.endpoint import Endpoint
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.api.shapes import json_schema, reader

_BUILT_IN: dict[str, Endpoint | str] = {
    "recommend": "nestrec.serving.api.endpoints.recommend:RECOMMEND",
    "rank": "nestrec.serving.api.endpoints.rank:RANK",
    "preinfer": "nestrec.serving.api.endpoints.preinfer:PREINFER",
    "events": "nestrec.serving.api.endpoints.users:EVENTS",
    "forget_events": "nestrec.serving.api.endpoints.users:FORGET_EVENTS",
    "forget_cache": "nestrec.serving.api.endpoints.users:FORGET_CACHE",
    "swap": "nestrec.serving.api.endpoints.admin:SWAP",
    "rollback": "nestrec.serving.api.endpoints.admin:ROLLBACK",
    "drain": "nestrec.serving.api.endpoints.admin:DRAIN",
    "fleet": "nestrec.serving.api.endpoints.admin:FLEET",
    "models": "nestrec.serving.api.endpoints.about:MODELS",
    "status": "nestrec.serving.api.endpoints.about:STATUS",
    "now": "nestrec.serving.api.endpoints.about:NOW",
    "items": "nestrec.serving.api.endpoints.items:ITEMS",
    "items_sample": "nestrec.serving.api.endpoints.items:ITEMS_SAMPLE",
    "titles": "nestrec.serving.api.endpoints.titles:TITLES",
    "live": "nestrec.serving.api.endpoints.about:LIVE",
    "ready": "nestrec.serving.api.endpoints.about:READY",
    "metrics": "nestrec.serving.api.endpoints.about:METRICS",
    "page": "nestrec.serving.api.endpoints.about:PAGE_LIVE",
    "docs": "nestrec.serving.api.endpoints.about:PAGE_DOCS",
    "openapi": "nestrec.serving.api.endpoints.about:OPENAPI",
}


def endpoint_seam() -> Seam[Endpoint]:
    """The endpoints that are installed now."""
    return Seam("nestrec.endpoints", "endpoint", _BUILT_IN, of=Endpoint)


ENDPOINTS = endpoint_seam()


def all_endpoints(seam: Seam[Endpoint] = ENDPOINTS) -> dict[str, Endpoint]:
    """By name; each route belongs to one of them."""
    found = {name: seam.find(name) for name in seam}
    for name, endpoint in found.items():
        if name not in seam.own:
            _check_described(seam, name, endpoint)
    routes: dict[str, str] = {}
    for name, endpoint in found.items():
        first = routes.setdefault(endpoint.path, name)
        if first != name:
            remedy = f"give it another path than that of {first!r}, or uninstall {seam.package_of(name)!r}"
            raise UserError(
                "is the path of two endpoints", field=f"{seam.group}: {name}", value=endpoint.path, remedy=remedy
            )
    return found


def _check_described(seam: Seam[Endpoint], name: str, endpoint: Endpoint) -> None:
    """Requests are read and all is described by what the endpoint says of itself: told when a server starts, and not
    when somebody asks for the description."""
    if not endpoint.path.startswith("/"):
        raise seam.unanswered(name, "path", f"its path {endpoint.path!r} does not begin with '/'")
    limits = LimitsConfig()
    for what, shape in (("request", endpoint.request), ("answer", endpoint.answer)):
        try:
            if shape is not None:
                json_schema(shape, limits, {})
            if what == "request" and endpoint.request is not None:
                reader(endpoint.request, limits)
        except Exception as error:
            problem = f"its {what} {shape!r} is not what JSON can hold ({type(error).__name__}: {error})"
            raise seam.unanswered(name, what, problem, see="; examples/plugin shows one") from error
