"""Implementation of `nestrec serve`: runs the HTTP app in uvicorn, on loopback by default.

SIGTERM starts a graceful shutdown: accepted requests are completed, then the process exits. SIGHUP reloads the model
folders and swaps the models that have changed (hot reload).
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
from nestrec.base.cuda import resolve_device
from nestrec.distributed.topology import check_device
from nestrec.serving.core import tracing
from nestrec.serving.frontend.frontend_hub import FrontendHub
from nestrec.serving.frontend.worker_pool import ForkServer
from nestrec.serving.history_store.memory_store import make_store
from nestrec.serving.http.http_app import App
from nestrec.serving.http.serve_config import (
    SLOT_VARIABLE,
    ServeConfig,
    create_security,
    num_frontend_workers,
    process_name,
    uvicorn_config,
)
from nestrec.serving.http.server_logging import install_nonblocking_log, wait_for_log
from nestrec.serving.http.signals import SignalHandler, exit_with_parent
from nestrec.serving.http.sockets import allow_open_files, bind_sockets, close_all, port_of, run_server, url_of
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.inference_service import Service
from nestrec.serving.service.model_reloader import Reloader

_LOG = logging.getLogger(__name__)
_KEEP_AWAKE_MS = 20.0
_EXIT_DELAY_S = 1.0
"""Time in seconds for requests of the other engines to finish after one engine has failed."""
_LOG_FLUSH_TIMEOUT_S = 0.25
_GC_THRESHOLD = 20_000
"""Number of net allocations between garbage collections; it is high because requests leave almost no cycles."""


class EngineLoss:
    """Terminates the process when an engine fails: starts a graceful shutdown, and exits after a second in any case."""

    def __init__(self, stop: Callable[[], None]):
        self._stop = stop
        self.has_occurred = False

    def __call__(self) -> None:
        """Start the shutdown; called on the thread of the engine."""
        self.has_occurred = True
        threading.Thread(target=self._exit_soon, name="nestrec-exit", daemon=True).start()
        self._stop()

    def _exit_soon(self) -> NoReturn:
        time.sleep(_EXIT_DELAY_S)
        wait_for_log(_LOG_FLUSH_TIMEOUT_S)
        os._exit(errors.ENGINE_LOST)


def serve(folders: list[str], cfg: ServeConfig, signals: SignalHandler, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, and complete accepted requests before returning.

    If an engine fails, the process exits with `errors.ENGINE_LOST` instead.

    Args:
        folders: Folders of exported models, or addresses of published versions.
        cfg: Options of `nestrec serve`.
        signals: Handler of SIGTERM, SIGINT and SIGHUP.
        announce: Called with the URL of the server once it accepts connections.
    """
    install_nonblocking_log(cfg.log, process_name())
    tracing.start(cfg.tracing)
    allow_open_files(cfg.limits.max_connections)
    torch.set_num_threads(cfg.num_threads)
    device = resolve_device(cfg.device)
    check_device(device)
    exit_with_parent(signals, cfg.service.drain_timeout_s + 5.0)
    security = create_security(cfg)
    is_held = SLOT_VARIABLE in os.environ  # the gateway has bound the port for this instance, so it must be shared
    sockets = bind_sockets(cfg.host, cfg.port, is_shared=is_held)
    count = num_frontend_workers(cfg, device)
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
    if follow.mode == "coordinated" and SLOT_VARIABLE not in os.environ:  # there is no gateway to coordinate
        follow = replace(follow, mode="independent")
    reloader = Reloader(service, device, cfg.tables, follow)
    signals.on_reload(reloader.request_reload)
    _prepare_interpreter()
    url = url_of(cfg.host, port_of(sockets), is_tls=security.certificates is not None)
    try:
        app = App(service, cfg.limits, make_store(cfg.history_store), reloader=reloader)
        if template is None:
            run_server(uvicorn_config(app, cfg, app, security), sockets, signals, lambda: announce(url))
        else:
            if cfg.keep_awake_ms is None:
                cfg = replace(cfg, keep_awake_ms=_KEEP_AWAKE_MS if torch.device(device).type == "cuda" else 0.0)
            hub = _hub(app, cfg, security, template, count=count, port=port_of(sockets))
            hub.run(uvicorn_config(hub, cfg, security=security), sockets, signals, lambda: announce(url))
    finally:
        if template is not None:
            template.close()
        tracing.stop()
        security.close()
        reloader.close()
        service.close()
    _LOG.info("stopped")
    wait_for_log()
    if loss.has_occurred:
        sys.exit(errors.ENGINE_LOST)


def _prepare_interpreter() -> None:
    gc.collect()
    gc.freeze()  # model and modules live until the end; scanning them in each collection would stall requests
    gc.set_threshold(_GC_THRESHOLD, 20, 100)
    # HTTP server and engines share the GIL. An engine releases it with every operation and needs it back at once.
    sys.setswitchinterval(5e-5)


def _hub(
    app: App, cfg: ServeConfig, security: ServerSecurity, template: ForkServer, *, count: int, port: int
) -> FrontendHub:
    app.set_auth_failures(security.auth_failures)
    app.set_security(security)
    return FrontendHub(
        app,
        template,
        lambda: bind_sockets(cfg.host, port, is_shared=True),
        count=count,
        config=pickle.dumps((cfg, count)),
        drain_s=cfg.service.drain_timeout_s,
        auth_failures=security.auth_failures,
        awake_s=(cfg.keep_awake_ms or 0.0) / 1e3,
    )
