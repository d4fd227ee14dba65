"""Open-loop load over bare sockets, for a server that shares its cores with whoever measures it.

The same promises as `open_loop` (intended moments, never a queue of its own, the whole answer read) in a fifth of the
processor time: no event loop, no task a request. Whatever the client takes is missing from the server and is felt as
latency.
"""

import re
import select
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_NOBODY = -1
_UNASKED = -2
"""numbers of no request, and of one whose answer is of no interest"""
_RETRY = re.compile(rb"\r\nretry-after: *\d+\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What became of each request."""

    status: NDArray[np.int64]
    """0 where the connection failed or no answer came"""
    sent_s: Floats
    """when it left, from the start of the load"""
    ended_s: Floats
    """when its whole answer had been read, from the start of the load; infinite where that never was"""
    says_when: NDArray[np.bool_]
    """the answer says when to come back"""


class _Connection:
    """One request at a time."""

    __slots__ = ("number", "received", "socket")

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        self.number = _NOBODY

    def whole_answer(self) -> tuple[bytes, bytes] | None:
        """Its head and body, once all of it has come. `EOFError` where the server has closed."""
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise EOFError
        self.received += piece
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self.received[: end + 2]
        length = _LENGTH.search(head)
        if len(self.received) < end + 4 + (int(length[1]) if length is not None else 0):
            return None
        body, self.received = self.received[end + 4 :], b""
        return head, body


class SocketLoad:
    """polls: never sleeps, so that the time in which a sleeping core wakes is not in the latencies."""

    def __init__(self, port: int, *, polls: bool = False, timeout_s: float = 30.0):
        self._port = port
        self._polls = polls
        self._timeout_s = timeout_s
        self._epoll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self._idle: deque[_Connection] = deque()  # in turn: a server may have a process for some of them each
        self._num_under_way = 0

    def run(
        self, at_s: Sequence[float] | Floats, requests: Sequence[bytes], wanted: Mapping[int, bytes] | None = None
    ) -> LoadOutcome:
        """Send request i at `at_s[i]`, which do not decrease, and wait for all answers. wanted: what is sent as soon as
        the answer to a request says that it is; its own answer is nobody's."""
        count = len(at_s)
        moments = [float(moment_s) for moment_s in at_s]
        self._wanted = wanted or {}
        self._outcome = LoadOutcome(
            np.zeros(count, np.int64), np.zeros(count), np.full(count, np.inf), np.zeros(count, np.bool_)
        )
        self._start_s = time.perf_counter()
        following = 0
        end_s = (moments[-1] if moments else 0.0) + self._timeout_s
        while following < count or self._num_under_way:
            now_s = time.perf_counter() - self._start_s
            if following < count and moments[following] <= now_s:
                self._send(following, requests[following])
                following += 1
            elif now_s > end_s:
                break
            else:
                self._read((moments[following] if following < count else end_s) - now_s)
        self._close()
        return self._outcome

    def run_in_turn(self, requests: Sequence[bytes]) -> Floats:
        """Seconds of requests that leave one after the other over one connection, as those of a load do; infinite from
        the first one that is refused or not answered."""
        seconds = np.full(len(requests), np.inf)
        connection = self._opened()
        connection.socket.settimeout(self._timeout_s)
        try:
            for number, request in enumerate(requests):
                start_s = time.perf_counter()
                answer = None
                connection.socket.sendall(request)
                while answer is None:
                    while self._polls and not self._epoll.poll(0):
                        if time.perf_counter() - start_s > self._timeout_s:
                            raise TimeoutError
                    answer = connection.whole_answer()
                if not answer[0].startswith(b"HTTP/1.1 200"):
                    break
                seconds[number] = time.perf_counter() - start_s
        except (OSError, EOFError):
            pass
        finally:
            self._close()
        return seconds

    def _send(self, number: int, data: bytes) -> None:
        if number >= 0:
            self._outcome.sent_s[number] = time.perf_counter() - self._start_s
        try:
            connection = self._idle.popleft() if self._idle else self._opened()
            connection.number = number
            self._num_under_way += 1
            connection.socket.sendall(data)
        except OSError:  # its answer, if any, is read with the others
            pass

    def _opened(self) -> _Connection:
        connection = _Connection(self._port)
        self._open[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, select.EPOLLIN)
        return connection

    def _read(self, wait_s: float) -> None:
        """What has come; waits for it at most so long. A timeout of epoll itself is up to a millisecond late."""
        if not self._polls:
            select.select([self._epoll], [], [], max(0.0, wait_s))
        for descriptor, _ in self._epoll.poll(0):
            self._read_from(self._open[descriptor])

    def _read_from(self, connection: _Connection) -> None:
        try:
            answer = connection.whole_answer()
        except (OSError, EOFError):
            self._drop(connection)
            return
        if answer is None:
            return
        (head, body) = answer
        number = connection.number
        outcome = self._outcome
        connection.number = _NOBODY
        self._num_under_way -= 1
        self._idle.append(connection)
        if number == _UNASKED:
            return
        outcome.ended_s[number] = time.perf_counter() - self._start_s
        outcome.status[number] = int(head.split(b" ", 2)[1])
        outcome.says_when[number] = _RETRY.search(head) is not None
        if number in self._wanted and b'"wanted"' in body:
            self._send(_UNASKED, self._wanted[number])

    def _drop(self, connection: _Connection) -> None:
        if connection.number != _NOBODY:
            self._num_under_way -= 1
        elif connection in self._idle:
            self._idle.remove(connection)
        self._open.pop(connection.socket.fileno(), None)
        self._epoll.unregister(connection.socket)
        connection.socket.close()

    def _close(self) -> None:
        for connection in list(self._open.values()):
            self._drop(connection)
        self._epoll.close()


def post(path: str, body: bytes) -> bytes:
    """A request as HTTP/1.1."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
