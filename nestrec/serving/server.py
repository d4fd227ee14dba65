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
from typing import NoReturn

import torch

from nestrec.base import errors
from nestrec.base.cuda import chosen_device
from nestrec.distributed.topology import check_device
from nestrec.serving.core import tracing
from nestrec.serving.frontend.frontend_hub import FrontendHub
from nestrec.serving.frontend.worker_pool import ForkServer
from nestrec.serving.history_store.memory_store import make_store
from nestrec.serving.http.http_app import App
from nestrec.serving.http.serve_config import (
    SLOT_VARIABLE,
    ServeConfig,
    name_of_process,
    num_fronts,
    safety_of,
    uvicorn_config,
)
from nestrec.serving.http.server_logging import log_without_waiting, wait_for_log
from nestrec.serving.http.signals import SignalHandler, end_with_front
from nestrec.serving.http.sockets import allow_open_files, bound_sockets, close_all, port_of, run_server, url_of
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.inference_service import Service
from nestrec.serving.service.model_reloader import Reloader

_LOG = logging.getLogger(__name__)
_AWAKE_MS = 20.0
_LAST_S = 1.0
"""time for requests of other engines, when one of them cannot continue"""
_LAST_LOG_S = 0.25
_COLLECT_EVERY = 20_000
"""objects made and not yet freed between two looks for garbage: requests leave next to none that must be looked for"""


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
        os._exit(errors.ENGINE_LOST)


def serve(folders: list[str], cfg: ServeConfig, signals: SignalHandler, announce: Callable[[str], None]) -> None:
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
    template = ForkServer() if count > 1 else None
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
        sys.exit(errors.ENGINE_LOST)


def _prepare_interpreter() -> None:
    gc.collect()
    gc.freeze()  # model and modules are never garbage, and looking through them again would stall requests
    gc.set_threshold(_COLLECT_EVERY, 20, 100)
    # Front and engines share an interpreter, which an engine gives up with every operation and needs back at once.
    sys.setswitchinterval(5e-5)


def _hub(
    app: App, cfg: ServeConfig, safety: ServerSecurity, template: ForkServer, *, count: int, port: int
) -> FrontendHub:
    app.count_refusals_of(safety.refusals)
    app.report_files_of(safety)
    return FrontendHub(
        app,
        template,
        lambda: bound_sockets(cfg.host, port, is_shared=True),
        count=count,
        config=pickle.dumps((cfg, count)),
        drain_s=cfg.service.drain_s,
        refusals=safety.refusals,
        awake_s=(cfg.front_awake_ms or 0.0) / 1e3,
    )
