"""The gate before every route: who asks, whether they may, and how often."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from nestrec.base.clock import Clock, RealClock
from nestrec.serving.api.protocol.http import Answered, Header, problem, retry_after
from nestrec.serving.client import client_of
from nestrec.serving.safety import front_secret
from nestrec.serving.safety.access import Access, Audience, may
from nestrec.serving.safety.keys import Key, KeyRing
from nestrec.serving.safety.rates import KeyRates, RatesOfKeys

_LONGEST_KEY = 512
_BEARER = b"bearer "
_CHALLENGE: Header = (b"www-authenticate", b'Bearer realm="nestrec"')
_HOW = "give a key: `Authorization: Bearer KEY` or `X-API-Key: KEY`"


@dataclass(frozen=True, slots=True)
class Admission:
    """What the gate decides about a request."""

    client: str
    """whose share of the device the work counts as"""
    key: str = ""
    """name of the key that was given; empty where none was needed"""
    refused: Answered | None = None
    """what is answered instead"""


class SafetyGate:
    """Decides by the head of a request. Used inside one event loop."""

    def __init__(
        self,
        access: Access,
        keys: KeyRing | None = None,
        *,
        front_only: bool = False,
        takes_admin: bool = True,
        refusals: dict[str, int] | None = None,
        clock: Clock | None = None,
        rates: RatesOfKeys | None = None,
        unix_s: Callable[[], float] = time.time,
    ):
        """takes_admin: admin endpoints may be asked at all; without keys whoever reaches the server may ask them.
        refusals: counted here by reason. rates: of keys; none: of this gate alone."""
        self._access, self._keys, self._front_only, self._takes_admin = access, keys, front_only, takes_admin
        self._rates, self._unix_s = rates or KeyRates(clock or RealClock()), unix_s
        self.refusals = {} if refusals is None else refusals

    def admit(self, path: str, raw_path: str, headers: list[Header], address: str) -> Admission:
        """path: decoded. address: of the connection."""
        named = dict(headers)
        if front_secret.HEADER in named and front_secret.is_front(named[front_secret.HEADER]):
            return Admission(client_of("127.0.0.1", headers))
        if self._front_only:
            return self._refused("front", problem(403, "only the front of this instance may ask it"))
        audience = self._access.audience_of(path, raw_path)
        if audience == "admins" and not self._takes_admin:
            return self._refused("port", problem(403, "admin endpoints are not answered here"))
        if self._keys is None or audience == "anyone":
            return Admission(client_of(address, headers))
        return self._by_key(_credential(headers, named), audience, self._keys)

    def _by_key(self, given: bytes | str, audience: Audience, keys: KeyRing) -> Admission:
        if isinstance(given, str):
            return self._refused(given, problem(401, _HOW, "", _CHALLENGE))
        key = keys.find(given)
        if key is None:
            return self._refused("unknown", problem(401, "the key is not known", "", _CHALLENGE))
        if key.expires_s <= self._unix_s():
            return self._refused("expired", problem(401, "the key has expired", "", _CHALLENGE))
        if not may(key.role, audience):
            return self._refused("role", problem(403, f"a {key.role} key may not ask this"))
        return self._within_rate(key)

    def route_of(self, path: str, raw_path: str) -> str:
        return self._access.route_of(path, raw_path)

    def _within_rate(self, key: Key) -> Admission:
        wait_s = self._rates.wait_s(key)
        if wait_s:
            return self._refused("rate", problem(429, "the key asks too often", "", retry_after(wait_s)))
        return Admission(f"key:{key.name}", key.name)

    def _refused(self, reason: str, answered: Answered) -> Admission:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        return Admission("", refused=answered)


def _credential(headers: list[Header], named: dict[bytes, bytes]) -> bytes | str:
    """The key of a request; as text, why there is none."""
    bearer, plain = named.get(b"authorization"), named.get(b"x-api-key")
    if bearer is None and plain is None:
        return "missing"
    num_given = sum(name in (b"authorization", b"x-api-key") for name, _ in headers)
    if num_given != 1:  # who decides which of them counts?
        return "malformed"
    if bearer is not None:
        if bearer[: len(_BEARER)].lower() != _BEARER:
            return "malformed"
        plain = bearer[len(_BEARER) :].strip(b" ")
    assert plain is not None
    return plain if 1 <= len(plain) <= _LONGEST_KEY else "malformed"
