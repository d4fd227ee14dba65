"""Histories in a Redis or Valkey that all instances share.

A user's events are one string of packed parts. Adding events appends a part, which is one trip and needs no look at
what is there, so writers cannot undo each other; reading is one trip for all users who wait at a moment. Parts are
merged by time when they are read, so that late events are in their place. Now and then whoever has appended puts the
parts together and cuts them to their bounds.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from nestrec.serving.background import reported
from nestrec.serving.histories.packed import DamagedHistoryError, cut, merged, packed, unpacked
from nestrec.serving.histories.store import HistoryStoreConfig, RawHistory, StoreAwayError
from nestrec.serving.histories.trips import Command, Trips

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
