"""The endpoints of the front: ours, and those that other packages add by the entry-point group `nestrec.endpoints`."""

from nestrec.base.errors import UserError
from nestrec.base.plugins import PluginRegistry
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.endpoint_spec import EndpointSpec
from nestrec.serving.inputs.request_schema import json_schema, reader

_BUILT_IN: dict[str, EndpointSpec | str] = {
    "recommend": "nestrec.serving.http.endpoints.recommend_endpoint:RECOMMEND",
    "rank": "nestrec.serving.http.endpoints.rank_endpoints:RANK",
    "preinfer": "nestrec.serving.http.endpoints.rank_endpoints:PREINFER",
    "events": "nestrec.serving.http.endpoints.user_endpoints:EVENTS",
    "forget_events": "nestrec.serving.http.endpoints.user_endpoints:FORGET_EVENTS",
    "forget_cache": "nestrec.serving.http.endpoints.user_endpoints:FORGET_CACHE",
    "swap": "nestrec.serving.http.endpoints.admin_endpoints:SWAP",
    "rollback": "nestrec.serving.http.endpoints.admin_endpoints:ROLLBACK",
    "drain": "nestrec.serving.http.endpoints.admin_endpoints:DRAIN",
    "fleet": "nestrec.serving.http.endpoints.admin_endpoints:FLEET",
    "models": "nestrec.serving.http.endpoints.status_endpoints:MODELS",
    "status": "nestrec.serving.http.endpoints.status_endpoints:STATUS",
    "now": "nestrec.serving.http.endpoints.status_endpoints:NOW",
    "items": "nestrec.serving.http.endpoints.catalog_endpoints:ITEMS",
    "items_sample": "nestrec.serving.http.endpoints.catalog_endpoints:ITEMS_SAMPLE",
    "titles": "nestrec.serving.http.endpoints.catalog_endpoints:TITLES",
    "live": "nestrec.serving.http.endpoints.status_endpoints:LIVE",
    "ready": "nestrec.serving.http.endpoints.status_endpoints:READY",
    "metrics": "nestrec.serving.http.endpoints.status_endpoints:METRICS",
    "page": "nestrec.serving.http.endpoints.status_endpoints:PAGE_LIVE",
    "docs": "nestrec.serving.http.endpoints.status_endpoints:PAGE_DOCS",
    "openapi": "nestrec.serving.http.endpoints.status_endpoints:OPENAPI",
}


def endpoint_seam() -> PluginRegistry[EndpointSpec]:
    """The endpoints that are installed now."""
    return PluginRegistry("nestrec.endpoints", "endpoint", _BUILT_IN, of=EndpointSpec)


ENDPOINTS = endpoint_seam()


def all_endpoints(seam: PluginRegistry[EndpointSpec] = ENDPOINTS) -> dict[str, EndpointSpec]:
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
                "is the path of two endpoints", option=f"{seam.group}: {name}", value=endpoint.path, remedy=remedy
            )
    return found


def _check_described(seam: PluginRegistry[EndpointSpec], name: str, endpoint: EndpointSpec) -> None:
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
