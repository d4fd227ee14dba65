"""Reloads and swaps models while the server runs.

Something slow that is asked for from outside: done one time after another, and the last request is never missed.

Other models while the old ones serve: one load after another, and the last one asked for wins.

A model is looked through and warmed up beside the one in service; where it will not do, that one stays. What was in
service before is remembered, so that a rollback needs no name. A model of an address of versions follows that from then
on, where the server is to follow, or stays at the version that is named with it (ADDRESS@VERSION).
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
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, role_of
from nestrec.serving.service.version_follower import VersionFollowConfig, VersionFollower
from nestrec.serving.versions.live_version import LiveModelVersion, ModelAddress, open_source, source_of

Result = TypeVar("Result")


async def on_daemon_thread(act: Callable[[], Result]) -> Result:
    """Run `act` as `asyncio.to_thread` does, but on a thread that the end of the process does not wait for.

    Storage may never answer, and the executor's threads are joined when a loop is closed and when the process ends.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Result] = loop.create_future()

    def finish(settle: Callable[[], None]) -> None:
        def settle_if_wanted() -> None:
            if not ended.done():  # else the request was cancelled
                settle()

        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(settle_if_wanted)

    def run() -> None:
        try:
            result = act()
        except BaseException as raised:
            error = raised
            finish(lambda: ended.set_exception(error))
        else:
            finish(lambda: ended.set_result(result))

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="nestrec-slow", daemon=True).start()
    return await ended


class CoalescingWorker:
    """A thread that acts when it is asked.

    Whoever asks while it acts gets one more turn after that one, however many ask: each turn sees the world as it is
    when the turn begins, so the last one sees what was there at the last request.
    """

    def __init__(self, name: str, act: Callable[[], None]):
        self._act = act
        self._condition = threading.Condition()
        self._is_closed = False
        self.num_asked = self.num_done = 0
        """requests, and those that have been seen to: equal where nothing is under way"""
        BackgroundThread(name, self._turn).start()

    def ask(self) -> None:
        with self._condition:
            self.num_asked += 1
            self._condition.notify_all()

    def close(self) -> None:
        """No further turn. One that is under way is left alone: the process is ending, and nothing waits for it."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _turn(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self.num_done < self.num_asked)
            if self._is_closed:
                return False
            asked = self.num_asked
        try:
            self._act()
        finally:
            self.num_done = asked
        return True


_LOG = logging.getLogger(__name__)
_TURN_S = 600.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is or was in service."""

    folder: str
    """with no link in it: what a link points to may change; or an address, with the version that stays"""
    version: str


class Reloader:
    """Thread safe; what is asked by a signal is done on a thread of its own."""

    def __init__(self, service: Service, device: str, tables: TablesConfig, follow: VersionFollowConfig | None = None):
        self._service = service
        self._device = device
        self._tables = tables
        self._follow = follow or VersionFollowConfig()
        self._lock = threading.Lock()
        self._folders = {role: _whole(text) for role, text in service.sources.items()}
        self.followers: dict[str, VersionFollower] = {}
        """by role: models of addresses"""
        for role, followed in service.followed.items():
            self._begin_to_follow(role, followed, service.sources[role])
        if self._follow.on and not self.followers:
            told = ", ".join(str(source) for source in self._folders.values())
            _LOG.warning("nothing is followed until an address is swapped in: no versions are published to %s", told)
        self.previous: Mapping[str, LoadedModel] = {}
        """what the last swap has replaced, by role"""
        self._turns = CoalescingWorker("nestrec-reload", self._reload_all)

    def ask(self) -> None:
        """Load the folders that the server was started with anew, soon."""
        self._service.reloads.asked += 1
        self._turns.ask()

    def close(self) -> None:
        self._turns.close()
        for follower in self.followers.values():
            follower.close()

    @property
    def current(self) -> dict[str, LoadedModel]:
        """What is in service, by role."""
        found = {}
        for role, folder in self._folders.items():
            follower = self.followers.get(role)
            told = folder if follower is None else str(follower.source)
            found[role] = LoadedModel(told, self._service.fleet(role).servable.version)
        return found

    def _begin_to_follow(self, role: str, followed: LiveModelVersion, text: str) -> None:
        source = source_of(text)
        assert source is not None, "a version comes from an address"
        if source.version is not None:
            source = source.at(followed.step.folder)
        follower = VersionFollower(
            self._service, role, followed, source, self._follow, device=self._device, tables=self._tables
        )
        self.followers[role] = follower
        if self._follow.on:
            follower.rehearse()
        if self._follow.on and self._follow.moves == "itself":
            follower.start()

    def swap(self, folders: Sequence[Path | str]) -> None:
        """Serve the models of these folders or addresses, one of each role that is served, or fewer. `UserError` where
        one will not do, and all stay as they are."""
        with self._turn():
            self._swap([(str(folder), None) for folder in folders])

    def rollback(self) -> None:
        """Serve what was served before the last swap."""
        with self._turn():
            remedy = "name what to go to: nestrec swap SERVER MODEL, or ADDRESS@VERSION for an earlier version"
            require(self.previous, "has had no other model yet", option="server", value="rollback", remedy=remedy)
            self._swap([self._as_it_was(role, one) for role, one in self.previous.items()], cause="rollback: ")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock for one change. The one before it may read from storage that never answers."""
        if not self._lock.acquire(timeout=_TURN_S):
            remedy = "try again later, or restart the server if the storage of its models does not answer"
            problem = f"an earlier change has been under way for more than {_TURN_S:g} s"
            raise UserError(problem, option="models", value=list(self._folders.values()), remedy=remedy)
        try:
            yield
        finally:
            self._lock.release()

    def _as_it_was(self, role: str, was: LoadedModel) -> tuple[str, str | None]:
        """What leads back to a model, and the version that a folder must hold."""
        source = source_of(was.folder)
        if source is None:
            return was.folder, was.version
        goes_on = self._follow.on and self._follow.moves == "itself" and self.current[role].folder != was.folder
        return (
            was.folder if source.version is not None or goes_on else str(source.at(shown_version(was.version)))
        ), None

    def _reload_all(self) -> None:
        reloads = self._service.reloads
        asked = reloads.asked
        try:
            self.swap(list(self._service.sources.values()))
            reloads.is_refused = False
        except Exception as error:  # whatever is wrong with them, the old models serve on
            is_told = isinstance(error, UserError | OSError)
            _LOG.error("the model stays as it is: %s", error, exc_info=None if is_told else error)
            reloads.is_refused = True
        reloads.done = asked

    def _swap(self, wanted: Sequence[tuple[str, str | None]], *, cause: str = "") -> None:
        """wanted: folders or addresses, and the versions that folders must hold. cause: prefix of the logged line."""
        before = self.current
        seen = set[str]()
        moves: list[tuple[VersionFollower, str | None]] = []
        fresh: dict[str, tuple[str, Servable, LiveModelVersion | None]] = {}
        for text, version in wanted:
            if (found := self._follower_at(text)) is not None:
                role, follower, at = found
                if role in seen:
                    raise _other_role(role, list(self._service.fleets), text)
                seen.add(role)
                moves.append((follower, at))
                continue
            # Where the folder is a link, all files come from what it points to now, wherever it points meanwhile.
            whole = _whole(text)
            source = source_of(text)
            followed = None if source is None else self._opened(source)
            servable = Servable.load(Path(whole), self._device, self._tables) if followed is None else followed.servable
            role = role_of(servable)
            if role not in self._service.fleets or role in seen:
                raise _other_role(role, list(self._service.fleets), text)
            seen.add(role)
            if version is not None and servable.version != version:
                remedy = "name the model to swap to"
                raise UserError("does not hold the model of that time", option="model", value=text, remedy=remedy)
            if servable.version == before[role].version:
                _LOG.info("the %s model is %s already", role, shown_version(servable.version))
                continue
            fresh[role] = (text if source is not None else whole, servable, followed)
        with contextlib.ExitStack() as held:
            held.enter_context(self._service.adding)  # items are added to what is in service, before or after the swap
            replaced = [self.followers[role] for role in fresh if role in self.followers]
            for follower in replaced:
                held.enter_context(follower.halted())
            self._move_all(moves, [servable for _, servable, _ in fresh.values()])
            for follower in replaced:
                follower.end()
            for role, (text, _, followed) in fresh.items():
                self._follow_or_not(role, text, followed)
        for follower in replaced:
            follower.close()
        self._tell(before, cause)

    def _opened(self, source: ModelAddress) -> LiveModelVersion:
        return open_source(source, self._device, self._tables, read_timeout_s=self._follow.read_timeout_s)

    def _move_all(self, moves: Sequence[tuple[VersionFollower, str | None]], fresh: Sequence[Servable]) -> None:
        """All of it, or nothing."""
        moved: list[tuple[VersionFollower, str, ModelAddress]] = []
        try:
            for follower, at in moves:
                was = follower.version, follower.source
                follower.move(at)
                moved.append((follower, *was))
            if fresh:
                self._service.swap(*fresh)
        except BaseException:
            for follower, version, source in moved:
                follower.move(version)
                follower.source = source
            raise

    def _follow_or_not(self, role: str, text: str, followed: LiveModelVersion | None) -> None:
        """What has come into service goes on from here, where it is a version; nobody else moves it."""
        self._folders[role] = text
        self._service.followed.pop(role, None)
        self.followers.pop(role, None)
        if followed is not None:
            self._service.followed[role] = followed
            self._begin_to_follow(role, followed, text)

    def _follower_at(self, text: str) -> tuple[str, VersionFollower, str | None] | None:
        """Role and follower of the model that comes from this address already, and the version that is named now."""
        source = source_of(text)
        for role, follower in self.followers.items():
            if source is not None and follower.source.address == source.address:
                return role, follower, source.version
        return None

    def _tell(self, before: Mapping[str, LoadedModel], cause: str) -> None:
        now = self.current
        changed = {role: loaded for role, loaded in before.items() if now[role] != loaded}
        if changed:
            self.previous = changed
        for role, loaded in changed.items():
            _LOG.info(
                "%sthe %s model %s has taken over from %s",
                cause,
                role,
                shown_version(now[role].version),
                shown_version(loaded.version),
            )


def _whole(text: str) -> str:
    source = source_of(text)
    return str(Path(text).resolve()) if source is None else str(source)


def _other_role(found: str, roles: Sequence[str], folder: str) -> UserError:
    remedy = f"put a {' and a '.join(roles)} model there, or start a server of the {found} model"
    return UserError(f"holds a {found} model now", option="--model", value=folder, remedy=remedy)
