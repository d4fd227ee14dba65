"""Options of `nestrec serve` about who may ask it.

Where a server may listen: on this machine as it is, elsewhere with keys or TLS, or where its operator says so.

What an instance knows its front by: a secret of the start, which no other process of the machine has.
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
    keys: str = ""
    """file of API keys, as `nestrec key` writes it, read again whenever it changes; empty: whoever reaches the server
    may ask"""
    certificate: str = ""
    """file of the TLS certificate and of those that vouch for it (PEM), read again whenever it changes; empty: plain
    HTTP"""
    private_key: str = ""
    """file of the certificate's private key (PEM), without a password"""
    admin_on_health_port: bool = False
    """admin endpoints are answered on `health_port` alone"""
    behind: Literal["", "gateway"] = ""
    """the front that started this process, set by it: requests of anything else are rejected"""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.private_key):
            missing = "private_key" if self.certificate else "certificate"
            remedy = f"give --safety.{missing} FILE as well"
            given = self.certificate or self.private_key
            raise UserError("is one half of a pair", option="safety", value=given, remedy=remedy)


def check_exposure(host: str, cfg: SecurityConfig, *, is_insecure: bool, health_port: int | None) -> None:
    """Refuse what would let anybody of the network in, unless that is meant."""
    if cfg.admin_on_health_port and health_port is None:
        remedy = "give --health_port as well"
        raise UserError("has no port to go to", option="safety.admin_on_health_port", value=True, remedy=remedy)
    if is_loopback(host) or cfg.keys or cfg.certificate or is_insecure:
        return
    remedy = (
        "give --safety.keys FILE (see `nestrec key`) or --safety.certificate and --safety.private_key; listen on "
        "127.0.0.1; or say --insecure where something before the server decides who may ask"
    )
    raise UserError("lets other machines ask without keys or TLS", option="host", value=host, remedy=remedy)


HEADER = b"x-nestrec-front"
VARIABLE = "NESTREC_FRONT_SECRET"


_LOCK = threading.Lock()
"""instances are started by a thread each: a cache alone lets all of them make one, and the front keeps only the last"""


def front_secret() -> str:
    """Of this process: its front's, which is taken out of the environment, or a new one where it is the front."""
    with _LOCK:
        return _made_once()


@functools.cache
def _made_once() -> str:
    return os.environ.pop(VARIABLE, None) or secrets.token_hex(32)


def is_front(given: bytes) -> bool:
    return hmac.compare_digest(given, front_secret().encode())
