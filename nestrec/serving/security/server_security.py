"""The gate before every route: who asks, whether they may, and how often.

The certificate of a server, read again when its files change: connections that are open keep the old one.

Keys and certificates of one server, read again as they change, and the gates of its ports.
"""

import base64
import datetime
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nestrec.base.clock import Clock, RealClock
from nestrec.base.errors import UserError
from nestrec.serving.core.asgi import Header, HttpResponse, client_of, is_loopback, problem, retry_after
from nestrec.serving.security import security_config
from nestrec.serving.security.auth import (
    AccessRules,
    ApiKey,
    ApiKeyStore,
    Audience,
    ProtectedRoute,
    WatchedFiles,
    Watcher,
    may,
)
from nestrec.serving.security.rate_limiter import LocalRateLimiter, RateLimiter
from nestrec.serving.security.security_config import SecurityConfig

_LONGEST_KEY = 512
_BEARER = b"bearer "
_CHALLENGE: Header = (b"www-authenticate", b'Bearer realm="nestrec"')
_HOW = "give a key: `Authorization: Bearer KEY` or `X-API-Key: KEY`"


@dataclass(frozen=True, slots=True)
class AccessDecision:
    """What the gate decides about a request."""

    client: str
    """whose share of the device the work counts as"""
    key: str = ""
    """name of the key that was given; empty where none was needed"""
    refused: HttpResponse | None = None
    """what is answered instead"""


class RequestAuthorizer:
    """Decides by the head of a request. Used inside one event loop."""

    def __init__(
        self,
        access: AccessRules,
        keys: ApiKeyStore | None = None,
        *,
        front_only: bool = False,
        takes_admin: bool = True,
        refusals: dict[str, int] | None = None,
        clock: Clock | None = None,
        rates: RateLimiter | None = None,
        unix_s: Callable[[], float] = time.time,
    ):
        """takes_admin: admin endpoints may be asked at all; without keys whoever reaches the server may ask them.
        refusals: counted here by reason. rates: of keys; none: of this gate alone."""
        self._access = access
        self._keys = keys
        self._front_only = front_only
        self._takes_admin = takes_admin
        self._rates = rates or LocalRateLimiter(clock or RealClock())
        self._unix_s = unix_s
        self.refusals = {} if refusals is None else refusals

    def admit(self, path: str, raw_path: str, headers: list[Header], address: str) -> AccessDecision:
        """path: decoded. address: of the connection."""
        named = dict(headers)
        if security_config.HEADER in named and security_config.is_front(named[security_config.HEADER]):
            return AccessDecision(client_of("127.0.0.1", headers))
        if self._front_only:
            return self._refused("front", problem(403, "only the front of this instance may ask it"))
        if self._keys is None and self._takes_admin:  # every route is for everyone
            return AccessDecision(client_of(address, headers))
        audience = self._access.audience_of(path, raw_path)
        if audience == "admins" and not self._takes_admin:
            return self._refused("port", problem(403, "admin endpoints are not answered here"))
        if self._keys is None or audience == "anyone":
            return AccessDecision(client_of(address, headers))
        return self._by_key(_credential(headers, named), audience, self._keys)

    def _by_key(self, given: bytes | str, audience: Audience, keys: ApiKeyStore) -> AccessDecision:
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

    def _within_rate(self, key: ApiKey) -> AccessDecision:
        wait_s = self._rates.wait_s(key)
        if wait_s:
            return self._refused("rate", problem(429, "the key asks too often", "", retry_after(wait_s)))
        return AccessDecision(f"key:{key.name}", key.name)

    def _refused(self, reason: str, answered: HttpResponse) -> AccessDecision:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        return AccessDecision("", refused=answered)


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


_LOG = logging.getLogger(__name__)
_FIRST_CERTIFICATE = re.compile("-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----([A-Za-z0-9+/=\\s]+)-----END")
_VERSION_TAG, _UTC_TIME_TAG = 0xA0, 0x17


class CertificateReloader:
    """A TLS context that follows its files."""

    def __init__(self, certificate: Path, private_key: Path, unix_s: Callable[[], float] = time.time):
        self._paths = (certificate, private_key)
        self._unix_s = unix_s
        self.context = _loaded(*self._paths)
        self.validity: Validity | None = None
        """Period in which clients accept the certificate in use."""
        self.file = WatchedFiles("certificate", self._paths, self._read)

    @staticmethod
    def of(cfg: SecurityConfig) -> "CertificateReloader | None":
        return CertificateReloader(Path(cfg.certificate), Path(cfg.private_key)) if cfg.certificate else None

    def reload_if_changed(self) -> bool:
        """Whether new connections get another certificate; where the new one will not do, the old one stays."""
        return self.file.look()

    def _read(self) -> None:
        _loaded(*self._paths)  # a pair that does not fit would leave the context with one half of it
        certificate = self._paths[0]
        now_s = self._unix_s()
        validity = Validity.of(certificate.read_text(encoding="utf-8", errors="replace"))
        if not validity.contains(now_s):
            if self.validity is not None and self.validity.contains(now_s):
                remedy = "replace it by a valid one; the one in use stays until then"
                what = f"is not valid now: {validity}"
                raise UserError(what, option="safety.certificate", value=str(certificate), remedy=remedy)
            _LOG.error("the certificate of %s is not valid now, so clients reject it: %s", certificate, validity)
        self.context.load_cert_chain(*self._paths)
        self.validity = validity
        _LOG.info("new connections get the certificate of %s, %s", certificate, validity)


@dataclass(frozen=True, slots=True)
class Validity:
    """Period in which clients accept a certificate."""

    first_s: float
    """Unix seconds"""
    last_s: float
    """Unix seconds"""

    @staticmethod
    def of(pem: str) -> "Validity":
        """Read the period of the first certificate of a PEM file, which is that of the server.

        The standard library shows it for certificates of a connection only, so the few fields before it are skipped
        here (RFC 5280, 4.1).
        """
        block = _FIRST_CERTIFICATE.search(pem)
        if block is None:
            raise UserError("contains no certificate", option="safety.certificate", value="", remedy="give a PEM file")
        try:
            der = base64.b64decode(block[1])
            _, certificate, _ = _element(der, 0)
            _, offset, _ = _element(der, certificate)  # of the first field of TBSCertificate
            num_before = 4 if der[offset] == _VERSION_TAG else 3  # version, serial number, signature algorithm, issuer
            for _ in range(num_before):
                _, _, offset = _element(der, offset)
            _, offset, _ = _element(der, offset)
            first = _element(der, offset)
            last = _element(der, first[2])
            return Validity(_time_s(der, *first), _time_s(der, *last))
        except (ValueError, IndexError) as error:
            remedy = "give a certificate in PEM"
            raise UserError(
                "does not contain a valid period", option="safety.certificate", value=block[1][:20], remedy=remedy
            ) from error

    def contains(self, unix_s: float) -> bool:
        return self.first_s <= unix_s <= self.last_s

    def __str__(self) -> str:
        first, last = (time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(s)) for s in (self.first_s, self.last_s))
        return f"valid from {first} to {last}"


def _element(der: bytes, offset: int) -> tuple[int, int, int]:
    """Return (tag, start, end) of the content of the element of DER at an offset."""
    tag = der[offset]
    size = der[offset + 1]
    start = offset + 2
    if size & 0x80:
        length_bytes = size & 0x7F
        size = int.from_bytes(der[start : start + length_bytes], "big")
        start += length_bytes
    return tag, start, start + size


def _time_s(der: bytes, tag: int, start: int, end: int) -> float:
    text = der[start:end].decode("ascii")
    if tag == _UTC_TIME_TAG:  # two digits of the year: 1950 to 2049
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()


def _loaded(certificate: Path, private_key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    no_password = "the private key must have no password"
    try:
        context.load_cert_chain(certificate, private_key, password=lambda: _refuse(no_password))
    except (OSError, ValueError) as error:  # a bad pair is an SSLError, which is an OSError
        remedy = f"give PEM files of a certificate and its own key ({no_password})"
        what = f"cannot be used with its private key: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, option="safety.certificate", value=str(certificate), remedy=remedy) from error
    return context


def _refuse(why: str) -> str:
    raise ValueError(why)


_WATCHED = ("/v1/gateway",)
"""what only a front answers"""


class ServerSecurity:
    """Whoever makes one closes it, or its process ends."""

    def __init__(self, cfg: SecurityConfig, host: str, rates: RateLimiter | None = None):
        """host: what the server listens on. rates: of keys, where other processes listen there as well."""
        self.cfg = cfg
        self._rates = rates
        self.keys = ApiKeyStore(Path(cfg.keys)) if cfg.keys else None
        self.certificates = CertificateReloader.of(cfg)
        self.refusals: dict[str, int] = {}
        """requests that no gate let in, by reason"""
        # Without keys nobody can be told from an admin, so only this machine may ask for what they do.
        self._knows_admins = self.keys is not None or is_loopback(host)
        readers = (self.keys, self.certificates)
        self.files = [reader.file for reader in readers if reader is not None]
        """watched: read again when they change"""
        self._watcher = Watcher(self.files)

    def gate(self, endpoints: Iterable[ProtectedRoute], *, of_health: bool = False) -> RequestAuthorizer:
        """Of the port that clients ask, or of the one for health."""
        is_admin_port = self.cfg.admin_on_health_port == of_health
        return RequestAuthorizer(
            AccessRules(endpoints, _WATCHED),
            self.keys,
            front_only=self.cfg.behind == "gateway",
            takes_admin=is_admin_port and self._knows_admins,
            refusals=self.refusals,
            rates=self._rates,
        )

    @property
    def file_ages_s(self) -> dict[str, float]:
        """Seconds since each kind of file was last known to be as it is on the disk."""
        return {files.name: files.age_s for files in self.files}

    @property
    def certificate_expiry_s(self) -> float | None:
        """Unix seconds at which the certificate in use expires; none without TLS."""
        validity = None if self.certificates is None else self.certificates.validity
        return None if validity is None else validity.last_s

    def close(self) -> None:
        self._watcher.close()
