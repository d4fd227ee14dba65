"""Security options of `nestrec serve`, the check of the listening address, and the secret of a gateway.

A server may listen on loopback without further options. On other addresses it requires API keys, TLS, or `--insecure`.

Instances recognize requests of their gateway by a random secret, which the gateway passes to them in the environment
and which no other process of the machine knows.
"""

import functools
import hmac
import os
import secrets
import threading
from typing import Literal

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.serving.core.asgi import is_loopback


@config
class SecurityConfig:
    api_keys: str = ""
    """File of API keys written by `nestrec create-key`, reloaded when it changes; empty: requests need no key."""
    tls_certificate: str = ""
    """File of the TLS certificate and its intermediate certificates (PEM), reloaded when it changes; empty: plain
    HTTP."""
    tls_private_key: str = ""
    """File of the certificate's private key (PEM), without a password."""
    admin_on_health_port: bool = False
    """Serve admin endpoints on `health_port` only."""
    behind: Literal["", "gateway"] = ""
    """Kind of load balancer that started this process and that is the only one whose requests are accepted; set
    automatically."""

    def __post_init__(self) -> None:
        if bool(self.tls_certificate) != bool(self.tls_private_key):
            missing = "tls_private_key" if self.tls_certificate else "tls_certificate"
            remedy = f"set --security.{missing} FILE too"
            path = self.tls_certificate or self.tls_private_key
            raise UserError(
                "TLS needs both a certificate and a private key", option="security", value=path, remedy=remedy
            )


def check_exposure(host: str, cfg: SecurityConfig, *, is_insecure: bool, health_port: int | None) -> None:
    """Raise `UserError` if other machines could send requests without authentication or TLS.

    Args:
        host: Address on which the server listens.
        cfg: Security options.
        is_insecure: Whether the user allows such requests (`--insecure`).
        health_port: Port of the health endpoints; None if they share the main port.
    """
    if cfg.admin_on_health_port and health_port is None:
        remedy = "set --health_port too"
        raise UserError("requires a health port", option="security.admin_on_health_port", value=True, remedy=remedy)
    if is_loopback(host) or cfg.api_keys or cfg.tls_certificate or is_insecure:
        return
    remedy = (
        "set --security.api_keys FILE (see `nestrec create-key`) or --security.tls_certificate and "
        "--security.tls_private_key; listen on 127.0.0.1; or set --insecure if a proxy authenticates requests"
    )
    raise UserError("other machines could connect without API keys or TLS", option="host", value=host, remedy=remedy)


GATEWAY_SECRET_HEADER = b"x-nestrec-gateway-secret"
GATEWAY_SECRET_VARIABLE = "NESTREC_GATEWAY_SECRET"


_LOCK = threading.Lock()
"""Guards the creation of the secret: a gateway starts its instances on several threads, and `functools.cache` alone
could call the function once per thread, so that instances would get different secrets."""


def gateway_secret() -> str:
    """Return the gateway's secret: taken out of the environment in an instance, created once in a gateway."""
    with _LOCK:
        return _secret_once()


@functools.cache
def _secret_once() -> str:
    return os.environ.pop(GATEWAY_SECRET_VARIABLE, None) or secrets.token_hex(32)


def is_gateway(secret: bytes) -> bool:
    """Return whether the secret of a request is that of this instance's gateway (constant-time comparison)."""
    return hmac.compare_digest(secret, gateway_secret().encode())
