"""Options of `nestrec serve` about who may ask it."""

from typing import Literal

from nestrec.base.config import config
from nestrec.base.errors import UserError


@config
class SafetyConfig:
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
    behind: Literal["", "gateway", "nginx"] = ""
    """the front that started this process, set by it. gateway: nobody else is answered; nginx: nobody else may ask
    admin endpoints"""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.private_key):
            missing = "private_key" if self.certificate else "certificate"
            remedy = f"give --safety.{missing} FILE as well"
            given = self.certificate or self.private_key
            raise UserError("is one half of a pair", field="safety", value=given, remedy=remedy)
