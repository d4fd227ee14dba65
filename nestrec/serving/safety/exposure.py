"""Where a server may listen: on this machine as it is, elsewhere with keys or TLS, or where its operator says so."""

from nestrec.base.errors import UserError
from nestrec.serving.api.protocol.hosts import is_loopback
from nestrec.serving.safety.config import SafetyConfig


def check_exposure(host: str, cfg: SafetyConfig, *, is_insecure: bool, health_port: int | None) -> None:
    """Refuse what would let anybody of the network in, unless that is meant."""
    if cfg.admin_on_health_port and health_port is None:
        remedy = "give --health_port as well"
        raise UserError("has no port to go to", field="safety.admin_on_health_port", value=True, remedy=remedy)
    if is_loopback(host) or cfg.keys or cfg.certificate or is_insecure:
        return
    remedy = (
        "give --safety.keys FILE (see `nestrec key`) or --safety.certificate and --safety.private_key; listen on "
        "127.0.0.1; or say --insecure where something before the server decides who may ask"
    )
    raise UserError("lets other machines ask without keys or TLS", field="host", value=host, remedy=remedy)
