"""Round trips to a Redis or Valkey: commands go out together, answers come back together, all within a time.

A connection on which anything went wrong is closed: an answer that comes late must never be taken for that of a later
question. Where the store does not answer, everybody is refused at once, and one trip in a while tries whether it is
back.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as LateError

from nestrec.serving.histories.store import StoreAwayError

Command = tuple[bytes | str | int, ...]
_LATE_IN_A_ROW = 3
"""trips after which a store is taken for gone; one alone may be late because this process was"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


class Trips:
    """A bounded number of connections to one store. Used inside one event loop."""

    def __init__(self, url: str, *, timeout_s: float, max_connections: int):
        self._timeout_s = timeout_s
        # The pool only knows how to make a connection from a url; which ones are idle is known here.
        self._pool = ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            driver_info=None,
        )
        self._idle: list[AbstractConnection] = []
        self._free = asyncio.Semaphore(max_connections)
        self._watch = Watch(asyncio.get_running_loop().time, timeout_s)

    async def send(self, *commands: Command) -> list[Any]:
        """The answers in order; one that is an error of the store is the `ResponseError` itself."""
        self._watch.check()
        try:
            async with asyncio.timeout(self._timeout_s), self._free:
                answers = await self._exchanged(commands)
        except (LateError, TimeoutError):
            self._watch.failed(is_lost=False)
            raise StoreAwayError("the store of histories does not answer in time") from None
        except (RedisError, OSError, EOFError):  # answers that are errors were not raised
            self._watch.failed(is_lost=True)
            raise StoreAwayError("the store of histories is away") from None
        self._watch.succeeded()
        return answers

    async def _exchanged(self, commands: Sequence[Command]) -> list[Any]:
        connection = await self._connected()
        is_kept = False
        try:
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            answers = [await _answer(connection) for _ in commands]
            is_kept = True
            return answers
        finally:
            if is_kept:
                self._idle.append(connection)
            else:
                await connection.disconnect(nowait=True)

    async def _connected(self) -> AbstractConnection:
        while self._idle:
            kept = self._idle.pop()
            try:
                if not await kept.can_read():  # with nothing asked, whatever can be read means that it was closed
                    return kept
            except LostError:
                continue
            await kept.disconnect(nowait=True)
        connection: AbstractConnection = self._pool.make_connection()
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


class Watch:
    """Whether the store is worth a trip."""

    def __init__(self, now_s: Callable[[], float], timeout_s: float):
        self._now_s, self._timeout_s = now_s, timeout_s
        self._closed_until_s, self._pause_s = 0.0, 0.0
        self._num_late = 0

    def check(self) -> None:
        """Raises where it is not. The first one after a pause goes and tries, and others wait for what it finds."""
        if not self._closed_until_s:
            return
        now_s = self._now_s()
        if now_s < self._closed_until_s:
            raise StoreAwayError("the store of histories is away")
        self._closed_until_s = now_s + self._timeout_s

    def failed(self, *, is_lost: bool) -> None:
        self._num_late += 1
        if is_lost or self._pause_s or self._num_late >= _LATE_IN_A_ROW:
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) or _FIRST_PAUSE_S
            self._closed_until_s = self._now_s() + self._pause_s

    def succeeded(self) -> None:
        self._closed_until_s = self._pause_s = 0.0
        self._num_late = 0
