"""Registry of HTTP endpoints: the built-in ones, and plugins from the entry-point group `nestrec.endpoints`."""

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
    """Return a registry of the built-in endpoints and of the plugins that are currently installed."""
    return PluginRegistry("nestrec.endpoints", "endpoint", _BUILT_IN, of=EndpointSpec)


ENDPOINTS = endpoint_seam()


def all_endpoints(seam: PluginRegistry[EndpointSpec] = ENDPOINTS) -> dict[str, EndpointSpec]:
    """Return the endpoints of a registry by name.

    Raises:
        UserError: Two endpoints have the same path, or the spec of a plugin is invalid.
    """
    endpoints = {name: seam.find(name) for name in seam}
    for name, endpoint in endpoints.items():
        if name not in seam.built_in_names:
            _check_described(seam, name, endpoint)
    routes: dict[str, str] = {}
    for name, endpoint in endpoints.items():
        first = routes.setdefault(endpoint.path, name)
        if first != name:
            remedy = f"change the path of one of them, or uninstall {seam.package_of(name)!r}"
            raise UserError(
                f"the endpoint {first!r} has the same path",
                option=f"{seam.group}: {name}",
                value=endpoint.path,
                remedy=remedy,
            )
    return endpoints


def _check_described(seam: PluginRegistry[EndpointSpec], name: str, endpoint: EndpointSpec) -> None:
    """Check that the schemas of a plugin can be parsed and documented, so that errors appear when the server starts."""
    if not endpoint.path.startswith("/"):
        raise seam.missing_field_error(name, "path", f"its path {endpoint.path!r} does not start with '/'")
    limits = LimitsConfig()
    for field, shape in (("request", endpoint.request), ("response", endpoint.response)):
        try:
            if shape is not None:
                json_schema(shape, limits, {})
            if field == "request" and endpoint.request is not None:
                reader(endpoint.request, limits)
        except Exception as error:
            problem = f"its {field} {shape!r} cannot be represented in JSON ({type(error).__name__}: {error})"
            raise seam.missing_field_error(name, field, problem, hint="; see examples/plugin") from error
