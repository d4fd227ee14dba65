"""Open-loop load generator on plain sockets, for a server that shares its cores with the load generator.

It has the same guarantees as `open_loop` (intended send times, no client-side queue, responses are read completely) but
needs only a fifth of the CPU time, without an event loop and tasks. The CPU time of the client is not available to the
server and would increase the latency.
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
_NO_REQUEST = -1
_IGNORED = -2
"""Numbers instead of that of a request: for an idle connection, and for a request whose response is ignored."""
_RETRY = re.compile(rb"\r\nretry-after: *\d+\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Results of all requests."""

    status: NDArray[np.int64]
    """HTTP status; 0 if the connection failed or the response is missing."""
    sent_s: Floats
    """Send time, from the start of the load."""
    ended_s: Floats
    """Time at which the response was read completely, from the start of the load; infinite without a response."""
    has_retry_after: NDArray[np.bool_]
    """Whether the response has a Retry-After header."""


class _Connection:
    """Connection that processes one request at a time."""

    __slots__ = ("number", "received", "socket")

    def __init__(self, port: int):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        self.number = _NO_REQUEST

    def read_response(self) -> tuple[bytes, bytes] | None:
        """Read available data, and return head and body when the response is complete.

        Raises:
            EOFError: The server has closed the connection.
        """
        data = self.socket.recv(1 << 18)
        if not data:
            raise EOFError
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self.received[: end + 2]
        length = _LENGTH.search(head)
        if len(self.received) < end + 4 + (int(length[1]) if length is not None else 0):
            return None
        body = self.received[end + 4 :]
        self.received = b""
        return head, body


class SocketLoad:
    """Load generator for a server on this machine.

    Args:
        port: Port of the server.
        polls: Whether to poll the sockets without sleeping, so that latencies do not include wake-up times of cores.
        timeout_s: Time to wait for responses after the last request.
    """

    def __init__(self, port: int, *, polls: bool = False, timeout_s: float = 30.0):
        self._port = port
        self._polls = polls
        self._timeout_s = timeout_s
        self._epoll = select.epoll()
        self._open: dict[int, _Connection] = {}
        # Connections are used in turn, because each process of the server may handle only some of them.
        self._idle: deque[_Connection] = deque()
        self._num_in_flight = 0

    def run(
        self, at_s: Sequence[float] | Floats, requests: Sequence[bytes], follow_ups: Mapping[int, bytes] | None = None
    ) -> LoadOutcome:
        """Send request i at `at_s[i]`, and wait for all responses.

        Args:
            at_s: Send times in ascending order, in seconds from the start.
            requests: HTTP requests.
            follow_ups: Number of a request to a follow-up request, which is sent if the response requests the history.
                The response to the follow-up request is ignored.
        """
        count = len(at_s)
        send_times = [float(send_s) for send_s in at_s]
        self._follow_ups = follow_ups or {}
        self._outcome = LoadOutcome(
            np.zeros(count, np.int64), np.zeros(count), np.full(count, np.inf), np.zeros(count, np.bool_)
        )
        self._start_s = time.perf_counter()
        number = 0
        end_s = (send_times[-1] if send_times else 0.0) + self._timeout_s
        while number < count or self._num_in_flight:
            now_s = time.perf_counter() - self._start_s
            if number < count and send_times[number] <= now_s:
                self._send(number, requests[number])
                number += 1
            elif now_s > end_s:
                break
            else:
                self._read((send_times[number] if number < count else end_s) - now_s)
        self._close()
        return self._outcome

    def run_in_turn(self, requests: Sequence[bytes]) -> Floats:
        """Send requests one after another over one connection, and return their latencies in seconds.

        Latencies are infinite from the first request that is rejected or fails.
        """
        seconds = np.full(len(requests), np.inf)
        connection = self._open_connection()
        connection.socket.settimeout(self._timeout_s)
        try:
            for number, request in enumerate(requests):
                start_s = time.perf_counter()
                response = None
                connection.socket.sendall(request)
                while response is None:
                    while self._polls and not self._epoll.poll(0):
                        if time.perf_counter() - start_s > self._timeout_s:
                            raise TimeoutError
                    response = connection.read_response()
                if not response[0].startswith(b"HTTP/1.1 200"):
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
            connection = self._idle.popleft() if self._idle else self._open_connection()
            connection.number = number
            self._num_in_flight += 1
            connection.socket.sendall(data)
        except OSError:  # a response, for example a rejection, is read with the others
            pass

    def _open_connection(self) -> _Connection:
        connection = _Connection(self._port)
        self._open[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, select.EPOLLIN)
        return connection

    def _read(self, wait_s: float) -> None:
        """Read available data, and wait for it at most `wait_s`, by `select`: timeouts of epoll are up to 1 ms late."""
        if not self._polls:
            select.select([self._epoll], [], [], max(0.0, wait_s))
        for descriptor, _ in self._epoll.poll(0):
            self._read_from(self._open[descriptor])

    def _read_from(self, connection: _Connection) -> None:
        try:
            response = connection.read_response()
        except (OSError, EOFError):
            self._drop(connection)
            return
        if response is None:
            return
        head, body = response
        number = connection.number
        outcome = self._outcome
        connection.number = _NO_REQUEST
        self._num_in_flight -= 1
        self._idle.append(connection)
        if number == _IGNORED:
            return
        outcome.ended_s[number] = time.perf_counter() - self._start_s
        outcome.status[number] = int(head.split(b" ", 2)[1])
        outcome.has_retry_after[number] = _RETRY.search(head) is not None
        if number in self._follow_ups and b'"history_required"' in body:
            self._send(_IGNORED, self._follow_ups[number])

    def _drop(self, connection: _Connection) -> None:
        if connection.number != _NO_REQUEST:
            self._num_in_flight -= 1
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
    """Return an HTTP/1.1 POST request."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
