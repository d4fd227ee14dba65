"""What becomes of those who have connected when a server is to end."""

import asyncio
import contextlib
import socket

import pytest
import uvicorn
import uvloop

from nestrec.serving.http.sockets import Server, bound_sockets, port_of

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_who_waits_to_be_accepted_is_answered_by_a_server_that_ends(loop):
    """All have sent their requests while the event loop stood still, so that none of them has been accepted."""
    with contextlib.ExitStack() as connections:

        async def end():
            sockets = bound_sockets("127.0.0.1", 0)
            config = uvicorn.Config(hello, http="httptools", lifespan="off", log_config=None)
            server = Server(config, lambda: None)
            config.load()
            server.lifespan = config.lifespan_class(config)
            await server.startup(sockets)
            asked = []
            for _ in range(100):
                asked.append(connections.enter_context(socket.create_connection(("127.0.0.1", port_of(sockets)), 30)))
                asked[-1].sendall(REQUEST)
            await server.shutdown(sockets)
            return asked

        with asyncio.Runner(loop_factory=loop) as runner:
            asked = runner.run(end())
        answers = [one.recv(4096) for one in asked]
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
