"""Rolling updates and operations over all instances of a fleet.

Changes that count when every instance has made them, since each remembers and knows things by itself.

A fleet that moves together: its front looks for newer versions, and takes all instances there, or none.

Instances are taken to a version by name, one after the other, as by `nestrec swap FRONT ADDRESS@VERSION`. Where one
does not take it, those before it get back what they had, and the front tries again with the next version.

Changes of a whole fleet while it serves: other models, instance by instance; an instance set aside; more or fewer.

While models roll, instances serve different versions. The one whose turn it is has a version of its own for the router,
so that nobody is sent to it who is not its own user, nor from it elsewhere: a user meets the new version when its
instance has it, and never again the old one. Where an instance does not take the new models, those before it get their
old ones back.

What a front is asked by whoever runs it: the endpoints under /v1/admin/, for all instances together.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import orjson

from nestrec.base.config_values import NumberRange
from nestrec.base.errors import CorruptFileError
from nestrec.serving.core.asgi import HttpResponse, as_json, parse_json, problem
from nestrec.serving.core.background_tasks import FAILURES, BackgroundThread
from nestrec.serving.core.http_client import Response
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.core.slot_router import Router
from nestrec.serving.fleet.readiness_probes import Probes, Turn, version_of
from nestrec.serving.fleet.upstream_connection import Upstream
from nestrec.serving.inputs.request_schema import AtLeast, RollbackRequest, SwapRequest, reader
from nestrec.serving.versions.live_version import ModelAddress, source_of
from nestrec.serving.versions.version_store import VersionStore


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be done, and when an instance has done it."""

    timeout_s: float
    """that an instance may take"""
    is_done_by_end: bool
    """a process that has ended has done it: what is to be forgotten ended with it. Not what is to be known: the next
    process of the instance begins without it"""


class FleetBroadcast:
    """All instances of a front."""

    def __init__(self, upstreams: Sequence[Upstream], probes: Probes):
        """upstreams: of the slots, as they are at any time."""
        self._upstreams = upstreams
        self._probes = probes

    async def make(self, change: Change, method: str, target: bytes, body: bytes = b"") -> Response | None:
        """The answer of the one that likes it least; none where an instance may not have done it."""
        slots = range(len(self._upstreams))
        responses = await asyncio.gather(*(self._made(change, slot, method, target, body) for slot in slots))
        heard = [response for response in responses if response is not None]
        return max(heard, key=lambda response: response.status) if len(heard) == len(slots) else None

    async def _made(self, change: Change, slot: int, method: str, target: bytes, body: bytes) -> Response | None:
        try:
            return await self._upstreams[slot].send(method, target, body, timeout_s=change.timeout_s)
        except ConnectionRefusedError:  # there is no process
            self._probes.lost(slot)
            return Response(204, {}, b"") if change.is_done_by_end else None
        except (OSError, EOFError):  # it may have done it, and only not have said so
            self._probes.begin(slot)
            return None


class FleetVersionFollower:
    """Looks on a thread of its own."""

    def __init__(
        self,
        models: Sequence[str],
        poll_s: float,
        swap: Callable[[list[str]], bool],
        followed: Callable[[Sequence[str]], Sequence[str]] = lambda models: models,
    ):
        """models: those of the instances; the ones that come from addresses are followed. swap: has all instances serve
        these, or none; whether they do. followed: what is to be followed by now, instead of those models."""
        self._models = list(models)
        self._followed = followed
        self._swap = swap
        self._poll_s = poll_s
        self._tried: dict[str, str] = {}
        self._versions: dict[str, VersionStore] = {}
        """by address: kept, since a read that never returns keeps a thread"""
        self._is_closed = threading.Event()
        self._thread = BackgroundThread("nestrec-front-follow", self._turn)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No further look. One that is under way is left alone: the process is ending."""
        self._is_closed.set()

    def look(self) -> bool:
        """Take the instances to the newest versions; whether all of them took what is new."""
        newer: list[str] = []
        for source in self._sources():
            try:
                newest = self._versions.setdefault(source.address, VersionStore(source.storage)).newest()
            except (OSError, CorruptFileError) as error:
                FAILURES.add("nestrec-front-follow", error, "the instances stay at their version")
                return False
            if newest is not None and self._tried.get(source.address) != newest.version:
                self._tried[source.address] = newest.version
                newer.append(str(source.at(newest.folder)))
        return not newer or self._swap(newer)

    def _sources(self) -> list[ModelAddress]:
        found = (source_of(model) for model in self._followed(self._models))
        return [source for source in found if source is not None and source.version is None]

    def _turn(self) -> bool:
        if self._is_closed.wait(self._poll_s):
            return False
        self.look()
        return True


_LOG = logging.getLogger(__name__)
_OK, _CONFLICT = 200, 409
_LOAD_S = 3600.0
"""that an instance may take to load and warm up its models"""
_BACK_S = 120.0
"""that a lost instance may take to come back"""
_POLL_S = 0.05
_ATTEMPTS = 3


class Supervisor(Protocol):
    """Whoever starts the processes of instances, and starts them again."""

    def set_models(self, slot: int, folders: list[str]) -> None:
        """What a process that is started in the slot from now on is to serve."""
        ...


@runtime_checkable
class Scaler(Supervisor, Protocol):
    """One that starts more of them, or fewer."""

    def add(self) -> int:
        """Start one more instance, in the slot after the last one; its port."""
        ...

    def has_failed(self, slot: int) -> bool:
        """The last process of a slot did not come to serve, or not for long."""
        ...

    def remove(self) -> None:
        """Stop the instance of the last slot; returns when its process has ended."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceState:
    """What an instance says of itself after a change."""

    folders: list[str]
    exact: list[str]
    """the same, with the versions of those that come from addresses"""
    version: str
    """of all its models"""


class InstanceRejectedError(Exception):
    """Why an instance does not do what it is asked."""

    def __init__(self, message: str, remedy: str = ""):
        super().__init__(message)
        self.remedy = remedy


class RollingUpdate:
    """One change after the other, inside of the front's event loop."""

    def __init__(
        self,
        upstreams: list[Upstream],
        router: Router,
        supervisor: Supervisor | None,
        probe: Callable[[int], Awaitable[bool]],
    ):
        """upstreams: of the slots, kept up to date here. probe: asks anew whether a slot is ready, and with what."""
        self._upstreams = upstreams
        self._router = router
        self._supervisor = supervisor
        self._probe = probe
        self._lock = asyncio.Lock()
        self._previous: list[str] | None = None
        self._stays_at: dict[str, str | None] = {}
        """by address: the version at which the instances stay, as they were told; none: they go on from there"""
        self._served: list[str] | None = None
        """folders and addresses of all models since the last change; none: those of the start"""
        self.rolling: int | None = None
        """the slot whose turn it is"""
        self._num_turns = 0

    @property
    def turn(self) -> Turn:
        return self._num_turns, self.rolling

    async def swap(self, folders: list[str], *, cause: str = "swap") -> HttpResponse:
        """Every instance serves the models of these folders, or none does. cause: as the log names it."""
        async with self._lock:
            return await self._told_to([whole_name(folder) for folder in folders], cause)

    async def follow(self, addresses: list[str]) -> HttpResponse:
        """The same for newer versions that nobody has asked for: those of addresses that are served, unless the
        instances were told to stay at a version."""
        async with self._lock:
            wanted = [address for address in addresses if self._goes_on(_address_of(address))]
            return await self._rolled(wanted, "follow") if wanted else await self.fleet()

    def followed(self, models: Sequence[str]) -> list[str]:
        """Of these models, which the instances began with, or of those that they were told to serve since: the ones
        whose newer versions they are to be taken to."""
        served = models if self._served is None else [_address_of(model) for model in self._served]
        return [model for model in served if self._goes_on(_address_of(model))]

    def _goes_on(self, address: str) -> bool:
        is_served = self._served is None or address in map(_address_of, self._served)
        return is_served and self._stays_at.get(address) is None

    async def _told_to(self, folders: list[str], cause: str) -> HttpResponse:
        answer = await self._rolled(folders, cause)
        if answer.status == _OK:
            for source in filter(None, map(source_of, folders)):
                self._stays_at[source.address] = source.version
        return answer

    async def rollback(self) -> HttpResponse:
        """Every instance serves what all of them served before the last swap."""
        async with self._lock:
            if self._previous is None:
                return problem(_CONFLICT, "the instances have had no other models yet")
            return await self._told_to(self._previous, "rollback")

    async def drain(self, slot: int, drain: bool) -> HttpResponse:
        """An instance is left out, or taken in again; what it has accepted is answered."""
        if not 0 <= slot < len(self._upstreams):
            return problem(400, f"must be one of {len(self._upstreams)} slots", "slot")
        try:
            answer = await self._asked(slot, "POST", b"/v1/admin/drain", {"drain": drain})
        except (OSError, EOFError, InstanceRejectedError) as error:
            return problem(_CONFLICT, f"instance {slot}: {error}")
        await self._probe(slot)
        return as_json({"slot": slot, **answer})

    async def scale(self, count: int, drain_s: float) -> HttpResponse:
        """So many instances. Users of those that stay keep their slots, but for the share of new ones."""
        scaler = self._supervisor
        if not isinstance(scaler, Scaler):
            return problem(_CONFLICT, "this front does not start its instances")
        async with self._lock:
            while len(self._upstreams) < count:
                if not await self._grown(scaler):
                    return problem(_CONFLICT, f"instance {len(self._upstreams)} did not start")
            while len(self._upstreams) > count:
                await self._shrunk(scaler, drain_s)
            return as_json({"instances": len(self._upstreams)})

    async def fleet(self) -> HttpResponse:
        """What each instance serves; none where it does not answer."""
        told = [await self._told(slot) for slot in range(len(self._upstreams))]
        return as_json({"instances": told, "ready": self._router.is_alive[: len(told)], "rolling": self.rolling})

    async def _told(self, slot: int) -> dict[str, Any] | None:
        """One after the other: to Ray, calls that one request makes at a time are one call."""
        try:
            return await self._asked(slot, "GET", b"/v1/admin/fleet")
        except (OSError, EOFError, InstanceRejectedError):
            return None

    async def _rolled(self, folders: list[str], cause: str) -> HttpResponse:
        done: list[tuple[int, InstanceState]] = []
        now: InstanceState | None = None
        for slot in range(len(self._upstreams)):
            try:
                before, now = await self._changed(slot, folders)
            except InstanceRejectedError as error:
                told = "%s: instance %d does not take the models, so all instances keep those they had: %s"
                _LOG.error(told, cause, slot, error)
                for earlier, had in done:
                    await self._restored(earlier, had.folders)
                return problem(_CONFLICT, f"instance {slot} does not take the models: {error}", remedy=error.remedy)
            done.append((slot, before))
        if now is not None:
            before = done[0][1]
            if sorted(before.folders) != sorted(now.folders):
                self._previous = before.folders
            elif before.version != now.version:  # another version of the same addresses
                self._previous = before.exact
            self._served = now.folders
            _LOG.info("%s: all %d instances serve %s", cause, len(done), now.version)
        return await self.fleet()

    async def _restored(self, slot: int, folders: list[str]) -> None:
        try:
            await self._changed(slot, folders)
        except InstanceRejectedError as error:
            _LOG.error("instance %d has not taken its old model back: %s", slot, error)

    async def _changed(self, slot: int, folders: list[str]) -> tuple[InstanceState, InstanceState]:
        """What an instance served before, and what it serves now. One that is lost meanwhile is asked again."""
        self._begin_turn(slot)
        try:
            for _ in range(_ATTEMPTS):
                if not await self._is_back(slot):
                    break
                try:
                    before = _taken(await self._asked(slot, "GET", b"/v1/admin/fleet"))
                    self._router.versions[slot] = f"rolling {slot}"
                    answer = await self._asked(slot, "POST", b"/v1/admin/swap", {"models": folders})
                except (OSError, EOFError):
                    continue
                now = _taken(answer)
                if self._supervisor is not None:
                    self._supervisor.set_models(slot, now.folders)
                return before, now
            raise InstanceRejectedError("it is away")
        finally:
            self._begin_turn(None)
            await self._probe(slot)  # which tells the router its version

    def _begin_turn(self, slot: int | None) -> None:
        self.rolling = slot
        self._num_turns += 1

    async def _is_back(self, slot: int) -> bool:
        """One that was set aside is left aside, and changed like the others."""
        end_s = time.monotonic() + _BACK_S
        while time.monotonic() < end_s:
            try:
                await self._upstreams[slot].send("GET", b"/health/live", timeout_s=2.0)
                return True
            except (OSError, EOFError):
                await asyncio.sleep(_POLL_S)
        return False

    async def _asked(self, slot: int, method: str, path: bytes, body: Any = None) -> dict[str, Any]:
        content = b"" if body is None else orjson.dumps(body)
        timeout_s = _LOAD_S if method == "POST" else 5.0
        response = await self._upstreams[slot].send(method, path, content, is_repeatable=False, timeout_s=timeout_s)
        answer = orjson.loads(response.body)
        if response.status != 200:
            error = answer.get("error", {})
            message = error.get("message", f"it answers with status {response.status}")
            raise InstanceRejectedError(message, error.get("remedy", ""))
        return dict(answer)

    async def _grown(self, scaler: Scaler) -> bool:
        slot = len(self._upstreams)
        port = await asyncio.to_thread(scaler.add)
        self._upstreams.append(Upstream(port))
        end_s = time.monotonic() + _LOAD_S
        while not await self._is_up(slot):
            if scaler.has_failed(slot) or time.monotonic() > end_s:
                self._upstreams.pop()
                await asyncio.to_thread(scaler.remove)
                return False
            await asyncio.sleep(_POLL_S)
        self._router.resize(slot + 1)
        await self._probe(slot)
        return True

    async def _is_up(self, slot: int) -> bool:
        """Warmed up; no user is sent to it yet."""
        try:
            response = await self._upstreams[slot].send("GET", b"/health/ready", timeout_s=2.0)
        except (OSError, EOFError):
            return False
        return response.status == 200

    async def _shrunk(self, scaler: Scaler, drain_s: float) -> None:
        slot = len(self._upstreams) - 1
        self._router.resize(slot)
        end_s = time.monotonic() + drain_s
        while self._router.loads[slot] and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)
        await self._upstreams.pop().close()
        await asyncio.to_thread(scaler.remove)


def whole_name(folder: str) -> str:
    """Of a folder or an address. Links are followed here: all instances get what they point to now."""
    return folder if "://" in folder else str(Path(folder).resolve())


def _address_of(model: str) -> str:
    """Without the version that is named with it; a folder as it is."""
    source = source_of(model)
    return model if source is None else source.address


def _at_version(model: str, version: str) -> str:
    source = source_of(model)
    return model if source is None or source.version is not None else str(source.at(version))


def _taken(answer: dict[str, Any]) -> InstanceState:
    models = answer["models"]
    return InstanceState(
        [model["folder"] for model in models.values()],
        [_at_version(model["folder"], model["version"]) for model in models.values()],
        version_of({role: model["version"] for role, model in models.items()}),
    )


_MOST_INSTANCES = 1024
"""Largest number of instances of a front: a mistyped number must not use up the machine's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDrainRequest:
    """An instance is to be left out, or taken in again."""

    slot: Annotated[int, AtLeast(0)]
    """which"""
    drain: bool | None = None
    """false takes it in again; true where it is left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """More or fewer instances."""

    instances: Annotated[int, NumberRange(1, _MOST_INSTANCES)]
    """that are to serve"""


class Operations:
    """Reads requests and has them done; what was begun goes on where the client does not wait for it."""

    def __init__(self, rollout: RollingUpdate, limits: LimitsConfig, drain_s: float):
        self._rollout = rollout
        self._drain_s = drain_s
        self._read_swap, self._read_rollback = reader(SwapRequest, limits), reader(RollbackRequest, limits)
        self._read_drain, self._read_scale = reader(SlotDrainRequest, limits), reader(ScaleRequest, limits)
        self.under_way: set[asyncio.Task[HttpResponse]] = set()

    async def answer(self, method: str, path: str, body: bytes) -> HttpResponse:
        """Of a request to /v1/admin/."""
        if (method, path) == ("GET", "/v1/admin/fleet"):
            return await self._rollout.fleet()
        if method != "POST":
            return problem(405, "use POST", "", (b"allow", b"POST"))
        data = parse_json(body)
        match path:
            case "/v1/admin/swap":
                change = self._rollout.swap(self._read_swap(data).models)
            case "/v1/admin/rollback":
                self._read_rollback(data)
                change = self._rollout.rollback()
            case "/v1/admin/drain":
                wanted = self._read_drain(data)
                change = self._rollout.drain(wanted.slot, wanted.drain is not False)
            case "/v1/admin/scale":
                change = self._rollout.scale(self._read_scale(data).instances, self._drain_s)
            case _:
                return problem(404, "there is nothing here")
        task = asyncio.create_task(change)
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return await asyncio.shield(task)
