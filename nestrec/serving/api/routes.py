"""The endpoints of the front: ours, and those that other packages add by the entry-point group `nestrec.endpoints`."""

from nestrec.base.errors import UserError
from nestrec.base.seam import Seam
from nestrec.serving.api.endpoint import Endpoint

_HERE = "nestrec.serving.api.endpoints"
_BUILT_IN: dict[str, Endpoint | str] = {
    "recommend": f"{_HERE}.recommend:RECOMMEND",
    "rank": f"{_HERE}.rank:RANK",
    "preinfer": f"{_HERE}.preinfer:PREINFER",
    "events": f"{_HERE}.users:EVENTS",
    "forget_events": f"{_HERE}.users:FORGET_EVENTS",
    "forget_cache": f"{_HERE}.users:FORGET_CACHE",
    "models": f"{_HERE}.about:MODELS",
    "status": f"{_HERE}.about:STATUS",
    "live": f"{_HERE}.about:LIVE",
    "ready": f"{_HERE}.about:READY",
    "metrics": f"{_HERE}.about:METRICS",
    "page": f"{_HERE}.about:PAGE_LIVE",
    "docs": f"{_HERE}.about:PAGE_DOCS",
    "openapi": f"{_HERE}.about:OPENAPI",
}


def endpoint_seam() -> Seam[Endpoint]:
    """The endpoints that are installed now."""
    return Seam("nestrec.endpoints", "endpoint", _BUILT_IN, of=Endpoint)


ENDPOINTS = endpoint_seam()


def all_endpoints(seam: Seam[Endpoint] = ENDPOINTS) -> dict[str, Endpoint]:
    """By name; each route belongs to one of them."""
    found = {name: seam.find(name) for name in seam}
    routes: dict[str, str] = {}
    for name, endpoint in found.items():
        first = routes.setdefault(endpoint.path, name)
        if first != name:
            remedy = f"give it another path than that of {first!r}, or uninstall {seam.package_of(name)!r}"
            raise UserError(
                "is the path of two endpoints", field=f"{seam.group}: {name}", value=endpoint.path, remedy=remedy
            )
    return found
