"""Histories in a Redis or Valkey that all instances share.

A user's events are one string of packed parts. Adding events appends a part, which is one trip and needs no look at
what is there, so writers cannot undo each other; reading is one trip for all users who wait at a moment. Parts are
merged by time when they are read, so that late events are in their place. Now and then whoever has appended puts the
parts together and cuts them to their bounds.

Round trips to a Redis or Valkey: commands go out together, answers come back together, all within a time.

A connection on which anything went wrong is closed: an answer that comes late must never be taken for that of a later
question. Where the store does not answer, everybody is refused at once, and one trip in a while tries whether it is
back.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as LateError

from nestrec.serving.core.background_tasks import reported
from nestrec.serving.history_store.history_codec import DamagedHistoryError, cut, merged, packed, unpacked
from nestrec.serving.history_store.history_store import HistoryStoreConfig, RawHistory, StoreAwayError

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


_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
_REPLACE_FRONT = """
local length = tonumber(ARGV[1])
if redis.sha1hex(redis.call('GETRANGE', KEYS[1], 0, length - 1)) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[3] .. redis.call('GETRANGE', KEYS[1], length, -1), 'KEEPTTL')
return 1
"""
"""in the store, so that nobody writes in between: what a history begins with, where it still does, becomes one part"""
_MOST_IN_A_TRIP = 16
"""users whose histories are read together"""
_UNREADABLE = "the history of this user cannot be read; erase it or send one"
_TIDY_BYTES = 1 << 13
"""parts are put together whenever a history has grown by so much"""
_LARGE_BYTES = 1 << 16
"""histories that are unpacked on a thread of their own: the event loop has others to answer"""


class RedisHistoryStore:
    """Used inside one event loop."""

    def __init__(self, cfg: HistoryStoreConfig):
        self._cfg, self._url = cfg, cfg.address()
        self._trips: Trips | None = None
        self._waiting: dict[str, asyncio.Future[bytes | None]] = {}
        self._on_the_way: set[str] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self.counts = {"trips": 0, "reads": 0, "tidied": 0, "refused": 0}
        """for those who watch: round trips, histories read by them, histories put together, commands refused"""

    async def get(self, user: str, timeout_s: float) -> RawHistory | None:
        """One trip at a time for a user: who asks while it is under way shares the next one, since events that were
        written meanwhile may have missed this one."""
        future = self._waiting.get(user)
        if future is None:
            future = self._waiting[user] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_seen)
            if len(self._readers) < self._cfg.max_connections:
                task = asyncio.create_task(self._read_waiting())
                self._readers.add(task)
                task.add_done_callback(self._readers.discard)
                task.add_done_callback(reported("nestrec-histories"))
        try:
            async with asyncio.timeout(min(timeout_s, 2 * self._cfg.timeout_ms / 1000.0)):
                parts = await asyncio.shield(future)
        except TimeoutError:
            raise StoreAwayError("the store of histories does not answer in time") from None
        if parts is None:
            return None
        try:
            return await _computed(self._read, user, parts)
        except DamagedHistoryError as error:  # never a guess
            _LOG.error("a history in the store cannot be read: %s", error)
            raise StoreAwayError(_UNREADABLE) from None

    async def append(self, user: str, events: RawHistory, timeout_s: float) -> None:
        key, part = self._key(user), packed(user, events)
        commands: list[Command] = [("APPEND", key, part)]
        if self._cfg.ttl_s is not None:  # both or none: an end of life that is lost would be none at all
            life = ("PEXPIRE", key, int(1000 * self._cfg.ttl_s))
            commands = [("MULTI",), *commands, life, ("EXEC",)]
        answers = await self._sent(*commands)
        length = answers[-1][0] if self._cfg.ttl_s is not None else answers[0]
        if length // _TIDY_BYTES != (length - len(part)) // _TIDY_BYTES or length > self._cfg.max_user_bytes:
            await self._tidy(user)

    async def forget(self, user: str, timeout_s: float) -> None:
        await self._sent(("UNLINK", self._key(user)))

    async def close(self) -> None:
        for task in list(self._readers):
            task.cancel()
        if self._trips is not None:
            await self._trips.close()

    def _key(self, user: str) -> bytes:
        return f"{self._cfg.prefix}:events:{user}".encode("utf-8", "surrogatepass")

    def _reached(self) -> Trips:
        """Made inside of the event loop that uses it."""
        if self._trips is None:
            timeout_s = self._cfg.timeout_ms / 1000.0
            self._trips = Trips(self._url, timeout_s=timeout_s, max_connections=self._cfg.max_connections)
        return self._trips

    def _read(self, user: str, parts: bytes) -> RawHistory:
        return merged(unpacked(user, parts), self._cfg.max_events)

    async def _sent(self, *commands: Command) -> list[Any]:
        """What the store answers; refused where it says that it cannot do it: memory that is full, a replica."""
        answers = await self._exchanged(*commands)
        for answer in answers:
            for one in answer if isinstance(answer, list) else [answer]:  # a transaction answers with a list
                if isinstance(one, ResponseError):
                    raise self._refused(one)
        return answers

    async def _exchanged(self, *commands: Command) -> list[Any]:
        self.counts["trips"] += 1
        return await self._reached().send(*commands)

    def _refused(self, error: ResponseError) -> StoreAwayError:
        self.counts["refused"] += 1
        reason = _reason(error)
        _LOG.error("the store of histories refuses: %s", reason)
        if reason == "WRONGTYPE":
            return StoreAwayError(_UNREADABLE)
        return StoreAwayError("the store of histories takes nothing now", 5.0)

    async def _read_waiting(self) -> None:
        """Trips until nobody waits whose trip can begin."""
        while users := [user for user in self._waiting if user not in self._on_the_way][:_MOST_IN_A_TRIP]:
            futures = {user: self._waiting.pop(user) for user in users}
            self._on_the_way.update(users)
            try:
                # Not MGET: its response for a key of another type is that there is no such key.
                values = await self._exchanged(*(("GET", self._key(user)) for user in users))
                self.counts["reads"] += len(users)
                for future, value in zip(futures.values(), values, strict=True):
                    if isinstance(value, ResponseError):
                        future.set_exception(self._refused(value))
                    else:
                        future.set_result(value)
            except StoreAwayError as error:
                for future in futures.values():
                    future.set_exception(error)
            except BaseException:
                for future in futures.values():
                    future.cancel()
                raise
            finally:
                self._on_the_way.difference_update(users)

    async def _tidy(self, user: str) -> None:
        """One part within its bounds in place of many. What was appended meanwhile stays behind it; a history that was
        erased or put together meanwhile is left as it is."""
        key = self._key(user)
        try:
            (parts,) = await self._sent(("GET", key))
            if parts is None:
                return
            part = await _computed(self._tidied, user, parts)
            digest = hashlib.sha1(parts, usedforsecurity=False).hexdigest()
            (is_done,) = await self._sent(("EVAL", _REPLACE_FRONT, 1, key, len(parts), digest, part))
            self.counts["tidied"] += is_done
        except StoreAwayError:
            _LOG.warning("a history was not cut: the store is away; it will be when more comes")
        except DamagedHistoryError as error:
            _LOG.error("a history in the store cannot be read: %s", error)

    def _tidied(self, user: str, parts: bytes) -> bytes:
        return cut(user, self._read(user, parts), self._cfg.max_user_bytes)[0]


async def _computed(compute: Callable[[str, bytes], Result], user: str, parts: bytes) -> Result:
    if len(parts) < _LARGE_BYTES:
        return compute(user, parts)
    return await asyncio.to_thread(compute, user, parts)


def _reason(error: ResponseError) -> str:
    """A word for it, which is all of it that surely holds no id; of some kinds it is the name of their class, and what
    they say begins with something else."""
    return str(error).partition(" ")[0] if type(error) is ResponseError else type(error).__name__


def _seen(future: "asyncio.Future[bytes | None]") -> None:
    """Whoever asked may have gone: an error that nobody waits for is no news."""
    if not future.cancelled():
        future.exception()
