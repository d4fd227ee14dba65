"""Open-loop load generation: requests are sent at their intended times, independent of the server.

The latency is measured from the intended send time, so that a stall increases the latency of every request that it
delays (no coordinated omission). A request that is rejected or fails has infinite latency.

The small HTTP/1.1 client never queues requests: it opens a connection if none is idle. It uses asyncio protocols
instead of streams to save CPU time, because a load generator shares the machine with the measured server.
"""

import asyncio
import contextlib
import math
import selectors
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_MAX_OPEN = 900


@dataclass(frozen=True, slots=True)
class Reply:
    """HTTP response; its status is 0 if the connection failed."""

    status: int
    head: bytes = b""
    """Status line and headers in lower case."""
    body: bytes = b""

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, or an empty text if it is missing."""
        return self.head.partition(b"\r\n" + name + b":")[2].partition(b"\r\n")[0].strip()


class HttpClient:
    """HTTP client with persistent connections, for one event loop. At most 900 requests can be in flight.

    Args:
        host: Host of the server.
        port: Port of the server.
        key: API key, if the server requires one.
        timeout_s: Timeout of a request, in seconds.
        context: TLS context, if the server uses TLS.
    """

    def __init__(
        self, host: str, port: int, *, key: str = "", timeout_s: float = 30.0, context: ssl.SSLContext | None = None
    ):
        self._context = context
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._credential = f"authorization: Bearer {key}\r\n" if key else ""
        self._idle: list[_Connection] = []
        self._num_open = 0

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a request on an idle or new connection, and return the response."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"{self._credential}content-length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(head.encode() + body)
        except (OSError, EOFError, TimeoutError, ValueError):
            return Reply(0)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    async def _exchange(self, data: bytes) -> Reply:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                break
            self._num_open -= 1
        else:
            connection = await self._open()
        is_reusable = False
        try:
            reply = await connection.send(data)
            is_reusable = reply.header(b"connection") != b"close"
            return reply
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                self._num_open -= 1
                connection.transport.close()

    async def _open(self) -> "_Connection":
        if self._num_open >= _MAX_OPEN:
            raise OSError("too many requests are in flight")
        self._num_open += 1
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._context)
        except BaseException:
            self._num_open -= 1
            raise
        return connection


class _Connection(asyncio.Protocol):
    """Connection that processes one request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._reply: asyncio.Future[Reply] | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self.is_lost = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._closed.set_result(None)
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(exc or EOFError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or self._reply is None or self._reply.done():
            return
        head = Reply(0, bytes(self._received[: end + 2]).lower())
        length = int(head.header(b"content-length") or 0)
        if len(self._received) >= end + 4 + length:
            status = int(head.head.split(b" ", 2)[1])
            body = bytes(self._received[end + 4 : end + 4 + length])
            del self._received[: end + 4 + length]
            self._reply.set_result(Reply(status, head.head, body))

    async def send(self, data: bytes) -> Reply:
        self._reply = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self._reply

    async def close(self) -> None:
        self.transport.close()
        with contextlib.suppress(OSError):
            await self._closed


Result = TypeVar("Result")
Send = Callable[[int], Awaitable[bool]]
"""Function that sends request number i and returns whether it succeeded."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of sending requests at one rate."""

    rate: float
    """Intended requests per second."""
    latency_ms: NDArray[np.float64]
    """Latency of each request from its intended send time; infinite if it was rejected or failed."""
    lateness_ms: float
    """99th percentile of the send delay of the generator; large values mean that the generator was too slow."""
    duration_s: float

    def percentile_ms(self, q: float) -> float:
        if not len(self.latency_ms):
            return math.inf
        return nearest_rank(np.sort(self.latency_ms), q)

    @property
    def num_rejected(self) -> int:
        return int(np.isinf(self.latency_ms).sum())

    def goodput(self, slo_ms: float) -> float:
        """Return the number of requests per second that meet the SLO."""
        return float((self.latency_ms <= slo_ms).sum()) / self.duration_s

    def meets(self, slo_ms: float) -> bool:
        return self.percentile_ms(99) <= slo_ms


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> NDArray[np.float64]:
    """Return the intended send times of requests, in seconds from the start."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0 / rate, size=math.ceil(rate * duration_s * 2) + 32)
    times = np.cumsum(gaps)
    return times[times < duration_s]


async def run_open_loop(at_s: Sequence[float] | NDArray[np.float64], send: Send, *, lead_s: float = 0.0) -> Trial:
    """Send request i at `at_s[i]`.

    Args:
        at_s: Send times, in seconds from the start.
        send: Function that sends a request.
        lead_s: Time within `send` before the measured request, for example after a pre-infer signal.
    """
    latency_ms = np.full(len(at_s), np.inf)
    lateness_ms = np.zeros(len(at_s))
    start_s = time.perf_counter()

    async def send_one(number: int, intended_s: float) -> None:
        lateness_ms[number] = (time.perf_counter() - intended_s) * 1e3
        has_succeeded = await send(number)
        if has_succeeded:
            latency_ms[number] = (time.perf_counter() - intended_s - lead_s) * 1e3

    tasks = []
    for number, offset_s in enumerate(at_s):
        wait_s = start_s + float(offset_s) - time.perf_counter()
        # The event loop must run even without a wait, because otherwise written data would not be sent.
        await asyncio.sleep(max(0.0, wait_s))
        tasks.append(asyncio.create_task(send_one(number, start_s + float(offset_s))))
    await asyncio.gather(*tasks)
    span_s = max(float(at_s[-1]), 1e-9) if len(at_s) else 1.0
    late_ms = float(np.quantile(lateness_ms, 0.99)) if len(at_s) else 0.0
    return Trial(len(at_s) / span_s, latency_ms, late_ms, span_s)


def nearest_rank(ordered: NDArray[np.float64], q: float) -> float:
    """Return the q-th percentile by the nearest-rank method.

    Args:
        ordered: Sorted values, at least one.
        q: Percentile from 0 to 100.
    """
    return float(ordered[min(len(ordered), math.ceil(q / 100 * len(ordered))) - 1])


def run_punctually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine like asyncio.run, but with precise timers, because those of epoll are up to 1 ms late."""
    loop = lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())  # noqa: E731
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(work)


def largest(
    measure: Callable[[float], Trial],
    slo_ms: float,
    *,
    start: float,
    rounds: int = 5,
    factor: float = 2.0,
    most: float = math.inf,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[float, Trial | None]:
    """Search for the largest value, for example of the rate, that meets the SLO.

    The value is multiplied or divided by `factor`, then by its square and so on, until the result is bracketed. Then
    the interval is halved.

    Args:
        measure: Function that measures a trial with a value.
        slo_ms: Latency that the 99th percentile must not exceed.
        start: First value.
        rounds: Number of bisections after the interval is as narrow as `factor`.
        factor: First factor between values.
        most: Maximum value.
        is_over: Function that is called after each trial; if it returns true, the search ends with the best value.

    Returns:
        The value and its trial, or 0 and None if no trial met the SLO.
    """
    low = 0.0
    high = math.inf
    best = None
    value = min(start, most)
    num_met = 0
    num_missed = 0
    for _ in range(24):
        trial = measure(value)
        if trial.meets(slo_ms):
            low, best, num_met = value, trial, num_met + 1
        else:
            high, num_missed = value, num_missed + 1
        if is_over():
            break
        if math.isinf(high):
            if low >= most:
                break
            value = min(low * factor**num_met, most)
        elif not low and high > start / 8:
            value = high / factor**num_missed
        elif low and high > low * factor * 1.01:
            value = math.sqrt(low * high)
        elif not low or rounds == 0 or high <= low * 1.05:
            break
        else:
            rounds -= 1
            value = (low + high) / 2
    return low, best
