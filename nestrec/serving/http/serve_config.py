"""The options of `nestrec serve`, and the configuration of uvicorn that they lead to."""

import os
from typing import Annotated, Any, Literal

import torch
import uvicorn

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural, NonNegative, Port, RemovedChoice
from nestrec.base.cuda import DeviceChoice
from nestrec.base.thread_team import usable_cores
from nestrec.serving.core.asgi import AllowedHosts
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.core.tracing import TracingConfig
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.http.fast_request import DirectApp
from nestrec.serving.http.http_app import App
from nestrec.serving.http.limited_http import protocol_with
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.http.server_logging import LogConfig, log_answer, log_answer_to_front
from nestrec.serving.http.sockets import HealthPortMiddleware
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.security.rate_limiter import RateLimiter
from nestrec.serving.security.security_config import SecurityConfig, check_exposure
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.inference_service import ServiceConfig
from nestrec.serving.service.version_follower import VersionFollowConfig

SLOT_VARIABLE = "NESTREC_SLOT"


"""of the environment of an instance: its number behind a front"""


_CORES_A_FRONT = 4
_MOST_FRONTS = 4
_NGINX = RemovedChoice(
    "nginx",
    "start each instance with `nestrec serve --port` and put nginx in front of them with the template in "
    "deploy/proxies/ of the source repository (its README.md has the commands), or use --front gateway",
)


@config
class ServeConfig:
    host: str = "127.0.0.1"
    """address to listen on; other machines reach it only where you name another"""
    port: Port = 8000
    """0 takes a free one"""
    health_port: Port | None = None
    """a port of its own for /health/live, /health/ready and /metrics, with connections of its own; none: only `port`"""
    hosts: tuple[str, ...] = ()
    """names under which clients may ask, beside addresses and localhost; none: any, or none where only this machine is
    listened to; `*`: any"""
    safety: SecurityConfig = SecurityConfig()
    """who may ask"""
    insecure: bool = False
    """listen to other machines without keys or TLS: something before the server decides who may ask"""
    device: DeviceChoice = "auto"
    """auto takes a GPU where there is one"""
    instances: Count = 1
    """processes behind a front"""
    front: Annotated[Literal["none", "gateway", "ray"], _NGINX] = "none"
    """what stands before several instances; none: this process answers by itself"""
    front_processes: Natural | None = None
    """processes that read requests and write answers, beside the one that computes; 0 or 1: that one does it itself;
    none: one for every four cores beside a GPU, four at most, where no front stands before"""
    front_awake_ms: NonNegative | None = None
    """for which front processes, and the thread that takes what they ask, keep their cores awake after a request, since
    one that slept is slow for the next; none: 20 beside a GPU, else 0"""
    ray_gpus: NonNegative | None = None
    """GPUs that each instance asks Ray for, a part of one where several share it; none: one where it runs on a GPU"""
    threads: Count = 1
    """threads of torch inside a batch"""
    tables: TablesConfig = TablesConfig()
    """where rows of embedding tables lie"""
    limits: LimitsConfig = LimitsConfig()
    """of requests"""
    service: ServiceConfig = ServiceConfig()
    """engines, cache, cascade"""
    tracing: TracingConfig = TracingConfig()
    """spans for OpenTelemetry"""
    log: LogConfig = LogConfig()
    """what is written to standard error, and how"""
    histories: HistoryStoreConfig = HistoryStoreConfig()
    """events that the server keeps"""
    follow: VersionFollowConfig = VersionFollowConfig()
    """newer versions of models that come from an address"""


def num_fronts(cfg: ServeConfig, device: str) -> int:
    """Processes that take requests."""
    if cfg.front_processes is not None:
        return max(1, cfg.front_processes)
    if torch.device(device).type != "cuda" or SLOT_VARIABLE in os.environ:
        return 1
    return max(1, min(_MOST_FRONTS, usable_cores() // _CORES_A_FRONT))


def safety_of(cfg: ServeConfig, rates: RateLimiter | None = None) -> ServerSecurity:
    """Refuses where other machines could ask without being asked who they are. rates: see `ServerSecurity`."""
    check_exposure(cfg.host, cfg.safety, is_insecure=cfg.insecure, health_port=cfg.health_port)
    return ServerSecurity(cfg.safety, cfg.host, rates)


def uvicorn_config(
    app: Any, cfg: ServeConfig, door: DirectApp | None = None, safety: ServerSecurity | None = None
) -> uvicorn.Config:
    """Errors are logged and warnings are not: uvicorn warns of every malformed request, so that a client could fill the
    log, and stop the server where nobody reads it. They are counted in a metric instead."""
    hosts, safety = AllowedHosts(cfg.host, cfg.hosts), safety or safety_of(cfg)
    endpoints = (app.front.endpoints if isinstance(app, App) else all_endpoints()).values()
    tell = log_answer_to_front if cfg.safety.behind else log_answer
    protocol = protocol_with(cfg.limits, hosts, safety.gate(endpoints), door, tell=tell if cfg.log.requests else None)
    if hasattr(app, "count_refusals_of"):
        app.count_refusals_of(safety.refusals)
    if hasattr(app, "report_files_of"):
        app.report_files_of(safety)
    if cfg.health_port is not None:
        app = HealthPortMiddleware(app, cfg.host, cfg.health_port, hosts, safety=safety, endpoints=endpoints)
    certificates = safety.certificates
    return uvicorn.Config(
        app, host=cfg.host, port=cfg.port, http=protocol, ws="none", lifespan="on", access_log=False,
        log_config=None, log_level="error", server_header=False, proxy_headers=False, timeout_keep_alive=30,
        backlog=cfg.limits.max_connections, timeout_graceful_shutdown=int(cfg.service.drain_s),
        ssl_context_factory=None if certificates is None else lambda *_: certificates.context,
    )  # fmt: skip


def name_of_process() -> str:
    """Return the name of this process in its log; empty if the server has no front."""
    return f"instance-{os.environ[SLOT_VARIABLE]}" if SLOT_VARIABLE in os.environ else ""
