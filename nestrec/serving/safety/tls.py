"""The certificate of a server, read again when its files change: connections that are open keep the old one."""

import logging
import ssl
from pathlib import Path

from nestrec.base.errors import UserError
from nestrec.serving.safety.config import SafetyConfig
from nestrec.serving.safety.watched_files import WatchedFiles

_LOG = logging.getLogger(__name__)


class Certificates:
    """A TLS context that follows its files."""

    def __init__(self, certificate: Path, private_key: Path):
        self._paths = (certificate, private_key)
        self._files = WatchedFiles(self._paths)
        self.context = _loaded(*self._paths)

    @staticmethod
    def of(cfg: SafetyConfig) -> "Certificates | None":
        return Certificates(Path(cfg.certificate), Path(cfg.private_key)) if cfg.certificate else None

    def reload_if_changed(self) -> bool:
        """Whether new connections get another certificate; where the new one will not do, the old one stays."""
        if not self._files.have_changed():
            return False
        try:
            _loaded(*self._paths)  # a pair that does not fit would leave the context with one half of it
            self.context.load_cert_chain(*self._paths)
        except (UserError, OSError) as error:
            _LOG.error("the certificate stays as it is: %s", error)
            return False
        _LOG.info("new connections get the certificate of %s as it is now", self._paths[0])
        return True


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
        raise UserError(what, field="safety.certificate", value=str(certificate), remedy=remedy) from error
    return context


def _refuse(why: str) -> str:
    raise ValueError(why)
