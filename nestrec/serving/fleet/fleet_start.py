"""`nestrec serve --instances N --front ...`: instances and their front, started and stopped together."""

import logging
from collections.abc import Callable, Sequence
from socket import socket

from nestrec.base.errors import UserError
from nestrec.serving.core import tracing
from nestrec.serving.core.asgi import is_loopback
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.fleet.instance_supervisor import LocalSupervisor
from nestrec.serving.fleet.rolling_update import FleetVersionFollower
from nestrec.serving.http.serve_config import ServeConfig, safety_of, uvicorn_config
from nestrec.serving.http.server_logging import log_without_waiting, wait_for_log
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import allow_open_files, bound_sockets, close_all, port_of, run_server, url_of
from nestrec.serving.security.security_config import check_exposure
from nestrec.serving.security.server_security import ServerSecurity

_LOG = logging.getLogger(__name__)
_OF_FRONT = (
    "host", "port", "health_port", "instances", "front", "insecure", "safety.behind", "safety.keys",
    "safety.certificate", "safety.private_key", "safety.admin_on_health_port",
)  # fmt: skip
"""Options that are not for instances."""


def serve_many(
    folders: Sequence[str],
    cfg: ServeConfig,
    overrides: dict[str, str],
    signals: SignalHandler,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP lets every instance load its models anew, one after the other.

    overrides: the options as they were typed. announce: told the address when somebody listens there.
    """
    log_without_waiting(cfg.log, "gateway")
    tracing.start(cfg.tracing)
    allow_open_files(cfg.limits.max_connections)
    _check_offered(cfg)
    if cfg.front == "ray":
        if cfg.health_port is not None:
            remedy = "ask Ray Serve's own health routes, or use --front gateway"
            raise UserError("is not offered before Ray", option="health_port", value=cfg.health_port, remedy=remedy)
        from nestrec.serving.fleet.ray_serve import serve_on_ray

        serve_on_ray(folders, cfg, signals, announce)
        return
    safety = safety_of(cfg)
    sockets = bound_sockets(cfg.host, cfg.port)
    url = url_of(cfg.host, port_of(sockets), is_tls=safety.certificates is not None)
    arguments = instance_arguments(cfg, overrides)
    models = [str(folder) for folder in folders]
    try:
        with LocalSupervisor(models, arguments, cfg.instances, stop_timeout_s=cfg.service.drain_s + 5.0) as instances:
            if instances.wait_until_up(lambda: signals.is_stopping):
                _serve_gateway(instances, cfg, safety, sockets=sockets, signals=signals, announce=lambda: announce(url))
    finally:
        safety.close()
        tracing.stop()
        close_all(sockets)
    _LOG.info("stopped, and all instances with it")
    wait_for_log()


def _check_offered(cfg: ServeConfig) -> None:
    """What a front of others' does not do for us is refused, rather than left out."""
    check_exposure(cfg.host, cfg.safety, is_insecure=cfg.insecure, health_port=cfg.health_port)
    if cfg.front == "ray" and cfg.safety.certificate:
        remedy = "use --front gateway, or put a proxy that has the certificate before it"
        given = cfg.safety.certificate
        raise UserError("is not used by ray", option="safety.certificate", value=given, remedy=remedy)
    if cfg.front == "ray" and cfg.safety.keys:
        remedy = "use --front gateway, or put a proxy that checks them before it and give --insecure"
        raise UserError("is not used by ray", option="safety.keys", value=cfg.safety.keys, remedy=remedy)


def _serve_gateway(
    instances: LocalSupervisor,
    cfg: ServeConfig,
    safety: ServerSecurity,
    *,
    sockets: list[socket],
    signals: SignalHandler,
    announce: Callable[[], None],
) -> None:
    gateway = Gateway(
        instances.ports,
        cfg.limits,
        shares_histories=cfg.histories.is_shared,
        supervisor=instances,
        folders=instances.slots[0].models,
        drain_s=cfg.service.drain_s,
    )
    signals.when_reloaded(gateway.ask_reload)
    models = list(instances.slots[0].models)
    follower = FleetVersionFollower(models, cfg.follow.poll_s, gateway.moved, gateway.rollout.followed)
    if cfg.follow.on and cfg.follow.moves == "together":
        follower.start()
    run_server(uvicorn_config(gateway, cfg, gateway, safety), sockets, signals, announce)
    follower.close()


def instance_arguments(cfg: ServeConfig, overrides: dict[str, str]) -> list[str]:
    """Options of one instance: those of the whole without what concerns the front, which is its only client."""
    arguments: list[str] = []
    overrides = {**overrides, "limits.max_connections_an_address": str(cfg.limits.max_connections)}
    if not cfg.hosts and not is_loopback(cfg.host):
        overrides["hosts"] = '["*"]'
    for name, value in overrides.items():
        if name not in _OF_FRONT:
            arguments += [f"--{name}", value]
    return [*arguments, "--safety.behind", cfg.front]
