"""Graceful shutdown with connections that were not accepted yet."""

import asyncio
import contextlib
import socket

import pytest
import uvicorn
import uvloop

from nestrec.serving.http.sockets import Server, bind_sockets, port_of

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_graceful_shutdown_serves_pending_connections(loop):
    """The event loop is blocked while all clients send their requests, so that no connection is accepted before."""
    with contextlib.ExitStack() as connections:

        async def connect_and_shut_down():
            sockets = bind_sockets("127.0.0.1", 0)
            config = uvicorn.Config(hello, http="httptools", lifespan="off", log_config=None)
            server = Server(config, lambda: None)
            config.load()
            server.lifespan = config.lifespan_class(config)
            await server.startup(sockets)
            clients = []
            for _ in range(100):
                clients.append(connections.enter_context(socket.create_connection(("127.0.0.1", port_of(sockets)), 30)))
                clients[-1].sendall(REQUEST)
            await server.shutdown(sockets)
            return clients

        with asyncio.Runner(loop_factory=loop) as runner:
            clients = runner.run(connect_and_shut_down())
        responses = [client.recv(4096) for client in clients]
    assert all(response.startswith(b"HTTP/1.1 200") for response in responses)
