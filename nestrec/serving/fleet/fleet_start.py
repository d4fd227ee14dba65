"""Starts and stops a fleet: `nestrec serve --num_instances N --load_balancer ...`."""

import logging
from collections.abc import Callable, Sequence
from socket import socket

from nestrec.base.errors import UserError
from nestrec.serving.core import tracing
from nestrec.serving.core.asgi import is_loopback
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.fleet.instance_supervisor import LocalSupervisor
from nestrec.serving.fleet.rolling_update import FleetVersionFollower
from nestrec.serving.http.serve_config import ServeConfig, create_security, uvicorn_config
from nestrec.serving.http.server_logging import install_nonblocking_log, wait_for_log
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import allow_open_files, bind_sockets, close_all, port_of, run_server, url_of
from nestrec.serving.security.security_config import check_exposure
from nestrec.serving.security.server_security import ServerSecurity

_LOG = logging.getLogger(__name__)
_GATEWAY_OPTIONS = (
    "host", "port", "health_port", "num_instances", "load_balancer", "insecure", "security.behind", "security.api_keys",
    "security.tls_certificate", "security.tls_private_key", "security.admin_on_health_port",
)  # fmt: skip
"""Options of the gateway that are not passed to the instances."""


def serve_fleet(
    folders: Sequence[str],
    cfg: ServeConfig,
    overrides: dict[str, str],
    signals: SignalHandler,
    announce: Callable[[str], None],
) -> None:
    """Start the instances and their load balancer, and serve until SIGTERM or SIGINT.

    SIGHUP reloads the models of all instances, one instance at a time.

    Args:
        folders: Folders or addresses of the models.
        cfg: Configuration of the fleet.
        overrides: Options as the user typed them, by name; they are passed to the instances.
        signals: Signal handler of the process.
        announce: Called with the URL when the load balancer accepts connections.

    Raises:
        UserError: An option is not supported by the load balancer, the port is not available, or an instance did not
            start.
    """
    install_nonblocking_log(cfg.log, "gateway")
    tracing.start(cfg.tracing)
    allow_open_files(cfg.limits.max_connections)
    _check_ray_options(cfg)
    if cfg.load_balancer == "ray":
        if cfg.health_port is not None:
            remedy = "use the health routes of Ray Serve, or --load_balancer gateway"
            raise UserError("not supported with Ray", option="health_port", value=cfg.health_port, remedy=remedy)
        from nestrec.serving.fleet.ray_serve import serve_on_ray

        serve_on_ray(folders, cfg, signals, announce)
        return
    security = create_security(cfg)
    sockets = bind_sockets(cfg.host, cfg.port)
    url = url_of(cfg.host, port_of(sockets), is_tls=security.certificates is not None)
    arguments = instance_arguments(cfg, overrides)
    models = [str(folder) for folder in folders]
    try:
        with LocalSupervisor(
            models, arguments, cfg.num_instances, stop_timeout_s=cfg.service.drain_timeout_s + 5.0
        ) as instances:
            if instances.wait_until_up(lambda: signals.is_stopping):
                _serve_gateway(
                    instances, cfg, security, sockets=sockets, signals=signals, announce=lambda: announce(url)
                )
    finally:
        security.close()
        tracing.stop()
        close_all(sockets)
    _LOG.info("stopped the gateway and all instances")
    wait_for_log()


def _check_ray_options(cfg: ServeConfig) -> None:
    """Raise a UserError for options that Ray Serve would ignore, and for a server exposed without protection."""
    check_exposure(cfg.host, cfg.security, is_insecure=cfg.insecure, health_port=cfg.health_port)
    if cfg.load_balancer == "ray" and cfg.security.tls_certificate:
        remedy = "use --load_balancer gateway, or terminate TLS in a proxy in front of Ray"
        certificate = cfg.security.tls_certificate
        raise UserError("not supported with Ray", option="security.tls_certificate", value=certificate, remedy=remedy)
    if cfg.load_balancer == "ray" and cfg.security.api_keys:
        remedy = "use --load_balancer gateway, or check the keys in a proxy in front of Ray and set --insecure"
        raise UserError(
            "not supported with Ray", option="security.api_keys", value=cfg.security.api_keys, remedy=remedy
        )


def _serve_gateway(
    instances: LocalSupervisor,
    cfg: ServeConfig,
    security: ServerSecurity,
    *,
    sockets: list[socket],
    signals: SignalHandler,
    announce: Callable[[], None],
) -> None:
    gateway = Gateway(
        instances.ports,
        cfg.limits,
        shares_histories=cfg.history_store.is_shared,
        supervisor=instances,
        folders=instances.slots[0].models,
        drain_s=cfg.service.drain_timeout_s,
    )
    signals.on_reload(gateway.request_reload)
    models = list(instances.slots[0].models)
    follower = FleetVersionFollower(
        models, cfg.follow.poll_interval_s, gateway.on_new_version, gateway.rollout.models_to_follow
    )
    if cfg.follow.enabled and cfg.follow.mode == "coordinated":
        follower.start()
    run_server(uvicorn_config(gateway, cfg, gateway, security), sockets, signals, announce)
    follower.close()


def instance_arguments(cfg: ServeConfig, overrides: dict[str, str]) -> list[str]:
    """Return the command-line options of an instance: those of the fleet without the options of the gateway.

    The gateway is the only client of an instance, so the per-address connection limit becomes the total limit.
    """
    arguments: list[str] = []
    overrides = {**overrides, "limits.max_connections_per_address": str(cfg.limits.max_connections)}
    if not cfg.allowed_hosts and not is_loopback(cfg.host):
        overrides["allowed_hosts"] = '["*"]'
    for name, value in overrides.items():
        if name not in _GATEWAY_OPTIONS:
            arguments += [f"--{name}", value]
    return [*arguments, "--security.behind", cfg.load_balancer]
