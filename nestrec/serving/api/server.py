"""`nestrec serve`: uvicorn over the front, on loopback unless told otherwise.

SIGTERM drains and ends it; SIGHUP loads the model folders anew and swaps what has changed.
"""

import gc
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
import uvicorn

from nestrec.base import exit_codes
from nestrec.base.bounds import Count, Natural, NonNegative, Port
from nestrec.base.config import config
from nestrec.base.devices import DeviceChoice, chosen_device
from nestrec.base.parallel import usable_cores
from nestrec.distributed.topology import check_device
from nestrec.serving import tracing
from nestrec.serving.api.app import App
from nestrec.serving.api.process.health_port import WithHealthPort
from nestrec.serving.api.process.listening import bound_sockets, close_all, port_of, run_server, url_of
from nestrec.serving.api.process.log import log_without_waiting, wait_for_log
from nestrec.serving.api.process.log_lines import LogConfig
from nestrec.serving.api.process.open_files import allow_open_files
from nestrec.serving.api.process.request_log import log_answer, log_answer_to_front
from nestrec.serving.api.process.signals import Signals
from nestrec.serving.api.protocol.hosts import HostNames
from nestrec.serving.api.protocol.limited_protocol import protocol_with
from nestrec.serving.api.protocol.plain_cycle import Door
from nestrec.serving.api.reloader import Reloader
from nestrec.serving.api.routes import all_endpoints
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.fronts.hub import FrontHub
from nestrec.serving.fronts.template import Template
from nestrec.serving.histories.store import HistoryStoreConfig, make_store
from nestrec.serving.many.tie import end_with_front
from nestrec.serving.model.tables import TablesConfig
from nestrec.serving.safety.config import SafetyConfig
from nestrec.serving.safety.exposure import check_exposure
from nestrec.serving.safety.rates import RatesOfKeys
from nestrec.serving.safety.safety import Safety
from nestrec.serving.service import Service, ServiceConfig
from nestrec.serving.tracing import TracingConfig
from nestrec.serving.versions.follower import VersionFollowConfig

_LOG = logging.getLogger(__name__)
SLOT_VARIABLE = "NESTREC_SLOT"
"""of the environment of an instance: its number behind a front"""
_CORES_A_FRONT, _MOST_FRONTS, _AWAKE_MS = 4, 4, 20.0
_LAST_S = 1.0
"""time for requests of other engines, when one of them cannot continue"""
_LAST_LOG_S = 0.25
_COLLECT_EVERY = 20_000
"""objects made and not yet freed between two looks for garbage: requests leave next to none that must be looked for"""


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
    safety: SafetyConfig = SafetyConfig()
    """who may ask"""
    insecure: bool = False
    """listen to other machines without keys or TLS: something before the server decides who may ask"""
    device: DeviceChoice = "auto"
    """auto takes a GPU where there is one"""
    instances: Count = 1
    """processes behind a front"""
    front: Literal["none", "gateway", "nginx", "ray"] = "none"
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


class EngineLoss:
    """Ends a process when an engine cannot continue: stops it as SIGTERM does, and exits after a second in any case."""

    def __init__(self, stop: Callable[[], None]):
        self._stop = stop
        self.has_come = False

    def __call__(self) -> None:
        """Called on the engine's thread."""
        self.has_come = True
        threading.Thread(target=self._exit_soon, name="nestrec-exit", daemon=True).start()
        self._stop()

    def _exit_soon(self) -> NoReturn:
        time.sleep(_LAST_S)
        wait_for_log(_LAST_LOG_S)
        os._exit(exit_codes.ENGINE_LOST)


def serve(folders: list[str], cfg: ServeConfig, signals: Signals, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; accepted requests are answered before it returns.

    If an engine cannot continue, the process exits with `exit_codes.ENGINE_LOST` instead.

    announce: told the address when somebody listens there.
    """
    log_without_waiting(cfg.log, name_of_process())
    tracing.start(cfg.tracing)
    allow_open_files(cfg.limits.max_connections)
    torch.set_num_threads(cfg.threads)
    device = chosen_device(cfg.device)
    check_device(device)
    end_with_front(signals, cfg.service.drain_s + 5.0)
    safety = safety_of(cfg)
    is_held = SLOT_VARIABLE in os.environ  # the port: its front holds it for this process
    sockets = bound_sockets(cfg.host, cfg.port, is_shared=is_held)
    count = num_fronts(cfg, device)
    template = Template() if count > 1 else None
    loss = EngineLoss(signals.stop)
    try:
        service = Service.load(
            folders,
            cfg.service,
            device,
            cfg.tables,
            on_engine_lost=loss,
            read_timeout_s=cfg.follow.read_timeout_s,
        )
    except BaseException:
        close_all(sockets)
        if template is not None:
            template.close()
        raise
    follow = cfg.follow
    if follow.moves == "together" and SLOT_VARIABLE not in os.environ:  # there is no front to move it
        follow = replace(follow, moves="itself")
    reloader = Reloader(service, device, cfg.tables, follow)
    signals.when_reloaded(reloader.ask)
    _prepare_interpreter()
    url = url_of(cfg.host, port_of(sockets), is_tls=safety.certificates is not None)
    try:
        app = App(service, cfg.limits, make_store(cfg.histories), reloader=reloader)
        if template is None:
            run_server(uvicorn_config(app, cfg, app, safety), sockets, signals, lambda: announce(url))
        else:
            if cfg.front_awake_ms is None:
                cfg = replace(cfg, front_awake_ms=_AWAKE_MS if torch.device(device).type == "cuda" else 0.0)
            hub = _hub(app, cfg, safety, template, count=count, port=port_of(sockets))
            hub.run(uvicorn_config(hub, cfg, safety=safety), sockets, signals, lambda: announce(url))
    finally:
        if template is not None:
            template.close()
        tracing.stop()
        safety.close()
        reloader.close()
        service.close()
    _LOG.info("stopped")
    wait_for_log()
    if loss.has_come:
        sys.exit(exit_codes.ENGINE_LOST)


def _prepare_interpreter() -> None:
    gc.collect()
    gc.freeze()  # model and modules are never garbage, and looking through them again would stall requests
    gc.set_threshold(_COLLECT_EVERY, 20, 100)
    # Front and engines share an interpreter, which an engine gives up with every operation and needs back at once.
    sys.setswitchinterval(5e-5)


def name_of_process() -> str:
    """Return the name of this process in its log; empty if the server has no front."""
    return f"instance-{os.environ[SLOT_VARIABLE]}" if SLOT_VARIABLE in os.environ else ""


def num_fronts(cfg: ServeConfig, device: str) -> int:
    """Processes that take requests."""
    if cfg.front_processes is not None:
        return max(1, cfg.front_processes)
    if torch.device(device).type != "cuda" or SLOT_VARIABLE in os.environ:
        return 1
    return max(1, min(_MOST_FRONTS, usable_cores() // _CORES_A_FRONT))


def _hub(app: App, cfg: ServeConfig, safety: Safety, template: Template, *, count: int, port: int) -> FrontHub:
    app.count_refusals_of(safety.refusals)
    app.report_files_of(safety)
    return FrontHub(
        app,
        template,
        lambda: bound_sockets(cfg.host, port, is_shared=True),
        count=count,
        config=pickle.dumps((cfg, count)),
        drain_s=cfg.service.drain_s,
        refusals=safety.refusals,
        awake_s=(cfg.front_awake_ms or 0.0) / 1e3,
    )


def safety_of(cfg: ServeConfig, rates: RatesOfKeys | None = None) -> Safety:
    """Refuses where other machines could ask without being asked who they are. rates: see `Safety`."""
    check_exposure(cfg.host, cfg.safety, is_insecure=cfg.insecure, health_port=cfg.health_port)
    return Safety(cfg.safety, cfg.host, rates)


def uvicorn_config(
    app: Any, cfg: ServeConfig, door: Door | None = None, safety: Safety | None = None
) -> uvicorn.Config:
    """Errors are logged and warnings are not: uvicorn warns of every malformed request, so that a client could fill the
    log, and stop the server where nobody reads it. They are counted in a metric instead."""
    hosts, safety = HostNames(cfg.host, cfg.hosts), safety or safety_of(cfg)
    endpoints = (app.front.endpoints if isinstance(app, App) else all_endpoints()).values()
    tell = log_answer_to_front if cfg.safety.behind else log_answer
    protocol = protocol_with(cfg.limits, hosts, safety.gate(endpoints), door, tell=tell if cfg.log.requests else None)
    if hasattr(app, "count_refusals_of"):
        app.count_refusals_of(safety.refusals)
    if hasattr(app, "report_files_of"):
        app.report_files_of(safety)
    if cfg.health_port is not None:
        app = WithHealthPort(app, cfg.host, cfg.health_port, hosts, safety=safety, endpoints=endpoints)
    certificates = safety.certificates
    return uvicorn.Config(
        app, host=cfg.host, port=cfg.port, http=protocol, ws="none", lifespan="on", access_log=False,
        log_config=None, log_level="error", server_header=False, proxy_headers=False, timeout_keep_alive=30,
        backlog=cfg.limits.max_connections, timeout_graceful_shutdown=int(cfg.service.drain_s),
        ssl_context_factory=None if certificates is None else lambda *_: certificates.context,
    )  # fmt: skip
