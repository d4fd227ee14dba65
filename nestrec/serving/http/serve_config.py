"""Options of `nestrec serve`, and the uvicorn configuration that results from them."""

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
from nestrec.serving.http.server_logging import LogConfig, log_instance_response, log_response
from nestrec.serving.http.sockets import HealthPortMiddleware
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.security.rate_limiter import RateLimiter
from nestrec.serving.security.security_config import SecurityConfig, check_exposure
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.inference_service import ServiceConfig
from nestrec.serving.service.version_follower import VersionFollowConfig

SLOT_VARIABLE = "NESTREC_SLOT"
"""Environment variable with the slot number of an instance; not set if the server has no load balancer."""
_CORES_PER_WORKER = 4
"""CPU cores per frontend worker by default."""
_MAX_DEFAULT_WORKERS = 4
"""Maximum default number of frontend workers."""
_NGINX = RemovedChoice(
    "nginx",
    "start each instance with `nestrec serve --port`, and nginx with the template in "
    "deploy/proxies/ of the source repository (its README.md has the commands), or use --load_balancer gateway",
)


@config
class ServeConfig:
    """Options of `nestrec serve`."""

    host: str = "127.0.0.1"
    """Address on which the server listens; the default accepts connections from this machine only."""
    port: Port = 8000
    """Port on which the server listens; 0 selects a free port."""
    health_port: Port | None = None
    """Additional port for /health/live, /health/ready and /metrics, with its own connection limits; these paths are
    available on `port` only by default."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients can use, in addition to IP addresses and localhost; `*` allows every name. By default,
    every name is allowed, unless the server listens on this machine only."""
    security: SecurityConfig = SecurityConfig()
    """API keys and TLS."""
    insecure: bool = False
    """Accept connections from other machines without API keys or TLS, for example behind a proxy that authenticates
    clients."""
    device: DeviceChoice = "auto"
    """Device of the models; auto selects a GPU if one is available, otherwise the CPU."""
    num_instances: Count = 1
    """Number of server processes behind the load balancer."""
    load_balancer: Annotated[Literal["none", "gateway", "ray"], _NGINX] = "none"
    """Load balancer of several instances; none starts one instance that serves clients directly."""
    frontend_workers: Natural | None = None
    """Number of processes that parse HTTP for the engine process; with 0 or 1, the engine process parses HTTP itself.
    By default, one per four CPU cores and at most four if the models run on a GPU and the server has no load balancer,
    otherwise 0."""
    keep_awake_ms: NonNegative | None = None
    """Milliseconds for which frontend workers, and the thread that receives their requests, busy-wait after a request,
    because a core that went to sleep delays the next request; 20 by default if the models run on a GPU, otherwise 0."""
    gpus_per_instance: NonNegative | None = None
    """Number of GPUs that Ray reserves per instance, a fraction if instances share a GPU; 1 by default if the models
    run on a GPU."""
    num_threads: Count = 1
    """Number of PyTorch threads per engine."""
    tables: TablesConfig = TablesConfig()
    """Storage of embedding tables."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of requests and connections."""
    service: ServiceConfig = ServiceConfig()
    """Engines, prefix cache, and retrieval and ranking cascade."""
    tracing: TracingConfig = TracingConfig()
    """OpenTelemetry spans."""
    log: LogConfig = LogConfig()
    """Format of the log, and access log."""
    history_store: HistoryStoreConfig = HistoryStoreConfig()
    """Store of user events."""
    follow: VersionFollowConfig = VersionFollowConfig()
    """Updates to newly published model versions."""


def num_frontend_workers(cfg: ServeConfig, device: str) -> int:
    """Return the number of processes that parse HTTP."""
    if cfg.frontend_workers is not None:
        return max(1, cfg.frontend_workers)
    if torch.device(device).type != "cuda" or SLOT_VARIABLE in os.environ:
        return 1
    return max(1, min(_MAX_DEFAULT_WORKERS, usable_cores() // _CORES_PER_WORKER))


def create_security(cfg: ServeConfig, rates: RateLimiter | None = None) -> ServerSecurity:
    """Create the authentication, TLS and rate limits of the server.

    Args:
        cfg: Options of the server.
        rates: Rate limits that are shared with other processes; see `ServerSecurity`.

    Raises:
        UserError: Other machines could send requests without authentication.
    """
    check_exposure(cfg.host, cfg.security, is_insecure=cfg.insecure, health_port=cfg.health_port)
    return ServerSecurity(cfg.security, cfg.host, rates)


def uvicorn_config(
    app: Any, cfg: ServeConfig, direct_app: DirectApp | None = None, security: ServerSecurity | None = None
) -> uvicorn.Config:
    """Return the uvicorn configuration of a server.

    uvicorn logs errors but not warnings: it warns about every malformed request, so clients could fill the log. A
    metric counts malformed requests instead.

    Args:
        app: ASGI application.
        cfg: Options of the server.
        direct_app: Application of the fast path without ASGI; None disables the fast path.
        security: Authentication, TLS and rate limits; created from `cfg` by default.
    """
    hosts, security = AllowedHosts(cfg.host, cfg.allowed_hosts), security or create_security(cfg)
    endpoints = (app.context.endpoints if isinstance(app, App) else all_endpoints()).values()
    on_response = log_instance_response if cfg.security.behind else log_response
    protocol = protocol_with(
        cfg.limits,
        hosts,
        security.make_authorizer(endpoints),
        direct_app,
        on_response=on_response if cfg.log.access_log else None,
    )
    if hasattr(app, "set_auth_failures"):
        app.set_auth_failures(security.auth_failures)
    if hasattr(app, "set_security"):
        app.set_security(security)
    if cfg.health_port is not None:
        app = HealthPortMiddleware(app, cfg.host, cfg.health_port, hosts, security=security, endpoints=endpoints)
    certificates = security.certificates
    return uvicorn.Config(
        app, host=cfg.host, port=cfg.port, http=protocol, ws="none", lifespan="on", access_log=False,
        log_config=None, log_level="error", server_header=False, proxy_headers=False, timeout_keep_alive=30,
        backlog=cfg.limits.max_connections, timeout_graceful_shutdown=int(cfg.service.drain_timeout_s),
        ssl_context_factory=None if certificates is None else lambda *_: certificates.context,
    )  # fmt: skip


def process_name() -> str:
    """Return the name of this process in its log; empty if the server has no load balancer."""
    return f"instance-{os.environ[SLOT_VARIABLE]}" if SLOT_VARIABLE in os.environ else ""
