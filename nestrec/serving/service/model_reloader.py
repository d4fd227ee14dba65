"""Hot reload, hot swap and rollback of models while the server runs.

A new model is loaded, validated and warmed up while the old one serves; if that fails, the old one stays in service.
Changes run one at a time. `Reloader` remembers the models before the last swap, so that a rollback needs no name. If
following is enabled, a model that was loaded from an address of published versions follows that address, or stays at
the version that was named with it (ADDRESS@VERSION).

`CoalescingWorker` runs a slow action on a background thread: requests that arrive while it runs are merged into one
further run, and the last request is never missed.
"""

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nestrec.base.errors import UserError, require
from nestrec.serving.core.background_tasks import BackgroundThread
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, role_of
from nestrec.serving.service.version_follower import VersionFollowConfig, VersionFollower
from nestrec.serving.versions.live_version import LiveModelVersion, ModelAddress, open_model, parse_model_address

Result = TypeVar("Result")


async def on_daemon_thread(act: Callable[[], Result]) -> Result:
    """Run `act` on a daemon thread and return its result.

    Same as `asyncio.to_thread`, but the process does not wait for the thread at its end. Storage may never respond, and
    threads of the executor are joined when the event loop is closed and when the process ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def finish(resolve: Callable[[], None]) -> None:
        def resolve_if_pending() -> None:
            if not future.done():  # otherwise the request was cancelled
                resolve()

        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has shut down
            loop.call_soon_threadsafe(resolve_if_pending)

    def run() -> None:
        try:
            result = act()
        except BaseException as raised:
            error = raised
            finish(lambda: future.set_exception(error))
        else:
            finish(lambda: future.set_result(result))

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="nestrec-slow", daemon=True).start()
    return await future


class CoalescingWorker:
    """Background thread that runs an action on request and coalesces requests.

    All requests that arrive during a run are served by one further run. A run starts after the last request that it
    serves, so it always sees the state at the time of that request.
    """

    def __init__(self, name: str, act: Callable[[], None]):
        self._act = act
        self._condition = threading.Condition()
        self._is_closed = False
        self.num_requested = self.num_done = 0
        """Number of requests, and number of those that have been served; equal if no run is pending."""
        BackgroundThread(name, self._run_once).start()

    def request_run(self) -> None:
        with self._condition:
            self.num_requested += 1
            self._condition.notify_all()

    def close(self) -> None:
        """Start no further runs. A current run is not awaited, because the process is shutting down."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _run_once(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self.num_done < self.num_requested)
            if self._is_closed:
                return False
            num_requested = self.num_requested
        try:
            self._act()
        finally:
            self.num_done = num_requested
        return True


_LOG = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model that is or was in service."""

    folder: str
    """Folder with symbolic links resolved, because their targets may change; or address of published versions, with the
    pinned version if there is one."""
    version: str
    """Version of the model."""


class Reloader:
    """Reloads, swaps and rolls back the models of a service. Thread-safe; reloads run on a background thread."""

    def __init__(self, service: Service, device: str, tables: TablesConfig, follow: VersionFollowConfig | None = None):
        self._service = service
        self._device = device
        self._tables = tables
        self._follow = follow or VersionFollowConfig()
        self._lock = threading.Lock()
        self._folders = {role: _canonical(text) for role, text in service.sources.items()}
        self.followers: dict[str, VersionFollower] = {}
        """Followers of the models that were loaded from addresses of published versions, by role."""
        for role, live in service.live_versions.items():
            self._start_following(role, live, service.sources[role])
        if self._follow.enabled and not self.followers:
            folders = ", ".join(str(source) for source in self._folders.values())
            _LOG.warning(
                "--follow has no effect until an address is swapped in: no versions are published to %s", folders
            )
        self.previous: Mapping[str, LoadedModel] = {}
        """Models that the last swap replaced, by role."""
        self._worker = CoalescingWorker("nestrec-reload", self._reload_all)

    def request_reload(self) -> None:
        """Reload the folders that the server was started with, on the background thread."""
        self._service.reloads.num_requested += 1
        self._worker.request_run()

    def close(self) -> None:
        self._worker.close()
        for follower in self.followers.values():
            follower.close()

    @property
    def current(self) -> dict[str, LoadedModel]:
        """Models in service, by role."""
        models = {}
        for role, folder in self._folders.items():
            follower = self.followers.get(role)
            source = folder if follower is None else str(follower.source)
            models[role] = LoadedModel(source, self._service.deployment(role).servable.version)
        return models

    def _start_following(self, role: str, live: LiveModelVersion, text: str) -> None:
        source = parse_model_address(text)
        assert source is not None, "versions are loaded from addresses"
        if source.version is not None:
            source = source.at(live.step.folder)
        follower = VersionFollower(
            self._service, role, live, source, self._follow, device=self._device, tables=self._tables
        )
        self.followers[role] = follower
        if self._follow.enabled:
            follower.warm_up()
        if self._follow.enabled and self._follow.mode == "independent":
            follower.start()

    def swap(self, folders: Sequence[Path | str]) -> None:
        """Serve the models of these folders or addresses instead of the current ones; either all are swapped, or none.

        Args:
            folders: Folders of exported models or addresses of published versions (ADDRESS, ADDRESS@VERSION), at most
                one per role.

        Raises:
            UserError: A model cannot be loaded, or its role is not served or occurs twice.
        """
        with self._hold_lock():
            self._swap([(str(folder), None) for folder in folders])

    def rollback(self) -> None:
        """Serve the models before the last swap again; raise `UserError` if there was none."""
        with self._hold_lock():
            remedy = "use nestrec swap SERVER MODEL, or ADDRESS@VERSION for an earlier version"
            require(self.previous, "no model has been swapped since the server started", remedy=remedy)
            self._swap([self._previous_target(role, one) for role, one in self.previous.items()], cause="rollback: ")

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the lock for one change. It has a timeout, because another change may wait for storage that is down."""
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            remedy = "try again later, or restart the server if the storage of its models does not respond"
            problem = f"an earlier swap or reload has been running for more than {_LOCK_TIMEOUT_S:g} s"
            raise UserError(problem, option="models", value=list(self._folders.values()), remedy=remedy)
        try:
            yield
        finally:
            self._lock.release()

    def _previous_target(self, role: str, was: LoadedModel) -> tuple[str, str | None]:
        """Return the folder or address to roll back to, and the version that a folder must contain."""
        source = parse_model_address(was.folder)
        if source is None:
            return was.folder, was.version
        keeps_following = (
            self._follow.enabled and self._follow.mode == "independent" and self.current[role].folder != was.folder
        )
        return (
            was.folder if source.version is not None or keeps_following else str(source.at(short_version(was.version)))
        ), None

    def _reload_all(self) -> None:
        reloads = self._service.reloads
        num_requested = reloads.num_requested
        try:
            self.swap(list(self._service.sources.values()))
            reloads.has_failed = False
        except Exception as error:  # the old models stay in service, whatever the error is
            is_expected = isinstance(error, UserError | OSError)
            _LOG.error(
                "reload failed, the current models stay in service: %s", error, exc_info=None if is_expected else error
            )
            reloads.has_failed = True
        reloads.num_done = num_requested

    def _swap(self, targets: Sequence[tuple[str, str | None]], *, cause: str = "") -> None:
        """Swap models.

        Args:
            targets: Folders or addresses, and the version that each folder must contain (None: any).
            cause: Prefix of the log message.
        """
        before = self.current
        seen = set[str]()
        moves: list[tuple[VersionFollower, str | None]] = []
        fresh: dict[str, tuple[str, Servable, LiveModelVersion | None]] = {}
        for text, version in targets:
            if (match := self._find_follower(text)) is not None:
                role, follower, at = match
                if role in seen:
                    raise _role_error(role, list(self._service.deployments), text)
                seen.add(role)
                moves.append((follower, at))
                continue
            # If the folder is a symbolic link, all files must come from its present target, even if it changes.
            canonical = _canonical(text)
            source = parse_model_address(text)
            live = None if source is None else self._open(source)
            servable = Servable.load(Path(canonical), self._device, self._tables) if live is None else live.servable
            role = role_of(servable)
            if role not in self._service.deployments or role in seen:
                raise _role_error(role, list(self._service.deployments), text)
            seen.add(role)
            if version is not None and servable.version != version:
                remedy = "name the model with nestrec swap SERVER MODEL"
                raise UserError(
                    "the folder no longer contains the previous model", option="model", value=text, remedy=remedy
                )
            if servable.version == before[role].version:
                _LOG.info("the %s model already has version %s", role, short_version(servable.version))
                continue
            fresh[role] = (text if source is not None else canonical, servable, live)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                self._service.add_items_lock
            )  # items are added before or after the swap, never during it
            replaced = [self.followers[role] for role in fresh if role in self.followers]
            for follower in replaced:
                stack.enter_context(follower.paused())
            self._move_all(moves, [servable for _, servable, _ in fresh.values()])
            for follower in replaced:
                follower.stop()
            for role, (text, _, live) in fresh.items():
                self._set_in_service(role, text, live)
        for follower in replaced:
            follower.close()
        self._record_changes(before, cause)

    def _open(self, source: ModelAddress) -> LiveModelVersion:
        return open_model(source, self._device, self._tables, read_timeout_s=self._follow.read_timeout_s)

    def _move_all(self, moves: Sequence[tuple[VersionFollower, str | None]], fresh: Sequence[Servable]) -> None:
        """Move followers to versions and swap models; undo the moves if one of the steps fails."""
        moved: list[tuple[VersionFollower, str, ModelAddress]] = []
        try:
            for follower, at in moves:
                was = follower.version, follower.source
                follower.move_to(at)
                moved.append((follower, *was))
            if fresh:
                self._service.swap(*fresh)
        except BaseException:
            for follower, version, source in moved:
                follower.move_to(version)
                follower.source = source
            raise

    def _set_in_service(self, role: str, text: str, live: LiveModelVersion | None) -> None:
        """Record the source of a model that is now in service; if it is a published version, start to follow it."""
        self._folders[role] = text
        self._service.live_versions.pop(role, None)
        self.followers.pop(role, None)
        if live is not None:
            self._service.live_versions[role] = live
            self._start_following(role, live, text)

    def _find_follower(self, text: str) -> tuple[str, VersionFollower, str | None] | None:
        """Return role and follower of the model that was loaded from this address, and the version named in `text`."""
        source = parse_model_address(text)
        for role, follower in self.followers.items():
            if source is not None and follower.source.address == source.address:
                return role, follower, source.version
        return None

    def _record_changes(self, before: Mapping[str, LoadedModel], cause: str) -> None:
        now = self.current
        changed = {role: loaded for role, loaded in before.items() if now[role] != loaded}
        if changed:
            self.previous = changed
        for role, loaded in changed.items():
            _LOG.info(
                "%s%s model: version %s replaced %s",
                cause,
                role,
                short_version(now[role].version),
                short_version(loaded.version),
            )


def _canonical(text: str) -> str:
    source = parse_model_address(text)
    return str(Path(text).resolve()) if source is None else str(source)


def _role_error(role: str, served_roles: Sequence[str], folder: str) -> UserError:
    remedy = f"swap to one {' and one '.join(served_roles)} model, or start a server with the {role} model"
    return UserError(f"cannot swap in this {role} model", option="--model", value=folder, remedy=remedy)
