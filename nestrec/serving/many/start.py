"""`nestrec serve --instances N --front ...`: instances and their front, started and stopped together."""

import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import socket

from nestrec.base.errors import UserError
from nestrec.serving.api.process.listening import bound_sockets, close_all, port_of, run_server, url_of
from nestrec.serving.api.process.log import log_without_waiting, wait_for_log
from nestrec.serving.api.process.open_files import allow_open_files
from nestrec.serving.api.process.signals import Signals
from nestrec.serving.api.protocol.hosts import is_loopback
from nestrec.serving.api.server import ServeConfig, uvicorn_config
from nestrec.serving.many.gateway import Gateway
from nestrec.serving.many.instances import Instances
from nestrec.serving.many.nginx import nginx_config, running_nginx

_LOG = logging.getLogger(__name__)


def serve_many(
    folders: Sequence[Path], cfg: ServeConfig, overrides: dict[str, str], signals: Signals,
    announce: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until SIGTERM or SIGINT; SIGHUP lets every instance load its models anew, one after the other.

    overrides: the options as they were typed. announce: told the address when somebody listens there.
    """
    log_without_waiting()
    allow_open_files(cfg.limits.max_connections)
    if cfg.front == "ray":
        if cfg.health_port is not None:
            remedy = "ask Ray Serve's own health routes, or use --front gateway"
            raise UserError("is not offered before Ray", field="health_port", value=cfg.health_port, remedy=remedy)
        from nestrec.serving.many.ray_front import serve_on_ray

        serve_on_ray(folders, cfg, signals, announce)
        return
    sockets = bound_sockets(cfg.host, cfg.port)
    url = url_of(cfg.host, port_of(sockets))
    arguments, models = instance_arguments(cfg, overrides), [str(folder) for folder in folders]
    try:
        with Instances(models, arguments, cfg.instances, stop_timeout_s=cfg.service.drain_s + 5.0) as instances:
            if instances.wait_until_up(lambda: signals.is_stopping):
                serve_front = _serve_nginx if cfg.front == "nginx" else _serve_gateway
                serve_front(instances, cfg, sockets, signals, lambda: announce(url))
    finally:
        close_all(sockets)
    _LOG.info("stopped, and all instances with it")
    wait_for_log()


def _serve_gateway(
    instances: Instances, cfg: ServeConfig, sockets: list[socket], signals: Signals, announce: Callable[[], None],
    *, when_resized: Callable[[list[int]], None] = lambda _: None,
) -> None:  # fmt: skip
    gateway = Gateway(
        instances.ports, cfg.limits, shares_histories=cfg.histories.is_shared, supervisor=instances,
        folders=instances.slots[0].models, drain_s=cfg.service.drain_s,
    )  # fmt: skip
    gateway.rollout.on_resized = when_resized
    signals.when_reloaded(gateway.ask_reload)
    run_server(uvicorn_config(gateway, cfg), sockets, signals, announce)


def _serve_nginx(
    instances: Instances, cfg: ServeConfig, sockets: list[socket], signals: Signals, announce: Callable[[], None]
) -> None:
    """nginx at the address, and a gateway behind it for what concerns all instances."""
    inner, port, limits = bound_sockets("127.0.0.1", 0), port_of(sockets), cfg.limits

    def configured(folder: Path, ports: list[int]) -> str:
        return nginx_config(
            ports, front_port=port_of(inner), host=cfg.host, port=port, folder=folder,
            max_body_bytes=limits.max_body_bytes, longest_ms=limits.max_timeout_ms,
            default_ms=limits.default_timeout_ms, shares_histories=cfg.histories.is_shared,
        )  # fmt: skip

    close_all(sockets)  # nginx opens its own
    is_stopping = lambda: signals.is_stopping  # noqa: E731
    with running_nginx(configured, instances.ports, cfg.host, port, is_stopping) as (process, configure_again):
        threading.Thread(target=_stop_with, args=(process, signals), name="nestrec-nginx", daemon=True).start()
        _serve_gateway(instances, cfg, inner, signals, announce, when_resized=configure_again)
        if (code := process.poll()) is not None:
            remedy = "see what it wrote above"
            raise UserError(f"has ended with code {code}", field="front", value="nginx", remedy=remedy)


def _stop_with(process: "subprocess.Popen[bytes]", signals: Signals) -> None:
    process.wait()
    signals.stop()


def instance_arguments(cfg: ServeConfig, overrides: dict[str, str]) -> list[str]:
    """Options of one instance: those of the whole without what concerns the front, which is its only client."""
    arguments: list[str] = []
    overrides = {**overrides, "limits.max_connections_an_address": str(cfg.limits.max_connections)}
    if not cfg.hosts and not is_loopback(cfg.host):
        overrides["hosts"] = '["*"]'
    for name, value in overrides.items():
        if name not in ("host", "port", "health_port", "instances", "front"):
            arguments += [f"--{name}", value]
    return arguments
