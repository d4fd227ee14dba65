"""Histories in a Redis or Valkey that all instances share.

A user's events are one string of packed parts. Adding events appends a part in one round trip, without reading what is
stored, so writers cannot undo each other. Users who wait at the same time are read in one round trip. Parts are merged
by time when they are read, so that late events are in their place. After some appends, the writer merges the parts and
cuts them to their bounds.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from nestrec.base.clock import Clock, RealClock
from nestrec.base.errors import UserError
from nestrec.serving.core.background_tasks import reported
from nestrec.serving.history_store.history_codec import CorruptHistoryError, cut, merged, packed, unpacked
from nestrec.serving.history_store.history_store import HistoryStoreConfig, HistoryStoreUnavailableError, RawHistory

_LOG = logging.getLogger(__name__)
Command = tuple[bytes | str | int, ...]
Result = TypeVar("Result")
_MAX_TIMEOUTS_IN_A_ROW = 3
"""The circuit breaker opens after that many; a single timeout may be due to a pause of this process."""
_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 1.0
_REPLACE_FRONT = """
local length = tonumber(ARGV[1])
if redis.sha1hex(redis.call('GETRANGE', KEYS[1], 0, length - 1)) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[3] .. redis.call('GETRANGE', KEYS[1], length, -1), 'KEEPTTL')
return 1
"""
"""in the store, so that nobody writes in between: what a history begins with, where it still does, becomes one part"""
_MAX_READS_PER_ROUND_TRIP = 16
_UNREADABLE = "the history of this user cannot be read; erase it or send one"
_TIDY_BYTES = 1 << 13
"""parts are put together whenever a history has grown by so much"""
_LARGE_BYTES = 1 << 16
"""histories that are unpacked on a thread of their own: the event loop has others to answer"""


class CircuitBreaker:
    """Rejects requests to a server that does not answer.

    It is closed at first, and opens after a lost connection or after several timeouts in a row. While it is open,
    requests are rejected. After a pause it is half-open: one request passes as a probe, and the others are rejected
    until the probe ends. A probe that succeeds closes the breaker. One that fails opens it for twice as long.
    """

    def __init__(self, clock: Clock, probe_timeout_s: float):
        self._clock = clock
        self._probe_timeout_s = probe_timeout_s
        self._pause_s = 0.0
        self._open_until_s = 0.0
        self._num_failures = 0

    def check(self) -> None:
        """Raise `HistoryStoreUnavailableError` if the request must not be sent."""
        if not self._pause_s:
            return
        now_s = self._clock.now_s()
        if now_s < self._open_until_s:
            raise HistoryStoreUnavailableError("the store of histories is away")
        self._open_until_s = now_s + self._probe_timeout_s  # half-open: this request is the probe

    def record_failure(self, *, is_timeout: bool) -> None:
        self._num_failures += 1
        if not is_timeout or self._pause_s or self._num_failures >= _MAX_TIMEOUTS_IN_A_ROW:
            self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s) or _MIN_PAUSE_S
            self._open_until_s = self._clock.now_s() + self._pause_s

    def record_success(self) -> None:
        self._pause_s = 0.0
        self._num_failures = 0


class RedisHistoryStore:
    """Used inside one event loop."""

    def __init__(self, cfg: HistoryStoreConfig, clock: Clock | None = None):
        self._cfg = cfg
        self._timeout_s = cfg.timeout_ms / 1000.0
        try:
            self._pool = ConnectionPool.from_url(
                cfg.address(),
                max_connections=cfg.max_connections,
                protocol=2,
                socket_timeout=None,  # one deadline for the whole request in `_request`
                socket_connect_timeout=self._timeout_s,
                retry=Retry(NoBackoff(), 0),
                driver_info=None,
            )
        except ValueError:  # neither the address nor the error is shown: both may contain a password
            remedy = "give redis://HOST:PORT/NUMBER, with special characters of a password as %XX"
            scheme = urlsplit(cfg.url).scheme
            raise UserError("is not a valid address", option="histories.url", value=scheme, remedy=remedy) from None
        # Not a BlockingConnectionPool: it serves new requests before those that wait, and takes more CPU time.
        self._free_connections = asyncio.Semaphore(self._pool.max_connections)
        self._breaker = CircuitBreaker(clock or RealClock(), self._timeout_s)
        self._waiting: dict[str, asyncio.Future[bytes | None]] = {}
        self._on_the_way: set[str] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self.counts = {"round_trips": 0, "reads": 0, "tidied": 0, "refused": 0}
        """Round trips, histories read by them, histories merged into one part, and commands refused by the server."""

    async def get(self, user: str, timeout_s: float) -> RawHistory | None:
        """Read with at most one round trip in flight per user: a call during it shares the next one, because the one
        in flight may miss events that were written since."""
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
            async with asyncio.timeout(min(timeout_s, 2 * self._timeout_s)):
                parts = await asyncio.shield(future)
        except TimeoutError:
            raise HistoryStoreUnavailableError("the store of histories does not answer in time") from None
        if parts is None:
            return None
        try:
            return await _computed(self._read, user, parts)
        except CorruptHistoryError as error:  # never a guess
            _LOG.error("a history in the store cannot be read: %s", error)
            raise HistoryStoreUnavailableError(_UNREADABLE) from None

    async def append(self, user: str, events: RawHistory, timeout_s: float) -> None:
        key = self._key(user)
        part = packed(user, events)
        commands: list[Command] = [("APPEND", key, part)]
        if self._cfg.ttl_s is not None:  # both or none: an end of life that is lost would be none at all
            life = ("PEXPIRE", key, int(1000 * self._cfg.ttl_s))
            commands = [("MULTI",), *commands, life, ("EXEC",)]
        replies = await self._execute(*commands)
        length = replies[-1][0] if self._cfg.ttl_s is not None else replies[0]
        if length // _TIDY_BYTES != (length - len(part)) // _TIDY_BYTES or length > self._cfg.max_user_bytes:
            await self._tidy(user)

    async def forget(self, user: str, timeout_s: float) -> None:
        await self._execute(("UNLINK", self._key(user)))

    async def close(self) -> None:
        for task in list(self._readers):
            task.cancel()
        try:
            await self._pool.aclose()
        except RedisError as error:  # every connection was closed, but the server did not confirm in time
            _LOG.warning("the connections to the store of histories were not closed in time: %s", error)

    def _key(self, user: str) -> bytes:
        return f"{self._cfg.prefix}:events:{user}".encode("utf-8", "surrogatepass")

    def _read(self, user: str, parts: bytes) -> RawHistory:
        return merged(unpacked(user, parts), self._cfg.max_events)

    async def _execute(self, *commands: Command) -> list[Any]:
        """Return the replies. Raise if the server refused a command, for example because its memory is full."""
        replies = await self._request(*commands)
        for reply in replies:
            for one in reply if isinstance(reply, list) else [reply]:  # the reply to EXEC is a list
                if isinstance(one, ResponseError):
                    raise self._refused(one)
        return replies

    async def _request(self, *commands: Command) -> list[Any]:
        """Send the commands in one round trip and return the replies, of which some may be `ResponseError`s."""
        self._breaker.check()
        self.counts["round_trips"] += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._free_connections:
                # Not `Redis.pipeline`: it creates a task per round trip, and replaces the errors of a transaction by
                # texts with the commands in place of the server's reason.
                connection = await self._pool.get_connection()
                try:
                    # A connection closes itself if this fails or is cancelled, so that no late reply is taken for
                    # the reply to a later command.
                    await connection.send_packed_command(connection.pack_commands(commands))
                    replies = [await _read_reply(connection) for _ in commands]
                finally:
                    await self._pool.release(connection)
        except (TimeoutError, RedisTimeoutError):
            self._breaker.record_failure(is_timeout=True)
            raise HistoryStoreUnavailableError("the store of histories does not answer in time") from None
        except (RedisError, OSError, EOFError):  # not replies that are errors: `_read_reply` returns them
            self._breaker.record_failure(is_timeout=False)
            raise HistoryStoreUnavailableError("the store of histories is away") from None
        self._breaker.record_success()
        return replies

    def _refused(self, error: ResponseError) -> HistoryStoreUnavailableError:
        self.counts["refused"] += 1
        reason = _reason(error)
        _LOG.error("the store of histories refuses: %s", reason)
        if reason == "WRONGTYPE":
            return HistoryStoreUnavailableError(_UNREADABLE)
        return HistoryStoreUnavailableError("the store of histories takes nothing now", 5.0)

    async def _read_waiting(self) -> None:
        """Read until every user who waits has a read in flight."""
        while users := [user for user in self._waiting if user not in self._on_the_way][:_MAX_READS_PER_ROUND_TRIP]:
            futures = {user: self._waiting.pop(user) for user in users}
            self._on_the_way.update(users)
            try:
                # Not MGET: its response for a key of another type is that there is no such key.
                values = await self._request(*(("GET", self._key(user)) for user in users))
                self.counts["reads"] += len(users)
                for future, value in zip(futures.values(), values, strict=True):
                    if isinstance(value, ResponseError):
                        future.set_exception(self._refused(value))
                    else:
                        future.set_result(value)
            except HistoryStoreUnavailableError as error:
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
            (parts,) = await self._execute(("GET", key))
            if parts is None:
                return
            part = await _computed(self._tidied, user, parts)
            digest = hashlib.sha1(parts, usedforsecurity=False).hexdigest()
            (is_done,) = await self._execute(("EVAL", _REPLACE_FRONT, 1, key, len(parts), digest, part))
            self.counts["tidied"] += is_done
        except HistoryStoreUnavailableError:
            _LOG.warning("a history was not cut: the store is away; it will be when more comes")
        except CorruptHistoryError as error:
            _LOG.error("a history in the store cannot be read: %s", error)

    def _tidied(self, user: str, parts: bytes) -> bytes:
        return cut(user, self._read(user, parts), self._cfg.max_user_bytes)[0]


async def _read_reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


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
