"""Tests of the load generator on plain sockets with small scripted servers."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from nestrec_bench.load_test.socket_load import SocketLoad, post


@contextlib.contextmanager
def serving(respond):
    """Run a server that calls respond(socket, number of the request on this connection) for every request."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            number = 0
            while connection.recv(65536):
                if respond(connection, number) is False:
                    return
                number += 1

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def reply(connection, status=b"200 OK", body=b"{}", head=b""):
    connection.sendall(b"HTTP/1.1 " + status + b"\r\n" + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize("polls", [False, True])
def test_socket_load_sends_on_schedule_and_reads_responses(polls):
    def respond(connection, _):
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-le")
        time.sleep(0.005)  # separate packets; a clock cannot be injected into the kernel
        connection.sendall(b"ngth: 4\r\n\r\nab")
        time.sleep(0.005)
        connection.sendall(b"cd")

    at_s = np.linspace(0.0, 0.1, 21)
    with serving(respond) as port:
        outcome = SocketLoad(port, polls=polls).run(at_s, [post("/", b"{}")] * 21)
    assert (outcome.status == 200).all()
    assert (outcome.sent_s >= at_s).all()
    assert (outcome.ended_s - outcome.sent_s >= 0.009).all()


def test_socket_load_stall_does_not_block_others():
    connections = []
    others_received = threading.Event()

    def respond(connection, _):
        connections.append(connection)
        if len(connections) == 1:
            others_received.wait(20.0)
        elif len(connections) == 4:
            others_received.set()
        reply(connection)

    with serving(respond) as port:
        outcome = SocketLoad(port).run([0.0, 0.05, 0.06, 0.07], [post("/", b"{}")] * 4)
    assert (outcome.status == 200).all()
    assert others_received.is_set(), "the other requests were sent while the first one waited"


def test_socket_load_distinguishes_rejections_and_failures():
    def respond(connection, number):
        return [
            lambda: reply(connection, b"429 Too Many Requests", head=b"Retry-After: 1\r\n"),
            lambda: reply(connection, b"503 Service Unavailable"),
            lambda: False,
        ][number]()

    with serving(respond) as port:
        load = SocketLoad(port)
        close = load._close
        load._close = lambda: None  # successive loads reuse the idle connections
        outcomes = [load.run([0.0], [post("/", b"{}")]) for _ in range(4)]
        close()
    assert [one.status.item() for one in outcomes] == [429, 503, 0, 429], "the last request opens a new connection"
    assert [one.has_retry_after.item() for one in outcomes] == [True, False, False, True]
    assert [np.isinf(one.ended_s).item() for one in outcomes] == [False, False, True, False]


def test_socket_load_without_server_or_response():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # reserves a port without a listener
        assert SocketLoad(taken.getsockname()[1]).run([0.0], [b"x"]).status.tolist() == [0]
    with serving(lambda *_: None) as port:
        assert SocketLoad(port, timeout_s=0.05).run([0.0], [b"x"]).status.tolist() == [0]


def test_socket_load_follow_up_requests_are_not_counted():
    bodies = iter([b'{"reason":"history_required"}', b'{"reason":"admitted"}', b'{"reason":"safe"}'])
    with serving(lambda connection, _: reply(connection, body=next(bodies))) as port:
        more = {0: post("/", b"{}"), 1: post("/", b"{}")}
        outcome = SocketLoad(port).run([0.0, 0.2], [post("/", b"{}")] * 2, more)
    assert (outcome.status == 200).all()
    assert next(bodies, None) is None


def test_socket_load_uses_longest_idle_connection():
    """All connections are used in turn, because each process of a server may handle only some of them."""
    peers = []

    def respond(connection, _):
        peers.append(connection.getpeername())
        reply(connection)

    with serving(respond) as port:
        load = SocketLoad(port)
        load._idle.extend(idle := [load._open_connection() for _ in range(3)])
        first = idle[0].socket.getsockname()
        assert (load.run([0.0], [post("/", b"{}")]).status == 200).all()
    assert peers == [first]


@pytest.mark.parametrize("polls", [False, True])
def test_socket_load_sequence_shares_one_connection(polls):
    """The latency of a single request must not include the time to connect, like that of a request in a load."""
    received = []

    def respond(connection, number):
        received.append((connection.getpeername(), number))
        reply(connection, body=b"x" * 70_000)

    with serving(respond) as port:
        seconds = SocketLoad(port, polls=polls).run_in_turn([post("/", b"{}")] * 5)
    assert np.isfinite(seconds).all()
    assert len({peer for peer, _ in received}) == 1
    assert [number for _, number in received] == [0, 1, 2, 3, 4]


def test_socket_load_sequence_stops_at_first_failure():
    def respond(connection, number):
        reply(connection, b"200 OK" if number == 0 else b"503 Service Unavailable")

    with serving(respond) as port:
        assert np.isfinite(SocketLoad(port).run_in_turn([post("/", b"{}")] * 3)).tolist() == [True, False, False]
    with serving(lambda *_: False) as port:
        assert np.isinf(SocketLoad(port).run_in_turn([post("/", b"{}")] * 2)).all()
    with serving(lambda *_: None) as port:
        assert np.isinf(SocketLoad(port, polls=True, timeout_s=0.05).run_in_turn([b"x"])).all()
