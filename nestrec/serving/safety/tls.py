"""The certificate of a server, read again when its files change: connections that are open keep the old one."""

import base64
import datetime
import logging
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nestrec.base.errors import UserError
from nestrec.serving.safety.config import SafetyConfig
from nestrec.serving.safety.watched_files import WatchedFiles

_LOG = logging.getLogger(__name__)
_FIRST_CERTIFICATE = re.compile("-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----([A-Za-z0-9+/=\\s]+)-----END")
_VERSION_TAG, _UTC_TIME_TAG = 0xA0, 0x17


class Certificates:
    """A TLS context that follows its files."""

    def __init__(self, certificate: Path, private_key: Path, unix_s: Callable[[], float] = time.time):
        self._paths = (certificate, private_key)
        self._unix_s = unix_s
        self.context = _loaded(*self._paths)
        self.validity: Validity | None = None
        """Period in which clients accept the certificate in use."""
        self.file = WatchedFiles("certificate", self._paths, self._read)

    @staticmethod
    def of(cfg: SafetyConfig) -> "Certificates | None":
        return Certificates(Path(cfg.certificate), Path(cfg.private_key)) if cfg.certificate else None

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
                raise UserError(what, field="safety.certificate", value=str(certificate), remedy=remedy)
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
            raise UserError("contains no certificate", field="safety.certificate", value="", remedy="give a PEM file")
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
                "does not contain a valid period", field="safety.certificate", value=block[1][:20], remedy=remedy
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
        raise UserError(what, field="safety.certificate", value=str(certificate), remedy=remedy) from error
    return context


def _refuse(why: str) -> str:
    raise ValueError(why)
