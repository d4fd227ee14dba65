"""Rolling updates and other operations on all instances of a fleet.

`FleetBroadcast` sends changes that every instance must apply, because each one has its own state.

`FleetVersionFollower` polls for newer model versions and updates all instances or none. Instances are updated to a
version by name, like `nestrec swap GATEWAY ADDRESS@VERSION`. If one rejects it, the instances updated before are rolled
back, and the follower tries again with the next version.

`RollingUpdate` changes the fleet while it serves: it swaps models one instance at a time (the first one is the canary),
drains an instance, and scales the number of instances. During a model swap, instances serve different versions. The
router treats the instance being updated as having a version of its own, so that only its own users are sent to it and
they are not sent elsewhere. A user gets the new version as soon as the user's instance has it and never goes back to
the old one. If an instance rejects the new models, the instances updated before get their old models back.

`Operations` implements the admin endpoints (/v1/admin/) of the gateway for the whole fleet.
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
from nestrec.serving.versions.live_version import ModelAddress, parse_model_address
from nestrec.serving.versions.version_store import VersionStore


@dataclass(frozen=True, slots=True)
class Change:
    """Kind of a change that every instance must apply."""

    timeout_s: float
    """Time for an instance to apply the change, in seconds."""
    is_done_if_down: bool
    """Whether an instance without a process counts as done. True for deletions, as the data ended with the process;
    False for insertions, as the next process of the instance starts without them."""


class FleetBroadcast:
    """Broadcasts requests to all instances of a gateway.

    Args:
        upstreams: Connections to the instances, by slot; the list may change later.
        probes: Notified of instances that do not respond.
    """

    def __init__(self, upstreams: Sequence[Upstream], probes: Probes):
        self._upstreams = upstreams
        self._probes = probes

    async def broadcast(self, change: Change, method: str, target: bytes, body: bytes = b"") -> Response | None:
        """Send a change to all instances concurrently.

        Args:
            change: Kind of the change.
            method: HTTP method.
            target: Path and query.
            body: Body of the request.

        Returns:
            The response with the highest status; None if an instance may not have applied the change.
        """
        slots = range(len(self._upstreams))
        responses = await asyncio.gather(*(self._send_to(change, slot, method, target, body) for slot in slots))
        received = [response for response in responses if response is not None]
        return max(received, key=lambda response: response.status) if len(received) == len(slots) else None

    async def _send_to(self, change: Change, slot: int, method: str, target: bytes, body: bytes) -> Response | None:
        try:
            return await self._upstreams[slot].send(method, target, body, timeout_s=change.timeout_s)
        except ConnectionRefusedError:  # there is no process
            self._probes.mark_lost(slot)
            return Response(204, {}, b"") if change.is_done_if_down else None
        except (OSError, EOFError):  # it may have applied the change, but did not confirm it
            self._probes.begin(slot)
            return None


class FleetVersionFollower:
    """Polls for newer versions of the models on its own thread and updates all instances to them."""

    def __init__(
        self,
        models: Sequence[str],
        poll_s: float,
        swap: Callable[[list[str]], bool],
        models_to_follow: Callable[[Sequence[str]], Sequence[str]] = lambda models: models,
    ):
        """Create the follower; `start` starts its thread.

        Args:
            models: Folders and addresses that the instances were started with; only addresses have newer versions.
            poll_s: Interval of polls in seconds.
            swap: Makes all instances serve these models, or none; returns whether they do.
            models_to_follow: Returns the models to follow now, given `models`; they change with swaps.
        """
        self._models = list(models)
        self._models_to_follow = models_to_follow
        self._swap = swap
        self._poll_s = poll_s
        self._tried: dict[str, str] = {}
        self._versions: dict[str, VersionStore] = {}
        """Version stores by address; reused, because a read that never returns blocks a thread of its store."""
        self._is_closed = threading.Event()
        self._thread = BackgroundThread("nestrec-fleet-follow", self._turn)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop polling. A poll in progress is not waited for, because the process is shutting down."""
        self._is_closed.set()

    def poll(self) -> bool:
        """Update the instances to the newest versions.

        Returns:
            False if reading the versions failed or an instance rejected one.
        """
        newer: list[str] = []
        for source in self._sources():
            try:
                newest = self._versions.setdefault(source.address, VersionStore(source.storage)).newest()
            except (OSError, CorruptFileError) as error:
                FAILURES.add("nestrec-fleet-follow", error, "the instances keep their current version")
                return False
            if newest is not None and self._tried.get(source.address) != newest.version:
                self._tried[source.address] = newest.version
                newer.append(str(source.at(newest.folder)))
        return not newer or self._swap(newer)

    def _sources(self) -> list[ModelAddress]:
        sources = (parse_model_address(model) for model in self._models_to_follow(self._models))
        return [source for source in sources if source is not None and source.version is None]

    def _turn(self) -> bool:
        if self._is_closed.wait(self._poll_s):
            return False
        self.poll()
        return True


_LOG = logging.getLogger(__name__)
_OK, _CONFLICT = 200, 409
_LOAD_TIMEOUT_S = 3600.0
"""Time for an instance to load and warm up its models, in seconds."""
_RECOVERY_TIMEOUT_S = 120.0
"""Time to wait for a lost instance to come back, in seconds."""
_POLL_S = 0.05
_ATTEMPTS = 3


class Supervisor(Protocol):
    """Starts and restarts the processes of instances."""

    def set_models(self, slot: int, folders: list[str]) -> None:
        """Set the models that the next process of a slot will serve."""
        ...


@runtime_checkable
class Scaler(Supervisor, Protocol):
    """Supervisor that can change the number of instances."""

    def add(self) -> int:
        """Start one more instance in the slot after the last one and return its port."""
        ...

    def has_failed(self, slot: int) -> bool:
        """Return whether the last process of a slot ended before or shortly after it accepted connections."""
        ...

    def remove(self) -> None:
        """Stop the instance of the last slot and wait until its process has ended."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceState:
    """Models that an instance serves."""

    folders: list[str]
    """Folders and addresses of the models."""
    exact: list[str]
    """Same as `folders`, but addresses include the served version."""
    version: str
    """Versions of all models, see `version_of`."""


class InstanceRejectedError(Exception):
    """An instance rejected a request."""

    def __init__(self, message: str, remedy: str = ""):
        super().__init__(message)
        self.remedy = remedy


class RollingUpdate:
    """Rolling updates, rollback, drain and scaling of a fleet.

    Changes are serialized by a lock. Use it from the event loop of the gateway.
    """

    def __init__(
        self,
        upstreams: list[Upstream],
        router: Router,
        supervisor: Supervisor | None,
        probe: Callable[[int], Awaitable[bool]],
    ):
        """Create it for a fleet.

        Args:
            upstreams: Connections to the instances, by slot; scaling changes this list.
            router: Router of the gateway; receives the versions and the number of slots.
            supervisor: Starts the instances; None if they are started by other means.
            probe: Runs a new readiness probe of a slot, which also updates the router.
        """
        self._upstreams = upstreams
        self._router = router
        self._supervisor = supervisor
        self._probe = probe
        self._lock = asyncio.Lock()
        self._previous: list[str] | None = None
        self._pinned_versions: dict[str, str | None] = {}
        """Version to which the instances are pinned, by address; None if they follow newer versions."""
        self._served: list[str] | None = None
        """Folders and addresses of all models since the last change; None if the initial models are served."""
        self.rolling: int | None = None
        """Slot being updated; None if there is none."""
        self._num_turns = 0

    @property
    def turn(self) -> Turn:
        """State of the rolling update."""
        return self._num_turns, self.rolling

    async def swap(self, folders: list[str], *, cause: str = "swap") -> HttpResponse:
        """Make all instances serve these models, one instance at a time; if one rejects them, restore all.

        Args:
            folders: Folders or addresses of the models; an address with a version pins the instances to it.
            cause: Name of the operation in the log.

        Returns:
            The response of `fleet`, or status 409 if an instance rejected the models.
        """
        async with self._lock:
            return await self._update_to([resolve_model_path(folder) for folder in folders], cause)

    async def follow(self, addresses: list[str]) -> HttpResponse:
        """Same as `swap`, but for automatic updates: addresses that are not served or are pinned are skipped."""
        async with self._lock:
            to_update = [address for address in addresses if self._is_followed(_address_of(address))]
            return await self._roll(to_update, "follow") if to_update else await self.fleet()

    def models_to_follow(self, models: Sequence[str]) -> list[str]:
        """Return the served models whose newer versions must be followed.

        Args:
            models: Models that the instances were started with; they count if the instances have not been updated.
        """
        served = models if self._served is None else [_address_of(model) for model in self._served]
        return [model for model in served if self._is_followed(_address_of(model))]

    def _is_followed(self, address: str) -> bool:
        is_served = self._served is None or address in map(_address_of, self._served)
        return is_served and self._pinned_versions.get(address) is None

    async def _update_to(self, folders: list[str], cause: str) -> HttpResponse:
        response = await self._roll(folders, cause)
        if response.status == _OK:
            for source in filter(None, map(parse_model_address, folders)):
                self._pinned_versions[source.address] = source.version
        return response

    async def rollback(self) -> HttpResponse:
        """Make all instances serve the models from before the last swap."""
        async with self._lock:
            if self._previous is None:
                message = "no model has been swapped since the gateway started"
                remedy = "use nestrec swap SERVER MODEL, or ADDRESS@VERSION for an earlier version"
                return problem(_CONFLICT, message, remedy=remedy)
            return await self._update_to(self._previous, "rollback")

    async def drain(self, slot: int, drain: bool) -> HttpResponse:
        """Drain an instance or take it in again. Requests that it has accepted are completed."""
        if not 0 <= slot < len(self._upstreams):
            return problem(400, f"must be a slot of the fleet, which has {len(self._upstreams)} slots", "slot")
        try:
            payload = await self._call_instance(slot, "POST", b"/v1/admin/drain", {"drain": drain})
        except (OSError, EOFError, InstanceRejectedError) as error:
            return problem(_CONFLICT, f"instance {slot}: {error}")
        await self._probe(slot)
        return as_json({"slot": slot, **payload})

    async def scale(self, count: int, drain_s: float) -> HttpResponse:
        """Change the number of instances. Users keep their slots, except for the share that moves to new instances.

        Args:
            count: Number of instances.
            drain_s: Time to drain an instance before it is removed, in seconds.
        """
        scaler = self._supervisor
        if not isinstance(scaler, Scaler):
            return problem(_CONFLICT, "cannot scale: this gateway does not start its instances")
        async with self._lock:
            while len(self._upstreams) < count:
                if not await self._add_instance(scaler):
                    return problem(_CONFLICT, f"instance {len(self._upstreams)} did not start")
            while len(self._upstreams) > count:
                await self._remove_instance(scaler, drain_s)
            return as_json({"instances": len(self._upstreams)})

    async def fleet(self) -> HttpResponse:
        """Return the state of each instance (null without a response), whether it is ready, and the slot in turn."""
        states = [await self._query_instance(slot) for slot in range(len(self._upstreams))]
        return as_json({"instances": states, "ready": self._router.is_alive[: len(states)], "rolling": self.rolling})

    async def _query_instance(self, slot: int) -> dict[str, Any] | None:
        """Return the state of an instance; None if it does not respond.

        Call it sequentially: Ray treats concurrent calls of one request as one call.
        """
        try:
            return await self._call_instance(slot, "GET", b"/v1/admin/fleet")
        except (OSError, EOFError, InstanceRejectedError):
            return None

    async def _roll(self, folders: list[str], cause: str) -> HttpResponse:
        done: list[tuple[int, InstanceState]] = []
        now: InstanceState | None = None
        for slot in range(len(self._upstreams)):
            try:
                before, now = await self._update_instance(slot, folders)
            except InstanceRejectedError as error:
                template = "%s: instance %d rejected the models, so all instances keep their previous models: %s"
                _LOG.error(template, cause, slot, error)
                for earlier, state in done:
                    await self._restore(earlier, state.folders)
                return problem(_CONFLICT, f"instance {slot} rejected the models: {error}", remedy=error.remedy)
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

    async def _restore(self, slot: int, folders: list[str]) -> None:
        try:
            await self._update_instance(slot, folders)
        except InstanceRejectedError as error:
            _LOG.error("instance %d could not be rolled back to its previous models: %s", slot, error)

    async def _update_instance(self, slot: int, folders: list[str]) -> tuple[InstanceState, InstanceState]:
        """Swap the models of one instance; retry if it is lost during the swap.

        Returns:
            Its state before and after.

        Raises:
            InstanceRejectedError: The instance rejected the models or did not come back.
        """
        self._begin_turn(slot)
        try:
            for _ in range(_ATTEMPTS):
                if not await self._wait_until_back(slot):
                    break
                try:
                    before = _parse_state(await self._call_instance(slot, "GET", b"/v1/admin/fleet"))
                    self._router.versions[slot] = f"rolling {slot}"
                    payload = await self._call_instance(slot, "POST", b"/v1/admin/swap", {"models": folders})
                except (OSError, EOFError):
                    continue
                now = _parse_state(payload)
                if self._supervisor is not None:
                    self._supervisor.set_models(slot, now.folders)
                return before, now
            raise InstanceRejectedError("it is not responding")
        finally:
            self._begin_turn(None)
            await self._probe(slot)  # which sets its version in the router

    def _begin_turn(self, slot: int | None) -> None:
        self.rolling = slot
        self._num_turns += 1

    async def _wait_until_back(self, slot: int) -> bool:
        """Wait until an instance is alive; return False on timeout. Drained instances are updated too."""
        end_s = time.monotonic() + _RECOVERY_TIMEOUT_S
        while time.monotonic() < end_s:
            try:
                await self._upstreams[slot].send("GET", b"/health/live", timeout_s=2.0)
                return True
            except (OSError, EOFError):
                await asyncio.sleep(_POLL_S)
        return False

    async def _call_instance(self, slot: int, method: str, path: bytes, body: Any = None) -> dict[str, Any]:
        content = b"" if body is None else orjson.dumps(body)
        timeout_s = _LOAD_TIMEOUT_S if method == "POST" else 5.0
        response = await self._upstreams[slot].send(method, path, content, is_repeatable=False, timeout_s=timeout_s)
        payload = orjson.loads(response.body)
        if response.status != 200:
            error = payload.get("error", {})
            message = error.get("message", f"it responded with status {response.status}")
            raise InstanceRejectedError(message, error.get("remedy", ""))
        return dict(payload)

    async def _add_instance(self, scaler: Scaler) -> bool:
        slot = len(self._upstreams)
        port = await asyncio.to_thread(scaler.add)
        self._upstreams.append(Upstream(port))
        end_s = time.monotonic() + _LOAD_TIMEOUT_S
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
        """Return whether a new instance is warmed up; it receives no requests yet."""
        try:
            response = await self._upstreams[slot].send("GET", b"/health/ready", timeout_s=2.0)
        except (OSError, EOFError):
            return False
        return response.status == 200

    async def _remove_instance(self, scaler: Scaler, drain_s: float) -> None:
        slot = len(self._upstreams) - 1
        self._router.resize(slot)
        end_s = time.monotonic() + drain_s
        while self._router.loads[slot] and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)
        await self._upstreams.pop().close()
        await asyncio.to_thread(scaler.remove)


def resolve_model_path(folder: str) -> str:
    """Return an address unchanged, or the resolved path of a folder.

    Links are resolved here, so that all instances load the same folder even if a link changes during the update.
    """
    return folder if "://" in folder else str(Path(folder).resolve())


def _address_of(model: str) -> str:
    """Return an address without its version, or a folder unchanged."""
    source = parse_model_address(model)
    return model if source is None else source.address


def _at_version(model: str, version: str) -> str:
    source = parse_model_address(model)
    return model if source is None or source.version is not None else str(source.at(version))


def _parse_state(payload: dict[str, Any]) -> InstanceState:
    models = payload["models"]
    return InstanceState(
        [model["folder"] for model in models.values()],
        [_at_version(model["folder"], model["version"]) for model in models.values()],
        version_of({role: model["version"] for role, model in models.items()}),
    )


_MAX_INSTANCES = 1024
"""Maximum number of instances of a gateway: a mistyped number must not exhaust the memory of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDrainRequest:
    """Request to drain an instance or to take it in again."""

    slot: Annotated[int, AtLeast(0)]
    """Slot of the instance."""
    drain: bool | None = None
    """Whether to drain the instance (default) or to take it in again (false)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """Request to change the number of instances."""

    instances: Annotated[int, NumberRange(1, _MAX_INSTANCES)]
    """Number of instances to run."""


class Operations:
    """Admin endpoints of a fleet. An operation that has started continues even if its client disconnects.

    Args:
        rollout: Executes the operations.
        limits: Limits of requests.
        drain_s: Time to drain an instance that is removed, in seconds.
    """

    def __init__(self, rollout: RollingUpdate, limits: LimitsConfig, drain_s: float):
        self._rollout = rollout
        self._drain_s = drain_s
        self._read_swap, self._read_rollback = reader(SwapRequest, limits), reader(RollbackRequest, limits)
        self._read_drain, self._read_scale = reader(SlotDrainRequest, limits), reader(ScaleRequest, limits)
        self.active_tasks: set[asyncio.Task[HttpResponse]] = set()

    async def handle(self, method: str, path: str, body: bytes) -> HttpResponse:
        """Execute a request to /v1/admin/ and return its response."""
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
                request = self._read_drain(data)
                change = self._rollout.drain(request.slot, request.drain is not False)
            case "/v1/admin/scale":
                change = self._rollout.scale(self._read_scale(data).instances, self._drain_s)
            case _:
                return problem(404, "no such path")
        task = asyncio.create_task(change)
        self.active_tasks.add(task)
        task.add_done_callback(self.active_tasks.discard)
        return await asyncio.shield(task)
