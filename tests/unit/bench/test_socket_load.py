"""The lean load generator against small servers that do what they are told."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from nestrec_bench.load_test.socket_load import SocketLoad, post


@contextlib.contextmanager
def serving(answer):
    """A server whose connections each run answer(socket, number of the request on it) for every request."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            number = 0
            while connection.recv(65536):
                if answer(connection, number) is False:
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
def test_requests_leave_at_their_moments_and_whole_answers_are_read(polls):
    def answer(connection, _):
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-le")
        time.sleep(0.005)  # pieces of their own: there is no clock to inject into the kernel
        connection.sendall(b"ngth: 4\r\n\r\nab")
        time.sleep(0.005)
        connection.sendall(b"cd")

    at_s = np.linspace(0.0, 0.1, 21)
    with serving(answer) as port:
        outcome = SocketLoad(port, polls=polls).run(at_s, [post("/", b"{}")] * 21)
    assert (outcome.status == 200).all()
    assert (outcome.sent_s >= at_s).all()
    assert (outcome.ended_s - outcome.sent_s >= 0.009).all()


def test_a_stall_of_one_connection_holds_nobody_else_back():
    asked = []
    have_others_asked = threading.Event()

    def answer(connection, _):
        asked.append(connection)
        if len(asked) == 1:
            have_others_asked.wait(20.0)
        elif len(asked) == 4:
            have_others_asked.set()
        reply(connection)

    with serving(answer) as port:
        outcome = SocketLoad(port).run([0.0, 0.05, 0.06, 0.07], [post("/", b"{}")] * 4)
    assert (outcome.status == 200).all()
    assert have_others_asked.is_set(), "they were sent while the first one waited"


def test_refusals_and_failures_are_told_apart():
    def answer(connection, number):
        return [
            lambda: reply(connection, b"429 Too Many Requests", head=b"Retry-After: 1\r\n"),
            lambda: reply(connection, b"503 Service Unavailable"),
            lambda: False,
        ][number]()

    with serving(answer) as port:
        load = SocketLoad(port)
        close, load._close = load._close, lambda: None  # one request after the other, on what the last one has left
        outcomes = [load.run([0.0], [post("/", b"{}")]) for _ in range(4)]
        close()
    assert [one.status.item() for one in outcomes] == [429, 503, 0, 429], "the last one is on a connection of its own"
    assert [one.says_when.item() for one in outcomes] == [True, False, False, True]
    assert [np.isinf(one.ended_s).item() for one in outcomes] == [False, False, True, False]


def test_nobody_listens_and_nobody_answers():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens
        assert SocketLoad(taken.getsockname()[1]).run([0.0], [b"x"]).status.tolist() == [0]
    with serving(lambda *_: None) as port:
        assert SocketLoad(port, timeout_s=0.05).run([0.0], [b"x"]).status.tolist() == [0]


def test_what_an_answer_wants_is_sent_after_it_and_counts_as_no_request():
    bodies = iter([b'{"reason":"wanted"}', b'{"reason":"admitted"}', b'{"reason":"safe"}'])
    with serving(lambda connection, _: reply(connection, body=next(bodies))) as port:
        more = {0: post("/", b"{}"), 1: post("/", b"{}")}
        outcome = SocketLoad(port).run([0.0, 0.2], [post("/", b"{}")] * 2, more)
    assert (outcome.status == 200).all()
    assert next(bodies, None) is None


def test_connections_are_used_in_turn():
    """The one that has been idle longest: a server may have a process for some of them each."""
    asked = []

    def answer(connection, _):
        asked.append(connection.getpeername())
        reply(connection)

    with serving(answer) as port:
        load = SocketLoad(port)
        load._idle.extend(idle := [load._opened() for _ in range(3)])
        first = idle[0].socket.getsockname()
        assert (load.run([0.0], [post("/", b"{}")]).status == 200).all()
    assert asked == [first]


@pytest.mark.parametrize("polls", [False, True])
def test_requests_in_turn_share_a_connection_and_are_timed_each(polls):
    """A connection of its own for each would be in the time of one alone, and not in that of one of a load."""
    asked = []

    def answer(connection, number):
        asked.append((connection.getpeername(), number))
        reply(connection, body=b"x" * 70_000)

    with serving(answer) as port:
        seconds = SocketLoad(port, polls=polls).run_in_turn([post("/", b"{}")] * 5)
    assert np.isfinite(seconds).all()
    assert len({peer for peer, _ in asked}) == 1
    assert [number for _, number in asked] == [0, 1, 2, 3, 4]


def test_requests_in_turn_end_with_the_first_that_is_not_answered():
    def answer(connection, number):
        reply(connection, b"200 OK" if number == 0 else b"503 Service Unavailable")

    with serving(answer) as port:
        assert np.isfinite(SocketLoad(port).run_in_turn([post("/", b"{}")] * 3)).tolist() == [True, False, False]
    with serving(lambda *_: False) as port:
        assert np.isinf(SocketLoad(port).run_in_turn([post("/", b"{}")] * 2)).all()
    with serving(lambda *_: None) as port:
        assert np.isinf(SocketLoad(port, polls=True, timeout_s=0.05).run_in_turn([b"x"])).all()
