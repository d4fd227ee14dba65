"""Whom each route is for: anyone, clients, those who watch a server, or those who change it."""

import re
from collections.abc import Iterable
from typing import Literal, Protocol

from nestrec.serving.safety.keys import Role

Audience = Literal["anyone", "clients", "watchers", "admins"]
_ADMIN = "/v1/admin/"
"""whatever stands below it is for admins, whoever added it"""
_MAY: dict[Role, frozenset[Audience]] = {
    "public": frozenset({"anyone", "clients"}),
    "monitor": frozenset({"anyone", "watchers"}),
    "admin": frozenset({"anyone", "clients", "watchers", "admins"}),
}


class Guarded(Protocol):
    """What an endpoint says of itself."""

    @property
    def path(self) -> str: ...
    @property
    def audience(self) -> Audience: ...
    @property
    def admin(self) -> bool: ...


class Access:
    """The audience of each path; one that no endpoint has is for clients, who are then told that nothing is there."""

    def __init__(self, endpoints: Iterable[Guarded], watched: Iterable[str] = ()):
        """watched: further paths that are for those who watch."""
        self._exact: dict[str, Audience] = dict.fromkeys(watched, "watchers")
        self._patterns: list[tuple[re.Pattern[str], str, Audience]] = []
        for endpoint in endpoints:
            audience: Audience = "admins" if endpoint.admin else endpoint.audience
            if "{" in endpoint.path:
                pattern = re.compile(re.sub(r"\\{\w+\\}", "([^/]*)", re.escape(endpoint.path)))
                self._patterns.append((pattern, endpoint.path, audience))
            else:
                self._exact[endpoint.path] = audience

    def audience_of(self, path: str, raw_path: str) -> Audience:
        """path: decoded. raw_path: in percent encoding, in which an id may hold any character."""
        if path.startswith(_ADMIN):
            return "admins"
        if (audience := self._exact.get(path)) is not None:
            return audience
        return next((audience for pattern, _, audience in self._patterns if pattern.fullmatch(raw_path)), "clients")

    def route_of(self, path: str, raw_path: str) -> str:
        """The route as it is declared, which holds no id; `other` for what is no route."""
        if path in self._exact:
            return path
        return next((route for pattern, route, _ in self._patterns if pattern.fullmatch(raw_path)), "other")


def may(role: Role, audience: Audience) -> bool:
    return audience in _MAY[role]
