"""One front: a process that takes requests on a socket of its own, and has them computed by another one.

It ends when it is told to, after answering what it has accepted, and when the process that computes is gone.
"""

import asyncio
import os
import pickle
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nestrec.serving import tracing
from nestrec.serving.api.process.listening import run_server
from nestrec.serving.api.process.log import log_without_waiting, wait_for_log
from nestrec.serving.api.process.open_files import allow_open_files
from nestrec.serving.api.process.signals import Signals
from nestrec.serving.api.routes import all_endpoints
from nestrec.serving.api.server import ServeConfig, name_of_process, safety_of, uvicorn_config
from nestrec.serving.fronts.awake import Awake
from nestrec.serving.fronts.frames import FrameKind
from nestrec.serving.fronts.front_app import FrontApp, FrontCounts
from nestrec.serving.fronts.remote import RemoteService
from nestrec.serving.safety.rates import RatesOfKeys

_HEAD = struct.Struct("<IBI")


def run_front(control: socket.socket, quick: socket.socket, sockets: list[socket.socket], rates: RatesOfKeys) -> None:
    """Serve until it is told to stop. control, quick: to the process that computes (`frames`). rates: of keys, of all
    fronts together."""
    signals = Signals.installed()
    signals.when_reloaded(lambda: None)  # models are loaded by the process that computes
    cfg = _share_of(*pickle.loads(_first_frame(control)))
    log_without_waiting(cfg.log, name_of_process())
    tracing.start(cfg.tracing)
    allow_open_files(cfg.limits.max_connections)
    sys.setswitchinterval(5e-5)
    safety, observed = safety_of(cfg, rates), FrontCounts()

    def tell() -> Mapping[str, Any]:
        unread, service.unread = service.unread, {}
        return {**observed.told(), "unread": unread}

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: service.quick, sock=quick)
        await loop.create_connection(lambda: service.control, sock=control)
        await service.until_told()

    def announce() -> None:
        service.control.send(FrameKind.LISTENING, os.getpid())

    service = RemoteService(cfg.service, tell, signals.stop)
    awake = Awake((cfg.front_awake_ms or 0.0) / 1e3)
    app = FrontApp(service, cfg.limits, all_endpoints(), observed, connect=connect, called=awake.called)
    try:
        run_server(uvicorn_config(app, cfg, app, safety), sockets, signals, announce)
    finally:
        tracing.stop()
        safety.close()
    wait_for_log()


def _share_of(cfg: ServeConfig, count: int) -> ServeConfig:
    """Limits of connections are those of all fronts together; the port for health is the other process's."""
    limits = cfg.limits
    limits = replace(
        limits,
        max_connections=-(-limits.max_connections // count),
        max_connections_an_address=-(-limits.max_connections_an_address // count),
    )
    return replace(cfg, limits=limits, health_port=None)


def _first_frame(channel: socket.socket) -> bytes:
    """Before there is an event loop."""
    size, kind, _ = _HEAD.unpack(_read(channel, _HEAD.size))
    assert kind == FrameKind.CONFIG
    return _read(channel, size + 4 - _HEAD.size)


def _read(channel: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        piece = channel.recv(size - len(parts))
        if not piece:
            raise EOFError
        parts += piece
    return parts
