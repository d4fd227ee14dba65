"""Keys and certificates of one server, read again as they change, and the gates of its ports."""

from collections.abc import Iterable
from pathlib import Path

from nestrec.serving.api.protocol.hosts import is_loopback
from nestrec.serving.safety.access import Access, Guarded
from nestrec.serving.safety.config import SafetyConfig
from nestrec.serving.safety.gate import SafetyGate
from nestrec.serving.safety.keys import KeyRing
from nestrec.serving.safety.rates import RatesOfKeys
from nestrec.serving.safety.tls import Certificates
from nestrec.serving.safety.watched_files import Watcher

_WATCHED = ("/v1/gateway",)
"""what only a front answers"""


class Safety:
    """Whoever makes one closes it, or its process ends."""

    def __init__(self, cfg: SafetyConfig, host: str, rates: RatesOfKeys | None = None):
        """host: what the server listens on. rates: of keys, where other processes listen there as well."""
        self.cfg, self._rates = cfg, rates
        self.keys = KeyRing(Path(cfg.keys)) if cfg.keys else None
        self.certificates = Certificates.of(cfg)
        self.refusals: dict[str, int] = {}
        """requests that no gate let in, by reason"""
        # Without keys nobody can be told from an admin, so only this machine may ask for what they do.
        self._knows_admins = self.keys is not None or (is_loopback(host) and not cfg.behind)
        readers = (self.keys, self.certificates)
        self.files = [reader.file for reader in readers if reader is not None]
        """watched: read again when they change"""
        self._watcher = Watcher(self.files)

    def gate(self, endpoints: Iterable[Guarded], *, of_health: bool = False) -> SafetyGate:
        """Of the port that clients ask, or of the one for health."""
        is_admin_port = self.cfg.admin_on_health_port == of_health
        return SafetyGate(
            Access(endpoints, _WATCHED),
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
