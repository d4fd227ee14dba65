"""History store in a Redis or Valkey server that all instances share.

The events of a user are stored as one string of encoded parts. An append adds a part in one round trip and does not
read the stored parts, so concurrent writers do not overwrite each other. Reads are batched: all users waiting at that
moment share one round trip. Parts are merged by time when they are read, so late events end up at their position. After
some appends, the writer compacts the parts into one and drops the oldest events beyond the limits.

A connection pool bounds the number of connections, every request has a deadline, and a circuit breaker rejects requests
immediately while the server is unavailable.
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
from nestrec.serving.history_store.history_codec import (
    CorruptHistoryError,
    decode_parts,
    encode_events,
    encode_newest,
    merge_parts,
)
from nestrec.serving.history_store.history_store import HistoryStoreConfig, HistoryStoreUnavailableError, RawHistory

_LOG = logging.getLogger(__name__)
Command = tuple[bytes | str | int, ...]
Result = TypeVar("Result")
_MAX_TIMEOUTS_IN_A_ROW = 3
"""Number of consecutive timeouts that opens the circuit breaker; one timeout can be due to a pause of this process."""
_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 1.0
_REPLACE_PREFIX_SCRIPT = """
local length = tonumber(ARGV[1])
if redis.sha1hex(redis.call('GETRANGE', KEYS[1], 0, length - 1)) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[3] .. redis.call('GETRANGE', KEYS[1], length, -1), 'KEEPTTL')
return 1
"""
"""Lua script that replaces the first ARGV[1] bytes of a history by a compacted part, if their SHA-1 is still ARGV[2].
It runs atomically on the server; bytes that were appended since remain after the new part."""
_MAX_READS_PER_ROUND_TRIP = 16
_UNREADABLE = "the stored history of this user cannot be read; delete it, or send a history with the request"
_COMPACTION_BYTES = 1 << 13
"""A history is compacted each time its size crosses a multiple of this number of bytes."""
_LARGE_BYTES = 1 << 16
"""Size in bytes from which histories are decoded on another thread, so that the event loop is not blocked."""


class CircuitBreaker:
    """Circuit breaker: rejects requests to a server that is not responding.

    It is closed at first, and opens after a lost connection or after several consecutive timeouts. While it is open,
    requests are rejected. After a pause it is half-open: one request passes as a probe, and the others are rejected
    until the probe ends. A successful probe closes the breaker; a failed one opens it for twice as long.
    """

    def __init__(self, clock: Clock, probe_timeout_s: float):
        self._clock = clock
        self._probe_timeout_s = probe_timeout_s
        self._pause_s = 0.0
        self._open_until_s = 0.0
        self._num_failures = 0

    def raise_if_open(self) -> None:
        """Raise `HistoryStoreUnavailableError` if the breaker is open, so that the request must not be sent."""
        if not self._pause_s:
            return
        now_s = self._clock.now_s()
        if now_s < self._open_until_s:
            raise HistoryStoreUnavailableError("the history store is unavailable")
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
    """History store in Redis or Valkey. Not thread-safe; use from one event loop.

    Args:
        cfg: Options of the store; `url` must be set.
        clock: Clock of the circuit breaker; the real time by default.
    """

    def __init__(self, cfg: HistoryStoreConfig, clock: Clock | None = None):
        self._cfg = cfg
        self._timeout_s = cfg.timeout_ms / 1000.0
        try:
            self._pool = ConnectionPool.from_url(
                cfg.address(),
                max_connections=cfg.max_connections,
                protocol=2,
                socket_timeout=None,  # `_request` sets one deadline for the complete request
                socket_connect_timeout=self._timeout_s,
                retry=Retry(NoBackoff(), 0),
                driver_info=None,
            )
        except ValueError:  # neither the address nor the error is shown: both may contain a password
            remedy = "use redis://HOST:PORT/NUMBER, with special characters of the password percent-encoded (%XX)"
            scheme = urlsplit(cfg.url).scheme
            raise UserError("invalid URL", option="history_store.url", value=scheme, remedy=remedy) from None
        # Not a BlockingConnectionPool: it serves new requests before waiting ones, and costs more CPU time.
        self._free_connections = asyncio.Semaphore(self._pool.max_connections)
        self._breaker = CircuitBreaker(clock or RealClock(), self._timeout_s)
        self._waiting: dict[str, asyncio.Future[bytes | None]] = {}
        self._in_flight: set[str] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self.counts = {"round_trips": 0, "reads": 0, "compacted": 0, "rejected": 0}
        """Number of round trips, histories read, histories compacted, and commands that the server rejected."""

    async def get(self, user: str, timeout_s: float) -> RawHistory | None:
        """Return the events of a user, oldest first, or None if the store has none.

        At most one read per user is in flight. A call during a read waits for the next one, because the read in flight
        may miss events that were written since it started.
        """
        future = self._waiting.get(user)
        if future is None:
            future = self._waiting[user] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_retrieve_exception)
            if len(self._readers) < self._cfg.max_connections:
                task = asyncio.create_task(self._read_waiting())
                self._readers.add(task)
                task.add_done_callback(self._readers.discard)
                task.add_done_callback(reported("nestrec-history-store"))
        try:
            async with asyncio.timeout(min(timeout_s, 2 * self._timeout_s)):
                parts = await asyncio.shield(future)
        except TimeoutError:
            raise HistoryStoreUnavailableError("the history store did not respond in time") from None
        if parts is None:
            return None
        try:
            return await _compute(self._decode, user, parts)
        except CorruptHistoryError as error:  # the request fails: a partial history would give wrong scores
            _LOG.error("cannot read a history from the history store: %s", error)
            raise HistoryStoreUnavailableError(_UNREADABLE) from None

    async def append(self, user: str, events: RawHistory, timeout_s: float) -> None:
        """Append events of a user; compact the stored history if it has grown enough."""
        key = self._key(user)
        part = encode_events(user, events)
        commands: list[Command] = [("APPEND", key, part)]
        if self._cfg.ttl_s is not None:  # a transaction: a history whose PEXPIRE was lost would never expire
            expire = ("PEXPIRE", key, int(1000 * self._cfg.ttl_s))
            commands = [("MULTI",), *commands, expire, ("EXEC",)]
        replies = await self._execute(*commands)
        length = replies[-1][0] if self._cfg.ttl_s is not None else replies[0]
        if (
            length // _COMPACTION_BYTES != (length - len(part)) // _COMPACTION_BYTES
            or length > self._cfg.max_user_bytes
        ):
            await self._compact(user)

    async def forget(self, user: str, timeout_s: float) -> None:
        """Delete all events of a user."""
        await self._execute(("UNLINK", self._key(user)))

    async def close(self) -> None:
        """Cancel reads in flight and close all connections."""
        for task in list(self._readers):
            task.cancel()
        try:
            await self._pool.aclose()
        except RedisError as error:  # every connection was closed, but the server did not confirm in time
            _LOG.warning("the connections to the history store were not closed in time: %s", error)

    def _key(self, user: str) -> bytes:
        return f"{self._cfg.key_prefix}:events:{user}".encode("utf-8", "surrogatepass")

    def _decode(self, user: str, parts: bytes) -> RawHistory:
        return merge_parts(decode_parts(user, parts), self._cfg.max_events)

    async def _execute(self, *commands: Command) -> list[Any]:
        """Send the commands in one round trip and return the replies.

        Raises:
            HistoryStoreUnavailableError: The server is unavailable, or rejected a command, for example because its
                memory is full.
        """
        replies = await self._request(*commands)
        for reply in replies:
            for result in reply if isinstance(reply, list) else [reply]:  # the reply to EXEC is a list
                if isinstance(result, ResponseError):
                    raise self._rejection_error(result)
        return replies

    async def _request(self, *commands: Command) -> list[Any]:
        """Send the commands in one round trip and return the replies, of which some may be `ResponseError`s."""
        self._breaker.raise_if_open()
        self.counts["round_trips"] += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._free_connections:
                # Not `Redis.pipeline`: it creates a task per round trip, and its errors of a transaction contain the
                # commands instead of the server's reason.
                connection = await self._pool.get_connection()
                try:
                    # A connection closes itself if this fails or is cancelled, so that a late reply is never matched
                    # to a later command.
                    await connection.send_packed_command(connection.pack_commands(commands))
                    replies = [await _read_reply(connection) for _ in commands]
                finally:
                    await self._pool.release(connection)
        except (TimeoutError, RedisTimeoutError):
            self._breaker.record_failure(is_timeout=True)
            raise HistoryStoreUnavailableError("the history store did not respond in time") from None
        except (RedisError, OSError, EOFError):  # connection failures only: `_read_reply` returns error replies
            self._breaker.record_failure(is_timeout=False)
            raise HistoryStoreUnavailableError("the history store is unavailable") from None
        self._breaker.record_success()
        return replies

    def _rejection_error(self, error: ResponseError) -> HistoryStoreUnavailableError:
        self.counts["rejected"] += 1
        reason = _reason(error)
        _LOG.error("the history store rejected a command: %s", reason)
        if reason == "WRONGTYPE":
            return HistoryStoreUnavailableError(_UNREADABLE)
        return HistoryStoreUnavailableError("the history store rejects commands at the moment", 5.0)

    async def _read_waiting(self) -> None:
        """Read until every waiting user has a read in flight."""
        while users := [user for user in self._waiting if user not in self._in_flight][:_MAX_READS_PER_ROUND_TRIP]:
            futures = {user: self._waiting.pop(user) for user in users}
            self._in_flight.update(users)
            try:
                # Not MGET: for a key of another type it returns nil, as if the key did not exist.
                values = await self._request(*(("GET", self._key(user)) for user in users))
                self.counts["reads"] += len(users)
                for future, value in zip(futures.values(), values, strict=True):
                    if isinstance(value, ResponseError):
                        future.set_exception(self._rejection_error(value))
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
                self._in_flight.difference_update(users)

    async def _compact(self, user: str) -> None:
        """Replace the parts of a history by one part within the limits.

        Parts appended during the compaction remain after the new part. A history that was deleted or compacted by
        another instance during that time is left unchanged.
        """
        key = self._key(user)
        try:
            (parts,) = await self._execute(("GET", key))
            if parts is None:
                return
            part = await _compute(self._encode_compacted, user, parts)
            digest = hashlib.sha1(parts, usedforsecurity=False).hexdigest()
            (is_done,) = await self._execute(("EVAL", _REPLACE_PREFIX_SCRIPT, 1, key, len(parts), digest, part))
            self.counts["compacted"] += is_done
        except HistoryStoreUnavailableError:
            _LOG.warning("a history was not compacted: the history store is unavailable; a later append retries it")
        except CorruptHistoryError as error:
            _LOG.error("cannot read a history from the history store: %s", error)

    def _encode_compacted(self, user: str, parts: bytes) -> bytes:
        return encode_newest(user, self._decode(user, parts), self._cfg.max_user_bytes)[0]


async def _read_reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


async def _compute(compute: Callable[[str, bytes], Result], user: str, parts: bytes) -> Result:
    if len(parts) < _LARGE_BYTES:
        return compute(user, parts)
    return await asyncio.to_thread(compute, user, parts)


def _reason(error: ResponseError) -> str:
    """Return the error code of the server, or the name of the exception class if it is a subclass.

    The rest of the message is not logged, because it can contain user ids.
    """
    return str(error).partition(" ")[0] if type(error) is ResponseError else type(error).__name__


def _retrieve_exception(future: "asyncio.Future[bytes | None]") -> None:
    """Mark the exception as retrieved: the caller may have timed out, and asyncio would log the exception."""
    if not future.cancelled():
        future.exception()
