"""An application on a socket of this process, configured as by `nestrec serve`."""

import asyncio
import contextlib

from uvicorn.server import ServerState

from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.http.http_app import App
from nestrec.serving.http.serve_config import create_security, uvicorn_config
from nestrec.serving.http.sockets import HealthPortMiddleware


@contextlib.asynccontextmanager
async def listening(app, cfg):
    """Serve an application and yield its port; if the config has a health port, it is open as well."""
    security = create_security(cfg)
    config = uvicorn_config(app, cfg, app if isinstance(app, App | Gateway) else None, security)
    config.load()
    state = ServerState()
    with_health = config.app if isinstance(config.app, HealthPortMiddleware) else None
    if with_health is not None:
        await with_health._listen()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),
        "127.0.0.1",
        0,
        ssl=config.ssl,
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        if with_health is not None:
            await with_health._close()
        security.close()
        server.close()
        for connection in list(state.connections):
            connection.transport.close()
        while state.connections:
            await asyncio.sleep(0.001)
