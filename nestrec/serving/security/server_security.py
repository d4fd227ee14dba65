"""Authentication, authorization and rate limits of requests, and hot reload of API keys and TLS certificates.

`RequestAuthorizer` decides about each request of one port before its route is called. `CertificateReloader` reloads
the TLS certificate when its files change; open connections keep the old one. `ServerSecurity` owns both for all ports
of a server.
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
    is_allowed,
)
from nestrec.serving.security.rate_limiter import LocalRateLimiter, RateLimiter
from nestrec.serving.security.security_config import SecurityConfig

_MAX_KEY_LENGTH = 512
_BEARER = b"bearer "
_CHALLENGE: Header = (b"www-authenticate", b'Bearer realm="nestrec"')
_HOW = "an API key is required: send the header `Authorization: Bearer KEY` or `X-API-Key: KEY`"


@dataclass(frozen=True, slots=True)
class AccessDecision:
    """Decision about a request: whether it is authorized, and for which client."""

    client: str
    """Client to which the request counts in fair queuing."""
    key: str = ""
    """Name of the API key that authorized the request; empty if no key was needed."""
    rejection: HttpResponse | None = None
    """Response of a rejected request; None if the request is authorized."""


class RequestAuthorizer:
    """Authenticates, authorizes and rate-limits the requests of a port by their headers. Use it from one event loop."""

    def __init__(
        self,
        access: AccessRules,
        keys: ApiKeyStore | None = None,
        *,
        gateway_only: bool = False,
        allow_admin: bool = True,
        auth_failures: dict[str, int] | None = None,
        clock: Clock | None = None,
        rates: RateLimiter | None = None,
        unix_s: Callable[[], float] = time.time,
    ):
        """Create the authorizer of a port.

        Args:
            access: Audiences of the routes.
            keys: API keys; None authorizes every caller that can reach the port.
            gateway_only: Whether only requests of this instance's gateway are authorized.
            allow_admin: Whether this port serves admin endpoints.
            auth_failures: Number of rejected requests by reason, which this authorizer increases.
            clock: Clock of the rate limits.
            rates: Rate limits of the keys; None limits the requests of this authorizer only.
            unix_s: Wall clock in Unix seconds, for the expiry of keys.
        """
        self._access = access
        self._keys = keys
        self._gateway_only = gateway_only
        self._allow_admin = allow_admin
        self._rates = rates or LocalRateLimiter(clock or RealClock())
        self._unix_s = unix_s
        self.auth_failures = {} if auth_failures is None else auth_failures

    def authorize(self, path: str, raw_path: str, headers: list[Header], address: str) -> AccessDecision:
        """Decide about a request.

        Args:
            path: Decoded path.
            raw_path: Percent-encoded path.
            headers: Headers of the request with lower-case names.
            address: IP address of the connection.
        """
        by_name = dict(headers)
        if security_config.GATEWAY_SECRET_HEADER in by_name and security_config.is_gateway(
            by_name[security_config.GATEWAY_SECRET_HEADER]
        ):
            return AccessDecision(client_of("127.0.0.1", headers))
        if self._gateway_only:
            return self._reject("gateway", problem(403, "this instance accepts requests only from its gateway"))
        if self._keys is None and self._allow_admin:  # without keys every caller has all roles
            return AccessDecision(client_of(address, headers))
        audience = self._access.audience_of(path, raw_path)
        if audience == "admins" and not self._allow_admin:
            return self._reject("port", problem(403, "this port does not serve admin endpoints"))
        if self._keys is None or audience == "anyone":
            return AccessDecision(client_of(address, headers))
        return self._authorize_by_key(_credential(headers, by_name), audience, self._keys)

    def _authorize_by_key(self, credential: bytes | str, audience: Audience, keys: ApiKeyStore) -> AccessDecision:
        if isinstance(credential, str):
            return self._reject(credential, problem(401, _HOW, "", _CHALLENGE))
        key = keys.find(credential)
        if key is None:
            return self._reject("unknown", problem(401, "the API key is unknown", "", _CHALLENGE))
        if key.expires_s <= self._unix_s():
            return self._reject("expired", problem(401, "the API key has expired", "", _CHALLENGE))
        if not is_allowed(key.role, audience):
            return self._reject("role", problem(403, f"an API key with the role {key.role} may not call this endpoint"))
        return self._check_rate(key)

    def route_of(self, path: str, raw_path: str) -> str:
        return self._access.route_of(path, raw_path)

    def _check_rate(self, key: ApiKey) -> AccessDecision:
        wait_s = self._rates.wait_s(key)
        if wait_s:
            return self._reject("rate", problem(429, "the API key exceeds its rate limit", "", retry_after(wait_s)))
        return AccessDecision(f"key:{key.name}", key.name)

    def _reject(self, reason: str, response: HttpResponse) -> AccessDecision:
        self.auth_failures[reason] = self.auth_failures.get(reason, 0) + 1
        return AccessDecision("", rejection=response)


def _credential(headers: list[Header], by_name: dict[bytes, bytes]) -> bytes | str:
    """Return the API key of a request as bytes, or the reason (`missing`, `malformed`) as text."""
    bearer, plain = by_name.get(b"authorization"), by_name.get(b"x-api-key")
    if bearer is None and plain is None:
        return "missing"
    num_credentials = sum(name in (b"authorization", b"x-api-key") for name, _ in headers)
    if num_credentials != 1:  # several keys are ambiguous: proxies and this server could choose different ones
        return "malformed"
    if bearer is not None:
        if bearer[: len(_BEARER)].lower() != _BEARER:
            return "malformed"
        plain = bearer[len(_BEARER) :].strip(b" ")
    assert plain is not None
    return plain if 1 <= len(plain) <= _MAX_KEY_LENGTH else "malformed"


_LOG = logging.getLogger(__name__)
_FIRST_CERTIFICATE = re.compile("-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----([A-Za-z0-9+/=\\s]+)-----END")
_VERSION_TAG, _UTC_TIME_TAG = 0xA0, 0x17


class CertificateReloader:
    """TLS context that reloads its certificate and private key when their files change."""

    def __init__(self, certificate: Path, private_key: Path, unix_s: Callable[[], float] = time.time):
        self._paths = (certificate, private_key)
        self._unix_s = unix_s
        self.context = _load_context(*self._paths)
        self.validity: Validity | None = None
        """Period in which clients accept the certificate in use."""
        self.file = WatchedFiles("certificate", self._paths, self._read)

    @staticmethod
    def from_config(cfg: SecurityConfig) -> "CertificateReloader | None":
        return (
            CertificateReloader(Path(cfg.tls_certificate), Path(cfg.tls_private_key)) if cfg.tls_certificate else None
        )

    def reload_if_changed(self) -> bool:
        """Reload the files if they have changed and return whether they were reloaded; if the new certificate is
        unusable, the old one stays."""
        return self.file.reload_if_changed()

    def _read(self) -> None:
        _load_context(*self._paths)  # checked first: loading a mismatched pair would leave half of it in the context
        certificate = self._paths[0]
        now_s = self._unix_s()
        validity = Validity.from_pem(certificate.read_text(encoding="utf-8", errors="replace"))
        if not validity.contains(now_s):
            if self.validity is not None and self.validity.contains(now_s):
                remedy = "replace it by a valid certificate; the current one stays in use until then"
                what = f"the certificate is expired or not yet valid: {validity}"
                raise UserError(what, option="security.tls_certificate", value=str(certificate), remedy=remedy)
            _LOG.error(
                "clients reject the certificate in %s: it is expired or not yet valid: %s", certificate, validity
            )
        self.context.load_cert_chain(*self._paths)
        self.validity = validity
        _LOG.info("loaded the certificate in %s for new connections, %s", certificate, validity)


@dataclass(frozen=True, slots=True)
class Validity:
    """Period in which clients accept a certificate."""

    first_s: float
    """Start of the period in Unix seconds."""
    last_s: float
    """End of the period in Unix seconds."""

    @staticmethod
    def from_pem(pem: str) -> "Validity":
        """Read the validity period of the first certificate in a PEM file, which is the server's own.

        The standard library reports the period only for certificates of a connection, so this method parses the DER
        encoding and skips the fields before the period (RFC 5280, 4.1).
        """
        block = _FIRST_CERTIFICATE.search(pem)
        if block is None:
            raise UserError(
                "the file does not contain a certificate",
                option="security.tls_certificate",
                value="",
                remedy="use a certificate in PEM format",
            )
        try:
            der = base64.b64decode(block[1])
            _, certificate, _ = _element(der, 0)
            _, offset, _ = _element(der, certificate)  # offset of the first field of TBSCertificate
            num_before = 4 if der[offset] == _VERSION_TAG else 3  # version, serial number, signature algorithm, issuer
            for _ in range(num_before):
                _, _, offset = _element(der, offset)
            _, offset, _ = _element(der, offset)
            first = _element(der, offset)
            last = _element(der, first[2])
            return Validity(_time_s(der, *first), _time_s(der, *last))
        except (ValueError, IndexError) as error:
            remedy = "use a certificate in PEM format"
            raise UserError(
                "cannot read the validity period of the certificate",
                option="security.tls_certificate",
                value=block[1][:20],
                remedy=remedy,
            ) from error

    def contains(self, unix_s: float) -> bool:
        return self.first_s <= unix_s <= self.last_s

    def __str__(self) -> str:
        first, last = (time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(s)) for s in (self.first_s, self.last_s))
        return f"valid from {first} to {last}"


def _element(der: bytes, offset: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at an offset, and start and end of its content."""
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
    if tag == _UTC_TIME_TAG:  # the year has two digits: 1950 to 2049
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()


def _load_context(certificate: Path, private_key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    no_password = "the private key must not have a password"
    try:
        context.load_cert_chain(certificate, private_key, password=lambda: _raise_error(no_password))
    except (OSError, ValueError) as error:  # a mismatched pair raises SSLError, which is an OSError
        remedy = f"use PEM files of a certificate and its own private key ({no_password})"
        what = f"the certificate cannot be used with its private key: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, option="security.tls_certificate", value=str(certificate), remedy=remedy) from error
    return context


def _raise_error(reason: str) -> str:
    raise ValueError(reason)


_GATEWAY_PATHS: dict[str, Audience] = {"/v1/gateway": "watchers", "/v1/admin/scale": "admins"}
"""Paths that only a gateway serves."""


class ServerSecurity:
    """API keys, rate limits and TLS certificate of a server, and the thread that reloads them. Must be closed."""

    def __init__(self, cfg: SecurityConfig, host: str, rates: RateLimiter | None = None):
        """Load keys and certificate, and start to reload them when they change.

        Args:
            cfg: Security options.
            host: Address on which the server listens.
            rates: Rate limits that are shared with other processes of the server; None uses separate ones per port.
        """
        self.cfg = cfg
        self._rates = rates
        self.keys = ApiKeyStore(Path(cfg.api_keys)) if cfg.api_keys else None
        self.certificates = CertificateReloader.from_config(cfg)
        self.auth_failures: dict[str, int] = {}
        """Number of requests that were rejected on any port, by reason."""
        # Without keys the server cannot recognize admins, so it serves admin endpoints only on loopback.
        self._can_identify_admins = self.keys is not None or is_loopback(host)
        readers = (self.keys, self.certificates)
        self.files = [reader.file for reader in readers if reader is not None]
        """Files that are reloaded when they change."""
        self._watcher = Watcher(self.files)

    def make_authorizer(self, endpoints: Iterable[ProtectedRoute], *, of_health: bool = False) -> RequestAuthorizer:
        """Return the authorizer of the main port, or of the health port (`of_health`)."""
        is_admin_port = self.cfg.admin_on_health_port == of_health
        return RequestAuthorizer(
            AccessRules(endpoints, _GATEWAY_PATHS),
            self.keys,
            gateway_only=self.cfg.behind == "gateway",
            allow_admin=is_admin_port and self._can_identify_admins,
            auth_failures=self.auth_failures,
            rates=self._rates,
        )

    @property
    def file_ages_s(self) -> dict[str, float]:
        """Seconds since each kind of file was last known to be up to date."""
        return {files.name: files.age_s for files in self.files}

    @property
    def certificate_expiry_s(self) -> float | None:
        """Expiry time of the certificate in use in Unix seconds; None without TLS."""
        validity = None if self.certificates is None else self.certificates.validity
        return None if validity is None else validity.last_s

    def close(self) -> None:
        self._watcher.close()
