"""`nestrec serve --instances N --front ...`: instances and their front, started and stopped together."""

import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from nestrec.serving.api.hosts import is_loopback
from nestrec.serving.api.log import log_without_waiting
from nestrec.serving.api.open_files import allow_open_files
from nestrec.serving.api.server import ServeConfig, uvicorn_config
from nestrec.serving.many.gateway import Gateway
from nestrec.serving.many.instances import Instances
from nestrec.serving.many.nginx import running_nginx


def serve_many(folders: Sequence[Path], cfg: ServeConfig, overrides: dict[str, str]) -> None:
    """Serve until SIGTERM or SIGINT. overrides: the options as they were typed."""
    log_without_waiting()
    allow_open_files(cfg.limits.max_connections)
    if cfg.front == "ray":
        from nestrec.serving.many.ray_front import serve_on_ray

        serve_on_ray(folders, cfg)
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    instances = Instances(
        instance_arguments(folders, cfg, overrides), cfg.instances, stop_timeout_s=cfg.service.drain_s + 5.0
    )
    with instances:
        if cfg.front == "nginx":
            limits = cfg.limits
            nginx = running_nginx(
                instances.ports, host=cfg.host, port=cfg.port, max_body_bytes=limits.max_body_bytes,
                timeout_s=limits.max_timeout_ms // 1000 + 1,
            )  # fmt: skip
            with nginx as process:
                while not stop.wait(0.2) and process.poll() is None:
                    pass
        else:
            uvicorn.Server(uvicorn_config(Gateway(instances.ports, cfg.limits), cfg)).run()


def instance_arguments(folders: Sequence[Path], cfg: ServeConfig, overrides: dict[str, str]) -> list[str]:
    """Options of one instance: those of the whole without what concerns the front, which is its only client."""
    arguments = [word for folder in folders for word in ("--model", str(folder))]
    overrides = {**overrides, "limits.max_connections_an_address": str(cfg.limits.max_connections)}
    if not cfg.hosts and not is_loopback(cfg.host):
        overrides["hosts"] = '["*"]'
    for name, value in overrides.items():
        if name not in ("host", "port", "health_port", "instances", "front"):
            arguments += [f"--{name}", value]
    return arguments
